"""The pieces in the order of their worth."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.on_chip import models, parity, peers, planted, speed, tuning
from benchmarks.on_chip.results import CardResults, Row
from benchmarks.on_chip.sizes import Sizes

Run = Callable[[Sizes, CardResults], Iterator[Row]]

_GRAPHS = "--xla_gpu_enable_command_buffer="
# A dispatch of many steps is one CUDA graph, whose kernels are traced too; and kernels that are launched one by one.
ONE_GRAPH = {
    "XLA_FLAGS": f"{_GRAPHS}FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL "
    "--xla_enable_command_buffers_during_profiling=true"
}
NO_GRAPHS = {"XLA_FLAGS": _GRAPHS}
TINY_ENVIRONMENT = {"ON_CHIP_PROCESS": "another"}  # in place of flags, which a CPU ignores and would compile again for
TINY_LIMIT = 120.0  # seconds


@dataclass(frozen=True)
class Piece:
    """A part of a run.

    Attributes:
      seconds: about what it takes on a chip. limit: seconds after which it counts as hung.
      process: consecutive pieces of one name share a process. environment: its variables.
    """

    name: str
    run: Run
    seconds: float
    limit: float = 300.0
    process: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def pieces(sizes: Sizes, out: Path, plant: Sequence[str] = ()) -> list[Piece]:
    """All pieces for these sizes, with planted failures among them. Tables of block sizes are written to `out`."""
    every = _pieces(sizes, out)
    if sizes.is_tiny:
        every = [replace(piece, seconds=0.0, limit=TINY_LIMIT) for piece in every]
    for number, name in enumerate(plant):
        failure = Piece(f"planted {name}", planted.RUNS[name], 0.0, planted.HANG_LIMIT, every[2 * number].process)
        every.insert(2 * number + 1, failure)
    return every


def _pieces(sizes: Sizes, out: Path) -> list[Piece]:
    model, *others = sizes.shapes
    (batch, context), *sizes_of_attention = [(b, c) for b in sizes.batches for c in sizes.contexts]

    def compared(model: str) -> list[Piece]:
        return [
            Piece(f"parity {model} {dtype}", partial(parity.paged, model, dtype), 40, process=f"parity {dtype}")
            for dtype in sizes.cache_dtypes
        ]

    def attended(batch: int, context: int, num_new: int = 1) -> list[Piece]:
        name = f"{'decode' if num_new == 1 else f'verify {num_new}'} attention b{batch} c{context}"
        return [
            Piece(f"{name} {dtype}", partial(speed.attention, dtype, batch, context, num_new), 20)
            for dtype in sizes.cache_dtypes
        ]

    def decoded(name: str, batch: int, what: str = "", *, is_traced: bool = False, environment=None, **options: Any):
        title = f"{name} b{batch} {what}".strip()
        traces = (out / "traces.zip", title.replace(" ", "-")) if is_traced else None
        run = partial(models.decode, name, batch, options, traces)
        environment = TINY_ENVIRONMENT if environment and sizes.is_tiny else environment or {}
        return Piece(title, run, 100, 420.0, what if environment else "", environment)

    first_batches = sizes.model_batches[:2]
    # Processes of other programs have the memory that this one leaves.
    others_process = {} if sizes.is_tiny else {"process": "peers", "environment": peers.ENVIRONMENT}
    every = [
        Piece("sanitizer", peers.sanitizer, 100, process=f"parity {sizes.cache_dtypes[0]}"),
        *compared(model),
        Piece("rates", speed.rates, 10),
        *attended(batch, context),
        *(decoded("8b", batch, is_traced=True) for batch in first_batches),
        *(decoded("8b", batch, "one graph", is_traced=True, environment=ONE_GRAPH) for batch in first_batches),
        Piece("torch", peers.torch, 60, **others_process),
        Piece("vllm", peers.vllm, 200, **others_process),
        *(decoded("8b", batch, "deterministic", is_traced=True, deterministic=True) for batch in first_batches),
        *(
            []
            if sizes.is_tiny
            else [decoded("8b", batch, "not deterministic", deterministic=False) for batch in first_batches]
        ),
        Piece("parity products", parity.products, 20),
        Piece("parity flash", parity.flash, 20),
        *(decoded("8b", batch) for batch in sizes.model_batches[2:]),
        Piece("8b prompt", partial(models.prompt, "8b", {}), 60),
        *(decoded("8b", batch, recipe, quantize=recipe) for recipe in sizes.quantized for batch in first_batches),
        *(decoded("8b", first_batches[-1], f"cache {kind}", kv_dtype=kind) for kind in sizes.kv_dtypes),
        *(piece for b, c in sizes_of_attention for piece in attended(b, c)),
        *(piece for num in sizes.new_tokens if num > 1 for piece in attended(batch, context, num)),
        Piece("speculation", models.speculation, 90, 420.0),
        Piece("start", partial(models.start, "1b"), 60),
        *(decoded("mixture", batch) for batch in first_batches),
        *(Piece(f"products {recipe}", partial(speed.products, recipe), 40) for recipe in sizes.quantized),
        *(Piece(f"prompt attention {num}", partial(speed.prompts, num), 30) for num in sizes.prompts_of_kernels),
        Piece("parity states and copies", parity.states, 20),
        *(Piece(name, run, 60) for name, run in tuning.runs(sizes, out).items()),
    ]
    if sizes.is_tiny:  # the others run nothing else
        return every
    return [
        *every,
        *(decoded("8b", batch, "no graphs", is_traced=True, environment=NO_GRAPHS) for batch in first_batches),
        *(piece for model in others for piece in compared(model)),
        *(decoded("1b", batch) for batch in sizes.model_batches),
        *(decoded("8b", sizes.model_batches[-1], recipe, quantize=recipe) for recipe in sizes.quantized),
        *(
            Piece(f"8b prompt {recipe}", partial(models.prompt, "8b", {"quantize": recipe}), 60)
            for recipe in sizes.quantized
        ),
    ]
