"""Which linear layers read one input, and what before them can divide it: derived from the configuration."""

from dataclasses import dataclass

from jaxinfer.calibration.capture import ROUTER, STACKS
from jaxinfer.models import ModelConfig


@dataclass(frozen=True)
class Fold:
    """Linear layers that read one input, and what can divide that input: a norm, or the outputs of a linear layer.

    Attributes:
      linears, stacks: the linear layers, and the stacks of experts.
      others: names of parameters [K, ...] that read it too and are not quantized: of the router.
      previous: a linear layer, a stack, or `V_UP`.
      is_by_kv_head: each head of the previous layer's outputs is read by several heads of queries.
    """

    linears: tuple[str, ...] = ()
    norm: str | None = None
    previous: str | None = None
    is_by_kv_head: bool = False
    stacks: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.linears + self.stacks

    @property
    def reads(self) -> tuple[str, ...]:
        """Whose input it is, as `LayerProgram.statistics` takes it."""
        return self.linears or (ROUTER,)


V_UP = "attention.v_up"  # [Hq, R, W], not quantized
_ATTENTION = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
_GATE, _UP, _DOWN = STACKS


def folds(config: ModelConfig, layer: int = 0) -> tuple[Fold, ...]:
    """The folds of a decoder layer, in the order of computation.

    Left out is an input that nothing can divide: what the residual stream itself is where no norm comes before
    (post_norm), and what an activation makes that is not linear in anything (no gate, or `MoEConfig.clamp`).
    """
    attention, inner = _attention(config)
    mlp, after = _feed_forward(config, layer)
    found: list[Fold] = []
    if config.block == "parallel_one_norm":
        found += [Fold((*attention, *mlp.linears), "attention_norm", stacks=mlp.stacks, others=mlp.others), *inner]
    elif config.block == "post_norm":
        found += inner
    else:
        found += [Fold(attention, "attention_norm"), *inner, mlp]
    return (*found, *after)


def left_out(config: ModelConfig, layer: int = 0) -> tuple[str, ...]:
    """What is no fold of a layer for another reason than its block, and why, for people."""
    moe = config.experts_of(layer)
    if moe is None or moe.clamp is None:
        return ()
    return (f"{_DOWN}: its input is not scaled, since the clamped activation before it is not linear in {_UP}",)


def _attention(config: ModelConfig) -> tuple[tuple[str, ...], list[Fold]]:
    """What reads the hidden state, and the folds behind that."""
    if config.mla is None:
        return _ATTENTION, [Fold(("attention.o_proj",), previous="attention.v_proj", is_by_kv_head=True)]
    values = Fold(("attention.o_proj",), previous=V_UP)
    if config.mla.query_rank is None:
        return ("attention.q_proj", "attention.kv_a_proj"), [values]
    queries = Fold(("attention.q_b_proj",), norm="attention.q_a_norm")
    return ("attention.q_a_proj", "attention.kv_a_proj"), [queries, values]


def _feed_forward(config: ModelConfig, layer: int) -> tuple[Fold, list[Fold]]:
    """What reads the hidden state, behind a norm, and the folds behind that."""
    moe = config.experts_of(layer)
    prefix = "mlp" if moe is None else "mlp.shared"
    mlp = (f"{prefix}.gate_proj", f"{prefix}.up_proj") if config.is_mlp_gated else (f"{prefix}.up_proj",)
    after = [Fold((f"{prefix}.down_proj",), previous=f"{prefix}.up_proj")] if config.is_mlp_gated else []
    if moe is None:
        return Fold(mlp, "mlp_norm"), after
    if not moe.shared_size:
        mlp, after = (), []
    if moe.clamp is None:
        after.append(Fold(stacks=(_DOWN,), previous=_UP))
    others = (f"{ROUTER}.weight", *(("mlp.shared_gate",) if moe.has_shared_gate else ()))
    return Fold(mlp, "mlp_norm", stacks=(_GATE, _UP), others=others), after
