"""Options that several commands share: the model, the engine, a draft, several hosts, and sampling."""

import dataclasses
import os
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.command import OK, UsageError
from jaxinfer.options import MISSING, argument, describe, option
from jaxinfer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.llm import LLM

_model = partial(option, group="Model")
_engine = partial(option, group="Engine")
_draft = partial(option, group="Speculative decoding")
_hosts = partial(option, group="Several hosts")
as_json = partial(option, False, flag="--json")
overwrite = partial(option, False, flag="--overwrite")


def model_argument(help: str = "A checkpoint's folder, a GGUF file, a Hugging Face hub id, or demo.") -> Any:
    """The model of commands that take it by position."""
    return argument(MISSING, help, "MODEL")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    model: str = _model(
        MISSING,
        "A checkpoint's folder or URL (gs://, s3://), a GGUF file, a Hugging Face hub id, or demo.",
        "MODEL",
        "--model -m",
    )
    tokenizer: str | None = _model(None, "Folder with tokenizer files, if not the checkpoint's own.", "PATH")
    dtype: str = _model(
        "auto", "auto, float32, bfloat16 or float16; auto is the checkpoint's, and float32 on CPUs.", "DTYPE"
    )
    quantize: str | None = _model(
        None, "Quantize weights while loading: int8, int4-g128, nf4, w8a8, fp8 or others.", "RECIPE"
    )
    max_model_len: int | None = _model(
        None, "Tokens of a prompt with its answer; default: the model's limit, at most 4,096.", "N", min=1
    )
    kv_dtype: str | None = _model(
        None, "Type of cached keys and values: auto, float32, bfloat16, float16, int8, fp8_e4m3 or fp8_e5m2.", "DTYPE"
    )
    revision: str | None = _model(None, "Branch, tag or commit of a hub id.", "TEXT")
    requantize: str | None = _model(
        None,
        "Quantized weights of a GGUF file become dense, or a format such as int4-g128; default: unchanged.",
        "NAME",
    )


@dataclass(frozen=True, kw_only=True)
class ServingOptions(ModelOptions):
    """The model, and the engine that serves many requests with it. None is not given."""

    max_seqs: int | None = _engine(None, "Sequences generated at the same time; default: 64, on a CPU 16.", "N", min=1)
    mesh: str | None = _engine(
        None, "Devices to run on: model=4, data=2,model=4, expert=8; default: one device.", "AXIS=N,..."
    )
    page_size: int | None = _engine(None, "Tokens of a cache page; default: 16, on a TPU 64.", "N", min=1)
    num_pages: int | None = _engine(None, "Pages of the cache; default: what --memory-fraction allows.", "N", min=2)
    memory_fraction: float | None = _engine(
        None, "Share of the device's memory for weights and cache; default: 0.9.", "X"
    )
    prefill_chunk: int | None = _engine(None, "Prompt tokens of one step; default: 512.", "N", min=1)
    deterministic: bool | None = _engine(
        None,
        "Log-probabilities are the same to the last bit, whatever else runs. Slower.",
        flag="--deterministic",
    )
    prefix_cache: bool | None = _engine(
        None, "Reuse the cached prefixes of earlier prompts; default: on.", flag="--prefix-cache/--no-prefix-cache"
    )


def read_num_draft_tokens(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of tokens or 'auto'") from None


def _read_widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(width) for width in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of widths, such as 3,2,1") from None


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """A draft for speculative decoding. None is not given."""

    draft: str | None = _draft(None, "Proposes tokens that the model verifies: a model, ngram, or layers:N.", "DRAFT")
    num_draft_tokens: str | None = _draft(
        None,
        "Draft tokens per round, 1 to 31; default: auto, adapted to the acceptance rate.",
        "N",
        parse=read_num_draft_tokens,
    )
    draft_tree: str | None = _draft(
        None, "Draft a tree instead of a chain: its widths by depth, such as 3,2,1.", "N,N,...", parse=_read_widths
    )
    acceptance: str | None = _draft(
        None, "exact: the answers without a draft; maximal: the same distribution, with more tokens accepted.", "RULE"
    )
    draft_kv_dtype: str | None = _draft(
        None, "As --kv-dtype, for the cache of a draft model; default: the same.", "DTYPE"
    )


@dataclass(frozen=True, kw_only=True)
class DraftedServingOptions(DraftOptions, ServingOptions):
    """The model, the engine, and a draft."""


@dataclass(frozen=True, kw_only=True)
class DraftedModelOptions(DraftOptions, ModelOptions):
    """The model and a draft."""


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


def given(source: type, names: Sequence[str] | None = None) -> Callable[[type], Any]:
    """A class decorator: a dataclass of the options of `source`, or those of `names`, as the command line has them. All
    are None by default: not given."""

    def decorate(cls: type) -> type:
        hints = typing.get_type_hints(source)
        added = [
            (name, _text_type(hints[name], about), option(None, about.help, **_rest(about)))
            for name, about in describe(source, names).items()
        ]
        made = dataclasses.make_dataclass(cls.__name__, added, bases=(cls,), frozen=True, kw_only=True)
        made.__doc__, made.__module__ = cls.__doc__, cls.__module__
        return made

    return decorate


def _text_type(hint: Any, about: Any) -> Any:
    """The type of an option's text: lists for those that may be repeated."""
    if about.is_repeated:
        return list[str] | None
    if about.parse is not None:
        return str | None
    return hint | None


def _rest(about: Any) -> dict[str, Any]:
    values = {field.name: getattr(about, field.name) for field in fields(about) if field.name not in ("help", "flags")}
    return {**values, "flag": " ".join(about.flags)}


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
class SamplingOptions(LogitOptions):
    """All fields of `SamplingParams`."""


def sampling_values(options: LogitOptions) -> dict[str, Any]:
    """The given options as values of `SamplingParams`, checked as far as possible without the model.

    Raises UsageError for a value that cannot be read, SamplingParamsError for one that is out of range.
    """
    values = given_values(options)
    SamplingParams.from_dict({"max_tokens": None, **values})
    return values


def given_values(options: Any) -> dict[str, Any]:
    """The options that are not None, by name; texts are parsed. Raises UsageError for one that cannot be read."""
    values = {}
    for name, about in describe(type(options)).items():
        value = getattr(options, name)
        if value is None or value == []:
            continue
        try:
            is_text = isinstance(value, (str, list))
            values[name] = about.parse(value) if about.parse is not None and is_text else value
        except ValueError as error:
            raise UsageError(f"--{name.replace('_', '-')}: {error}") from None
    return values


def merge_params(defaults: SamplingParams, values: dict[str, Any]) -> SamplingParams:
    """`defaults` with `values` over them."""
    return SamplingParams.from_dict(
        {**{field.name: getattr(defaults, field.name) for field in fields(defaults)}, **values}
    )


def llm_arguments(options: ModelOptions) -> dict[str, Any]:
    """The given options as arguments of `LLM`, without the model. Raises UsageError for what cannot be read."""
    return {name: value for name, value in given_values(options).items() if name not in ("model", "as_json")}


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
    """Loads the model, with a spinner on a terminal. `more` are arguments of `LLM` that options may override."""
    from jaxinfer.cli.output import waiting

    if options.revision is not None and Path(options.model).exists():
        raise UsageError(f"--revision is for hub ids, and {options.model} is a folder on this machine")
    arguments = {**more, **llm_arguments(options)}
    with waiting(f"loading {options.model}"):
        from jaxinfer.llm import LLM

        return LLM(options.model, **arguments)
