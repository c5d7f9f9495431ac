"""Options of an engine. Imports neither JAX nor NumPy, so that a command line can describe them at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from jaxinfer.cache.policy.contract import CachePolicy
from jaxinfer.cache.policy.kinds import KEEPS_ALL, parse_policy
from jaxinfer.options import option

if TYPE_CHECKING:
    from jaxinfer.engine.adapter_slots import AdapterSizes
    from jaxinfer.sampling import Processor
    from jaxinfer.speculative import Draft, TokenTree

CACHES = ("paged", "contiguous")
MAX_DRAFT_TOKENS = 31
TOKEN_UNIT = 16  # tokens of a step are a multiple of it: whole rows of a register's tile, also of 16-bit values
SPECULATION = "Speculative decoding"
ADAPTERS = "Adapters"

_engine = partial(option, group="Engine")
_speculation = partial(option, group=SPECULATION)
_adapters = partial(option, group=ADAPTERS)
ADAPTER_PARTS = ("dora", "bias", "experts", "embed", "lm_head", "tokens", "saved_embed", "saved_lm_head")
DEFAULT_ADAPTER_TOKENS = 64
DEFAULT_ADAPTER_RANK = 16


def parse_draft_tokens(text: str) -> int | Literal["auto"]:
    """ "auto" or a number, from a command line. Raises ValueError for anything else."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"num_draft_tokens must be 1 to {MAX_DRAFT_TOKENS} or 'auto', got {text!r}") from None


def parse_host_cache(text: str) -> float | Literal["auto"]:
    """ "auto" or a number of GiB, from a command line. Raises ValueError for anything else."""
    if text == "auto":
        return "auto"
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"host_cache_gib must be auto or a number of GiB, got {text!r}") from None


def parse_deterministic(text: str) -> bool | Literal["auto"]:
    """ "auto", "on" or "off", from a command line. Raises ValueError for anything else."""
    known: dict[str, bool | Literal["auto"]] = {"auto": "auto", "on": True, "off": False}
    if text not in known:
        raise ValueError(f"deterministic must be auto, on or off, got {text!r}")
    return known[text]


def parse_tree(text: str) -> tuple[int, ...]:
    """Widths such as "3,2,1", from a command line. Raises ValueError for anything else."""
    try:
        return tuple(int(width) for width in text.split(","))
    except ValueError:
        raise ValueError(f"draft_tree is widths such as 3,2,1, got {text!r}") from None


