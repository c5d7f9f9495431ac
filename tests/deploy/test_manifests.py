"""The manifests: their numbers are those of plans, their flags those of the command line, and pods are closed."""

import shutil
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from deploy.update import TARGETS, text_of
from jaxinfer.cli.main import app
from jaxinfer.fleet.front.options import address_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PYTHON = ROOT / ".venv-manifests" / "bin" / "python"
MANIFESTS = {path.stem: list(yaml.safe_load_all(path.read_text())) for path in (DEPLOY / "kubernetes").glob("*.yaml")}
needs_helm = pytest.mark.skipif(not PYTHON.exists(), reason="Helm is missing: make test-manifests installs it")


def pods_of(resources):
    """Templates of pods."""
    for resource in resources:
        spec = resource.get("spec", {})
        template = spec.get("template") or spec.get("leaderWorkerTemplate", {}).get("workerTemplate")
        if template is not None:
            yield template


PODS = [(name, pod) for name, resources in sorted(MANIFESTS.items()) for pod in pods_of(resources)]


def command_of(pod):
    """The subcommand and its arguments."""
    args = pod["spec"]["containers"][0]["args"]
    return args[1:] if args[0] == "jaxinfer" else args


def value_of(args, flag):
    return args[args.index(flag) + 1]


@pytest.mark.all_buckets
@pytest.mark.parametrize(
    "name", ["h100", pytest.param("v6e", marks=pytest.mark.slow), pytest.param("v6e-hosts", marks=pytest.mark.slow)]
)
def test_values_are_those_of_plans(name):
    assert (DEPLOY / "chart" / f"values-{name}.yaml").read_text() == text_of(TARGETS[name])


def test_commands_are_those_of_the_command_line():
    commands = typer.main.get_command(app).commands
    variables = {"$(LWS_GROUP_SIZE)": "8", "$(LWS_WORKER_INDEX)": "0"}
    for name, pod in PODS:
        command, *args = command_of(pod)
        with commands[command].make_context(command, [variables.get(arg, arg) for arg in args]) as context:
            assert context.params["model" if command != "front" else "replicas"], name
    assert {command_of(pod)[0] for _, pod in PODS} == {"serve", "front", "batch"}


@pytest.mark.slow
def test_a_front_names_its_servers():
    for name, resources in MANIFESTS.items():
        for front in (pod for pod in pods_of(resources) if command_of(pod)[0] == "front"):
            (servers,) = [one for one in resources if one["kind"] == "StatefulSet"]
            (service,) = [one for one in resources if one["spec"].get("clusterIP") == "None"]
            base, args = servers["metadata"]["name"], command_of(front)
            urls = [args[place + 1] for place, arg in enumerate(args) if arg == "--replica"]
            hosts = [f"{base}-{number}.{service['metadata']['name']}" for number in range(servers["spec"]["replicas"])]
            assert [address_of(url) for url in urls] == [(host, 8000) for host in hosts], name
            assert servers["spec"]["serviceName"] == service["metadata"]["name"]
            assert service["spec"]["publishNotReadyAddresses"]


@pytest.mark.slow
@pytest.mark.parametrize(("code", "kept"), [(0, True), (3, True), (1, False), (134, False)])
def test_hosts_stay_when_their_batch_has_ended_and_fail_with_it(code, kept):
    ((_, pod),) = [(name, pod) for name, pod in PODS if command_of(pod)[0] == "batch"]
    shell, flag, script, name = pod["spec"]["containers"][0]["command"]
    assert script.endswith("exec sleep infinity")
    script = script.removesuffix("exec sleep infinity") + "exit 42"
    ran = subprocess.run([shell, flag, script, name, "sh", "-c", f"exit {code}"], capture_output=True, check=False)
    assert ran.returncode == (42 if kept else code)


def test_pods_end_after_their_answers_and_start_within_their_plan():
    for name, pod in PODS:
        args, (container,) = command_of(pod), pod["spec"]["containers"]
        if args[0] == "batch":
            continue
        seconds = container["lifecycle"]["preStop"]["sleep"]["seconds"] + float(value_of(args, "--drain-timeout"))
        assert pod["spec"]["terminationGracePeriodSeconds"] > seconds + 5, name
        if args[0] == "serve" and not name.startswith("cpu"):
            planned = yaml.safe_load((DEPLOY / "chart" / f"values-{name.partition('-')[0]}.yaml").read_text())
            probe = container["startupProbe"]
            assert probe["periodSeconds"] * probe["failureThreshold"] >= planned["startupSeconds"], name


