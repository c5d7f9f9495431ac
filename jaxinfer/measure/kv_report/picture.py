"""The report as a picture: the KL by the bytes that a sequence keeps."""

from collections.abc import Sequence
from pathlib import Path

from jaxinfer.checks import need_plotting
from jaxinfer.measure.kv_report.report import ALL, CacheFigures

_COLOURS = ("#4269d0", "#3ca951", "#ff725c", "#a463f2", "#9c6b4e", "#efb118", "#97bbf5")
_MARKERS = "osD^vP*"


def draw(rows: Sequence[CacheFigures], file: Path, title: str) -> None:
    """Writes the picture: a colour for each kv_dtype, a marker for each policy; KL from 0 at the bottom, in powers of
    ten above the smallest. Raises ImportError without matplotlib."""
    need_plotting("a picture")
    from matplotlib.figure import Figure

    measured = [row for row in rows if row.kl is not None and row.sequence_bytes is not None]
    dtypes = list(dict.fromkeys(row.kv_dtype for row in measured))
    policies = list(dict.fromkeys(row.choice.kv_policy for row in measured))
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    for row in measured:
        colour = _COLOURS[dtypes.index(row.kv_dtype) % len(_COLOURS)]
        marker = _MARKERS[policies.index(row.choice.kv_policy) % len(_MARKERS)]
        axes.plot((row.sequence_bytes or 0) / 2**10, row.kl or 0.0, marker, color=colour, markersize=8)
    for number, name in enumerate(dtypes):
        axes.plot([], [], "o", color=_COLOURS[number % len(_COLOURS)], label=name)
    for number, name in enumerate(policies):
        label = "no policy" if name == ALL else name
        axes.plot([], [], _MARKERS[number % len(_MARKERS)], color="grey", label=label)
    smallest = min((row.kl for row in measured if row.kl), default=1e-6)
    axes.set_yscale("symlog", linthresh=smallest)
    axes.set_ylim(bottom=-smallest / 4)
    axes.set_xlim(left=0)
    axes.set_xlabel("KiB kept of a text")
    axes.set_ylabel("mean KL against the full cache (nats)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, ncols=2)
    figure.savefig(file, dpi=130)
