"""Pieces that find block sizes, one for each call; they write the chip's table beside the results."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.on_chip.parity import own_kernel
from benchmarks.on_chip.results import CardResults, Row
from benchmarks.on_chip.sizes import Sizes
from pallas_kernels import tune, tuning
from pallas_kernels.paged_attention.shapes import decode_shape
from pallas_kernels.platform import current_platform


def calls(sizes: Sizes) -> list[tune.TuningCall]:
    """What is tuned: the calls of `pallas_kernels.tune`, or one small one without a chip."""
    if (kernel := own_kernel()) is not None:
        return list(tune.calls(kernel, current_platform(), list(sizes.shapes), is_quick=False))
    options = {"dtype": sizes.q_dtype, "cache_dtype": sizes.cache_dtypes[0], "page_size": sizes.page_sizes[0]}
    shape = decode_shape(sizes.shapes[0], sizes.batches[-1], sizes.contexts[0], **options)
    call = tune.paged_call("xla decode", shape, "xla", sizes.layers)
    return [replace(call, module=OneCandidate(call.module))]


@dataclass(frozen=True)
class OneCandidate:
    """A module with a tunable call, of whose sizes one is tried beside the heuristic's."""

    module: Any

    def candidates(self, spec: Any) -> dict[str, list[Any]]:
        every, heuristic = self.module.candidates(spec), self.module.tunable(spec)
        return {name: [sizes for sizes in tried if sizes != heuristic[name]][:1] for name, tried in every.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def tune_call(call: tune.TuningCall, folder: Path, sizes: Sizes, results: CardResults) -> Iterator[Row]:
    """The block sizes of one call, and what they gain."""
    if (reason := call.module.unsupported(call.spec, current_platform())) is not None:
        yield Row(call.name, note=f"not run: {reason}")
        return
    said: list[str] = []
    best = tune.tune_into(folder / f"{tuning.chip()}.json", call, said.append)
    tuning.table.cache_clear()  # later pieces use what was found
    for name, found in best.items():
        yield Row(f"{call.name} {name}", note=f"{found or 'the heuristic is as good'}; {said[-1]}")


def runs(sizes: Sizes, folder: Path) -> dict[str, partial]:
    """By name of the call, what tunes it."""
    return {f"tuning {call.name}": partial(tune_call, call, folder) for call in calls(sizes)}
