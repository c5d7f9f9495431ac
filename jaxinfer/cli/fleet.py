"""`jaxinfer fleet`: several engines as one."""

from dataclasses import dataclass
from pathlib import Path

import typer

from jaxinfer.cli.command import command, say
from jaxinfer.cli.fleet_simulate import simulate
from jaxinfer.cli.names import NamedCommand, NamedGroup
from jaxinfer.fleet.ray_serve.deploy import read_file, serve_fleet
from jaxinfer.options import MISSING, argument, option


@dataclass(frozen=True, kw_only=True)
class FleetServeOptions:
    """The fleet's file, and the cluster."""

    file: Path = argument(MISSING, "YAML file of the fleet (docs/guides/ray.md).", "FILE")
    ray_address: str | None = option(
        None,
        "A running Ray cluster, such as auto; by default Ray is started on this machine, and ended with the command.",
        "ADDRESS",
        "--ray-address",
        group="Ray",
    )


def fleet_serve(options: FleetServeOptions) -> int:
    """Serve a model from several engines under Ray Serve, behind one address.

    A stream whose engine dies goes on at another one, token for token. Run again with a changed file and --ray-address,
    it changes the fleet that runs: weights and adapters are replaced engine by engine, while requests are answered.
    """
    return serve_fleet(read_file(options.file), options.ray_address, say)


app = typer.Typer(
    cls=NamedGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Several engines as one: served under Ray, or simulated on paper.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _function in {"serve": fleet_serve, "simulate": simulate}.items():
    app.command(_name, cls=NamedCommand)(command(_function))
