"""Options of the server. Imports neither JAX nor the web stack, so that a command line can describe them at once."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit

from jaxinfer.options import option

LOOPBACK = ("localhost", "127.0.0.1", "::1")
PoolingName = Literal["last", "mean", "cls"]  # those of jaxinfer.embedding_files, which imports JAX
POOLINGS = get_args(PoolingName)
REASONING = ("auto", "none", "think", "mistral", "seed", "gpt-oss")

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s,*A-Z]+")

_server = partial(option, group="Server")
_access = partial(option, group="Access")
_load = partial(option, group="Overload")
_many = partial(option, group="Many models")
_adapters = partial(option, group="Adapters over HTTP")
_weights = partial(option, group="Weights over HTTP")
_states = partial(option, group="Hidden states over HTTP")
_events = partial(option, group="KV events")

_ENDPOINT = re.compile(r"tcp://(\*|[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\]):(\d{1,5})")
_MAX_PORT = 65535
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_MAX_SECONDS = 2**31
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b)?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The server's address, its access rules, and its limits."""

    host: str = _server("127.0.0.1", "Address to listen at. Any but a loopback address needs --api-keys.", "ADDRESS")
    port: int = _server(8000, "Port to listen at; 0 takes a free one.", "N", min=0, max=65535)
    served_model_name: str | None = _server(
        None,
        "Name of the one model in requests and answers; by default that of its folder or file, or its hub id. "
        "NAME=MODEL names it too.",
        "NAME",
        "--served-model-name",
    )
    lazy: bool = _server(
        False,
        "Answer as soon as the model is loaded and compile meanwhile; first requests wait for the programs they need.",
    )
    reasoning: str = _server(
        "auto",
        "Tags of the model's reasoning, which answers have apart as reasoning_content: think, mistral, gemma4, seed, "
        "gpt-oss (its channels) or none; auto takes those that the chat template names.",
        "FAMILY",
    )
    pooling: PoolingName | None = _server(
        None,
        "How vectors of texts are pooled where a request has no field pooling: last, mean or cls (the first token); by "
        "default as the checkpoint says. Models whose checkpoint says nothing then score and rerank by cosines.",
    )
    drain_timeout: float = _server(
        30.0, "Seconds that running answers have to end after SIGTERM; then they end with an error.", "SECONDS", min=0
    )
    ui: bool = _server(True, "The chat page at /.", flag="--ui/--no-ui")
    log_prompts: bool = _server(False, "Write the text of prompts to the request log, and to traces.")
    otlp_endpoint: str | None = _server(
        None,
        "Collector of OpenTelemetry traces, such as http://localhost:4318; needs the extra tracing. OpenTelemetry's "
        "own variables (OTEL_...) name it too.",
        "URL",
    )
    api_keys: Path | None = _access(
        None,
        "File of keys, one a line, each with an optional name after a space. Every route but /health, /ready and the "
        "chat page needs one, as Authorization: Bearer KEY or x-api-key: KEY.",
        "FILE",
    )
    allowed_hosts: list[str] | None = _access(
        None,
        "Host names that requests may be for; by default those of the loopback addresses where the server listens at "
        "one, else any.",
        "NAME",
        "--allowed-host",
        is_repeated=True,
    )
    allowed_origins: list[str] | None = _access(
        None,
        "Web origins whose pages may use the server (CORS), such as http://localhost:3000; by default none.",
        "ORIGIN",
        "--allowed-origin",
        is_repeated=True,
    )
    accept_sent_tokens: bool = _access(
        False,
        "For a front (jaxinfer front) before several servers: streams tell it their token ids, and a request may hand "
        "over those that were sent, after which its answer goes on without making them again.",
    )
    open_metrics: bool = _access(
        False,
        "/metrics needs no key, for readers that send none, such as the endpoint picker of a Kubernetes gateway. It "
        "has counts, names of models, and of adapters that any key may name; nothing of requests.",
    )
    max_queued: int = _load(256, "Answers that may wait; a request beyond them is refused with status 429.", "N", min=1)
    max_queued_tokens: int = _load(
        1_000_000, "Prompt tokens that may wait, as estimated from the size of the text; beyond them 429.", "N", min=1
    )
    max_body_bytes: int = _load(16 << 20, "Size of a request; beyond it 413.", "BYTES", min=1024)
    max_header_bytes: int = _load(32 << 10, "Size of a request's headers; beyond it 431.", "BYTES", min=1024)
    max_connections: int = _load(
        4096, "Open connections, or fewer where the limit on open files is lower; one beyond them gets 503.", "N", min=1
    )
    max_n: int = _load(16, "Answers of one request, its prompts times n; beyond it 400.", "N", min=1)
    ignore_unknown_fields: bool = _load(
        False, "Ignore fields of requests that are not known, and log each once; by default such a request gets 400."
    )
    send_timeout: float = _load(
        60.0, "Seconds after which a client that does not read its answer is disconnected.", "SECONDS", min=1
    )

    models: list[str] | None = _many(
        None,
        "A model that requests may name, beside MODEL, the one of requests that name none: a folder, a file, a hub id "
        "or an alias, named by its folder or file unless as NAME=MODEL. It is loaded when a request names it, the "
        "first at the start unless --lazy. Without any model, those that are stored on this machine may be named.",
        "[NAME=]MODEL",
        "--model",
        is_repeated=True,
    )
    allow_any: bool = _many(
        False, "Requests may name any model on this machine: a folder, a file, a hub id that was downloaded."
    )
    model_memory: str | None = _many(
        None,
        "Bytes of a device that the loaded models may need together, such as 24GiB, as they are counted before one is "
        "loaded; by default memory_fraction of what is free at the start. Idle models are unloaded for another one.",
        "BYTES",
    )
    pin: list[str] | None = _many(
        None, "A model that is loaded at the start and never unloaded.", "NAME", "--pin", is_repeated=True
    )
    keep_alive: list[str] | None = _many(
        None,
        "How long a model stays loaded after its last request, such as 300, 5m or -1 for ever; NAME=5m for one model. "
        "A request's keep_alive comes first. By default 5m; the one model of a server that has no other stays.",
        "TIME",
        "--keep-alive",
        is_repeated=True,
    )

    adapter_routes: bool = _adapters(
        False,
        "Routes that load and unload adapters while the server runs: /v1/load_lora_adapter, /v1/unload_lora_adapter, "
        "/server_info, /pause and /resume. They need an admin key and --adapter-root.",
    )
    admin_keys: Path | None = _adapters(
        None,
        "File of keys for these routes, as that of --api-keys, none of them an API key; by default the one key in the "
        "environment variable JAXINFER_ADMIN_KEY. They serve for all other routes too.",
        "FILE",
    )
    adapter_roots: list[str] | None = _adapters(
        None,
        "Folder below which these routes read adapters, whatever links lead out of it.",
        "DIR",
        "--adapter-root",
        is_repeated=True,
    )
    adapter_max_mib: int = _adapters(
        1024, "MiB of all files in the folder of an adapter; a larger one is refused.", "MIB", min=1
    )

    hidden_states: bool = _states(
        False,
        "A route, /v1/hidden_states, that answers with the hidden states of a prompt and its answer after some of the "
        "--tapped-layers, as safetensors.",
    )
    hidden_states_max_mib: int = _states(
        64, "MiB of one answer of this route; a request for more gets 400.", "MIB", min=1
    )

    weight_routes: bool = _weights(
        False,
        "Routes that replace the model's weights while the server runs, pause it and give its memory back: "
        "/start_weight_update, /update_weights, /finish_weight_update, /pause, /resume, /sleep, /wake_up and others of "
        "vLLM's. They need an admin key, and are on a port of their own at 127.0.0.1, which has all other routes too.",
    )
    weights_roots: list[str] | None = _weights(
        None,
        "Folder below which these routes read checkpoints, whatever links lead out of it.",
        "DIR",
        "--weights-root",
        is_repeated=True,
    )
    admin_port: int = _weights(
        0, "Port of these routes at 127.0.0.1; 0 is a free one, which is printed.", "PORT", min=0, max=65535
    )

    kv_events: str | None = _events(
        None,
        "Send events of cached blocks over ZMQ, in vLLM's form, for routers that send a request where its prompt is "
        "cached; such as tcp://127.0.0.1:5557, and the next ports for the other engines of a data axis. Needs the "
        "extra events, and is for a server of one model.",
        "ENDPOINT",
    )
    kv_events_replay: str | None = _events(
        None, "Socket at which routers get events again that they missed, such as tcp://127.0.0.1:5558.", "ENDPOINT"
    )
    kv_events_format: Literal["maps", "positional"] = _events(
        "maps", "Form of an event: maps, as vLLM sends them since June 2026, or positional, as before."
    )
    kv_events_buffer: int = _events(10_000, "Messages that are kept for the replay socket.", "N", min=1)
    kv_events_topic: str = _events(
        "", "Topic of the messages: none as by default of vLLM's, kv@POD_IP:PORT@MODEL for llm-d.", "TOPIC"
    )
    kv_events_any_address: bool = _events(
        False,
        "Let the sockets of events be at another address than a loopback one. They have no keys and no encryption, and "
        "events carry the token ids of all prompts: whoever can connect can read these.",
    )

    def __post_init__(self) -> None:
        self._check_events()
        _ = self.keep_alive_seconds, self.memory_bytes
        if self.adapter_routes and not self.adapter_roots:
            raise ValueError("adapter_routes needs adapter_roots (--adapter-root DIR), where adapters may be read")
        if self.adapter_roots and not self.adapter_routes:
            raise ValueError("adapter_roots is for adapter_routes (--adapter-routes), which is not given")
        if self.admin_keys and not (self.adapter_routes or self.weight_routes):
            raise ValueError("admin_keys is for adapter_routes (--adapter-routes) or weight_routes (--weight-routes)")
        for name in ("weights_roots", "admin_port"):
            if getattr(self, name) and not self.weight_routes:
                raise ValueError(f"{name} is for weight_routes (--weight-routes), which is not given")
        if self.pooling not in (None, *POOLINGS):
            raise ValueError(f"pooling={self.pooling!r} is none of {', '.join(POOLINGS)}")
        if self.reasoning not in REASONING:
            raise ValueError(f"reasoning={self.reasoning!r} is none of {', '.join(REASONING)}")
        if self.otlp_endpoint is not None and not _is_http_url(self.otlp_endpoint):
            raise ValueError(f"otlp_endpoint={self.otlp_endpoint!r} is not a URL such as http://localhost:4318")
        for origin in self.allowed_origins or ():
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins: {origin!r} is no origin such as http://localhost:3000, in lower case"
                )
        if not self.is_loopback and self.api_keys is None:
            raise ValueError(
                f"host={self.host!r} is reachable from other machines, so that anybody could use the model: give "
                f"api_keys (--api-keys FILE), or listen at 127.0.0.1"
            )

    def _check_events(self) -> None:
        """Raises ValueError for options of events that contradict each other."""
        for name in ("kv_events_replay", "kv_events_topic", "kv_events_any_address"):
            if getattr(self, name) and self.kv_events is None:
                raise ValueError(f"{name} is for kv_events (--kv-events ENDPOINT), which is not given")
        if self.kv_events_format not in ("maps", "positional"):
            raise ValueError(f"kv_events_format={self.kv_events_format!r} is none of maps, positional")
        port = 0
        endpoints = {name: value for name in ("kv_events", "kv_events_replay") if (value := getattr(self, name))}
        for name, endpoint in endpoints.items():
            try:
                host, port = kv_endpoint(endpoint)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            if host not in LOOPBACK and not self.kv_events_any_address:
                raise ValueError(
                    f"{name}={endpoint!r} can be reached from other machines, and events carry the token ids of all "
                    f"prompts: give kv_events_any_address (--kv-events-any-address), or an address of 127.0.0.1"
                )
        if port and len(endpoints) == 2 and len(set(endpoints.values())) == 1:
            raise ValueError(f"kv_events and kv_events_replay are both {self.kv_events!r}: they need two ports")

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can connect."""
        return self.host in LOOPBACK

    @property
    def memory_bytes(self) -> int | None:
        """`model_memory` in bytes. Raises ValueError."""
        if self.model_memory is None:
            return None
        try:
            return parse_bytes(self.model_memory)
        except ValueError as error:
            raise ValueError(f"model_memory: {error}") from None

    @property
    def keep_alive_seconds(self) -> dict[str, float]:
        """Seconds by the name of a model; "" is for all others. Raises ValueError."""
        by_name = {"": 300.0}
        for text in self.keep_alive or ():
            name, _, value = text.rpartition("=")
            try:
                seconds = parse_duration(value)
            except ValueError as error:
                raise ValueError(f"keep_alive={text!r:.60}: {error}") from None
            by_name[name] = math.inf if seconds is None else seconds
        return by_name

    @property
    def hosts(self) -> Sequence[str] | None:
        """Host names that requests may be for; None for any."""
        if self.allowed_hosts:
            return tuple(name.lower() for name in self.allowed_hosts)
        return LOOPBACK if self.is_loopback else None


def parse_duration(value: str | float | None) -> float | None:
    """Seconds of a number, or of a text such as "300", "5m" or "1h30m"; infinity for what is below 0. Raises ValueError
    for anything else."""
    if value is None:
        return None
    if isinstance(value, str):
        text = value.strip()
        sign, rest = (-1, text[1:]) if text.startswith("-") else (1, text)
        try:
            seconds = float(rest)
        except ValueError:
            parts = _DURATION.findall(rest)
            if not parts or "".join(number + unit for number, unit in parts) != rest:
                raise ValueError(f"{value!r:.60} is no time such as 300, 5m or -1") from None
            seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
        value = sign * seconds
    if isinstance(value, bool) or not abs(value) <= _MAX_SECONDS:
        raise ValueError(f"{value!r:.60} is no time such as 300, 5m or -1")
    return math.inf if value < 0 else float(value)


def parse_bytes(text: str) -> int:
    """Bytes of a text such as "24GiB" or "500000000". Raises ValueError."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r:.60} is no number of bytes such as 24GiB")
    number, prefix, is_binary = match.groups()
    power = "kmgt".index(prefix.lower()) + 1 if prefix else 0
    return int(float(number) * (1024 if is_binary or not prefix else 1000) ** power)


def kv_endpoint(endpoint: str) -> tuple[str, int]:
    """Host, "*" for all addresses, and port of a text such as "tcp://127.0.0.1:5557"; port 0 is a free one. Raises
    ValueError."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or int(match[2]) > _MAX_PORT:
        raise ValueError(f"{endpoint!r:.80} is no endpoint such as tcp://127.0.0.1:5557")
    return match[1].strip("[]"), int(match[2])


def _is_http_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False
