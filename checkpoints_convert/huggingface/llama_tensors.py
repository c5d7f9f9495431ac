"""Rules of the tensor names of Llama, which most families keep, and of the parts that other families name alike."""

from collections.abc import Iterable, Sequence

from checkpoints_convert.huggingface.rules import INDEX, TensorRule, linear, norm

LAYER, TARGET = "model.layers.{layer}", "layers.{layer}"
QKV, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
EXPERTS = f"{TARGET}.mlp.experts"


def linears(source: str, target: str, names: Iterable[str], own: Iterable[str] | None = None) -> tuple[TensorRule, ...]:
    """Rules for the Linears of a part with these names, which are `own` in the checkpoint if that is given."""
    pairs = zip(names, names if own is None else own, strict=True)
    return tuple(rule for name, stored in pairs for rule in linear(f"{source}.{stored}", f"{target}.{name}"))


EMBEDDING: tuple[TensorRule, ...] = (TensorRule("model.embed_tokens.weight", ("embed",)),)
HEAD: tuple[TensorRule, ...] = (TensorRule("lm_head.weight", ("lm_head",), transpose=True),)
ATTENTION: tuple[TensorRule, ...] = (
    *linear(f"{LAYER}.self_attn.q_proj", f"{TARGET}.attention.q_proj", is_rotated=True),
    *linear(f"{LAYER}.self_attn.k_proj", f"{TARGET}.attention.k_proj", is_rotated=True),
    *linears(f"{LAYER}.self_attn", f"{TARGET}.attention", ("v_proj", "o_proj")),
)
QK_NORMS: tuple[TensorRule, ...] = (
    *norm(f"{LAYER}.self_attn.q_norm", f"{TARGET}.attention.q_norm", is_rotated=True),
    *norm(f"{LAYER}.self_attn.k_norm", f"{TARGET}.attention.k_norm", is_rotated=True),
)
GATED_MLP = linears(f"{LAYER}.mlp", f"{TARGET}.mlp", MLP)
FUSED_MLP: tuple[TensorRule, ...] = (
    *linear(f"{LAYER}.mlp.gate_up_proj", f"{TARGET}.mlp.gate_proj", f"{TARGET}.mlp.up_proj"),
    *linear(f"{LAYER}.mlp.down_proj", f"{TARGET}.mlp.down_proj"),
)
NORMS: tuple[TensorRule, ...] = (
    *norm(f"{LAYER}.input_layernorm", f"{TARGET}.attention_norm"),
    *norm(f"{LAYER}.post_attention_layernorm", f"{TARGET}.mlp_norm"),
    *norm("model.norm", "final_norm"),
)
# A rule without a parameter in a model has no effect: a family adds rules for what it has besides these.
LLAMA_TENSORS = (*EMBEDDING, *NORMS, *ATTENTION, *QK_NORMS, *GATED_MLP, *HEAD)
POST_NORMS = (
    *norm(f"{LAYER}.post_attention_layernorm", f"{TARGET}.attention_post_norm"),
    *norm(f"{LAYER}.post_feedforward_layernorm", f"{TARGET}.mlp_post_norm"),
    *norm("model.norm", "final_norm"),
)
SANDWICH_NORMS = (
    *norm(f"{LAYER}.input_layernorm", f"{TARGET}.attention_norm"),
    *norm(f"{LAYER}.pre_feedforward_layernorm", f"{TARGET}.mlp_norm"),
    *POST_NORMS,
)


def router(source: str) -> tuple[TensorRule, ...]:
    return (TensorRule(f"{source}.weight", (f"{TARGET}.mlp.router.weight",), transpose=True),)


def shared_mlp(source: str) -> tuple[TensorRule, ...]:
    """The MLP that all tokens go through."""
    return linears(source, f"{TARGET}.mlp.shared", MLP)


def each_expert(source: str, own: Sequence[str] = MLP, names: Sequence[str] = MLP) -> tuple[TensorRule, ...]:
    """Experts one by one, as repositories, `save_pretrained` and quantized checkpoints have them."""
    return tuple(
        TensorRule(f"{source}.{INDEX}.{stored}.weight", (f"{EXPERTS}.{name}.weight",), transpose=True)
        for stored, name in zip(own, names, strict=True)
    )


def all_experts(
    source: str,
    target: str = EXPERTS,
    *,
    names: tuple[str, str] = ("gate_up_proj", "down_proj"),
    transpose: bool = True,
    groups: str | None = None,
) -> tuple[TensorRule, ...]:
    """Experts in two tensors, [E, 2 F, D] and [E, D, F] if they are transposed, as Transformers 5 has them."""
    fused = (f"{target}.gate_proj.weight", f"{target}.up_proj.weight")
    return (
        TensorRule(f"{source}.{names[0]}", fused, transpose=transpose, groups=groups),
        TensorRule(f"{source}.{names[1]}", (f"{target}.down_proj.weight",), transpose=transpose),
    )


def experts_of(source: str, own: Sequence[str] = MLP) -> tuple[TensorRule, ...]:
    """Experts one by one below `source`, or all in two tensors of the MLP."""
    return (*each_expert(f"{source}.experts", own), *all_experts(f"{LAYER}.mlp.experts"))
