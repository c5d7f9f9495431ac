"""The contract of a draft, and its kinds: a smaller model, a trained head, n-grams of the sequence, the target's first
layers, or the tokens of an answer that is checked.

`Draft` itself drafts nothing. What proposes tokens inside the jitted round is a draft's `proposer`; here is no JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from jaxinfer.cache import KVScales
    from jaxinfer.models import DraftHeadConfig, ModelConfig, Params
    from jaxinfer.quantization.on_device import Copies
    from jaxinfer.speculative.proposers import Proposer
    from jaxinfer.speculative.vocabularies import TokenTables

    Model = tuple[ModelConfig, Params]
    Maker = Callable[[str, ModelConfig, Params], "Draft"]


@dataclass(frozen=True)
class Draft:
    """Drafts nothing: the contract, with what holds where a kind says nothing else."""

    lengths: ClassVar[tuple[int, ...]] = ()  # tokens of a round, from which an adaptive engine chooses; () for none
    has_branches: ClassVar[bool] = True  # it can fill a tree
    in_cache: ClassVar[bool] = False  # it stores keys in the target's cache
    observes: ClassVar[bool] = False  # in every pass of the target, so that it is never behind
    num_ahead: ClassVar[int] = 0  # tokens after a page that what it stores of the page follows from
    max_drafts: ClassVar[int | None] = None  # most tokens of a round that it can draft; None for any number
    is_trained_for_target: ClassVar[bool] = False  # so that it may be worthless for another revision of it

    @property
    def name(self) -> str:
        """The name in options and reports; "" for no draft."""
        return ""

    @property
    def own(self) -> tuple[Model, ...]:
        """The model with weights and a cache of its own, under the target's page table, if there is one."""
        return ()

    @property
    def own_scales(self) -> KVScales | None:
        """Scales of its checkpoint for an fp8 cache of its own."""
        return None

    def describe_own(self) -> dict[str, str]:
        """Facts of its weights for reports."""
        return {}

    def carried(self, num_slots: int) -> Any:
        """Abstract arrays of so many slots that it keeps from pass to pass beside its own pages; None for none. They
        are moved with the slots, and zeros at first."""
        del num_slots

    def models(self, config: ModelConfig, params: Params) -> tuple[Model, ...]:
        """The model that it computes with, for a target; () for none."""
        del config, params
        return self.own

    def with_params(self, make: Callable[[ModelConfig, Params], Model]) -> Self:
        """The draft with what `make` gives for its own model."""
        del make
        return self

    def with_layers(self, layers: Sequence[int] | None) -> Self:
        """The draft of these layers of its model, where it has one; of all for None."""
        del layers
        return self

    @property
    def predicts_acceptance(self) -> bool:
        """True if it says of each token how likely it is to be accepted (`Proposal.chances`)."""
        return False

    @property
    def drafts_at_once(self) -> bool:
        """True if one pass of it drafts all tokens of a round, whatever their number."""
        return False

    def num_tried(self, num_proposed: int, num_asked: int) -> int:
        """Tokens of a round that count as drafted for its estimate of acceptance, where it might draft `num_asked`."""
        del num_asked
        return num_proposed

    def proposer(self, *models: Any) -> Proposer:
        """Proposer of a round, a static argument; `models` are its own as programs take them."""
        raise NotImplementedError("no draft proposes tokens")


NO_DRAFT = Draft()


@dataclass(frozen=True, eq=False)
class ModelDraft(Draft):
    """A smaller model, of the same tokens or with tables for them (`for_tokens`). It has its own cache, under the
    target's page table.

    Attributes:
      title: its name.
      kv_scales: scales of its checkpoint for an fp8 cache.
      copies: how many of its quantized weights `params` holds as float32.
      num_predicted: tokens of the target that it drafts through tables; None for one without.
    """

    title: str
    config: ModelConfig
    params: Params
    kv_scales: KVScales | None = None
    copies: Copies | None = None
    num_predicted: int | None = None

    lengths: ClassVar[tuple[int, ...]] = (2, 4, 8)

    @property
    def name(self) -> str:
        return self.title

    @property
    def own(self) -> tuple[Model, ...]:
        return ((self.config, self.params),)

    @property
    def own_scales(self) -> KVScales | None:
        return self.kv_scales

    def describe_own(self) -> dict[str, str]:
        facts = {} if self.copies is None else {"float32 copies": str(self.copies)}
        if self.config.token_map is None or self.num_predicted is None:
            return facts
        of = f"{self.num_predicted:,} of {self.config.token_map.num_tokens:,} tokens of the model"
        return {**facts, "tokens": f"drafts {of}, through tables"}

    def for_tokens(self, tables: TokenTables, arrays: Params) -> Self:
        """The draft for a target with another tokenizer; `arrays` are those of the tables, placed, or their shapes."""
        from jaxinfer.models import TokenMapConfig

        num_tokens, num_pieces = tables.pieces.shape
        token_map = TokenMapConfig(num_tokens, num_pieces, tables.first_token)
        config = replace(self.config, token_map=token_map)
        return replace(self, config=config, params={**self.params, **arrays}, num_predicted=tables.num_predicted)

    def with_params(self, make: Callable[[ModelConfig, Params], Model]) -> Self:
        config, params = make(self.config, self.params)
        return replace(self, config=config, params=params)

    def with_layers(self, layers: Sequence[int] | None) -> Self:
        if layers is None:
            return self
        from jaxinfer.models.host_layers import take_layers

        chosen = self.config.with_layers(layers), take_layers(self.params, layers)
        return replace(self.with_params(lambda *_: chosen), kv_scales=None)

    def proposer(self, *models: Any) -> Proposer:
        from jaxinfer.speculative.proposers import ModelProposer

        return ModelProposer(*models)


