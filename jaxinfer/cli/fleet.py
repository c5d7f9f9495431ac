"""`jaxinfer fleet`: several engines as one."""

import typer

from jaxinfer.cli.command import command
from jaxinfer.cli.fleet_serve import fleet_serve
from jaxinfer.cli.names import NamedCommand, NamedGroup

app = typer.Typer(cls=NamedGroup, help="Several engines as one: served under Ray.", no_args_is_help=True)
app.command("serve", cls=NamedCommand)(command(fleet_serve))
