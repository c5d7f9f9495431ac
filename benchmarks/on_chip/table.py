"""The table of a file of results, for people."""

from collections import Counter
from collections.abc import Iterator

from benchmarks.on_chip.results import DONE, CardResults, Results, Row


def lines(results: Results) -> Iterator[str]:
    """For each card a line for each figure, and the count of what is wrong, short or has not run well."""
    for number, (key, card) in enumerate(results.cards.items()):
        yield from [""] * (number > 0)
        yield f"{key} ({card.machine['platform']}, driver {card.machine['driver']}, Python {card.machine['python']})"
        for name in card.pieces:
            yield from piece_lines(card, name)
        if card.running is not None:
            yield f"{card.running}: running"
            yield from (f"  {_line(Row(**row))}" for row in card.found)
        yield _summary(card)


def piece_lines(card: CardResults, name: str) -> Iterator[str]:
    """The lines of one piece."""
    piece = card.pieces[name]
    ending = "" if piece["status"] == DONE else f": {piece['status']}: {piece.get('error', '')[:160]}"
    yield f"{name} ({piece['seconds']:.0f} s){ending}" + (f" [{piece['clocks']}]" if "clocks" in piece else "")
    yield from (f"  {_line(row)}" for row in card.rows(name))


def _summary(card: CardResults) -> str:
    verdicts = Counter(row.verdict for name in card.pieces for row in card.rows(name))
    num_bad = sum(piece["status"] != DONE for piece in card.pieces.values())
    counts = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in ("ok", "SHORT", "WRONG"))
    return f"{len(card.pieces)} pieces, {num_bad} that did not end well; of the figures with a bound {counts}"


def _line(row: Row) -> str:
    share = "" if row.share is None else f"{row.share:.1%} of {row.of}"
    goal = "" if row.goal is None else f"(goal {row.goal:.0%})"
    predicted = "" if row.difference is None else f"predicted {_number(row.predicted)} ({row.difference:+.1%})"
    columns = f"{row.case:44}{_number(row.value):>12} {row.unit:14}{share:24}{goal:12}{row.verdict:6}"
    return f"{columns} {'; '.join(filter(None, (predicted, row.note)))}".rstrip()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if abs(value) < 1e5 else f"{value:.4g}"
