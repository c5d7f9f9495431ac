"""Tables for people, by rich: aligned columns without lines, the same on a terminal and in a pipe."""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

WIDE = 10_000  # columns: nothing is wrapped or cut off


def make_table(titles: Sequence[str], rows: Iterable[Sequence[Any]], *, num_left: int = 1) -> "Table":
    """The first `num_left` columns are aligned left, the others right. [Brackets] in cells are no markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=any(titles))
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number < num_left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return table


def table_text(titles: Sequence[str], rows: Iterable[Sequence[Any]], *, num_left: int = 1, indent: str = "") -> str:
    """A table as lines of plain text, each ended by a newline."""
    from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=WIDE, color_system=None).print(make_table(titles, rows, num_left=num_left))
    return "".join(f"{indent}{line}".rstrip() + "\n" for line in file.getvalue().splitlines())


def facts_text(facts: Mapping[str, Any], indent: str = "") -> str:
    """Names and values, one a line."""
    return table_text(("", ""), facts.items(), num_left=2, indent=indent)
