"""Options that several commands share: which model, and how to sample."""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.cli.command import OK, UsageError

if TYPE_CHECKING:
    from jaxinfer.llm import LLM
    from jaxinfer.sampling import SamplingParams

UNLIMITED = "none"
_MODEL = "Model"
_ENGINE = "Engine"
_HOSTS = "Several hosts"
_DRAFT = "Speculative decoding"
_SAMPLING = "Sampling"
_LIMITS = "Length and stopping"
_REPORT = "What is reported"

# Where the model is what a command is about, it needs no flag.
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, a GGUF file, a Hugging Face hub id, or demo.")
]


@dataclass(frozen=True)
class ModelOptions:
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="A checkpoint's folder or URL (gs://, s3://), a GGUF file, a Hugging Face hub id, or demo.",
            rich_help_panel=_MODEL,
        ),
    ]
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Folder with tokenizer files, if not the checkpoint's own.", metavar="PATH", rich_help_panel=_MODEL
        ),
    ] = None
    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            help="auto, float32, bfloat16 or float16. auto is the checkpoint's; float32 on CPUs.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto"
    quantize: Annotated[
        str | None,
        typer.Option(
            help="Round weights while loading, such as int8, int4-g128, nf4, w8a8 or fp8.",
            metavar="RECIPE",
            rich_help_panel=_MODEL,
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of a prompt with its answer; default: what the model allows, at most 4,096.",
            metavar="N",
            rich_help_panel=_MODEL,
        ),
    ] = None
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="What keys and values are stored as: auto, float32, bfloat16, float16, int8, fp8_e4m3 or fp8_e5m2.",
            metavar="DTYPE",
            rich_help_panel=_MODEL,
        ),
    ] = None
    revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of a hub id.", metavar="TEXT", rich_help_panel=_MODEL),
    ] = None
    requantize: Annotated[
        str | None,
        typer.Option(
            help="For a GGUF file's quantized weights: dense, or a format such as int4-g128; default: kept exactly.",
            metavar="NAME",
            rich_help_panel=_MODEL,
        ),
    ] = None


@dataclass(frozen=True)
class ServingOptions(ModelOptions):
    """The model, and the engine that serves many requests with it. None is not given."""

    max_seqs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Answers generated at once; default: 64, on a CPU 16.", metavar="N", rich_help_panel=_ENGINE
        ),
    ] = None
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Devices to run on: model=4, data=2,model=4, expert=8; default: one.",
            metavar="AXIS=N,...",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    page_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of a cache page; default: 16, on a TPU 64.", metavar="N", rich_help_panel=_ENGINE
        ),
    ] = None
    num_pages: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Pages of the cache; default: as --memory-fraction allows.",
            metavar="N",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    memory_fraction: Annotated[
        float | None,
        typer.Option(
            help="Of the device's memory, for weights and cache; default: 0.9.", metavar="X", rich_help_panel=_ENGINE
        ),
    ] = None
    prefill_chunk: Annotated[
        int | None,
        typer.Option(min=1, help="Prompt tokens of one step; default: 512.", metavar="N", rich_help_panel=_ENGINE),
    ] = None
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic",
            metavar="",
            help="Every bit of the log-probabilities repeats, whatever else runs. Slower.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    prefix_cache: Annotated[
        bool | None,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            metavar="",
            help="Reuse the beginnings of earlier prompts; default: on.",
            rich_help_panel=_ENGINE,
        ),
    ] = None


