"""A fleet as an application of Ray Serve: `build` for Python, `application` for a configuration of Ray Serve."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxinfer.api.arguments import checked_options
from jaxinfer.fleet.ray_serve.options import FleetOptions

try:
    from ray import serve  # pyright: ignore[reportMissingImports]
    from ray.serve import Application  # pyright: ignore[reportMissingImports]
    from ray.serve.config import RequestRouterConfig  # pyright: ignore[reportMissingImports]
    from ray.serve.schema import LoggingConfig  # pyright: ignore[reportMissingImports]
except ImportError:
    from jaxinfer.extras import install_hint

    raise ImportError(f"a fleet needs Ray Serve: {install_hint('ray')}", name="ray.serve") from None

_ROUTER = "jaxinfer.fleet.ray_serve.router:FleetRequestRouter"


def build(model: str, **options: Any) -> Application:
    """An application of Ray Serve: replicas of a model behind a front, for `ray.serve.run`.

    A stream whose replica dies goes on at another one, token for token. The front answers at the routes of
    `jaxinfer serve`, at the address of Ray Serve (`serve.start(http_options={"host": "127.0.0.1"})`).

    Args:
      model: as every host can open it. options: fields of `FleetOptions`, such as num_replicas, mesh, options, server,
        placement; placement and weights may be dicts. `host` and `port` are Ray Serve's, and `host` says whether
        clients need keys.

    Raises ValueError or TypeError for options that are wrong, ImportError without the extra `ray`.
    """
    read = FleetOptions.read({"model": model, **{name: _plain(value) for name, value in options.items()}})
    checked_options(model, read.llm_options())
    return _bound(read)


def application(args: Mapping[str, Any]) -> Application:
    """As `build`, of one mapping: for a configuration of Ray Serve, with
    `import_path: jaxinfer.fleet.ray_serve.app:application` and `args`."""
    return build(**args)


def _bound(options: FleetOptions) -> Application:
    from jaxinfer.fleet.ray_serve.front import FleetFront
    from jaxinfer.fleet.ray_serve.replica import FleetReplica

    quiet = LoggingConfig(enable_access_log=False)  # the server has a log of requests
    router = RequestRouterConfig(request_router_class=_ROUTER, request_router_kwargs=options.router())
    arguments = options.replica_deployment()
    replicas = serve.deployment(request_router_config=router, logging_config=quiet, **arguments)(FleetReplica)
    front = serve.deployment(logging_config=quiet, **options.front_deployment())(FleetFront)
    fixed = options.fixed()
    return front.bind(replicas.bind(fixed), fixed, options.num_replicas)


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
