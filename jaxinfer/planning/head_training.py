"""Plans of head training for chips that are not there: memory of a device, and the bytes that its programs move."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jaxinfer.checks import format_bytes
from jaxinfer.engine.abstract_work import layer_kinds
from jaxinfer.models import ModelConfig, Params
from jaxinfer.models.host_layers import take_layers
from jaxinfer.planning.chips import Place, layout_of
from jaxinfer.planning.compiled import (
    BASE_LAYERS,
    MORE_LAYERS,
    Compiler,
    ProgramFigures,
    ProgressCallback,
    chip_compiler,
    extrapolate,
    read_figures,
)
from jaxinfer.quantization.on_device import dequantize_params
from jaxinfer.quantization.tree import is_quantized, num_bytes, weights
from jaxinfer.tables import table_text
from jaxinfer.training.head_programs import OBSERVE, STEP, HeadProgram, head_programs
from jaxinfer.training.heads import HeadOptions, head_bytes
from pallas_kernels.ahead_of_time import slice_mesh

# Without a GPU to time products on, XLA gives those in float32 at the highest precision to Triton, and finds no tiles.
_COMPILER_OPTIONS = {"gpu": {"xla_gpu_enable_triton_gemm": False}}


@dataclass(frozen=True, eq=False)
class HeadTrainingRequest:
    """A head's training to plan for.

    Attributes:
      name, config, params: the target, with abstract parameters as `loading.load_shapes` returns them.
      place: the chips. mesh: such as "data=2,model=4"; None shards the target over as many devices as divide it, and
        the rows of a step over the rest.
      options: of the training. memory_fraction: what the training may use of a device's usable memory.
    """

    name: str
    config: ModelConfig
    params: Params
    place: Place
    options: HeadOptions
    mesh: str | None = None
    memory_fraction: float = 0.9

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the mesh axes. Raises ValueError for a mesh that does not divide the target."""
        layout = layout_of(self.place, self.config, mesh=self.mesh)
        return (("data", layout.num_replicas), *layout.axes)


