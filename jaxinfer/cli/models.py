"""`jaxinfer models`: which models open, as a table made from the loader's own."""

from typing import Annotated

import typer

from jaxinfer.cli.output import console, plain_cell, write_json


def models(
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="One JSON object.")] = False,
) -> None:
    """List the model families that open.

    A checkpoint is known by the first of `architectures` in its config.json. What sets a family apart is what it does
    otherwise than Llama.
    """
    from checkpoints_convert.huggingface.families import supported_families

    families = supported_families()
    if as_json:
        write_json({"families": [family.to_dict() for family in families]})
        return
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 1, 0))
    for title in ("family", "architectures", "examples", "what sets it apart"):
        table.add_column(title, overflow="fold")
    for family in families:
        cells = (family.title, "\n".join(family.architectures), family.examples, ", ".join(family.differences))
        table.add_row(*map(plain_cell, cells))
    console().print(table)