@dataclass(frozen=True)
class NgramDraft(Draft):
    """Prompt lookup (Saxena 2023): drafts the continuation of the longest earlier match of the newest tokens, the
    latest of equally long ones.

    Attributes:
      min_match, max_match: shortest and longest match, in tokens.
    """

    min_match: int = 2
    max_match: int = 8

    lengths: ClassVar[tuple[int, ...]] = (3, 7, 15)  # it costs nothing, and is accepted in long runs
    has_branches: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return "ngram"

    def num_tried(self, num_proposed: int, num_asked: int) -> int:
        return num_asked  # where no n-gram was found, nothing was gained

    def proposer(self, *models: Any) -> Proposer:
        from jaxinfer.speculative.proposers import NgramProposer

        return NgramProposer(self.min_match, self.max_match)


@dataclass(frozen=True)
class ClaimedDraft(Draft):
    """Drafts the tokens that an answer is claimed to have (`Request.claimed`), so that all of a round are checked in
    one pass: those that the sampler chooses are accepted. Requests without a claim get worthless drafts."""

    lengths: ClassVar[tuple[int, ...]] = (7, 15, 31)
    has_branches: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return "claimed"

    def proposer(self, *models: Any) -> Proposer:
        from jaxinfer.speculative.proposers import ClaimedProposer

        return ClaimedProposer()


@dataclass(frozen=True)
class LayersDraft(Draft):
    """The target's first layers with its final norm and head (Elhoushi et al. 2024, LayerSkip, section 4.3).

    They write to the target's own pages; the target's pass overwrites those keys and values with equal ones.
    """

    num_layers: int

    lengths: ClassVar[tuple[int, ...]] = (2, 4, 8)
    in_cache: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"layers:{self.num_layers}"

    def models(self, config: ModelConfig, params: Params) -> tuple[Model, ...]:
        from jaxinfer.models.host_layers import take_layers

        layers = range(self.num_layers)
        return ((config.with_layers(layers), take_layers(params, layers)),)

    def with_layers(self, layers: Sequence[int] | None) -> Self:
        return self if layers is None else replace(self, num_layers=len(layers))

    def proposer(self, *models: Any) -> Proposer:
        from jaxinfer.speculative.proposers import LayersProposer

        return LayersProposer(*models)