@dataclass(frozen=True)
class DraftOptions:
    """A draft beside the model, if one is named."""

    draft: Annotated[
        str | None,
        typer.Option(
            help="What drafts tokens that the model checks together: a model, ngram, or layers:N.",
            metavar="DRAFT",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    num_draft_tokens: Annotated[
        str | None,
        typer.Option(
            help="Drafted before each check, 1 to 31; default: auto, as many as pay.",
            metavar="N",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    draft_tree: Annotated[
        str | None,
        typer.Option(
            help="A tree of drafts instead of a chain: its widths per depth, such as 3,2,1.",
            metavar="N,N,...",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    acceptance: Annotated[
        str | None,
        typer.Option(
            help="exact: the answers without a draft. maximal: of the same distribution, with more accepted.",
            metavar="RULE",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    draft_kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="As --kv-dtype, of a draft model's cache; default: the same.", metavar="DTYPE", rich_help_panel=_DRAFT
        ),
    ] = None


@dataclass(frozen=True)
class DraftedServingOptions(DraftOptions, ServingOptions):
    """The model, the engine, and a draft."""


@dataclass(frozen=True)
class HostsOptions:
    """Which host this is, where the same command runs on several."""

    coordinator: Annotated[
        str | None,
        typer.Option(
            help="Run the same command on each host; host 0 listens there.",
            metavar="HOST:PORT",
            rich_help_panel=_HOSTS,
        ),
    ] = None
    num_processes: Annotated[
        int | None,
        typer.Option(min=1, help="Number of hosts.", metavar="N", rich_help_panel=_HOSTS),
    ] = None
    process_id: Annotated[
        int | None,
        typer.Option(min=0, help="Which of them this is, from 0.", metavar="I", rich_help_panel=_HOSTS),
    ] = None
    all_hosts: Annotated[
        bool,
        typer.Option(
            "--all-hosts",
            metavar="",
            help="As the environment of a TPU pod, Slurm or Open MPI says.",
            rich_help_panel=_HOSTS,
        ),
    ] = False

    @property
    def is_given(self) -> bool:
        return any(value not in (None, False) for value in vars(self).values()) or "JAXINFER_COORDINATOR" in os.environ


@dataclass(frozen=True)
class DraftedModelOptions(DraftOptions, ModelOptions):
    """The model and a draft."""


@dataclass(frozen=True)
class LogitOptions:
    """The fields of `SamplingParams` that change the distribution a token is drawn from."""

    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the most probable token.", metavar="X", rich_help_panel=_SAMPLING),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Keep the most probable tokens up to this mass, in (0, 1].", metavar="X", rich_help_panel=_SAMPLING
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(help="Keep the K most probable tokens; 0 keeps all.", metavar="K", rich_help_panel=_SAMPLING),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Drop tokens less probable than X times the best one, 0..1.", metavar="X", rich_help_panel=_SAMPLING
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        typer.Option(
            help="Subtracted from the logit of tokens already generated, -2..2.",
            metavar="X",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        typer.Option(help="The same, once per time it was generated.", metavar="X", rich_help_panel=_SAMPLING),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Divides the logit of tokens of prompt and answer; 1 is none.", metavar="X", rich_help_panel=_SAMPLING
        ),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            help="Added to a token id's logit, -100..100; may be repeated.",
            metavar="ID=BIAS",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    allowed_token_ids: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these token ids can be chosen; may be repeated.",
            metavar="ID,ID",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        typer.Option(help="Never complete this text; may be repeated.", metavar="TEXT", rich_help_panel=_SAMPLING),
    ] = None


@dataclass(frozen=True)
class SamplingOptions(LogitOptions):
    """Every field of `SamplingParams`. None is not given."""

    seed: Annotated[
        int | None,
        typer.Option(
            help="Same seed, same answer. Default: from the prompt's number, so that a run repeats.",
            metavar="N",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    n: Annotated[
        int | None,
        typer.Option("--n", "-n", help="Answers for each prompt, 1..16.", metavar="N", rich_help_panel=_SAMPLING),
    ] = None
    max_tokens: Annotated[
        str | None,
        typer.Option(
            help=f"Tokens to generate at most; {UNLIMITED}: as many as fit. Default: generation_config's, else 16.",
            metavar=f"N|{UNLIMITED}",
            rich_help_panel=_LIMITS,
        ),
    ] = None
    min_tokens: Annotated[
        int | None,
        typer.Option(help="No end before this many tokens.", metavar="N", rich_help_panel=_LIMITS),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text that ends the answer; may be repeated.", metavar="TEXT", rich_help_panel=_LIMITS),
    ] = None
    stop_token_ids: Annotated[
        list[str] | None,
        typer.Option(
            help="Token ids that end the answer; may be repeated.",
            metavar="ID,ID",
            rich_help_panel=_LIMITS,
        ),
    ] = None
    ignore_eos: Annotated[
        bool | None,
        typer.Option(metavar="", help="Go on after the end-of-sequence token.", rich_help_panel=_LIMITS),
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None,
        typer.Option(
            "--include-stop-str/--cut-stop-str", metavar="", help="Leave the stop text in.", rich_help_panel=_LIMITS
        ),
    ] = None
    skip_special_tokens: Annotated[
        bool | None,
        typer.Option(
            "--skip-special-tokens/--keep-special",
            metavar="",
            help="Leave special tokens out of the text.",
            rich_help_panel=_REPORT,
        ),
    ] = None
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="Log-probability of each token and of the N best ones, 0..20.", metavar="N", rich_help_panel=_REPORT
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        typer.Option(help="The same for each token of the prompt.", metavar="N", rich_help_panel=_REPORT),
    ] = None


def sampling_values(options: LogitOptions) -> dict[str, Any]:
    """The given ones as values of `SamplingParams`, checked as far as can be without the model.

    Raises UsageError for what cannot be read, SamplingParamsError for what is refused.
    """
    from jaxinfer.sampling.params import SamplingParams

    values: dict[str, Any] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        if value is None or value == []:
            continue
        values[field.name] = _READERS[field.name](value) if field.name in _READERS else value
    SamplingParams.from_dict({"max_tokens": None, **values})
    return values


def _read_token_ids(texts: list[str]) -> list[int]:
    try:
        return [int(part) for text in texts for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{', '.join(texts)!r} is not a token id, or several with commas between: 13,198") from None


def _read_bias(texts: list[str]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for text in texts:
        token, _, number = text.partition("=")
        try:
            bias[int(token)] = float(number)
        except ValueError:
            raise UsageError(f"{text!r} is not ID=BIAS, such as 13=-2.5") from None
    return bias


def _read_max_tokens(text: str) -> int | None:
    if text == UNLIMITED:
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--max-tokens: {text!r} is not a number of tokens or {UNLIMITED!r}") from None


def read_num_draft_tokens(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise UsageError(f"--num-draft-tokens: {text!r} is not a number of tokens or 'auto'") from None


def _read_widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(width) for width in text.split(","))
    except ValueError:
        raise UsageError(f"--draft-tree: {text!r} is not a list of widths, such as 3,2,1") from None


_READERS: dict[str, Callable[[Any], Any]] = {
    "logit_bias": _read_bias,
    "allowed_token_ids": _read_token_ids,
    "stop_token_ids": _read_token_ids,
    "max_tokens": _read_max_tokens,
}


def merge_params(defaults: "SamplingParams", values: dict[str, Any]) -> "SamplingParams":
    """`defaults` with `values` over them."""
    from jaxinfer.sampling.params import SamplingParams

    return SamplingParams.from_dict(
        {**{field.name: getattr(defaults, field.name) for field in fields(defaults)}, **values}
    )


def llm_arguments(options: ModelOptions) -> dict[str, Any]:
    """The given options as arguments of `LLM`, without the model. Raises UsageError for what cannot be read."""
    given = {field.name: getattr(options, field.name) for field in fields(options) if field.name != "model"}
    arguments = {name: value for name, value in given.items() if value is not None}
    for name, read in (("num_draft_tokens", read_num_draft_tokens), ("draft_tree", _read_widths)):
        if isinstance(arguments.get(name), str):
            arguments[name] = read(arguments[name])
    return arguments


def join_hosts(options: HostsOptions) -> bool:
    """Joins the other hosts where there are some; returns whether this host reads and writes, as host 0 does."""
    if not options.is_given:
        return True
    from jaxinfer.parallel.hosts import initialize_hosts

    hosts = initialize_hosts(options.coordinator, options.num_processes, options.process_id)
    return hosts is None or hosts.is_leader


def follow(options: ModelOptions) -> int:
    """The whole of a command on another host than 0: does what host 0 says, until its part of the work ends."""
    with open_llm(options) as llm:
        llm.on_leader(lambda: None)
    return OK


def open_llm(options: ModelOptions, **more: Any) -> "LLM":
    """Loads the model, with a word on a terminal meanwhile. `more` are arguments of `LLM` unless options say so too."""
    from jaxinfer.cli.output import waiting

    if options.revision is not None and Path(options.model).exists():
        raise UsageError(f"--revision is for hub ids, and {options.model} is a folder on this machine")
    arguments = {**more, **llm_arguments(options)}
    with waiting(f"loading {options.model}"):
        from jaxinfer.llm import LLM

        return LLM(options.model, **arguments)
