"""Renders the chart into kubernetes/, for people without Helm, or checks it: python deploy/render.py [--check]

Runs in .venv-manifests (deploy/requirements.txt). A check lints the chart with all files of values, compares
kubernetes/ with what the chart renders, and validates every object: by the schemas of Kubernetes, strictly, or by those
of schemas/.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import yaml

DEPLOY = Path(__file__).parent
CHART = DEPLOY / "chart"
KUBERNETES = "1.37"
OWN_SCHEMAS = {
    ("inference.networking.k8s.io/v1", "InferencePool"): "inferencepool.json",
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): "leaderworkerset.json",
    ("llm-d.ai/v1alpha1", "EndpointPickerConfig"): "endpointpickerconfig.json",
}
_PEER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}}}
# Manifests by name: a file of values, and what it is rendered with beside.
VARIANTS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "cpu-front": (None, {}),
    "v6e-front": ("v6e", {}),
    "v6e-gateway": ("v6e", {"route": "gateway", "peers": [_PEER]}),
    "v6e-hosts": ("v6e-hosts", {}),
    "h100-front": ("h100", {}),
    "h100-gateway": ("h100", {"route": "gateway", "peers": [_PEER]}),
    "h100-service": ("h100", {"route": "service", "peers": [_PEER], "replicas": 1}),
}


def values_of(variant: str) -> dict[str, Any]:
    """The values of a variant over those of the chart."""
    name, more = VARIANTS[variant]
    made = {} if name is None else yaml.safe_load((CHART / f"values-{name}.yaml").read_text())
    return {**made, **more}


def render(variant: str) -> str:
    """The manifests of a variant."""
    with helm_python.Chart.load(CHART) as chart:
        values = values_of(variant)
        chart.validate_schema(values)
        rendered = chart.render(values, name="jaxinfer", namespace="default")
    name, more = VARIANTS[variant]
    files = "" if name is None else f" -f deploy/chart/values-{name}.yaml"
    sets = "".join(f" --set-json '{key}={json.dumps(value)}'" for key, value in more.items())
    texts = [text.strip() for path, text in sorted(rendered.items()) if path.endswith(".yaml")]
    body = "\n---\n".join(text.removeprefix("---").strip() for text in texts if text)
    return f"# Made by deploy/update.py: helm template jaxinfer deploy/chart{files}{sets}\n{body}\n"


def lint(variant: str) -> Iterator[str]:
    """Findings of Helm's linter, notes left out."""
    report = helm_python.lint(CHART, values_of(variant), strict=True)
    for message in report["messages"]:
        if message["severity"] > 1:
            yield f"lint: {message['path']}: {message['error']}"
    yield from (f"lint: {error}" for error in report["errors"])


def problems_of(resource: dict[str, Any], name: str) -> Iterator[str]:
    """Errors of an object, and of those inside it."""
    own = OWN_SCHEMAS.get((resource["apiVersion"], resource["kind"]))
    where = f"{name}: {resource['kind']}"
    try:
        if own is None:
            kubernetes_validate.validate(resource, KUBERNETES, strict=True)
        else:
            jsonschema.validate(resource, json.loads((DEPLOY / "schemas" / own).read_text()))
    except (kubernetes_validate.ValidationError, jsonschema.ValidationError) as error:
        yield f"{where}: {'.'.join(map(str, error.absolute_path))}: {error.message:.300}"
        return
    except kubernetes_validate.SchemaNotFoundError as error:
        yield f"{where}: {error.message}"
        return
    if resource["kind"] == "LeaderWorkerSet":
        template = resource["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        yield from problems_of({"apiVersion": "v1", "kind": "Pod", **template}, where)
    if resource["kind"] == "ConfigMap":
        for text in resource["data"].values():
            yield from problems_of(yaml.safe_load(text), where)


def check() -> Iterator[str]:
    """All that is wrong, a sentence each."""
    num_objects = 0
    for variant in VARIANTS:
        yield from (f"{variant}: {problem}" for problem in lint(variant))
        try:
            text = render(variant)
        except helm_python.HelmError as error:
            yield f"{variant}: {error}"
            continue
        file = DEPLOY / "kubernetes" / f"{variant}.yaml"
        if not file.exists() or file.read_text() != text:
            yield f"{file.name} differs from what the chart renders: python deploy/update.py"
        for resource in yaml.safe_load_all(text):
            num_objects += 1
            yield from problems_of(resource, variant)
    print(f"Helm {helm_python.helm_sdk_version()}: {len(VARIANTS)} variants, {num_objects} objects")


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        problems = list(check())
        print("\n".join(problems) or "nothing is wrong")
        return 1 if problems else 0
    if sys.argv[1:]:
        raise SystemExit(__doc__)
    for variant in VARIANTS:
        (DEPLOY / "kubernetes" / f"{variant}.yaml").write_text(render(variant))
        print(f"deploy/kubernetes/{variant}.yaml")
    return 0


if __name__ == "__main__":
    sys.exit(main())