def test_only_the_front_and_peers_reach_servers():
    for name, pod in PODS:
        args, labels = command_of(pod), pod["metadata"]["labels"]
        if args[0] == "front":
            continue
        (policy,) = [one["spec"] for one in MANIFESTS[name] if one["kind"] == "NetworkPolicy"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
        assert policy["policyTypes"] == ["Ingress"]
        (rule,) = policy["ingress"]
        assert rule["from"], f"{name}: an empty list lets everybody in"
        selectors = [peer["podSelector"]["matchLabels"] for peer in rule["from"] if "podSelector" in peer]
        components = {selector["app.kubernetes.io/component"] for selector in selectors}
        allowed = {"batch": {"host"}, "serve": {"front"} if "--accept-sent-tokens" in args else set()}[args[0]]
        assert components == allowed, name
        if args[0] == "serve":
            assert "--api-keys" in args


@pytest.mark.slow
def test_pods_are_without_rights():
    for name, pod in PODS:
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        security = spec["securityContext"]
        assert security["runAsNonRoot"], name
        assert security["runAsUser"] == int((DEPLOY / "Dockerfile").read_text().partition("\nUSER ")[2].split()[0])
        assert security["fsGroupChangePolicy"] == "OnRootMismatch"
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not spec["automountServiceAccountToken"]
        assert not spec["enableServiceLinks"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in spec["volumes"]}
        for variable in container["env"]:
            if (
                variable["name"] == "JAXINFER_CACHE_DIR"
            ):  # a folder in the volume, which jaxinfer makes for itself alone
                assert variable["value"].startswith(mounts["cache"] + "/")


@needs_helm
@pytest.mark.slow
def test_the_chart_and_its_manifests_are_valid():
    ran = subprocess.run([PYTHON, DEPLOY / "render.py", "--check"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (0, "nothing is wrong"), ran.stdout + ran.stderr


@needs_helm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        (
            "chart/templates/servers.yaml",
            "terminationGracePeriodSeconds:",
            "terminationGraceSeconds:",
            "terminationGraceSeconds",
        ),
        ("chart/templates/front.yaml", "periodSeconds: 10", "periodSeconds: ten", "'ten' is not"),
        ("chart/templates/gateway.yaml", "targetPorts:", "targetPort:", "InferencePool: spec"),
        ("chart/templates/gateway.yaml", "failureMode: FailClose", "failureMode: FailShut", "'FailShut' is not one of"),
        ("chart/templates/hosts.yaml", "RecreateGroupOnPodRestart", "Always", "'Always' is not one of"),
        (
            "chart/templates/hosts.yaml",
            "mountPath: /batch",
            "mountpath: /batch",
            "LeaderWorkerSet: Pod: spec.containers.0",
        ),
        ("chart/picker.yaml", "kvUsageSpec", "kvUsage", "EndpointPickerConfig: plugins.1"),
        ("chart/picker.yaml", "path: /metrics", "patch: /metrics", "'patch' was unexpected"),
        ("chart/values-v6e.yaml", "memory:", "memories:", "memories"),
        ("chart/Chart.yaml", "\nversion: 0.1.0", "\nversion: one", "lint: Chart.yaml"),
        ("chart/templates/front.yaml", "{{- if $hasFront }}", "{{- if $hasFrnt }}", "undefined variable"),
        ("kubernetes/h100-front.yaml", "replicas: 2", "replicas: 3", "h100-front.yaml differs"),
    ],
)
def test_what_is_wrong_is_told(tmp_path, file, old, new, told):
    copy = shutil.copytree(DEPLOY, tmp_path / "deploy", ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new, 1))
    ran = subprocess.run([PYTHON, copy / "render.py", "--check"], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert told in ran.stdout, ran.stdout + ran.stderr


@needs_helm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"route": "service"}, "peers"),  # an empty list of peers would let everybody in, or nobody
        ({"route": "gateway"}, "peers"),
        ({"drainSecond": 5}, "drainSecond"),
        ({"engine": {"max_seqs": 5}}, "max_seqs"),
        ({"chips": {"resource": "google.com/tpu"}}, "count"),
    ],
)
def test_values_that_cannot_be_are_refused(values, told):
    chart = str(DEPLOY / "chart")
    code = f"import helm_python\nhelm_python.Chart.load({chart!r}).render({values!r}, name='x')"
    ran = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert told in ran.stderr


@needs_helm
@pytest.mark.slow
def test_yaml_of_the_guide_is_valid(tmp_path):
    page = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    blocks = [block.partition("```")[0] for block in page.split("```yaml\n")[1:]]
    assert blocks
    for number, block in enumerate(blocks):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block)
        validate = [PYTHON, "-m", "kubernetes_validate", "--strict", "--no-warn", file]
        ran = subprocess.run(list(map(str, validate)), capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert ran.stdout.count("INFO") == len(list(yaml.safe_load_all(block))), ran.stdout