def parse_names(text: str) -> tuple[str, ...]:
    """Names such as "q_proj,v_proj", from a command line. Raises ValueError for none."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError(f"names such as q_proj,v_proj are wanted, got {text!r}")
    return names


def parse_layers(text: str) -> tuple[int, ...]:
    """Numbers of layers such as "3,7", from a command line. Raises ValueError for anything else."""
    try:
        return tuple(int(layer) for layer in text.split(","))
    except ValueError:
        raise ValueError(f"layers are numbers such as 3,7, got {text!r}") from None


def most_tokens(prefill_chunk: int, max_seqs: int) -> int:
    """Tokens of the largest step: a whole chunk beside as many decoding answers as there are slots."""
    return -(-(prefill_chunk + max_seqs) // TOKEN_UNIT) * TOKEN_UNIT


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes such as "64,256,576", from a command line. Raises ValueError for anything else."""
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise ValueError(f"sizes are numbers such as 64,256,576, got {text!r}") from None


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """How an engine with a draft speculates."""

    num_draft_tokens: int | Literal["auto"] = _speculation(
        "auto",
        "Tokens drafted before each check, 1 to 31; auto adapts the number to the acceptance rate and to the cost of "
        "drafting and verifying at the current load, down to none.",
        "N",
        parse=parse_draft_tokens,
    )
    draft_tree: Sequence[int] | None = _speculation(
        None,
        "Widths per depth, such as 3,2,1, of a token tree that is drafted instead of a chain.",
        "WIDTHS",
        parse=parse_tree,
    )
    acceptance: str = _speculation(
        "exact",
        "exact gives the answers of plain decoding; maximal gives answers of the same distribution with more drafts "
        "accepted, which depend on what else runs.",
        "RULE",
    )
    draft_kv_dtype: str | None = _speculation(
        None, "As kv_dtype, of a draft model's own cache; by default the same. It changes no answer.", "DTYPE"
    )
    draft_lengths: Sequence[int] | None = _speculation(
        None,
        "Numbers of drafted tokens that num_draft_tokens=auto chooses from; each has programs of its own. By default "
        "2, 4 and 8, or 3, 7 and 15 for draft=ngram.",
        "LENGTHS",
        parse=parse_tree,
    )

    def __post_init__(self) -> None:
        from jaxinfer.cache.kv_dtype import check_kv_dtype
        from jaxinfer.speculative import TokenTree

        count = self.num_draft_tokens
        is_number = isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= MAX_DRAFT_TOKENS
        if count != "auto" and not is_number:
            raise ValueError(f"num_draft_tokens must be 1 to {MAX_DRAFT_TOKENS} or 'auto', got {count!r}")
        if self.draft_kv_dtype is not None:
            check_kv_dtype(self.draft_kv_dtype, "draft_kv_dtype")
        if self.acceptance not in ("exact", "maximal"):
            raise ValueError(f"acceptance={self.acceptance!r} is neither 'exact' nor 'maximal'")
        if self.draft_tree is not None:
            object.__setattr__(self, "draft_tree", tuple(self.draft_tree))
            if count != "auto":
                raise ValueError(f"num_draft_tokens={count} cannot be combined with draft_tree={self.draft_tree}")
            if not self.draft_tree:
                raise ValueError("draft_tree has no depth: give widths such as (3, 2, 1)")
            TokenTree(tuple(self.draft_tree))

    def trees(self, default_lengths: Sequence[int]) -> "tuple[TokenTree, ...]":
        """The token trees that rounds are compiled for, the smallest first; () without lengths: nothing drafts."""
        if not default_lengths:
            return ()
        from jaxinfer.speculative import TokenTree, chain

        if self.draft_tree is not None:
            return (TokenTree(tuple(self.draft_tree)),)
        if self.num_draft_tokens != "auto":
            return (chain(self.num_draft_tokens),)
        return tuple(chain(length) for length in self.draft_lengths or default_lengths)

    @property
    def is_adaptive(self) -> bool:
        """True if the number of drafted tokens adapts."""
        return self.num_draft_tokens == "auto" and self.draft_tree is None


