"""The pieces in the order of their worth."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.on_chip import kernels, models, tuning
from benchmarks.on_chip.results import Results, Row
from benchmarks.on_chip.sizes import Sizes

Run = Callable[[Sizes, Results], Iterator[Row]]
PROGRAMS = ("decode", "verify", "prefill", "mixed")


@dataclass(frozen=True)
class Piece:
    """A part of a run. `seconds` is about what it takes on a chip."""

    name: str
    run: Run
    seconds: float


def pieces(sizes: Sizes, folder: Path) -> list[Piece]:
    """All pieces for these sizes. Tables of block sizes are written to `folder`."""
    first, *others = sizes.shapes

    def parity(model: str) -> list[Piece]:
        return [
            Piece(f"parity {program} {model}", partial(kernels.paged_parity, model, program), 25)
            for program in PROGRAMS
        ]

    def whole(name: str, what: str, **options: str) -> Piece:
        return Piece(f"{name} {what}", partial(models.whole, name, options), 90)

    return [
        Piece("rates", kernels.rates, 10),
        *parity(first),
        Piece("parity products", kernels.product_parity, 20),
        Piece("parity flash", kernels.flash_parity, 20),
        whole("8b", "as it is"),
        Piece("decode attention", kernels.decode_speed, 90),
        *(whole("8b", recipe, quantize=recipe) for recipe in sizes.quantized),
        *(whole("8b", f"cache {kind}", kv_dtype=kind) for kind in sizes.kv_dtypes),
        Piece("speculation", models.speculation, 90),
        Piece("start", partial(models.start, "1b"), 60),
        whole("mixture", "as it is"),
        Piece("products", kernels.product_speed, 60),
        Piece("prompt attention", kernels.prefill_speed, 40),
        Piece("parity states and copies", kernels.state_parity, 20),
        *(Piece(name, run, 60) for name, run in tuning.runs(sizes, folder).items()),
        *(piece for model in others for piece in parity(model)),
        whole("1b", "as it is"),
    ]
