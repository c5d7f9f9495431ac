"""Faults in the manifests for Kubernetes, and in what they need of a server."""

from tests.faults.fault import Fault

MANIFESTS = "tests/deploy/test_manifests.py::"
GUARD = "tests/server/test_guard.py::"

FAULTS = (
    Fault(
        "manifests/a-metric-of-another-name",
        "deploy/chart/picker.yaml",
        "jaxinfer_kv_cache_usage_perc",
        "jaxinfer_kv_cache_usage",
        ("tests/server/test_adapters.py::test_an_endpoint_picker_finds_its_metrics_without_a_key",),
        "a gateway sends requests to servers whose cache is full",
    ),
    Fault(
        "manifests/more-pages-than-fit",
        "deploy/update.py",
        "num_seqs), compiles=False)",
        "num_seqs // 2), compiles=False)",
        (MANIFESTS + "test_values_are_those_of_plans",),
        "servers end at their start, as their cache does not fit beside the weights",
    ),
    Fault(
        "manifests/anybody-reaches-servers",
        "deploy/kubernetes/h100-front.yaml",
        "  policyTypes: [Ingress]",
        "  policyTypes: [Egress]",
        (MANIFESTS + "test_only_the_front_and_peers_reach_servers",),
        "pods of other people give the tokens with which an answer begins",
    ),
    Fault(
        "manifests/no-time-to-end",
        "deploy/kubernetes/h100-service.yaml",
        "terminationGracePeriodSeconds: 90",
        "terminationGracePeriodSeconds: 30",
        (MANIFESTS + "test_pods_end_after_their_answers_and_start_within_their_plan",),
        "servers are killed while they let their answers end",
    ),
    Fault(
        "manifests/all-is-open-with-the-metrics",
        "jaxinfer/server/middleware.py",
        'key is None and scope["path"] in self._open_paths',
        "key is None and len(self._open_paths) > len(OPEN_PATHS)",
        (GUARD + "test_open_metrics_open_that_path_alone",),
        "with open metrics anybody uses the model without a key",
    ),
)