@dataclass(frozen=True)
class HeadTrainingPlan:
    """Memory that a head's training needs, and its programs.

    Attributes:
      parts: bytes of one device by name while `peak` runs; their sum is `total`. budget: what may be used.
      programs: figures by name, {} if none was compiled. seconds: how long planning took.
    """

    request: HeadTrainingRequest
    parts: dict[str, int]
    peak: str
    budget: int
    programs: dict[str, ProgramFigures] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.budget

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values; bytes are those of one device."""
        request, options = self.request, self.request.options
        names = ("kind", "batch_size", "length", "draft_vocab_size", "unroll", "block_size", "compute_dtype")
        return {
            "model": request.name,
            "on": request.place.name,
            "fits": self.fits,
            "mesh": _mesh_text(request),
            "options": {name: getattr(options, name) for name in names},
            "bytes": {
                **self.parts,
                "total": self.total,
                "budget": self.budget,
                "is_measured": bool(self.programs),
                "largest program": self.peak,
            },
            "programs": {name: figures.to_dict() for name, figures in self.programs.items()},
            "seconds": self.seconds,
        }

    def to_text(self) -> str:
        """A page of text."""
        request, options = self.request, self.request.options
        size = options.draft_vocab_size or request.config.vocab_size
        drafted = f"blocks of {options.block_size}" if options.is_block else f"chains of {options.unroll}"
        place = request.place
        how = f"while {self.peak} runs" if self.programs else "temporaries estimated"
        rows = [(name, format_bytes(size)) for name, size in {**self.parts, "total": self.total}.items()]
        text = (
            f"training a head for {request.name} {'fits' if self.fits else 'does not fit'} on {place.name} "
            f"({place.num_chips} x {place.chip.title}, {_mesh_text(request)})\n"
            f"  {options.kind}, {drafted} tokens of {size:,}; steps of {options.batch_size} "
            f"rows of {options.length} tokens\n"
            f"  {format_bytes(self.total)} of {format_bytes(self.budget)} per device\n\n"
            f"{table_text((f'memory of one device, {how}', 'bytes'), rows)}"
        )
        if not self.programs:
            return text + "\ncounted, not compiled\n"
        titles = ("programs, on one device", "TFLOP", "HBM bytes", "temporaries", "exchanges", "sent", "compiled in")
        lines = [
            (
                name,
                "-" if figures.flops is None else f"{figures.flops / 1e12:.3f}",
                "-" if figures.moved_bytes is None else format_bytes(figures.moved_bytes),
                format_bytes(figures.temporary_bytes),
                f"{figures.num_collectives:.0f}",
                f"{figures.sent_bytes / 1e6:.1f} MB",
                f"{figures.seconds:.0f} s",
            )
            for name, figures in self.programs.items()
        ]
        return f"{text}\n{table_text(titles, lines)}"


def plan_head_training(
    request: HeadTrainingRequest,
    *,
    whole: bool | None = None,
    compiles: bool = True,
    compiler: Compiler | None = None,
    progress: ProgressCallback = lambda step: None,
) -> HeadTrainingPlan:
    """Plans the training of a head by compiling its programs, the target's pass with a few layers unless `whole`.

    Raises ValueError as `HeadTrainingRequest.axes` and `head_programs`; RuntimeError if the chip's compiler is not
    installed.
    """
    began, chip = time.perf_counter(), request.place.chip
    compiles = compiles and (compiler is not None or chip.can_compile)
    layout, axes = layout_of(request.place, request.config, mesh=request.mesh), request.axes
    names, sizes = zip(*axes, strict=True)
    mesh = slice_mesh(chip.name, axes) if compiles else AbstractMesh(sizes, names)
    dense = jax.eval_shape(dequantize_params, request.params)

    def programs_of(num_layers: int) -> dict[str, HeadProgram]:
        layers = range(num_layers)
        return head_programs(request.config.with_layers(layers), take_layers(dense, layers), request.options, mesh)

    every = programs_of(request.config.num_layers)
    has_quantized = any(is_quantized(leaf) for leaf in weights(request.params))
    own = num_bytes(request.params) // layout.num_devices if has_quantized else 0
    held = {name: local_bytes(program.held) + own for name, program in every.items()}
    programs: dict[str, ProgramFigures] = {}
    if compiles:
        compile_one = compiler or chip_compiler(chip.name, mesh, _COMPILER_OPTIONS.get(chip.platform))

        def figures(program: HeadProgram) -> ProgramFigures:
            compilation = compile_one(program.function, program.arguments)
            return read_figures(compilation, mesh.size, chip.platform, chip.l2_bytes or 0)

        for name, program in every.items():
            progress(name)
            few = _of_few_layers(request, programs_of, figures) if name == OBSERVE and not whole else None
            programs[name] = replace(few or figures(program), resident_bytes=held[name])
    peak = max(programs, key=lambda name: programs[name].total_bytes) if programs else STEP
    state = every[STEP].arguments[0]
    parts = {"target": local_bytes(every[OBSERVE].arguments[0]), "head and optimizer": local_bytes(state)}
    if own:
        parts["quantized target"] = own
    rest = round(programs[peak].total_bytes) - sum(parts.values()) if programs else _estimated(request, every[STEP])
    parts["states of rows, temporaries"] = rest
    budget = int(request.memory_fraction * request.place.device_bytes)
    return HeadTrainingPlan(request, parts, peak, budget, programs, time.perf_counter() - began)


def local_bytes(tree: Any) -> int:
    """Bytes of one device of arrays, or of shapes with shardings; those without one are there in full."""
    return sum(math.prod(_local_shape(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _local_shape(leaf: Any) -> tuple[int, ...]:
    return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)


def _of_few_layers(
    request: HeadTrainingRequest, programs_of: Callable[[int], dict], figures: Callable[[HeadProgram], ProgramFigures]
) -> ProgramFigures | None:
    """Figures of the target's pass, from two with few layers; None for layers of several kinds, or too few."""
    count, more = request.config.num_layers, BASE_LAYERS + MORE_LAYERS
    if count <= more or len(layer_kinds(request.config, request.params)) > 1:
        return None
    base, larger = (figures(programs_of(number)[OBSERVE]) for number in (BASE_LAYERS, more))
    return extrapolate(base, [(larger, (count - BASE_LAYERS) / MORE_LAYERS)])


def _estimated(request: HeadTrainingRequest, step: HeadProgram) -> int:
    """Bytes of a device, beside parameters and the optimizer's, while a step of the head runs."""
    options, (state, batch, _) = request.options, step.arguments
    axes = dict(request.axes)
    rows, shards = options.batch_size // axes["data"], axes.get("model", 1)
    num_anchors, size = batch.anchors.shape[1], options.draft_vocab_size or request.config.vocab_size
    config = request.config.with_layers(range(options.num_layers))  # as large as the head
    head = head_bytes(config, rows, options.length, num_anchors * options.num_drafts, size, shards)
    # As the compilers say of Llama-3-8B: a GPU's fuses half of it, and adds the gradients as they come.
    fused = 2 if request.place.chip.platform == "gpu" else 1
    return local_bytes(batch) + head // fused + 2 * local_bytes(state["params"]) // fused


def _mesh_text(request: HeadTrainingRequest) -> str:
    return ",".join(f"{name}={size}" for name, size in request.axes)
