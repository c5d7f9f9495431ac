"""`jaxinfer models`: the supported model families, from the loader's catalogue."""

from dataclasses import dataclass

from jaxinfer.cli.options import as_json
from jaxinfer.cli.output import console, plain_cell, write_json


@dataclass(frozen=True)
class ModelsOptions:
    as_json: bool = as_json("One JSON object.")


def models(options: ModelsOptions) -> None:
    """List the supported model families.

    The family of a checkpoint is the first of `architectures` in its config.json. The last column lists how a family
    differs from Llama.
    """
    from checkpoints_convert.huggingface.families import supported_families

    families = supported_families()
    if options.as_json:
        write_json({"families": [family.to_dict() for family in families]})
        return
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 1, 0))
    for title in ("family", "architectures", "examples", "differences from Llama"):
        table.add_column(title, overflow="fold")
    for family in families:
        cells = (family.title, "\n".join(family.architectures), family.examples, ", ".join(family.differences))
        table.add_row(*map(plain_cell, cells))
    console().print(table)
