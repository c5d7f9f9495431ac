"""`jaxinfer ps` and `jaxinfer stop`: the models that a server has loaded."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from jaxinfer.checks import format_bytes
from jaxinfer.cli.command import UsageError
from jaxinfer.cli.options import as_json
from jaxinfer.cli.output import console, write_json, write_report, write_text
from jaxinfer.options import MISSING, argument, option
from jaxinfer.tables import make_table

_SECONDS = 600.0  # that a model's running answers may take until it is unloaded
_KEY = "JAXINFER_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    url: str = option("http://127.0.0.1:8000", f"The server. Its API key is read from {_KEY}.", "URL")
    as_json: bool = as_json("One JSON object.")


@dataclass(frozen=True, kw_only=True)
class StopOptions(ServerAddress):
    name: str = argument(MISSING, "The model, as requests name it.", "NAME")


def ps(options: ServerAddress) -> None:
    """Show the models that a server has loaded, and their LoRA adapters.

    Of each: its bytes, the requests that use it and those that wait for it, the seconds since the last one, and those
    until it is unloaded if none comes. Adapters are those that the API key may name.
    """
    listed = ask(options.url, "GET", "/v1/models")["data"]
    # Adapters have no state of their own, and a parent.
    models = [model for model in listed if "status" in model and model["status"]["value"] != "unloaded"]
    adapters = [model for model in listed if model.get("parent") is not None]
    if options.as_json:
        write_json({"models": models, "adapters": adapters})
        return
    titles = ("model", "state", "size", "requests", "waiting", "idle", "unloaded in")
    console().print(make_table(titles, map(_cells, models), num_left=len(titles)))
    if adapters:
        rows = [(adapter["id"], adapter["parent"], adapter["root"]) for adapter in adapters]
        write_text("\n")
        console().print(make_table(("adapter", "of", "folder"), rows, num_left=3))


def _cells(model: Mapping[str, Any]) -> list[Any]:
    status = model["status"]
    stays = status["value"] == "ready" and status["keep_alive_seconds"] is None
    idle, left = (
        "" if status[name] is None else f"{status[name]:.0f} s" for name in ("idle_seconds", "keep_alive_seconds")
    )
    return [
        model["id"],
        status["value"] if not status["error"] else f"{status['value']}: {status['error']}",
        format_bytes(status["bytes"]) if status["bytes"] else "",
        status["requests"],
        status["waiting"],
        idle,
        "stays" if stays else left,
    ]


def stop(options: StopOptions) -> None:
    """Unload a model of a server, when the requests that use it have ended.

    The next request that names it loads it again.
    """
    model = ask(options.url, "POST", "/models/unload", {"model": options.name})
    write_report(model, lambda model: f"{model['id']} is {model['status']['value']}\n", as_json=options.as_json)


def ask(url: str, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """A server's answer. Raises UsageError for what is no URL, RuntimeError with the server's reason where it refuses,
    ConnectionError where there is none."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--url {url}: a server's address is such as http://127.0.0.1:8000")
    headers = {"content-type": "application/json"}
    if key := os.environ.get(_KEY):
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(parts.geturl().rstrip("/") + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        try:
            reason = json.load(error)["error"]["message"] + (f": set {_KEY}" if error.code == 401 else "")
        except (ValueError, KeyError, TypeError, OSError):
            reason = f"the server answered with status {error.code}"
        raise RuntimeError(reason) from None
    except urllib.error.URLError as error:
        raise ConnectionError(f"no server answers at {url}: {error.reason}") from None
