"""`jaxinfer fleet`: several engines as one."""

import typer

from jaxinfer.cli.command import command
from jaxinfer.cli.fleet_serve import fleet_serve
from jaxinfer.cli.fleet_simulate import simulate
from jaxinfer.cli.names import NamedCommand, NamedGroup

app = typer.Typer(
    cls=NamedGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Several engines as one: served under Ray, or simulated on paper.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _function in {"serve": fleet_serve, "simulate": simulate}.items():
    app.command(_name, cls=NamedCommand)(command(_function))
