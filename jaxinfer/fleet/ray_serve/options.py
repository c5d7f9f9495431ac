"""Options of a fleet, from Python or from a file. Imports neither JAX nor Ray, so that mistakes are told at once."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jaxinfer.fleet.front.options import FrontOptions
from jaxinfer.fleet.ray_serve.choice import ROUTINGS, Routing
from jaxinfer.options import MISSING, option
from jaxinfer.server.options import LOOPBACK, ServerOptions

_fleet = partial(option, group="Fleet")
_placement = partial(option, group="Placement")


def _made(group: str, factory: Callable[[], Any], help: str) -> Any:
    """An option whose default is made for each."""
    return field(default_factory=factory, metadata=option(None, help, group=group).metadata)


REPLICA, FRONT = "Replica", "Front"
"""Names of the deployments."""
SERVER_FIELDS = (
    *("served_model_name", "lazy", "reasoning", "pooling", "log_prompts", "api_keys", "allowed_origins", "ui"),
    *("max_queued", "max_queued_tokens", "max_body_bytes", "max_header_bytes", "max_n", "ignore_unknown_fields"),
    *("max_connections", "send_timeout"),
)
_MAX_ONGOING = 1 << 14  # of Ray for a replica; the server's own limits are lower, and answer with 429
_STRATEGIES = ("PACK", "STRICT_PACK")
_GRACE_SECONDS = 5.0  # for the end of a process after its answers


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Resources that Ray reserves for each replica, on one host.

    Raises ValueError.
    """

    num_cpus: float = _placement(1.0, "Processors of a replica, as Ray counts them.", "N")
    num_gpus: float = _placement(0.0, "GPUs of a replica; it sees no other ones.", "N")
    resources: Mapping[str, float] = _made("Placement", dict, "Other resources of Ray, such as {TPU: 4}.")
    bundles: Sequence[Mapping[str, float]] = _placement(
        (), "Bundles of a placement group for each replica, which runs in the first."
    )
    strategy: str = _placement("STRICT_PACK", "How its bundles are placed: PACK or STRICT_PACK.", "NAME")

    def __post_init__(self) -> None:
        for name in ("num_cpus", "num_gpus"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"placement: {name}={getattr(self, name)!r} must be a number of at least 0")
        if self.strategy not in _STRATEGIES:
            raise ValueError(
                f"placement: strategy={self.strategy!r} is none of {', '.join(_STRATEGIES)}: a replica lies on one host"
            )

    def actor_options(self) -> dict[str, Any]:
        """Options of a replica's actor."""
        return {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "resources": dict(self.resources)}


