"""`jaxinfer fleet serve`: a fleet's file as a configuration of Ray Serve, applied, and watched until it runs."""

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxinfer.extras import install_hint
from jaxinfer.fleet.ray_serve.options import REPLICA, FleetOptions

_NAME = "jaxinfer"  # of the application
_IMPORT_PATH = "jaxinfer.fleet.ray_serve.app:application"
_AUTH_MODE = "RAY_AUTH_MODE"
_POLL_SECONDS = 0.5
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b: ")


class FleetError(RuntimeError):
    """Ray Serve could not start or change a fleet."""


def read_file(path: Path) -> FleetOptions:
    """The options in a YAML file; paths that are there from its folder are made absolute, since replicas run in
    another one. Raises ValueError, with the file's name, OSError."""
    try:
        import yaml
    except ImportError:
        raise ImportError(f"a fleet's file needs yaml: {install_hint('ray')}", name="yaml") from None
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        return FleetOptions.read(_from_folder(values, path.resolve().parent))
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from None


def serve_config(options: FleetOptions, others: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The configuration of Ray Serve: what a running fleet takes without a new start is in `deployments`.

    Args:
      others: applications of the cluster that stay.
    """
    replicas = {"name": REPLICA, "num_replicas": options.num_replicas, "user_config": options.changeable()}
    own = {"name": _NAME, "route_prefix": "/", "import_path": _IMPORT_PATH, "args": options.fixed()}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": options.host, "port": options.port},
        "applications": [*others, {**own, "deployments": [replicas]}],
    }


def serve_fleet(
    options: FleetOptions, address: str | None = None, on_progress: Callable[[str], None] = lambda told: None
) -> int:
    """Starts a fleet, or changes the one that runs, and returns when it does; where Ray was started here, when a signal
    has come and the answers have ended.

    Args:
      address: of a running cluster, such as "auto"; None starts Ray on this machine.

    Raises FleetError, ImportError without the extra `ray`, ValueError for a cluster that anybody could use.
    """
    if options.weights is not None and address is None and not Path(options.weights.path).is_dir():
        raise ValueError(f"weights: {options.weights.path} is no folder")
    _check_authentication(address)
    try:
        import ray  # pyright: ignore[reportMissingImports]
        from ray import serve  # pyright: ignore[reportMissingImports]
        from ray.dashboard.modules.serve.sdk import ServeSubmissionClient  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"a fleet needs {error.name}: {install_hint('ray')}", name=error.name) from None
    context = ray.init(
        address=address or "local",
        log_to_driver=False,
        logging_level=logging.ERROR,
        **({} if address else {"include_dashboard": True, "dashboard_host": "127.0.0.1"}),
    )
    try:
        with _signals() as stopping:  # after Ray has set its own handlers
            client = ServeSubmissionClient(f"http://{context.dashboard_url}")
            apply(client, options, on_progress, stopping)
            if not stopping.is_set():
                on_progress(f"ready: {options.num_replicas} replicas at http://{options.host}:{options.port}")
            if address is None:
                stopping.wait()
                on_progress("draining")
                serve.delete(_NAME)  # its answers end; a shutdown alone ends Ray's proxy under them
                serve.shutdown()
    finally:
        ray.shutdown()
    return 0


def apply(
    client: Any, options: FleetOptions, on_progress: Callable[[str], None], stopping: threading.Event | None = None
) -> None:
    """Gives Ray Serve the configuration, and waits until all replicas have it. Raises FleetError.

    Args:
      client: `ServeSubmissionClient`, or what has its `get_serve_details` and `deploy_applications`.
    """
    details = client.get_serve_details()
    _check_address(details, options)
    others = [
        about["deployed_app_config"]
        for name, about in details.get("applications", {}).items()
        if name != _NAME and about.get("deployed_app_config")
    ]
    client.deploy_applications(serve_config(options, others))
    told = ""
    while not (stopping is not None and stopping.is_set()):
        about = client.get_serve_details().get("applications", {}).get(_NAME, {})
        replicas = about.get("deployments", {}).get(REPLICA, {})
        states = [replica["state"] for replica in replicas.get("replicas", ())]
        if replicas.get("deployment_config", {}).get("user_config") == options.changeable():
            if about.get("status") == "RUNNING" and states == ["RUNNING"] * options.num_replicas:
                return
            if about.get("status") in _FAILED:
                raise FleetError(f"Ray Serve: {_reason(replicas.get('message') or about.get('message'))}")
        now = f"{states.count('RUNNING')} of {options.num_replicas} replicas run"
        if now != told:
            on_progress(now)
            told = now
        time.sleep(_POLL_SECONDS)


def _check_address(details: Mapping[str, Any], options: FleetOptions) -> None:
    """Raises FleetError where Ray Serve already listens elsewhere, which it does not change."""
    now = details.get("http_options") or {}
    if details.get("applications") and (now.get("host"), now.get("port")) != (options.host, options.port):
        told = f"http://{now.get('host')}:{now.get('port')}"
        raise FleetError(f"Ray Serve listens at {told}, not at http://{options.host}:{options.port}: end it first")


def _check_authentication(address: str | None) -> None:
    """Ray listens at all addresses of the machine: without tokens anybody who reaches them may run programs."""
    mode = os.environ.setdefault(_AUTH_MODE, "token")
    if address is None and mode.lower() != "token":
        raise ValueError(
            f"{_AUTH_MODE}={mode}: Ray listens at all addresses of this machine, so that anybody who reaches them "
            f"could run programs; unset it, or set it to token"
        )


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set; the second signal ends the program as ever."""
    stopping, former, wakeup = threading.Event(), {}, -1

    def stop(number: int, frame: Any) -> None:
        stopping.set()
        for known, handler in former.items():
            signal.signal(known, handler)

    if threading.current_thread() is threading.main_thread():
        former = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        wakeup = signal.set_wakeup_fd(-1)  # by which the command line ends a program that takes longer
    try:
        yield stopping
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        if former:
            signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)


def _from_folder(values: Any, folder: Path) -> Any:
    """The values of a file with absolute paths, where there is something from its folder on."""
    if not isinstance(values, dict):
        return values

    def absolute(value: Any) -> Any:
        return str(folder / value) if isinstance(value, str) and (folder / value).exists() else value

    values = {**values, **{name: absolute(values[name]) for name in ("model",) if name in values}}
    for name, keys in (("weights", ("path",)), ("server", ("api_keys",)), ("adapters", None)):
        if isinstance(group := values.get(name), dict):
            chosen = group if keys is None else [key for key in keys if key in group]
            values[name] = {**group, **{key: absolute(group[key]) for key in chosen}}
    return values


def _reason(text: str | None) -> str:
    """The error in a message of Ray, which has a traceback."""
    lines = [line.strip() for line in (text or "").strip().splitlines()] or ["it says no reason"]
    return next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1])
