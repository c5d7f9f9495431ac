"""Options of the front. Imports no web stack, so that a command line can describe them at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from jaxinfer.options import option
from jaxinfer.server.options import LOOPBACK

_front = partial(option, group="Front")
_access = partial(option, group="Access")
_load = partial(option, group="Overload")


@dataclass(frozen=True, kw_only=True)
class FrontOptions:
    """The front's replicas, its address, and its limits."""

    replicas: list[str] | None = _front(
        None,
        "A server (jaxinfer serve --accept-sent-tokens) of the same model, with the same options; at least two are "
        "needed to outlive one.",
        "URL",
        "--replica",
        is_repeated=True,
    )
    host: str = _front("127.0.0.1", "Address to listen at. Elsewhere than at a loopback address, replicas need keys.")
    port: int = _front(8080, "Port to listen at; 0 takes a free one.", "N", min=0, max=65535)
    stall_timeout: float = _front(
        30.0,
        "Seconds without a byte, or without an answer to /ready, after which a replica is given up. A stream has a "
        "byte every 15 seconds.",
        "SECONDS",
        min=16,
    )
    wait_timeout: float = _front(
        30.0, "Seconds that a request waits for a replica while none is ready; then 503.", "SECONDS", min=0
    )
    max_imbalance: int = _front(
        8,
        "Requests that the server which has most of a prompt cached may run more than the one that runs fewest, and "
        "still get the request.",
        "N",
        min=0,
    )
    drain_timeout: float = _front(30.0, "Seconds that running answers have to end after SIGTERM.", "SECONDS", min=0)
    allowed_hosts: list[str] | None = _access(
        None,
        "Host names that requests may be for; by default those of the loopback addresses where the front listens at "
        "one, else any.",
        "NAME",
        "--allowed-host",
        is_repeated=True,
    )
    max_body_bytes: int = _load(16 << 20, "Size of a request; beyond it 413.", "BYTES", min=1024)
    max_connections: int = _load(4096, "Open connections; one beyond them gets 503.", "N", min=1)
    send_timeout: float = _load(
        60.0, "Seconds after which a client that does not read its answer is disconnected.", "SECONDS", min=1
    )

    def __post_init__(self) -> None:
        if not self.replicas:
            raise ValueError("a front needs replicas (--replica URL, once for each)")
        for url in self.replicas:
            address_of(url)
        if len(set(map(address_of, self.replicas))) < len(self.replicas):
            raise ValueError("replicas: one is named twice")

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can connect."""
        return self.host in LOOPBACK

    @property
    def hosts(self) -> Sequence[str] | None:
        """Host names that requests may be for; None for any."""
        if self.allowed_hosts:
            return tuple(name.lower() for name in self.allowed_hosts)
        return LOOPBACK if self.is_loopback else None


def address_of(url: str) -> tuple[str, int]:
    """Host and port of a replica. Raises ValueError for what is no URL such as http://127.0.0.1:8000."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if parts.scheme != "http" or not host or parts.path not in ("", "/") or parts.query or parts.username:
        raise ValueError(f"replica {url!r:.80} is no URL such as http://127.0.0.1:8000")
    return host, 80 if port is None else port