@dataclass(frozen=True, kw_only=True)
class WeightsSource:
    """Weights that replace those of the model: a checkpoint's folder that every host can read, and a version."""

    path: str
    version: str

    def __post_init__(self) -> None:
        for name in ("path", "version"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"weights: {name} must be a text, got {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """A fleet: its model, its replicas, where they lie, and its address.

    `weights` and `adapters`, and `num_replicas`, are changed while it runs; a change of anything else starts all
    replicas again, one after the other.

    Raises ValueError.
    """

    model: str = _fleet(MISSING, "A checkpoint's folder, a GGUF file, a hub id or demo, as every host can open it.")
    num_replicas: int = _fleet(1, "Engines, each in a process of its own.", "N", min=1)
    mesh: str | None = _fleet(None, "The mesh of each replica, such as model=4.", "AXIS=N")
    options: Mapping[str, Any] = _made("Fleet", dict, "Options of `LLM` for each replica.")
    server: Mapping[str, Any] = _made(
        "Fleet", dict, "Options of the server of each replica: " + ", ".join(SERVER_FIELDS) + "."
    )
    weights: WeightsSource | None = _fleet(None, "`path` and `version` of weights that replace those of the model.")
    adapters: Mapping[str, str] = _made("Fleet", dict, "Folders of adapters by name; `options` need max_adapters.")
    placement: Placement = _made("Fleet", Placement, "Where replicas lie.")
    routing: Routing = _fleet(
        "prefix",
        "prefix: a request goes to the replica that has most of its prompt cached, unless it is too busy; load: to the "
        "one with the fewest requests; round_robin: to each in turn.",
    )
    max_imbalance: int = _fleet(
        8, "Requests that the replica with the prefix may run more than the one that runs fewest.", "N", min=0
    )
    host: str = _fleet("127.0.0.1", "Address to listen at. Any but a loopback address needs api_keys in `server`.")
    port: int = _fleet(8000, "Port of Ray's proxy.", "N", min=1, max=65535)
    direct_port: int | None = _fleet(
        None,
        "Port at which the front listens by itself as well: a chunk costs an eighth of what it costs through Ray's "
        "proxy. On the machine of the front alone.",
        "N",
        min=1,
        max=65535,
    )
    allowed_hosts: Sequence[str] | None = _fleet(
        None, "Host names that requests may be for; by default those of the loopback addresses, or any elsewhere."
    )
    replica_host: Literal["loopback", "node"] = _fleet(
        "loopback",
        "Where replicas listen for the front: loopback, for a fleet on one machine, or node, the address of their "
        "machine in the cluster. They answer only to the front's key, which is a new one at each start.",
    )
    num_fronts: int = _fleet(1, "Processes that pass requests on. Each routes by what it has sent itself.", "N", min=1)
    stall_timeout: float = _fleet(30.0, "Seconds without a byte after which a replica is given up.", "SECONDS", min=16)
    wait_timeout: float = _fleet(60.0, "Seconds that a request waits for a replica; then 503.", "SECONDS", min=0)
    drain_timeout: float = _fleet(
        30.0, "Seconds that running answers have to end at a replica that is stopped; others then go on with them."
    )
    health_period: float = _fleet(2.0, "Seconds between looks at each replica.", "SECONDS")

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model must be a text, got {self.model!r}")
        for name, least in (("num_replicas", 1), ("num_fronts", 1), ("max_imbalance", 0), ("port", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        for name, least in (("stall_timeout", 16), ("wait_timeout", 0), ("drain_timeout", 0), ("health_period", 0.1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < least:
                raise ValueError(f"{name} must be at least {least} seconds, got {value!r}")
        if self.direct_port is not None and (not isinstance(self.direct_port, int) or self.direct_port < 1):
            raise ValueError(f"direct_port must be an integer of at least 1, got {self.direct_port!r}")
        if self.direct_port == self.port:
            raise ValueError(f"direct_port and port are both {self.port}: Ray's proxy listens at port")
        if self.routing not in ROUTINGS:
            raise ValueError(f"routing={self.routing!r} is none of {', '.join(ROUTINGS)}")
        if self.replica_host not in ("loopback", "node"):
            raise ValueError(f"replica_host={self.replica_host!r} is neither loopback nor node")
        if "mesh" in self.options:
            raise ValueError("options: mesh stands beside model, not in options")
        if self.adapters and not self.options.get("max_adapters"):
            raise ValueError(f"{len(self.adapters)} adapters need max_adapters in options, such as max_adapters: 8")
        if unknown := [name for name in self.server if name not in SERVER_FIELDS]:
            raise ValueError(f"server: {unknown[0]!r} is none of {', '.join(SERVER_FIELDS)}")
        if self.host not in LOOPBACK and not self.server.get("api_keys"):
            raise ValueError(
                f"host={self.host!r} is reachable from other machines, so that anybody could use the model: give "
                f"api_keys in server, or listen at 127.0.0.1"
            )
        self.server_options("127.0.0.1")

    @classmethod
    def read(cls, values: Any) -> "FleetOptions":
        """Options of a mapping, as in a file. Raises ValueError, with the name, for one that is unknown."""
        values = _fields("the fleet", cls, values)
        for name, kind in (("placement", Placement), ("weights", WeightsSource)):
            if values.get(name) is not None:
                values[name] = kind(**_fields(name, kind, values[name]))
            else:
                values.pop(name, None)
        for name in ("options", "server", "adapters"):
            if not isinstance(values.get(name, {}), Mapping):
                raise ValueError(f"{name} must be names with values, got {values[name]!r:.80}")
        return cls(**values)

    def llm_options(self) -> dict[str, Any]:
        """Keywords of `LLM`."""
        return {**self.options, **({} if self.mesh is None else {"mesh": self.mesh})}

    def server_options(self, address: str) -> ServerOptions:
        """Options of a replica's server at an address. Raises ValueError."""
        given = dict(self.server)
        if given.get("api_keys") is not None:
            given["api_keys"] = Path(given["api_keys"])
        try:
            options = ServerOptions(port=0, accept_sent_tokens=True, allowed_hosts=[address], **given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"server: {error}") from None
        return options

    def front_options(self) -> "FleetFrontOptions":
        """Options of the front."""
        hosts = None if self.allowed_hosts is None else list(self.allowed_hosts)
        more = {
            name: self.server[name]
            for name in ("max_body_bytes", "max_connections", "send_timeout")
            if name in self.server
        }
        return FleetFrontOptions(
            host=self.host,
            stall_timeout=self.stall_timeout,
            wait_timeout=self.wait_timeout,
            drain_timeout=self.drain_timeout,
            allowed_hosts=hosts,
            **more,
        )

    def changeable(self) -> dict[str, Any]:
        """`user_config` of Ray Serve: what replicas are given again while they run."""
        weights = None if self.weights is None else dataclasses.asdict(self.weights)
        return {"weights": weights, "adapters": dict(self.adapters)}

    def fixed(self) -> dict[str, Any]:
        """All else, as JSON data; a change of it starts replicas again."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("weights", "adapters", "num_replicas"):
            del values[name]
        placement = dataclasses.asdict(self.placement)
        placement = {**placement, "bundles": [dict(bundle) for bundle in self.placement.bundles]}
        values["server"] = {name: str(v) if isinstance(v, Path) else v for name, v in self.server.items()}
        return {**values, "options": dict(self.options), "placement": placement}

    def replica_deployment(self) -> dict[str, Any]:
        """Arguments of Ray Serve for the deployment of replicas."""
        arguments: dict[str, Any] = {
            "name": REPLICA,
            "num_replicas": self.num_replicas,
            "user_config": self.changeable(),
            "max_ongoing_requests": _MAX_ONGOING,
            "graceful_shutdown_timeout_s": self.drain_timeout + _GRACE_SECONDS,
            "graceful_shutdown_wait_loop_s": 0.2,
            "health_check_period_s": self.health_period,
            "health_check_timeout_s": max(30.0, self.health_period),
            "ray_actor_options": self.placement.actor_options(),
        }
        if self.placement.bundles:
            arguments["placement_group_bundles"] = [dict(bundle) for bundle in self.placement.bundles]
            arguments["placement_group_strategy"] = self.placement.strategy
        return arguments

    def router(self) -> dict[str, Any]:
        """Keywords of `FleetRequestRouter.initialize_state`."""
        return {"routing": self.routing, "max_imbalance": self.max_imbalance}

    def front_deployment(self) -> dict[str, Any]:
        """Arguments of Ray Serve for the deployment of the front."""
        return {
            "name": FRONT,
            "num_replicas": self.num_fronts,
            "max_ongoing_requests": _MAX_ONGOING,
            "graceful_shutdown_timeout_s": self.drain_timeout + _GRACE_SECONDS,
            "graceful_shutdown_wait_loop_s": 0.2,
            "ray_actor_options": {"num_cpus": 0.1},
        }


class FleetFrontOptions(FrontOptions):
    """Options of a front whose replicas Ray knows."""

    def __post_init__(self) -> None:
        pass


def _fields(what: str, kind: type, values: Any) -> dict[str, Any]:
    """The values of a dataclass's fields. Raises ValueError for what is none of them, or is missing."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{what} must be names with values, got {values!r:.80}")
    names = [field.name for field in dataclasses.fields(kind)]
    if unknown := [name for name in values if name not in names]:
        raise ValueError(f"{what}: {unknown[0]!r} is none of {', '.join(names)}")
    required = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing := [name for name in required if name not in values]:
        raise ValueError(f"{what}: {missing[0]} is missing")
    return dict(values)
