"""The table of a file of results, for people."""

from collections.abc import Iterator

from benchmarks.on_chip.results import DONE, Results, Row


def lines(results: Results) -> Iterator[str]:
    """The chip, a line for each figure, and the count of what is wrong, short or has not run well."""
    machine = results.machine
    yield f"{machine['device']} ({machine['platform']}), driver {machine['driver']}"
    yield f"JAX {machine['jax']}, jaxlib {machine['jaxlib']}, Python {machine['python']}"
    verdicts: dict[str, int] = {}
    for name, piece in results.pieces.items():
        ending = "" if piece["status"] == DONE else f": {piece['status']}: {piece.get('error', '')[:160]}"
        yield f"{name} ({piece['seconds']:.0f} s){ending}"
        for row in results.rows(name):
            verdicts[row.verdict] = verdicts.get(row.verdict, 0) + 1
            yield f"  {_line(row)}"
    bad = sum(piece["status"] != DONE for piece in results.pieces.values())
    counts = ", ".join(f"{verdicts.get(verdict, 0)} {verdict}" for verdict in ("ok", "SHORT", "WRONG"))
    yield f"{len(results.pieces)} pieces, {bad} that did not end well; of the figures with a bound {counts}"


def _line(row: Row) -> str:
    value = "-" if row.value is None else f"{row.value:,.4g}" if abs(row.value) < 1e5 else f"{row.value:.4g}"
    share = "" if row.share is None else f"{row.share:.1%} of {row.of}"
    goal = "" if row.goal is None else f"(goal {row.goal:.0%})"
    return f"{row.case:44}{value:>12} {row.unit:14}{share:24}{goal:12}{row.verdict:6} {row.note}".rstrip()