@dataclass(frozen=True, kw_only=True)
class EngineOptions(SpeculationOptions):
    """How an engine runs a model; the options of `SpeculationOptions` need a draft."""

    max_model_len: int | None = _engine(
        None, "Tokens of a prompt with its answer. By default what the model allows, at most 4,096.", "N", min=1
    )
    max_seqs: int | None = _engine(None, "Answers generated at once; by default 64, on a CPU 16.", "N", min=1)
    steps_per_dispatch: int = _engine(8, "Decode steps per call of the device when no prompt waits.", "N", min=1)
    kv_dtype: str = _engine(
        "auto",
        "What keys and values are stored as: auto (what the model computes in), float32, bfloat16, float16, int8 (with "
        "a scale for each token and head), fp8_e4m3, fp8_e5m2, int4 (4 bits of rotated keys and values, with such "
        "scales) or int8_int4 (keys int8, values int4).",
        "DTYPE",
    )
    kv_policy: str | None = _engine(
        None,
        "Which keys and values stay as a sequence grows: sinks(4)+window(1024) keeps the first and the last pages that "
        "hold so many tokens; snapkv(N), pyramidkv(N), keydiff(N) and expected_attention(N) keep N tokens of a prompt, "
        "chosen at its end, and all of the answer; h2o(N) keeps N tokens of both, half of them the last ones, the "
        "others those that were attended to most. Or which are read: with quest(N) all stay, and a token of an answer "
        "attends to the best pages of N tokens. By default all.",
        "POLICY",
    )
    cache: str = _engine(
        "paged", "paged, or contiguous: one page of max_model_len tokens for each of max_seqs slots, for study.", "KIND"
    )
    page_size: int | None = _engine(
        None,
        "Tokens of a page; by default 64 on a TPU, 16 elsewhere (32 on a GPU with kv_dtype int8, int4 or int8_int4).",
        "N",
        min=1,
    )
    num_pages: int | None = _engine(
        None,
        "Pages of the cache; by default as many as memory_fraction of the device's memory holds beside the weights (on "
        "a CPU no more than max_seqs answers of max_model_len can use).",
        "N",
        min=2,
    )
    memory_fraction: float = _engine(
        0.9, "Share of the device's memory for weights, cache and temporary arrays; by default 0.9.", "X"
    )
    prefill_chunk: int | None = _engine(
        None,
        "Prompt tokens that one step computes beside the decoding answers, at most; by default 512, on an H100 or "
        "H200 2,048, or all rows of a step if deterministic.",
        "N",
        min=1,
    )
    token_buckets: Sequence[int] | None = _engine(
        None,
        "Numbers of tokens, multiples of 16, that steps with prompts are padded to; each is a program. The last is "
        "prefill_chunk and max_seqs together. By default 32, 128, 256, ... (docs/planning.md chooses them from a "
        "trace).",
        "SIZES",
        parse=parse_sizes,
    )
    decode_slots: Sequence[int] | None = _engine(
        None,
        "Numbers of answers that decode steps are padded to; each is a program. The last is max_seqs. By default 1, 4, "
        "8, 16, ...",
        "SIZES",
        parse=parse_sizes,
    )
    deterministic: bool | Literal["auto"] = _engine(
        "auto",
        "Log-probabilities keep every bit whatever else runs and however prompts are cut: all passes over the model "
        "have one shape. auto is on where decoding is predicted to take at most 2 % longer, never on a CPU, and "
        "LLM.explain() says why.",
        "MODE",
        parse=parse_deterministic,
        bare=("on", "off", "auto"),
    )
    prefix_cache: bool = _engine(
        True,
        "Reuse the cached beginnings of earlier prompts and answers; on by default.",
        flag="--prefix-cache/--no-prefix-cache",
    )
    host_cache_gib: float | Literal["auto"] | None = _engine(
        None,
        "GiB of host memory, of each replica, for cached beginnings that have no room on the device; by default none. "
        "They come back when a prompt begins with them. A number is used in any case; auto takes up to half of the "
        "host's free memory, and none where tokens are computed faster than they are copied to the device. In one "
        "process.",
        "X",
        parse=parse_host_cache,
    )
    prefix_store: str | None = _engine(
        None,
        "Folder of files in which the cached beginnings of prompts are kept over restarts and shared by processes; by "
        "default none. They are read into the memory of host_cache_gib, which has to be given.",
        "DIR",
    )
    prefix_store_gib: float = _engine(
        16.0, "GiB of files in prefix_store, of all models; those that were not used for longest go.", "X"
    )
    num_saved_states: int | None = _engine(
        None,
        "States that are kept to reuse cached beginnings, of models with recurrent layers; by default max_seqs. With 0 "
        "such a model reuses nothing.",
        "N",
        min=0,
    )
    max_waiting: int | None = _engine(
        None, "Answers that may wait for a slot; by default any number. Beyond it, QueueFullError.", "N", min=1
    )
    grammar_memory: int = _engine(
        32,
        "MiB of device memory for tables of structured output; answers without one are under masks from the host, more "
        "slowly. 0 for none.",
        "MIB",
        min=0,
    )
    max_adapters: int | None = _adapters(
        None,
        "LoRA adapters on the device at once; more may be loaded, and move there when a request names them. By default "
        "as many as are given at the start, and none without any.",
        "N",
        min=0,
    )
    max_loaded_adapters: int | None = _adapters(
        None,
        "LoRA adapters in the host's memory at once, those on the device among them; loading one more is refused until "
        "another is unloaded. By default any number.",
        "N",
        min=1,
    )
    max_adapter_rank: int | None = _adapters(
        None, "The largest rank of an adapter; by default the largest of those given at the start, or 16.", "N", min=1
    )
    adapter_modules: Sequence[str] | None = _adapters(
        None,
        "Weights that have room for adapters, such as q_proj,v_proj; by default all linear layers.",
        "NAMES",
        parse=parse_names,
    )
    adapter_parts: Sequence[str] | None = _adapters(
        None,
        "What adapters may have beside pairs of matrices for linear layers: dora (magnitudes), bias (trained biases), "
        "experts, embed and lm_head (pairs for these), tokens or tokens:N (so many trained tokens), saved_embed and "
        "saved_lm_head (tables of their own). By default what those given at the start have.",
        "NAMES",
        parse=parse_names,
    )
    max_adapter_tokens: int | None = _adapters(
        None,
        "Tokens that an adapter may add to the vocabulary; only its own requests read and write them. By default as "
        "many as one of those given at the start adds.",
        "N",
        min=0,
    )
    processors: "Sequence[Processor | Callable[..., Any]]" = option(
        (),
        "Functions that change logits before they are sampled from, in their order (docs/guides/own_code.md). In "
        "Python only.",
    )
    steered_layers: Sequence[int] = _engine(
        (),
        "Layers after which requests may add vectors of their own to the hidden states (steering), by number from 0; "
        "by default none. In Python only.",
    )
    tapped_layers: Sequence[int] = _engine(
        (),
        "Layers after which requests may ask for the hidden states of their tokens, by number from 0; by default none.",
        "LAYERS",
        parse=parse_layers,
    )
    shuffle_seed: int | None = option(None, "Orders the pages at random, for tests; by default in order.", "N")

    def __post_init__(self) -> None:
        from jaxinfer.cache.kv_dtype import check_kv_dtype

        super().__post_init__()
        for name in ("max_model_len", "max_seqs", "steps_per_dispatch", "page_size", "num_pages", "prefill_chunk"):
            self._check_count(name)
        self._check_count("max_waiting")
        self._check_adapters()
        self._check_layers("steered_layers")
        self._check_layers("tapped_layers")
        check_kv_dtype(self.kv_dtype)
        if self.num_pages == 1:
            raise ValueError("num_pages=1: a pool needs the null page and at least one more")
        if not _is_count(self.grammar_memory):
            raise ValueError(f"grammar_memory must be 0 or a positive integer of MiB, got {self.grammar_memory!r}")
        if self.num_saved_states is not None and not _is_count(self.num_saved_states):
            raise ValueError(f"num_saved_states must be 0 or a positive integer, got {self.num_saved_states!r}")
        if self.processors:
            from jaxinfer.sampling.processors import as_processors

            object.__setattr__(self, "processors", as_processors(self.processors))
        self._check_host_cache()
        fraction = self.memory_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
            raise ValueError(f"memory_fraction must be in (0, 1], got {fraction!r}")
        if not isinstance(self.prefix_cache, bool):
            raise ValueError(f"prefix_cache must be True or False, got {self.prefix_cache!r}")
        if self.deterministic != "auto" and not isinstance(self.deterministic, bool):
            raise ValueError(f"deterministic must be True, False or 'auto', got {self.deterministic!r}")
        if self.cache not in CACHES:
            raise ValueError(f"cache={self.cache!r} is neither 'paged' nor 'contiguous'")
        if self.cache == "contiguous":
            for name in ("page_size", "num_pages", "num_saved_states"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}={getattr(self, name)!r} is for cache='paged' only")
            if self.kv_policy is not None:
                raise ValueError(f"kv_policy={self.kv_policy!r} is of pages: it is for cache='paged' only")
        for name, unit in (("token_buckets", TOKEN_UNIT), ("decode_slots", 1)):
            self._check_sizes(name, unit)
        if self.policy is not KEEPS_ALL and self.draft_tree is not None:
            raise ValueError(
                f"kv_policy={self.kv_policy!r} cannot be combined with draft_tree={self.draft_tree}: drafts are "
                f"chains; use num_draft_tokens"
            )
        if self.deterministic is True and self.draft_tree is not None:
            raise ValueError(
                f"deterministic=True cannot be combined with draft_tree={self.draft_tree}: the keys of a tree are "
                f"summed in another order; draft a chain with num_draft_tokens"
            )

    def _check_adapters(self) -> None:
        if self.max_adapters is not None and not _is_count(self.max_adapters):
            raise ValueError(f"max_adapters must be 0 or a positive integer, got {self.max_adapters!r}")
        self._check_count("max_adapter_rank")
        self._check_count("max_loaded_adapters")
        if self.max_loaded_adapters is not None and self.max_loaded_adapters < (self.max_adapters or 0):
            raise ValueError(
                f"max_loaded_adapters={self.max_loaded_adapters} is less than max_adapters={self.max_adapters}: "
                f"adapters on the device are in the host's memory too"
            )
        if self.max_adapter_tokens is not None and not _is_count(self.max_adapter_tokens):
            raise ValueError(f"max_adapter_tokens must be 0 or a positive integer, got {self.max_adapter_tokens!r}")
        for name in ("adapter_modules", "adapter_parts"):
            if (given := getattr(self, name)) is None:
                continue
            if isinstance(given, str) or not all(isinstance(part, str) and part for part in given):
                raise ValueError(f"{name} must be a list of names, got {given!r:.60}")
            object.__setattr__(self, name, tuple(given))
        for part in self.adapter_parts or ():
            name, colon, count = part.partition(":")
            is_known = name == "tokens" and count.isdecimal() and int(count) > 0 if colon else name in ADAPTER_PARTS
            if not is_known:
                raise ValueError(f"adapter_parts has {part!r}: it may have {', '.join(ADAPTER_PARTS)} and tokens:N")
        if not self.max_adapters:
            for name in (
                *("max_loaded_adapters", "max_adapter_rank", "max_adapter_tokens"),
                *("adapter_modules", "adapter_parts"),
            ):
                if (given := getattr(self, name)) is not None and self.max_adapters is not None:
                    raise ValueError(f"{name}={given!r} is for adapters, and max_adapters is {self.max_adapters}")

    def _check_layers(self, name: str) -> None:
        given = getattr(self, name)
        layers: tuple[Any, ...] = (
            tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (None,)
        )
        if not all(map(_is_count, layers)) or len(set(layers)) < len(layers):
            raise ValueError(f"{name} must be different numbers of layers, such as (3, 7), got {given!r:.60}")
        object.__setattr__(self, name, tuple(sorted(layers)))

    @property
    def adapter_sizes(self) -> "AdapterSizes | None":
        """Room for adapters; None for none."""
        from jaxinfer.engine.adapter_slots import AdapterSizes

        if not self.max_adapters:
            return None
        counts: dict[str, str] = {}
        for part in self.adapter_parts or ():
            name, _, counts[name] = part.partition(":")
        num_tokens = int(counts.pop("tokens") or DEFAULT_ADAPTER_TOKENS) if "tokens" in counts else 0
        modules = None if self.adapter_modules is None else tuple(self.adapter_modules)
        rank = self.max_adapter_rank or DEFAULT_ADAPTER_RANK
        num_added = self.max_adapter_tokens or 0
        return AdapterSizes(self.max_adapters, rank, modules, frozenset(counts), num_tokens, num_added)

    def _check_sizes(self, name: str, unit: int) -> None:
        if (given := getattr(self, name)) is None:
            return
        sizes: tuple[int, ...] = tuple(given) if isinstance(given, Sequence) else ()
        if not sizes or not all(type(size) is int for size in sizes):
            raise ValueError(f"{name} must be numbers such as (64, 256, 576), got {given!r}")
        if sizes[0] < 1 or list(sizes) != sorted(set(sizes)) or any(size % unit for size in sizes):
            multiples = f" multiples of {unit}" if unit > 1 else " numbers"
            raise ValueError(f"{name} must be positive{multiples} that increase, got {sizes}")
        if self.deterministic is True:
            raise ValueError(f"{name}={sizes} cannot be combined with deterministic=True, which has one shape")
        object.__setattr__(self, name, sizes)

    def _check_host_cache(self) -> None:
        store_gib = self.prefix_store_gib
        if isinstance(store_gib, bool) or not isinstance(store_gib, (int, float)) or not 0 < store_gib < float("inf"):
            raise ValueError(f"prefix_store_gib must be a positive number of GiB, got {store_gib!r}")
        if self.prefix_store is not None and (not str(self.prefix_store) or self.host_cache_gib is None):
            raise ValueError(f"prefix_store={self.prefix_store!r}: give a folder, and host_cache_gib to read it into")
        gib = self.host_cache_gib
        if gib is None:
            return
        if self.prefix_store is not None and gib == "auto":
            raise ValueError(
                f"prefix_store={self.prefix_store!r} is read into host memory, and host_cache_gib='auto' may take "
                f"none: give a number of GiB"
            )
        is_number = isinstance(gib, (int, float)) and not isinstance(gib, bool) and 0 < gib < float("inf")
        if gib != "auto" and not is_number:
            raise ValueError(f"host_cache_gib must be a positive number of GiB or 'auto', got {gib!r}")
        if not self.prefix_cache or self.cache != "paged":
            missing = "cache='contiguous'" if self.prefix_cache else "prefix_cache=False"
            raise ValueError(f"host_cache_gib={gib!r} holds cached beginnings: it cannot be combined with {missing}")

    @property
    def policy(self) -> CachePolicy:
        """`kv_policy`, parsed; without one everything is kept and read."""
        return KEEPS_ALL if self.kv_policy is None else parse_policy(self.kv_policy)

    def check_buckets(self, prefill_chunk: int, max_seqs: int) -> None:
        """Raises ValueError for `token_buckets` and `decode_slots` that do not end with what these numbers need."""
        tokens = f"prefill_chunk={prefill_chunk} and max_seqs={max_seqs}"
        for name, last, source in (
            ("token_buckets", most_tokens(prefill_chunk, max_seqs), tokens),
            ("decode_slots", max_seqs, f"max_seqs={max_seqs}"),
        ):
            if (sizes := getattr(self, name)) is not None and sizes[-1] != last:
                raise ValueError(f"{name}={sizes} must end with {last}, for {source}")

    def check_needs_draft(self, has_draft: bool) -> None:
        """Raises ValueError for an option that needs a draft where there is none."""
        for field in () if has_draft else fields(SpeculationOptions):
            if (value := getattr(self, field.name)) != field.default:
                raise ValueError(f"{field.name}={value!r} needs a draft")

    def check_draft(self, draft: "Draft") -> None:
        """Raises ValueError as `check_needs_draft`, and for an option that the draft cannot fulfil."""
        self.check_needs_draft(bool(draft.name))
        if self.draft_kv_dtype is not None and not draft.own:
            raise ValueError(f"draft_kv_dtype={self.draft_kv_dtype!r}: draft={draft.name!r} has no cache of its own")
        lengths: Sequence[Any] = self.draft_lengths or () if self.is_adaptive else (self.num_draft_tokens,)
        most = draft.max_drafts
        if most is not None and self.draft_tree is None and (longest := max(lengths, default=0)) > most:
            name = "draft_lengths" if self.is_adaptive else "num_draft_tokens"
            raise ValueError(f"{name}={longest}: draft={draft.name!r} drafts at most {most} tokens")
        if self.draft_tree is not None and not draft.has_branches:
            raise ValueError(f"draft={draft.name!r} drafts a chain, it cannot fill draft_tree={self.draft_tree}")

    def _check_count(self, name: str) -> None:
        value = getattr(self, name)
        if value is None and type(self).__dataclass_fields__[name].default is None:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
