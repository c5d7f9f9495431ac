"""Model configurations. Families of models differ in these fields, not in code."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from jaxinfer.models.draft_head_config import DraftHeadConfig
from jaxinfer.models.moe_config import MoEConfig
from jaxinfer.models.recurrent_config import (
    ATTENTION_KINDS,
    RECURRENT_KINDS,
    ConvConfig,
    DeltaConfig,
    LayerKind,
    MambaConfig,
    RecurrentConfig,
)
from jaxinfer.models.rope_config import RopeConfig

# RMSNorm (Zhang & Sennrich 2019), whose weight multiplies the result after rounding to the input's dtype ("rms": Llama)
# or before ("rms_float32": OLMo 2; "rms_zero_centred", weight plus one: Gemma); or LayerNorm (Ba et al. 2016).
NormKind = Literal["rms", "rms_float32", "rms_zero_centred", "layer"]
# Order of norms and residuals; A is attention, M the MLP, N a norm:
#   pre_norm            x += A(N(x)), x += M(N(x))
#   post_norm           x += N(A(x)), x += N(M(x))
#   sandwich_norm       x += N(A(N(x))), x += N(M(N(x)))
#   parallel_one_norm   x += A(y) + M(y) with y = N(x)
#   parallel_two_norms  x += A(N(x)) + M(N(x))
BlockKind = Literal["pre_norm", "post_norm", "sandwich_norm", "parallel_one_norm", "parallel_two_norms"]
# "relu2" is the square of ReLU; "xielu" (Huang & Schlag 2024) has trained parameters in each MLP.
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
# What a norm of queries or keys normalizes: each head, with one weight [K] for all heads ("head") or one per head [H,
# K] ("each_head"); or all heads together, with a weight [H * K] ("all_heads").
QKNormSpan = Literal["head", "each_head", "all_heads"]


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values of all heads are projections of one
    latent vector per token. The cache holds that vector and one rotated key, which all heads share.

    Attributes:
      latent_size: width of the latent vector (kv_lora_rank).
      rope_size: width of the rotated part of queries and keys (qk_rope_head_dim).
      nope_size: width of the part without position (qk_nope_head_dim).
      value_size: width of a head's values (v_head_dim).
      query_rank: width of the latent vector of queries (q_lora_rank); None if queries are projected directly.
      is_interleaved: the weights rotate dimension 2i with 2i + 1 instead of i with i + rope_size / 2.
      norm_eps: of the norms of the latent vectors.
      index_topk: a query attends to that many tokens, which an indexer chooses (DeepSeek-V3.2); 0 for all.
      index_heads, index_size: heads of the indexer's queries, and their width.
      is_index_interleaved: as `is_interleaved`, of the indexer.
    """

    latent_size: int
    rope_size: int
    nope_size: int
    value_size: int
    query_rank: int | None = None
    is_interleaved: bool = True
    norm_eps: float = 1e-6
    index_topk: int = 0
    index_heads: int = 0
    index_size: int = 0
    is_index_interleaved: bool = False

    def __post_init__(self) -> None:
        sizes = ("latent_size", "rope_size", "nope_size", "value_size")
        sizes += ("index_topk", "index_heads", "index_size") if self.has_indexer else ()
        for name in (*sizes, *(() if self.query_rank is None else ("query_rank",))):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.rope_size % 2:
            raise ValueError(f"rope_size={self.rope_size} is odd")
        if self.has_indexer and (self.query_rank is None or self.index_size < self.rope_size):
            raise ValueError(
                f"an indexer needs a query_rank and an index_size of at least rope_size={self.rope_size}, got "
                f"query_rank={self.query_rank} and index_size={self.index_size}"
            )

    @property
    def has_indexer(self) -> bool:
        return bool(self.index_topk or self.index_heads or self.index_size)

    @property
    def query_size(self) -> int:
        """Width of a head's query, before its first part is projected to the latent space."""
        return self.nope_size + self.rope_size

    @property
    def key_size(self) -> int:
        """Width of a token's cache entry: the latent vector, the rotated key, and the indexer's key."""
        return self.latent_size + self.rope_size + self.index_size


@dataclass(frozen=True)
class LayerInputConfig:
    """An input of each layer beside the hidden states (Gemma 3n's per-layer embeddings): a row of the token's own
    embedding for that layer, plus a projection of the token's embedding.

    Attributes:
      size: width of the input of one layer. vocab_size: tokens of the table.
      count: layers that the table has inputs for.
    """

    size: int
    vocab_size: int
    count: int


