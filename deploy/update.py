"""Makes the chart's files of values by `jaxinfer plan`, and from the chart the manifests of kubernetes/.

Run as python deploy/update.py. The manifests are rendered by Helm, which `make manifests` installs into
.venv-manifests.
"""

import contextlib
import math
import os
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from jaxinfer.chips import chips

DEPLOY = Path(__file__).parent
MANIFESTS_PYTHON = DEPLOY.parent / ".venv-manifests" / "bin" / "python"

# Assumptions, where a plan has no figure.
DISK_BYTES_A_SECOND = 200e6  # of the volume of weights
COMPILE_SECONDS = 120  # of one program: those of Qwen3-8B for a v6e take a minute of processor time each
START_SECONDS = 60  # of Python and JAX
PROGRAM_BYTES = 16 << 30  # of the host, beside the weights on their way to the devices: Python, XLA while it compiles
MOST_SEQS = 256


@dataclass(frozen=True)
class Target:
    """A model on chips, and what their nodes are called.

    Attributes:
      model: folder in models/, and on the volume of weights. on, mesh: as of `jaxinfer plan`. context: tokens of a
        prompt with its answer. resource, chips_per_host, node_selector: as the cluster names them.
      env: variables that change what JAX may use. hosts: values of several hosts.
    """

    model: str
    on: str
    context: int
    resource: str
    chips_per_host: int
    node_selector: dict[str, str]
    mesh: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)


def tpu_nodes(accelerator: str, topology: str) -> dict[str, str]:
    """GKE's labels of the nodes of a slice."""
    return {"cloud.google.com/gke-tpu-accelerator": accelerator, "cloud.google.com/gke-tpu-topology": topology}


TPU, GPU = "google.com/tpu", "nvidia.com/gpu"
TARGETS = {
    "v6e": Target("qwen3-8b", "v6e:1x1", 4096, TPU, 1, tpu_nodes("tpu-v6e-slice", "1x1")),
    "h100": Target(
        *("qwen3-8b", "h100x1", 8192, GPU, 1, {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}),
        env={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"},  # nobody else uses the GPU of a pod
    ),
    # Every device has a part of every layer: a replica needs devices of every host.
    "v6e-hosts": Target(
        *("qwen3-235b-a22b", "v6e:4x8", 8192, TPU, 4, tpu_nodes("tpu-v6e-slice", "4x8")),
        mesh="model=32",
        hosts={"exclusiveTopology": "cloud.google.com/gke-nodepool"},
    ),
}


@contextlib.contextmanager
def with_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that a plan reads: JAX's share of a GPU."""
    with mock.patch.dict(os.environ, variables):
        chips.cache_clear()
        yield
    chips.cache_clear()


def values_of(target: Target) -> tuple[str, dict[str, object]]:
    """The command that plans a target with as many sequences as fit, and the values that follow from its plan.

    Raises ValueError for a model that does not fit with one.
    """
    from jaxinfer.cli.plan import PlanOptions, plan_request
    from jaxinfer.planning import MemoryPlan, make_plan
    from jaxinfer.planning.buckets import num_programs

    folder = str(DEPLOY / "models" / target.model)
    options = PlanOptions(model=folder, on=target.on, mesh=target.mesh, context=target.context, compile_=False)
    with with_variables(target.env):
        request = plan_request(options)

        def plan_of(num_seqs: int) -> MemoryPlan:
            return make_plan(request.with_options(max_seqs=num_seqs), compiles=False)

        counts = range(1, MOST_SEQS + 1)
        max_seqs = bisect_left(counts, True, key=lambda count: not plan_of(count).fits)
        if max_seqs < 1:
            raise ValueError(f"{target.model} does not fit on {target.on} with one sequence of {target.context} tokens")
        facts, spec = plan_of(max_seqs).to_dict(), request.with_options(max_seqs=max_seqs).spec()
    layout, num_bytes = facts["layout"], facts["bytes"]["weights"]
    num_hosts = -(-layout["devices"] // target.chips_per_host)
    programs = num_programs(spec, len(spec.token_buckets), len(spec.decode_slots))
    on_host = num_bytes * min(layout["devices"], target.chips_per_host)
    seconds = START_SECONDS + on_host / DISK_BYTES_A_SECOND + programs * COMPILE_SECONDS
    engine = {"max-model-len": target.context, "max-seqs": max_seqs, "num-pages": spec.num_pages}
    if layout["devices"] > 1:
        engine["mesh"] = layout["mesh"]
    values: dict[str, object] = {
        "model": f"/models/{target.model}",
        "weightsClaim": "jaxinfer-weights",
        "cacheClaim": "jaxinfer-cache",
        "engine": engine,
        "chips": {"resource": target.resource, "count": target.chips_per_host, "nodeSelector": target.node_selector},
        "memory": f"{math.ceil((on_host + PROGRAM_BYTES) / (1 << 30))}Gi",
        "startupSeconds": math.ceil(seconds / 60) * 60,
    }
    if target.env:
        values["env"] = target.env
    if num_hosts > 1:
        values["hosts"] = {"size": num_hosts, **target.hosts}
    variables = "".join(f"{name}={value} " for name, value in target.env.items())
    mesh = f" --mesh {target.mesh}" if target.mesh else ""
    command = (
        f"{variables}jaxinfer plan deploy/models/{target.model} --on {target.on}{mesh} --max-seqs {max_seqs} "
        f"--context {target.context} --no-compile"
    )
    return command, values


def text_of(target: Target) -> str:
    """A file of values."""
    import yaml

    command, values = values_of(target)
    made = yaml.safe_dump(values, sort_keys=False, default_flow_style=False)
    return f"# Made by deploy/update.py from what this prints:\n# {command}\n{made}"


def files() -> dict[Path, str]:
    """The files of values that there should be, with their content."""
    return {DEPLOY / "chart" / f"values-{name}.yaml": text_of(target) for name, target in TARGETS.items()}


def main() -> int:
    for path, text in files().items():
        path.write_text(text)
        print(path.relative_to(DEPLOY.parent))
    if not MANIFESTS_PYTHON.exists():
        print("error: the manifests are rendered by Helm: make manifests installs it", file=sys.stderr)
        return 1
    return subprocess.run([MANIFESTS_PYTHON, DEPLOY / "render.py"], check=False).returncode


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
