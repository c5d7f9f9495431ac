"""What is supported, as rows of a table made from the families' entries."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from checkpoints_convert.huggingface.families import FAMILIES, WRAPPERS
from checkpoints_convert.huggingface.family import Family


@dataclass(frozen=True)
class SupportedFamily:
    """A family, for people and as JSON.

    Attributes:
      title, examples: what it is called, and well-known models of it.
      architectures: names in the `architectures` of config.json, the first its own, others of models with images.
      model_type: Transformers' name.
      differences: what it does otherwise than Llama.
    """

    title: str
    architectures: tuple[str, ...]
    model_type: str
    examples: str
    differences: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {**asdict(self), "architectures": list(self.architectures), "differences": list(self.differences)}


def supported_families() -> list[SupportedFamily]:
    """All families, in the order of the table."""
    return [
        SupportedFamily(
            family.title,
            (family.architecture, *(name for name, kind in WRAPPERS.items() if kind == family.model_type)),
            family.model_type,
            family.examples,
            tuple(dict.fromkeys(_differences(family))),
        )
        for family in FAMILIES.values()
    ]


_BLOCKS = {
    "post_norm": "norms after attention and MLP",
    "sandwich_norm": "norms before and after attention and MLP",
    "parallel_one_norm": "attention and MLP side by side",
    "parallel_two_norms": "attention and MLP side by side",
}
_WINDOWS = {
    "all": "sliding windows",
    "late": "sliding windows in late layers",
    "pattern": "sliding windows in most layers",
    "unrotated": "sliding windows in some layers",
}
# Parts of a layer that only some families have, by what the names of their parameters hold.
_PARTS = {
    ".mlp.experts.": "a mixture of experts",
    ".mlp.shared.": "shared experts",
    ".attention.k_up.": "latent attention",
    ".attention.sinks": "attention sinks",
}
# Fields of ModelConfig that a family may set, and what they stand for.
_SETTINGS = {
    "attention_softcap": "capped scores",
    "logit_softcap": "capped logits",
    "logit_scale": "scaled logits",
    "embedding_multiplier": "scaled embedding",
    "residual_multiplier": "scaled residuals",
    "qk_norm": "norms of queries and keys",
}


def _differences(family: Family) -> Iterator[str]:
    fixed, rope = family.fixed, family.rope
    targets = {target for rule in family.tensors for target in rule.targets}
    yield from (title for part, title in _PARTS.items() if any(part in target for target in targets))
    if fixed.get("norm") == "layer":
        yield "LayerNorm"
    if fixed.get("norm") == "rms_zero_centred":
        yield "norms times 1 + w"
    if fixed.get("block") in _BLOCKS:
        yield _BLOCKS[fixed["block"]]
    if any(setting.field == "block" for setting in family.settings):
        yield _BLOCKS["parallel_two_norms"]
    if fixed.get("is_mlp_gated") is False:
        yield "MLP without gate"
    elif family.activations[family.activation] != "silu":
        yield "GELU"
    if family.qk_norm:
        yield _SETTINGS["qk_norm"]
    for setting in family.settings:
        is_off = setting.kind == "optional" and setting.default is None
        if setting.field in _SETTINGS and not is_off:
            yield _SETTINGS[setting.field] + (" in some models" if setting.default is False else "")
    if family.windows in _WINDOWS:
        yield _WINDOWS[family.windows]
    if fixed.get("has_position_embedding"):
        yield "learned positions"
    elif rope.rotated != "all":
        yield "layers without rotation"
    if rope.local_theta is not None:
        yield "a rotation of its own in layers with a window"
    if rope.has_partial:
        yield "partial rotation"
    if rope.pairs_neighbours:
        yield "interleaved rotation"
    if rope.has_query_scale:
        yield "queries that grow with the position"
    # Experts are stored fused by some writers and one by one by others, which sets no family apart.
    if any(len(rule.targets) > 1 and not any(part in rule.targets[0] for part in _PARTS) for rule in family.tensors):
        yield "fused projections"
