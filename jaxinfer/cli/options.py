"""Options that several commands share: the model, the engine, a draft, several hosts, and sampling."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.api.options import ON_LOADING, LLMOptions
from jaxinfer.cli.command import OK, UsageError
from jaxinfer.option_names import our_value
from jaxinfer.options import MISSING, Description, argument, describe, option
from jaxinfer.progress import Stage
from jaxinfer.sampling.params import SamplingParams, our_names

if TYPE_CHECKING:
    from jaxinfer.api.llm import LLM

_hosts = partial(option, group="Several hosts")
_structured = partial(option, group="Structured output")
as_json = partial(option, False, flag="--json")
overwrite = partial(option, False, flag="--overwrite")


def model_argument(
    help: str = "A checkpoint's folder, a GGUF file, a Hugging Face hub id or a short name (qwen3:0.6b), an alias, or "
    "demo.",
) -> Any:
    """The model of commands that take it by position."""
    return argument(MISSING, help, "MODEL")


def given(source: type, names: Sequence[str] | None = None) -> Callable[[type], Any]:
    """A class decorator: a dataclass of the options of `source`, or those of `names`, as the command line has them. All
    are None by default: not given."""

    def decorate(cls: type) -> type:
        added = []
        for field in fields(source):
            if (about := describe(source, names).get(field.name)) is not None:
                # A switch that is off by default has no negative form.
                flags = about.flags or (("--" + field.name.replace("_", "-"),) if field.default is False else ())
                metadata = {"option": replace(about, flags=flags)}
                own = dataclasses.field(default=None, metadata=metadata)
                added.append((field.name, _text_type(field.type, about), own))
        made = dataclasses.make_dataclass(cls.__name__, added, bases=(cls,), frozen=True, kw_only=True)
        made.__doc__, made.__module__ = cls.__doc__, cls.__module__
        return made

    return decorate


def _text_type(hint: Any, about: Description) -> Any:
    """The type of an option's text: lists for those that may be repeated. A type in quotes is one of ours, for which
    the command line takes a text."""
    if about.is_repeated:
        return list[str] | None
    if about.parse is not None or isinstance(hint, str):
        return str | None
    return hint | None


@given(LLMOptions, (*ON_LOADING, "offload", "max_model_len", "kv_dtype", "kv_policy"))
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    model: str = option(
        MISSING,
        "A checkpoint's folder or URL (gs://, s3://), a GGUF file, a Hugging Face hub id or a short name (qwen3:0.6b), "
        "an alias, or demo.",
        "MODEL",
        "--model -m",
        group="Model",
    )

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...


@given(
    LLMOptions,
    (
        *("max_seqs", "mesh", "cache", "page_size", "num_pages", "memory_fraction", "prefill_chunk"),
        *("token_buckets", "decode_slots", "deterministic", "prefix_cache"),
        *("host_cache_gib", "prefix_store", "prefix_store_gib"),
    ),
)
class ServingOptions(ModelOptions):
    """The model, and the engine that serves many requests with it."""


DRAFT = ("draft", "num_draft_tokens", "draft_tree", "acceptance", "draft_kv_dtype")


@given(LLMOptions, DRAFT)
class DraftOptions:
    """A draft for speculative decoding."""


@dataclass(frozen=True, kw_only=True)
class DraftedServingOptions(DraftOptions, ServingOptions):
    """The model, the engine, and a draft."""


ADAPTER = "adapter"  # of a line of a file
ADAPTER_ROOM = (
    *("max_adapters", "max_loaded_adapters", "max_adapter_rank", "adapter_modules", "adapter_parts"),
    "max_adapter_tokens",
)
ADAPTERS = ("adapters", *ADAPTER_ROOM, "base_model")


@given(LLMOptions, ADAPTERS)
class AdapterOptions:
    """LoRA adapters, and the room for them."""


@given(LLMOptions, ("tool_parser",))
class ChatServingOptions(AdapterOptions, DraftedServingOptions):
    """The model, the engine, a draft, adapters, and calls of tools."""


@dataclass(frozen=True, kw_only=True)
class DraftedModelOptions(DraftOptions, ModelOptions):
    """The model and a draft."""


@dataclass(frozen=True, kw_only=True)
class AnswerAdapterOptions(AdapterOptions):
    """The adapters of a command that answers with one of them."""

    use_adapter: str | None = option(
        None, "The adapter that answers, where several are given; one alone answers.", "NAME", group="Adapters"
    )


def chosen_adapter(options: AnswerAdapterOptions) -> str | None:
    """The name of the adapter that answers; None for the model without one. Raises UsageError where it is not known."""
    names = list(given_values(options).get("adapters", {}))
    name = options.use_adapter
    if name is None and len(names) > 1:
        raise UsageError(f"--use-adapter says which of {', '.join(names)} answers")
    if name is not None and name not in names:
        raise UsageError(f"--use-adapter {name}: {_no_such_adapter(names)}")
    return name or next(iter(names), None)


def adapters_of_lines(options: AnswerAdapterOptions, lines: Sequence[tuple[str, dict[str, Any]]]) -> list[str | None]:
    """The name of the adapter that answers each line of a file, given by its place and its values.

    A line's "adapter" is taken out of its values; null is the model without one, and lines without it have that of
    `chosen_adapter`. Raises UsageError, with the place, for a name that is not known.
    """
    names, adapters = list(given_values(options).get("adapters", {})), []
    for where, values in lines:
        if ADAPTER not in values:
            try:
                adapters.append(chosen_adapter(options))
            except UsageError as error:
                named = "" if options.use_adapter is not None else f"{where} names no adapter: "
                raise UsageError(f"{named}{error}") from None
            continue
        name = values.pop(ADAPTER)
        if name is not None and (not isinstance(name, str) or not name):
            raise UsageError(f"{where}: adapter must be the name of an adapter or null, got {name!r:.60}")
        if name is not None and name not in names:
            raise UsageError(f"{where}: adapter {name!r:.80}: {_no_such_adapter(names)}")
        adapters.append(name)
    return adapters


def _no_such_adapter(names: Sequence[str]) -> str:
    known = f", only {', '.join(names)}" if names else ": --adapter NAME=DIR gives one"
    return f"there is no such adapter{known}"


@dataclass(frozen=True, kw_only=True)
class HostsOptions:
    """The part of this host in a command that runs on several."""

    coordinator: str | None = _hosts(
        None, "Run the same command on each host; host 0 listens at this address.", "HOST:PORT"
    )
    num_processes: int | None = _hosts(None, "Number of hosts.", "N", min=1)
    process_id: int | None = _hosts(None, "Number of this host, from 0.", "I", min=0)
    all_hosts: bool = _hosts(False, "Take these from the environment of a TPU pod, Slurm or Open MPI.")

    @property
    def is_given(self) -> bool:
        return any(value not in (None, False) for value in vars(self).values()) or "JAXINFER_COORDINATOR" in os.environ


LOGITS = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words"),
)


@given(SamplingParams, LOGITS)
class LogitOptions:
    """The fields of `SamplingParams` that change the distribution of tokens."""

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...


@given(SamplingParams)
@dataclass(frozen=True, kw_only=True)
class SamplingOptions(LogitOptions):
    """All fields of `SamplingParams`; those of its `structured` are options of their own."""

    json_schema: Path | None = _structured(None, "The answer is JSON that matches the schema in this file.", "FILE")
    json_object: bool = _structured(False, "The answer is a JSON object.", flag="--json-object")
    regex: str | None = _structured(None, "The answer matches this regular expression, all of it.", "PATTERN")
    choice: list[str] | None = _structured(None, "The answer is one of these texts.", "TEXT", is_repeated=True)
    grammar: Path | None = _structured(None, "The answer is of the grammar in this file (Lark, llguidance's).", "FILE")


_STRUCTURED = {"json_schema": "json", **{name: name for name in ("json_object", "regex", "choice", "grammar")}}


def sampling_values(options: LogitOptions) -> dict[str, Any]:
    """The given options as values of `SamplingParams`, checked as far as possible without the model.

    Raises UsageError for a value that cannot be read, SamplingParamsError for one that is out of range.
    """
    values = given_values(options)
    structured: dict[str, Any] = {}
    for name in _STRUCTURED.keys() & values.keys():
        value = values.pop(name)
        if value is not False:
            structured[_STRUCTURED[name]] = _read_text(value, name) if isinstance(value, Path) else value
    if structured:
        values["structured"] = structured
    SamplingParams.from_dict({"max_tokens": None, **values})
    return values


def _read_text(path: Path, name: str) -> str:
    try:
        return path.read_text("utf-8-sig")  # a Windows editor writes a mark at the start
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--{name.replace('_', '-')}: {path} cannot be read: {error}") from None


def given_values(options: Any) -> dict[str, Any]:
    """The options that are not None, by name; texts are parsed. Raises UsageError for one that cannot be read."""
    values = {}
    for name, about in describe(type(options)).items():
        value = getattr(options, name)
        if value is None or value == []:
            continue
        try:
            is_text = isinstance(value, (str, list))
            values[name] = our_value(name, about.parse(value) if about.parse is not None and is_text else value)
        except ValueError as error:
            raise UsageError(f"--{name.replace('_', '-')}: {error}") from None
    return values


def merge_params(defaults: SamplingParams, values: dict[str, Any]) -> SamplingParams:
    """`defaults` with `values` over them, which may have the names of other engines."""
    own = {field.name: getattr(defaults, field.name) for field in fields(defaults)}
    return SamplingParams.from_dict({**own, **our_names(values)})


_NOT_OF_LLM = ("model", "as_json", "jobs", "use_adapter")


def llm_arguments(options: ModelOptions) -> dict[str, Any]:
    """The given options as arguments of `LLM`, without the model. Raises UsageError for what cannot be read."""
    return {name: value for name, value in given_values(options).items() if name not in _NOT_OF_LLM}


def join_hosts(options: HostsOptions) -> bool:
    """Joins the other hosts, if there are any; returns whether this host reads and writes files, as host 0 does."""
    if not options.is_given:
        return True
    from jaxinfer.parallel.hosts import initialize_hosts

    hosts = initialize_hosts(options.coordinator, options.num_processes, options.process_id)
    return hosts is None or hosts.is_leader


def follow(options: ModelOptions) -> int:
    """A whole command on a host other than 0: takes part in host 0's work until that ends."""
    with open_llm(options) as llm:
        llm.on_leader(lambda: None)
    return OK


def open_llm(options: ModelOptions, **more: Any) -> "LLM":
    """Loads the model. `more` are arguments of `LLM` that options may override."""

    if options.revision is not None and Path(options.model).exists():
        raise UsageError(f"--revision is for hub ids, and {options.model} is a folder on this machine")
    arguments = {**more, **llm_arguments(options)}
    with Stage(f"loading {options.model}"):
        from jaxinfer.api.llm import LLM

        return LLM(options.model, **arguments)