@dataclass(frozen=True, eq=False)
class HeadDraft(Draft):
    """A head that was trained for the target (`models.DraftHeadConfig`). It observes hidden states of every pass, and
    has its own cache, under the target's page table; embedding and vocabulary head may be the target's.

    Attributes:
      title: its name.
      config, params: its own; the configuration is that of `head_for`.
      taps: names of the states that it observes.
      copies: as of `ModelDraft`.
    """

    title: str
    config: ModelConfig
    params: Params
    taps: tuple[str, ...]
    copies: Copies | None = None

    has_branches: ClassVar[bool] = False
    observes: ClassVar[bool] = True
    is_trained_for_target: ClassVar[bool] = True

    @property
    def head(self) -> DraftHeadConfig:
        """Settings of the head."""
        if self.config.draft_head is None:
            raise ValueError(f"{self.title} is no head that drafts")
        return self.config.draft_head

    @property
    def name(self) -> str:
        return self.title

    @property
    def predicts_acceptance(self) -> bool:
        return self.head.has_confidence

    @property
    def drafts_at_once(self) -> bool:
        return self.head.is_block

    @property
    def lengths(self) -> tuple[int, ...]:
        most = self.head.max_drafts
        return (2, 4, 8) if most is None else tuple(sorted({max(1, most // 2), most}))

    @property
    def max_drafts(self) -> int | None:
        return self.head.max_drafts

    @property
    def num_ahead(self) -> int:
        return 0 if self.head.is_block else 1  # the last pair of a page has the token after it

    @property
    def own(self) -> tuple[Model, ...]:
        return ((self.config, self.params),)

    def describe_own(self) -> dict[str, str]:
        return {} if self.copies is None else {"float32 copies": str(self.copies)}

    def carried(self, num_slots: int) -> Any:
        if self.head.is_block:
            return None
        import jax

        from jaxinfer.models import compute_dtype

        state = jax.ShapeDtypeStruct((num_slots, self.config.hidden_size), compute_dtype(self.params))
        return {"state": state, "end": jax.ShapeDtypeStruct((num_slots,), "int32")}

    def models(self, config: ModelConfig, params: Params) -> tuple[Model, ...]:
        head, is_tied = self.head, not self.head.has_lm_head and config.tie_word_embeddings
        lacking = {"embed": not head.has_embedding, "lm_head": not (head.has_lm_head or is_tied)}
        shared = {name: params[name] for name, is_lacking in lacking.items() if is_lacking}
        whole = replace(head, has_embedding=True, has_lm_head=True)
        return ((replace(self.config, draft_head=whole, tie_word_embeddings=is_tied), {**self.params, **shared}),)

    def with_params(self, make: Callable[[ModelConfig, Params], Model]) -> Self:
        config, params = make(self.config, self.params)
        return replace(self, config=config, params=params)

    def proposer(self, *models: Any) -> Proposer:
        from jaxinfer.speculative.heads import HeadProposer

        return HeadProposer(models[0], self.taps)


def head_for(config: ModelConfig, target: ModelConfig) -> tuple[ModelConfig, tuple[str, ...]]:
    """The configuration of a head as a target has it draft, and the names of the states that it observes: logits are
    scaled as the target's.

    Raises ValueError, with both numbers, for a head of another target: of other widths, layers or tokens.
    """
    from jaxinfer.models import tap_names_of

    head = config.draft_head
    if head is None:
        raise ValueError(f"{config.architecture} is no head that drafts")
    if head.tap_size != target.hidden_size:
        raise ValueError(
            f"the head reads states of width {head.tap_size}, and the target's have {target.hidden_size}: it was made "
            "for another model"
        )
    takes = [name for name, has in (("embedding", head.has_embedding), ("head", head.has_lm_head)) if not has]
    if takes and config.hidden_size != target.hidden_size:
        raise ValueError(
            f"the head takes the target's {' and '.join(takes)}, of width {target.hidden_size}, and its own width is "
            f"{config.hidden_size}"
        )
    if config.vocab_size != target.vocab_size:
        raise ValueError(f"the head is for {config.vocab_size} tokens, and the target has {target.vocab_size}")
    if head.has_embedding and not head.has_lm_head and target.tie_word_embeddings:
        raise ValueError(
            "the head has its own embedding and takes the target's head, which is the target's embedding: give it a "
            "head of its own, or no embedding"
        )
    scale = target.logit_scale if config.logit_scale == 1.0 else config.logit_scale
    softcap = target.logit_softcap if config.logit_softcap is None else config.logit_softcap
    return replace(config, logit_scale=scale, logit_softcap=softcap), tap_names_of(head, target.num_layers)


def _layers_draft(number: str, config: ModelConfig, params: Params) -> LayersDraft:
    del params
    if not number.isdecimal():
        raise ValueError(f"draft='layers:{number}': layers:N takes the target's first N layers, such as layers:4")
    if not 1 <= int(number) < config.num_layers:
        raise ValueError(f"draft='layers:{number}': the target has {config.num_layers} layers, use 1 to one less")
    return LayersDraft(int(number))


OWN_HEAD = "mtp"  # what `draft` names the head in the target's own files by

# By its name, with a colon if a text comes after it, what makes a draft of the text for a target.
_KINDS: dict[str, Maker] = {
    "layers:": _layers_draft,
    "ngram": lambda *_: NgramDraft(),
    "claimed": lambda *_: ClaimedDraft(),
}


def register_draft(name: str, make: Maker) -> None:
    """Adds a kind of draft: for the name "a:", `draft="a:text"` is `make(text, config, params)` of the target. Raises
    ValueError for a name that a kind has."""
    if name in _KINDS:
        raise ValueError(f"draft={name!r} is a kind of draft already")
    _KINDS[name] = make


def names_kind(draft: object) -> bool:
    """Tells whether a text names a kind of draft, such as "ngram", "layers:4" or "mtp", and not a model that drafts."""
    if draft == OWN_HEAD:
        return True
    name, colon, _ = draft.partition(":") if isinstance(draft, str) else ("", "", "")
    return name + colon in _KINDS


def draft_by_name(draft: Any, config: ModelConfig, params: Params) -> Draft | None:
    """The draft that None, "ngram", "layers:N" or a registered name gives for a target; None for one that is read from
    files. Raises ValueError for what the kind cannot be made of."""
    if draft is None:
        return NO_DRAFT
    if not names_kind(draft) or draft == OWN_HEAD:
        return None
    name, colon, text = draft.partition(":")
    return _KINDS[name + colon](text, config, params)