@dataclass(frozen=True)
class TokenMapConfig:
    """Tokens of another tokenizer, which a model reads and predicts through tables: its ids are theirs.

    Attributes:
      num_tokens: ids of the other tokenizer's model. num_pieces: most own tokens that one of them is read as.
      first_token: own token that the first position of a sequence is read as; None for the one that is there.
    """

    num_tokens: int
    num_pieces: int
    first_token: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_pieces"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
      architecture: the architecture in the checkpoint's config, such as "LlamaForCausalLM".
      hidden_size, intermediate_size, head_dim: widths; num_heads * head_dim may differ from hidden_size.
      rope: rotary embedding of all layers, except those that use `local_rope`.
      local_rope: rotary embedding of layers with a sliding window, if different.
      rotated_layers: per layer, whether queries and keys are rotated; empty means all are.
      has_position_embedding: a learned embedding of each of `max_position_embeddings` positions is added to the input.
      norm, norm_eps, norm_bias, block: formula and placement of the norms.
      activation, is_mlp_gated: the MLP is down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate.
      qkv_bias, output_bias, mlp_bias, lm_head_bias: which projections have a bias.
      qk_norm, qk_norm_span: norm of queries and keys, before rotation. It has a bias if norm_bias and the span is
        "head".
      has_qk_norm_weight: whether that norm has a weight; without one it is an RMSNorm (Llama 4).
      is_qk_norm_after_rotation: whether that norm follows the rotation; layers without rotation then have none.
      qkv_clip: queries, keys and values are clipped to +-this, before rotation; None for no clipping (OLMoE).
      query_temperature, query_temperature_period: queries at position p of layers without rotation are multiplied by
        1 + query_temperature * ln(1 + floor((p + 1) / query_temperature_period)) (Llama 4); None for no factor.
      attention_chunk: a query of a rotated layer sees the keys of its own chunk of that many tokens only (Llama 4).
        There is no mask for it: sequences are not longer than one chunk. None for no chunks.
      attention_scale: factor on attention scores; None is head_dim**-0.5.
      attention_softcap, logit_softcap: scores, or logits, become c * tanh(x / c) (Gemma 2, section 2).
      embedding_multiplier, residual_multiplier, logit_scale: factors on the embedding (rounded to its dtype first), on
        the outputs of attention and MLP, and on the logits.
      sliding_windows: per layer, the number of visible keys including the query's own, or None for all; empty means all
        in every layer.
      has_sinks: each head has an attention sink: a logit that takes part in the softmax and has no value (gpt-oss).
      global_head_dim, num_global_kv_heads: widths of layers without a sliding window, if different (Gemma 4).
      has_value_norm: values are normalized by an RMSNorm without weight.
      global_values_are_keys: layers without a sliding window have no projection of values: those are the projected
        keys, before their norm.
      kv_sources: per layer, the layer whose keys and values it reads: itself, or an earlier one with the same window,
        whose cache is then the only one; empty if each has its own.
      has_double_mlp: layers that read an earlier layer's keys have an MLP of twice the width.
      layer_inputs, layer_input_slots: inputs of each layer beside the hidden states, and which of them each layer has.
      has_layer_scalar: a trained number multiplies the hidden states after each layer.
      moe: mixture of experts in place of the MLP of some layers; None for none.
      mla: multi-head latent attention; None for ordinary attention. `num_kv_heads` and `head_dim` then describe the
        cache: 1 and mla.key_size.
      layer_kinds: per layer, what mixes tokens; empty means attention in every layer.
      delta, mamba, conv: the recurrent layers of kind "gated_delta", "mamba2" and "short_conv".
      mlp_layers: per layer, whether it has an MLP or experts; empty means all do.
      is_attention_gated: the queries' projection has a gate beside each head's query, and attention's output is
        multiplied by its sigmoid (Qwen3-Next).
      attention_in_multiplier, attention_out_multiplier, mlp_multipliers: factors on the input and output of attention,
        and on gate and output of the MLP (Falcon-H1).
      token_map: tokens of another tokenizer that the model reads and predicts, as a draft; None for its own.
      draft_head: what makes of the layers a trained head that drafts for a target; None for a model of its own.
      max_position_embeddings: longest sequence that the checkpoint declares, in tokens.
      dtype: dtype of the stored weights.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    max_position_embeddings: int = 2048
    dtype: str = "float32"
    local_rope: RopeConfig | None = None
    rotated_layers: tuple[bool, ...] = ()
    has_position_embedding: bool = False
    norm: NormKind = "rms"
    norm_bias: bool = False
    block: BlockKind = "pre_norm"
    activation: Activation = "silu"
    is_mlp_gated: bool = True
    lm_head_bias: bool = False
    qk_norm_span: QKNormSpan = "head"
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_scale: float = 1.0
    has_sinks: bool = False
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    has_qk_norm_weight: bool = True
    is_qk_norm_after_rotation: bool = False
    qkv_clip: float | None = None
    query_temperature: float | None = None
    query_temperature_period: int = 8192
    attention_chunk: int | None = None
    layer_kinds: tuple[LayerKind, ...] = ()
    delta: DeltaConfig | None = None
    mamba: MambaConfig | None = None
    conv: ConvConfig | None = None
    mlp_layers: tuple[bool, ...] = ()
    is_attention_gated: bool = False
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    mlp_multipliers: tuple[float, float] = (1.0, 1.0)
    global_head_dim: int | None = None
    num_global_kv_heads: int | None = None
    has_value_norm: bool = False
    global_values_are_keys: bool = False
    kv_sources: tuple[int, ...] = ()
    has_double_mlp: bool = False
    layer_inputs: LayerInputConfig | None = None
    layer_input_slots: tuple[int, ...] = ()
    has_layer_scalar: bool = False
    draft_head: DraftHeadConfig | None = None
    token_map: TokenMapConfig | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                     "num_kv_heads", "head_dim", "max_position_embeddings"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        for name in ("norm_eps", "attention_scale", "attention_softcap", "logit_softcap", "embedding_multiplier",
                     "residual_multiplier", "logit_scale", "qkv_clip", "query_temperature",
                     "query_temperature_period", "attention_chunk"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive, got {value!r}")
        for name, kind in (("norm", NormKind), ("block", BlockKind), ("activation", Activation),
                           ("qk_norm_span", QKNormSpan)):  # fmt: skip
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}")
        for name in ("num_kv_heads", "num_global_kv_heads"):
            if (count := getattr(self, name)) is not None and self.num_heads % count:
                raise ValueError(f"num_heads={self.num_heads} is not a multiple of {name}={count}")
        for name in _PER_LAYER:
            values = getattr(self, name)
            if values and len(values) != self.num_layers:
                raise ValueError(f"{len(values)} {name} for {self.num_layers} layers")
        for rope, head_dim in zip(self.ropes, (self.global_head_dim or self.head_dim, self.head_dim), strict=False):
            if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= head_dim:
                raise ValueError(f"rotary_dim={rope.rotary_dim} must be even and at most head_dim={head_dim}")
        if self.moe is not None and not set(self.moe.layers) <= set(range(self.num_layers)):
            raise ValueError(f"moe.layers={self.moe.layers} of a model with {self.num_layers} layers")
        if self.mla is not None:
            _check_latent(self, self.mla)
        _check_kinds(self)
        _check_sharing(self)
        if self.norm_bias and self.norm != "layer":
            raise ValueError(f"norm_bias: only norms of kind 'layer' have a bias, not {self.norm!r}")
        if self.is_qk_norm_after_rotation and self.qk_norm_span == "all_heads":
            raise ValueError("is_qk_norm_after_rotation: a norm of all heads together is before the rotation")
        if not self.has_qk_norm_weight and (self.qk_norm_span != "head" or self.norm == "layer"):
            raise ValueError(f"has_qk_norm_weight: only RMSNorms of a head have none, not {self.qk_norm_span!r}")
        if self.activation == "xielu" and (self.is_mlp_gated or self.moe is not None):
            raise ValueError("activation 'xielu' has parameters of its own: only MLPs without gate and experts have it")

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings, whether or not a layer uses them."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    @property
    def caches_values(self) -> bool:
        """True if the cache stores values; in latent attention they are the first part of the keys."""
        return self.mla is None

    def experts_of(self, layer: int) -> MoEConfig | None:
        """The mixture of experts of a layer, or None if it has an MLP."""
        return self.moe if self.moe is not None and layer in self.moe.layers else None

    def layer_kind(self, layer: int) -> LayerKind:
        """The kind of a layer: what mixes its tokens."""
        return self.layer_kinds[layer] if self.layer_kinds else "attention"

    def has_attention(self, layer: int) -> bool:
        """True if a layer has attention."""
        return self.layer_kind(layer) in ATTENTION_KINDS

    def head_dim_of(self, layer: int) -> int:
        """Width of a layer's heads."""
        return self.head_dim if self.window(layer) is not None else self.global_head_dim or self.head_dim

    def num_kv_heads_of(self, layer: int) -> int:
        """Key-value heads of a layer."""
        return self.num_kv_heads if self.window(layer) is not None else self.num_global_kv_heads or self.num_kv_heads

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads, its own number if they are its own."""
        return self.kv_sources[layer] if self.kv_sources else layer

    def caches_keys(self, layer: int) -> bool:
        """True if a layer stores keys and values."""
        return self.has_attention(layer) and self.kv_source(layer) == layer

    def is_kv_source(self, layer: int) -> bool:
        """True if a later layer reads the keys and values of this one."""
        return layer in self.kv_sources[layer + 1 :]

    def mlp_size(self, layer: int) -> int:
        """Inner width of a layer's MLP."""
        return self.intermediate_size * (2 if self.has_double_mlp and self.kv_source(layer) != layer else 1)

    def has_mlp(self, layer: int) -> bool:
        """True if a layer has an MLP or experts."""
        return not self.mlp_layers or self.mlp_layers[layer]

    def recurrent_of(self, layer: int) -> RecurrentConfig | None:
        """The recurrent part of a layer, or None."""
        return self._recurrent(self.layer_kind(layer))

    def _recurrent(self, kind: LayerKind) -> RecurrentConfig | None:
        if kind == "gated_delta":
            return self.delta
        if kind == "short_conv":
            return self.conv
        return self.mamba if kind in RECURRENT_KINDS else None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention."""
        return tuple(i for i in range(self.num_layers) if self.has_attention(i))

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """The layers that store keys and values."""
        return tuple(i for i in range(self.num_layers) if self.caches_keys(i))

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers that keep a state."""
        return tuple(i for i in range(self.num_layers) if self.recurrent_of(i) is not None)

    @property
    def qk_norm_bias(self) -> bool:
        return self.norm_bias and self.qk_norm_span == "head"

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, or None."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    def rope_of(self, layer: int) -> RopeConfig | None:
        """The rotary embedding of a layer, or None."""
        if self.rotated_layers and not self.rotated_layers[layer]:
            return None
        return self.local_rope if self.local_rope is not None and self.window(layer) is not None else self.rope

    @property
    def kinds(self) -> tuple[int, ...]:
        """For each layer the number of the first one that differs from it in its weights only."""
        kinds = [
            (
                *(self.window(i), self.rope_of(i), self.experts_of(i), self.layer_kind(i), self.has_mlp(i)),
                *(self.kv_source(i) == i, i if self.is_kv_source(i) else None),
            )
            for i in range(self.num_layers)
        ]
        return tuple(kinds.index(kind) for kind in kinds)

    def with_layers(self, layers: Sequence[int]) -> "ModelConfig":
        """The configuration of a model of these layers, in this order. Raises ValueError for a layer without the one
        whose keys and values it reads."""
        per_layer = {name: tuple(values[i] for i in layers) for name in _PER_LAYER if (values := getattr(self, name))}
        if self.kv_sources:
            if lost := [i for i in layers if self.kv_sources[i] not in layers]:
                source = self.kv_sources[lost[0]]
                raise ValueError(f"layer {lost[0]} reads the keys and values of layer {source}, which is not there")
            per_layer["kv_sources"] = tuple(list(layers).index(source) for source in per_layer["kv_sources"])
        moe = self.moe
        if moe is not None:
            moe = replace(moe, layers=tuple(new for new, old in enumerate(layers) if old in moe.layers))
        return replace(self, num_layers=len(layers), moe=moe, **per_layer)

    @property
    def max_length(self) -> int:
        """Longest sequence that can be computed, in tokens."""
        return min(self.max_position_embeddings, self.attention_chunk or self.max_position_embeddings)

    def for_length(self, num_tokens: int) -> "ModelConfig":
        """The configuration with rotary embeddings for sequences of `num_tokens`, where they depend on the length.

        Raises ValueError for sequences longer than `attention_chunk`.
        """
        if self.attention_chunk is not None and num_tokens > self.attention_chunk:
            raise ValueError(
                f"sequences of {num_tokens} tokens are not supported: the attention of {self.architecture} is cut into "
                f"chunks of attention_chunk_size={self.attention_chunk} tokens, and sequences must fit in the first"
            )
        rope, *local = (
            replace(rope, sequence_length=num_tokens)
            if rope.depends_on_length and rope.sequence_length is None
            else rope
            for rope in self.ropes
        )
        return replace(self, rope=rope, local_rope=local[0] if local else None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `from_dict` is its inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ModelConfig":
        """Inverse of `to_dict`. Raises ValueError for unknown fields."""
        _check_fields(cls, data)
        values: dict[str, Any] = {key: _as_tuple(value) for key, value in data.items()}
        for name, kind in _NESTED.items():
            if values.get(name) is not None:
                values[name] = _nested_from_dict(kind, values[name])
        return cls(**values)


# Fields with one entry per layer, or empty.
_PER_LAYER = ("sliding_windows", "rotated_layers", "layer_kinds", "mlp_layers", "kv_sources", "layer_input_slots")
# Fields that are configurations of their own.
_NESTED = {
    "rope": RopeConfig,
    "local_rope": RopeConfig,
    "moe": MoEConfig,
    "mla": MLAConfig,
    "delta": DeltaConfig,
    "mamba": MambaConfig,
    "conv": ConvConfig,
    "layer_inputs": LayerInputConfig,
    "draft_head": DraftHeadConfig,
    "token_map": TokenMapConfig,
}


def _check_kinds(config: ModelConfig) -> None:
    if unknown := sorted(set(config.layer_kinds) - set(get_args(LayerKind))):
        raise ValueError(f"layer_kinds names {unknown[0]!r}, known are {', '.join(get_args(LayerKind))}")
    for kind in RECURRENT_KINDS:
        if kind in config.layer_kinds and config._recurrent(kind) is None:
            raise ValueError(f"layer_kinds has {kind!r}, but the configuration describes no such layer")
    for name in ("attention_in_multiplier", "attention_out_multiplier"):
        if not math.isfinite(getattr(config, name)):
            raise ValueError(f"{name} must be finite, got {getattr(config, name)!r}")
    if config.recurrent_layers and config.block != "pre_norm":
        raise ValueError(f"recurrent layers need block='pre_norm', got {config.block!r}")
    empty = [i for i in range(config.num_layers) if config.layer_kind(i) == "none" and not config.has_mlp(i)]
    if empty:
        raise ValueError(f"layer {empty[0]} has neither a mixer nor an MLP")


def _check_sharing(config: ModelConfig) -> None:
    for layer, source in enumerate(config.kv_sources):
        is_fit = source == layer or (0 <= source < layer and config.caches_keys(source))
        if not is_fit or config.window(source) != config.window(layer):
            raise ValueError(f"layer {layer} cannot read the keys and values of layer {source}")
    if config.mla is not None and (config.kv_sources or config.global_head_dim or config.num_global_kv_heads):
        raise ValueError("latent attention has one width in all layers, and keys of its own in each")
    if (config.layer_inputs is None) != (not config.layer_input_slots):
        raise ValueError("layer_inputs and layer_input_slots go together")
    if config.layer_inputs is not None and not set(config.layer_input_slots) <= set(range(config.layer_inputs.count)):
        raise ValueError(f"layer_input_slots={config.layer_input_slots} of {config.layer_inputs.count} inputs")


def _check_latent(config: ModelConfig, mla: MLAConfig) -> None:
    if (config.num_kv_heads, config.head_dim) != (1, mla.key_size):
        raise ValueError(
            f"latent attention caches 1 head of {mla.key_size}, but num_kv_heads={config.num_kv_heads} and "
            f"head_dim={config.head_dim}"
        )
    if config.rope.rotary_dim != mla.rope_size:
        raise ValueError(f"rotary_dim={config.rope.rotary_dim} is not rope_size={mla.rope_size}")
    if config.attention_scale is None:
        raise ValueError("latent attention needs an attention_scale: the default is that of the cached width")
    if config.qk_norm or config.has_sinks or config.rotated_layers:
        raise ValueError("latent attention has no qk_norm, no sinks, and rotates every layer")


def _nested_from_dict(kind: type, data: dict[str, Any]) -> Any:
    _check_fields(kind, data)
    return kind(**{key: _as_tuple(value) for key, value in data.items()})


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_fields(kind: type, data: dict[str, Any]) -> None:
    unknown = sorted(set(data) - {field.name for field in fields(kind)})
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {', '.join(unknown)}: written by a newer jaxinfer?")
