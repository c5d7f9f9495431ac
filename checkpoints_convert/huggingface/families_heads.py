"""Trained heads that draft for a target: EAGLE-3 (also SGLang's and speculators' files), DFlash, DFlash 2 and DSpark
(z-lab's, DeepSpec's and speculators'), and the MTP layers in the files of DeepSeek, GLM and Qwen.

Their configurations differ by who published them. Each is made flat first: the fields of the layers as a family has
them, and beside them "draft_head", what is the head's own, which no file has under that name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import CONFIG
from checkpoints_convert.huggingface.families_deepseek import DEEPSEEK
from checkpoints_convert.huggingface.families_recurrent import DELTA
from checkpoints_convert.huggingface.family import (
    ATTENTION_BIAS,
    LINEAR_BIAS,
    ConfigPart,
    Family,
    Fields,
    Setting,
)
from checkpoints_convert.huggingface.llama_tensors import LAYER, TARGET, linears
from checkpoints_convert.huggingface.rules import INDEX, TensorRule, linear, norm
from jaxinfer.models import DraftHeadConfig, ModelConfig

MTP = "MTP"  # at the end of the architecture of a model whose multi-token prediction drafts
_SLIDING = "sliding_attention"
_EAGLE3, _EAGLE3_QWEN, _BLOCKS = "LlamaForCausalLMEagle3", "Qwen3ForCausalLMEagle3", "DFlashDraftModel"
_NUM_TAPS = 3  # of EAGLE-3, unless its configuration names layers
TOLD_BY_FILES = ("has_embedding", "has_lm_head", "has_draft_index")  # fields that the tensors decide
SPECULATORS_VERSION = "0.9.0"  # of the speculators library, whose form is written
_SPECULATORS = {"eagle3": "Eagle3DraftModel", "dflash": "DFlashDraftModel"}  # its classes of the heads that it opens
Data = Mapping[str, Any]


def _rules(prefix: str, target: str = TARGET) -> tuple[TensorRule, ...]:
    """Rules of a layer of Llama or Qwen3 whose tensors begin with `prefix`, in places that heads have beside others."""
    attention, own = f"{prefix}.self_attn", f"{target}.attention"
    return (
        *norm(f"{prefix}.input_layernorm", f"{target}.attention_norm"),
        *norm(f"{prefix}.input_layernorm", f"{target}.token_norm"),
        *norm(f"{prefix}.hidden_norm", f"{target}.state_norm"),
        *norm(f"{prefix}.post_attention_layernorm", f"{target}.mlp_norm"),
        *linears(attention, own, ("q_proj", "k_proj", "v_proj", "o_proj")),
        *(rule for name in ("q_norm", "k_norm") for rule in norm(f"{attention}.{name}", f"{own}.{name}")),
        *linears(f"{prefix}.mlp", f"{target}.mlp", ("gate_proj", "up_proj", "down_proj")),
        *(
            rule
            for name in ("attention_conv", "mlp_conv")
            for rule in (
                TensorRule(f"{prefix}.{name}.base_kernel", (f"{target}.{name}.base",)),
                *linear(f"{prefix}.{name}.kernel_projection", f"{target}.{name}.kernel_proj"),
            )
        ),
    )


_ENDS = (
    TensorRule("embed_tokens.weight", ("embed",)),
    TensorRule("lm_head.weight", ("lm_head",), transpose=True),
    *linear("fc", "taps_proj"),
    *norm("input_norm", "joined_tap_norm"),
    TensorRule(f"fc_norm.{INDEX}.weight", ("tap_norms.weight",)),
    *norm("hidden_norm", "context_norm"),
    *norm("norm", "final_norm"),
    TensorRule("candidate_selector.predecessor_codebook", ("selector.before",)),
    TensorRule("candidate_selector.successor_codebook", ("selector.after",)),
    *linear("candidate_selector.hidden_projection", "selector.state_proj"),
    TensorRule("markov_head.markov_w1.weight", ("markov.embed",)),
    *linear("markov_head.markov_w2", "markov.out_proj"),
    *(rule for name in ("gate_proj", "joint_proj") for rule in linear(f"markov_head.{name}", f"markov.{name}")),
    *linear("confidence_head.proj", "confidence_proj"),
)
_TENSORS = (*_ENDS, *_rules("layers.{layer}"))
VOCABULARY = "d2t"  # of each token of a smaller vocabulary, what its number in the target's is larger by
IS_DRAFTED = "t2d"  # of each token of the target's vocabulary, whether it is in the smaller one
_SKIPPED = (VOCABULARY, IS_DRAFTED, r"verifier_(norm|lm_head)\.weight", r".*\.rotary_emb\..*")


def _build(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    """The head of a flat configuration."""
    given = fields.data.get("draft_head")
    own = Fields(given if isinstance(given, Mapping) else {}, fields.problems)
    kind, taps = own.text("kind", "eagle3"), own.data.get("taps")
    if taps is not None and not (isinstance(taps, list) and all(type(tap) is int and tap >= 0 for tap in taps)):
        own.problem("target layer ids", f"must be a list of layers, got {taps!r}")
        taps = None
    num_taps = 1 if kind == "mtp" else _NUM_TAPS if taps is None else len(taps)
    vocab_size = own.integer("draft_vocab_size", values["vocab_size"])
    if vocab_size > values["vocab_size"]:
        own.problem("draft_vocab_size", f"{vocab_size} is more than the vocab_size {values['vocab_size']}")
    settings: dict[str, Any] = {
        "kind": kind,
        "tap_layers": tuple(taps or ()),
        "num_taps": num_taps,
        "tap_size": own.integer("target_hidden_size", values["hidden_size"]),
        "vocab_size": None if vocab_size == values["vocab_size"] else vocab_size,
        "returns_normed": own.boolean("norm_output", kind == "mtp"),
        "first_layer": own.integer("first_layer", 0, least=0),
    }
    if kind == "eagle3":
        is_each, is_all = own.boolean("fc_norm", False), own.boolean("norm_before_fc", False)
        if is_each and is_all:
            own.problem("fc_norm", "and norm_before_fc are both true, which is not supported: a state has one norm")
        norms = "each" if is_each else "all" if is_all else "none"
        settings |= {"tap_norms": norms, "adds_normed": own.boolean("norm_before_residual", False)}
    if kind == "dflash":
        settings |= _block_settings(own, values)
    return {"draft_head": DraftHeadConfig(**settings)}


def _block_settings(own: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    windows, count = values["sliding_windows"], values["num_layers"]
    sees = own.data.get("causal_layers", "windows")
    causal = {"all": range(count), "none": ()}.get(
        sees, [layer for layer in range(count) if windows and windows[layer]]
    )
    rank, has_confidence = own.integer("markov_rank", 0, least=0), own.boolean("enable_confidence_head", False)
    return {
        "block_size": own.integer("block_size"),
        "mask_token": own.integer("mask_token_id", least=0, most=values["vocab_size"] - 1),
        "drafts_at_root": own.boolean("sample_from_anchor", False),
        "causal_layers": tuple(causal),
        "conv_size": own.integer("conv_kernel_size", 0, least=0),
        "conv_group": own.integer("conv_group_size", 0, least=0),
        "selector_rank": own.integer("selector_rank", 0, least=0),
        "selector_top_k": own.integer("selector_top_k", 0, least=0, most=values["vocab_size"]),
        "markov_rank": rank,
        "markov_kind": own.text("markov_head_type", "vanilla"),
        "has_confidence": has_confidence,
        "confidence_has_token": has_confidence and own.boolean("confidence_head_with_markov", False),
    }


def _express(config: ModelConfig) -> dict[str, Any]:
    """The fields of a head in SGLang's form of EAGLE-3 or z-lab's of DFlash; `_check_round_trip` finds what they cannot
    express."""
    head = config.draft_head
    if head is None:
        raise ValueError(f"{config.architecture} is no head that drafts")
    outputs = [layer - 1 for layer in head.tap_layers]
    common = {"draft_vocab_size": head.vocab_size or config.vocab_size, "target_hidden_size": head.tap_size}
    if head.kind == "eagle3":
        layers = {"eagle_aux_hidden_state_layer_ids": list(head.tap_layers)} if head.tap_layers else {}
        nested = {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True}
        return {
            **common,
            **layers,
            **({"eagle_config": nested} if layers else {}),
            "norm_before_fc": head.tap_norms == "all",
            "fc_norm": head.tap_norms == "each",
            "norm_output": head.returns_normed,
            "norm_before_residual": head.adds_normed,
        }
    own = {"mask_token_id": head.mask_token, "target_layer_ids": outputs, "block_size": head.block_size}
    return {**common, "block_size": head.block_size, "is_causal": False, "dflash_config": own}


_HEAD = ConfigPart(_build, _express)
_EAGLE3_FAMILY = Family(
    _EAGLE3,
    "llama",
    title="EAGLE-3",
    examples="lmsys/SGLang-EAGLE3-*, RedHatAI/*-speculator.eagle3",
    max_position_embeddings=2048,
    **LINEAR_BIAS,
    prefix="",
    # The first rule of a parameter is that by which it is written.
    tensors=(*_ENDS, *_rules("midlayer", "layers.0"), *_rules("layers.{layer}")),
    skipped=_SKIPPED,
    parts=(_HEAD,),
)
_EAGLE3_QWEN_FAMILY = replace(
    _EAGLE3_FAMILY,
    architecture=_EAGLE3_QWEN,
    model_type="qwen3",
    max_position_embeddings=32768,
    num_kv_heads=32,
    head_dim=128,
    mlp_bias=False,
    qk_norm=True,
    windows="late",
    default_window=4096,
)
_BLOCK_FAMILY = replace(
    _EAGLE3_QWEN_FAMILY,
    architecture=_BLOCKS,
    title="DFlash, DFlash 2, DSpark",
    tensors=_TENSORS,
    examples="z-lab/*-DFlash, *-DSpark",
    **ATTENTION_BIAS,
    settings=(
        Setting("embedding_multiplier", "input_embedding_scale", "number", 1.0),
        Setting("logit_scale", "output_multiplier", "number", 1.0),
        Setting("logit_softcap", "final_logit_softcapping", "optional", None),
    ),
)

# Tensors of multi-token prediction in files of DeepSeek and GLM, after the layers; in Qwen's; in the speculators
# library's own form of the latter.
_LATER = (
    *norm(f"{LAYER}.enorm", "token_norm"),
    *norm(f"{LAYER}.hnorm", "state_norm"),
    *linear(f"{LAYER}.eh_proj", "pair_proj"),
    *norm(f"{LAYER}.shared_head.norm", "final_norm"),
)
_QWEN = (
    *norm("mtp.pre_fc_norm_embedding", "token_norm"),
    *norm("mtp.pre_fc_norm_hidden", "state_norm"),
    *linear("mtp.fc", "pair_proj"),
    *norm("mtp.norm", "final_norm"),
)
_APART = (
    *norm("mtp_layers.0.token_layernorm", "token_norm"),
    *norm("mtp_layers.0.hidden_layernorm", "state_norm"),
    *linear("mtp_layers.0.input_proj", "pair_proj"),
    *norm("mtp_layers.0.final_layernorm", "final_norm"),
)


def _moved(rules: Sequence[TensorRule], prefix: str) -> tuple[TensorRule, ...]:
    """The rules of a layer, with another beginning of its tensors' names."""
    of_layers = (rule for rule in rules if rule.source.startswith(LAYER))
    return tuple(replace(rule, source=rule.source.replace(LAYER, prefix, 1)) for rule in of_layers)


def _later(family: Family) -> Family:
    rules = tuple(rule for rule in family.tensors if rule.source.startswith(LAYER))
    # The other layers, and copies of the embedding and the head.
    return _mtp(family, (*_LATER, *rules), (r"(?!model\.layers\.).*", r"model\.layers\..*"))


def _qwen(family: Family) -> Family:
    rules = (*_QWEN, *_moved(family.tensors, "mtp.layers.0"), *_APART, *_moved(family.tensors, "mtp_layers.0"))
    return _mtp(family, rules, (r"(?!mtp).*",))


def _mtp(family: Family, rules: tuple[TensorRule, ...], skipped: tuple[str, ...]) -> Family:
    return replace(
        family,
        architecture=f"{family.architecture}{MTP}",
        tensors=rules,
        skipped=skipped,
        parts=(*family.parts, _HEAD),
        has_later_layers=False,
    )


_WITH_LATER = {"DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"}
HEADS: dict[str, Family] = {
    family.architecture: family
    for family in (
        *(_EAGLE3_FAMILY, _EAGLE3_QWEN_FAMILY, _BLOCK_FAMILY),
        *(_later(family) for family in DEEPSEEK if family.architecture in _WITH_LATER),
        *map(_qwen, DELTA),
    )
}


@dataclass(frozen=True)
class SpeculatorsForm:
    """Fields of the speculators library's form of a head, beside the head's own.

    Attributes:
      verifier: folder or hub id of the target, from which the library takes what the files lack.
      architecture: the target's, as in its config.json.
      num_drafts: draft tokens of a round.
    """

    verifier: str
    architecture: str
    num_drafts: int

    def family(self, family: Family) -> Family:
        """The family whose rules name the tensors as the library does."""
        return replace(family, tensors=_TENSORS)

    def config(self, config: ModelConfig, data: Data) -> dict[str, Any]:
        """The head's config.json, of the flat one in the published form.

        Raises CheckpointError for a kind of head, or states of a target, that the library does not open.
        """
        head = config.draft_head
        if head is None or head.kind not in _SPECULATORS:
            kind = config.architecture if head is None else f"heads of kind {head.kind}"
            raise CheckpointError(CONFIG, f"the speculators library's form is not written for {kind}")
        taps = list(head.tap_layers)
        if len(set(taps)) < len(taps):
            listed = ",".join(map(str, taps))
            raise CheckpointError(CONFIG, f"the speculators library reads no state of a target twice, as {listed} does")
        others = {"architectures", "torch_dtype", *_express(config)}
        others |= {setting.name for setting in HEADS[config.architecture].settings}
        proposal = {"proposal_type": "greedy", "speculative_tokens": self.num_drafts}
        own = {
            "eagle_aux_hidden_state_layer_ids": taps or None,
            "norm_before_residual": head.adds_normed,
            "norm_before_fc": head.tap_norms == "all",
            "fc_norm": head.tap_norms == "each",
            "norm_output": head.returns_normed,
        }
        if head.is_block:
            own = {
                "aux_hidden_state_layer_ids": taps,
                "block_size": head.block_size,
                "mask_token_id": head.mask_token,
                "sample_from_anchor": head.drafts_at_root,
                "sliding_window_non_causal": any(config.sliding_windows) and not head.causal_layers,
            }
        return {
            "architectures": [_SPECULATORS[head.kind]],
            "speculators_model_type": head.kind,
            "speculators_version": SPECULATORS_VERSION,
            "speculators_config": {
                "algorithm": head.kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": self.verifier, "architectures": [self.architecture]},
            },
            "transformer_layer_config": {name: value for name, value in data.items() if name not in others},
            "draft_vocab_size": head.vocab_size or config.vocab_size,
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "dtype": config.dtype,
            **own,
        }


def is_head(data: Data) -> bool:
    """True if a config.json is of a head in files of its own."""
    return _form(data) is not None


def head_part(data: Data) -> Data:
    """The flat configuration of a head; of any other model, `data` itself."""
    form = _form(data)
    return data if form is None else form(data)


def _form(data: Data) -> Callable[[Data], dict[str, Any]] | None:
    kind, names = data.get("speculators_model_type"), data.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if "draft_head" in data:
        return dict
    if kind == "mtp":
        return _speculators_mtp
    if kind == "eagle3" or "Eagle3" in name:
        return _eagle3
    if kind in ("dflash", "dflash2", "dspark") or re.search(r"DFlash|DSpark", name):
        return _blocks
    return None


def _layers(data: Data) -> dict[str, Any]:
    """Fields of the layers, which the speculators library keeps apart."""
    own = data.get("transformer_layer_config")
    flat = dict(own) if isinstance(own, Mapping) else dict(data)
    inherited = {name: data[name] for name in ("quantization_config", "torch_dtype", "dtype") if name in data}
    return {**inherited, **flat, "tie_word_embeddings": False}


def _outputs(ids: Any) -> Any:
    """Numbers of states, of numbers of the layers whose outputs they are, -1 for the embedding."""
    return [layer + 1 if type(layer) is int else layer for layer in ids] if isinstance(ids, list) else ids


def _taken(data: Data, *names: str) -> dict[str, Any]:
    return {name: data[name] for name in names if data.get(name) is not None}


def _eagle3(data: Data) -> dict[str, Any]:
    flat = _layers(data)
    is_apart = isinstance(data.get("transformer_layer_config"), Mapping)
    nested, taps = data.get("eagle_config"), data.get("eagle_aux_hidden_state_layer_ids")
    if taps is None and isinstance(nested, Mapping):
        taps = _outputs(nested.get("eagle_aux_hidden_state_layer_ids"))
    names = ("draft_vocab_size", "target_hidden_size", "norm_before_fc", "fc_norm", "norm_output")
    # Files of the library that lack it were trained with it.
    added = {"norm_before_residual": data.get("norm_before_residual", is_apart)}
    kind = flat.get("model_type", "qwen3" if is_apart else "llama")
    architecture = {"llama": _EAGLE3, "qwen3": _EAGLE3_QWEN}.get(kind, f"Eagle3 with layers of {kind!r}")
    head = {"kind": "eagle3", "taps": taps, **_taken(data, *names), **added}
    return {"num_hidden_layers": 1, **flat, "architectures": [architecture], "draft_head": head}


def _blocks(data: Data) -> dict[str, Any]:
    flat, own = {name: value for name, value in _layers(data).items() if name != "is_causal"}, data.get("dflash_config")
    own = own if isinstance(own, Mapping) else {}
    kind = data.get("speculators_model_type")
    is_dspark = kind == "dspark" or "DSpark" in str(data.get("architectures"))
    given = {**data, **own}
    taps = given.get("aux_hidden_state_layer_ids")
    names = ("draft_vocab_size", "block_size", "mask_token_id", "sample_from_anchor", "conv_kernel_size",
             "conv_group_size", "selector_rank", "selector_top_k", "markov_rank", "markov_head_type",
             "enable_confidence_head", "confidence_head_with_markov")  # fmt: skip
    head = {
        "kind": "dflash",
        "taps": _outputs(given.get("target_layer_ids")) if taps is None else taps,
        "sample_from_anchor": is_dspark,
        **_taken(given, *names),
        "causal_layers": _causality(data, own, kind),
    }
    if own.get("use_swa") and isinstance(count := flat.get("num_hidden_layers"), int):
        flat |= {"layer_types": [_SLIDING] * min(count, 1000), "sliding_window": own.get("swa_window_size")}
    if _SLIDING in (flat.get("layer_types") or ()):
        flat["use_sliding_window"] = True
    scales = _taken(own, "input_embedding_scale", "output_multiplier", "final_logit_softcapping")
    refused = "with attention sinks" if own.get("attention_sink_bias") else None
    name = _BLOCKS if refused is None else f"{_BLOCKS} {refused}"
    return {**flat, **scales, "architectures": [name], "draft_head": head}


def _causality(data: Data, own: Data, kind: Any) -> str:
    """In which layers tokens of a block do not see later ones: all, those with a window, or none."""
    if kind is not None:
        return "none" if data.get("sliding_window_non_causal", kind == "dflash2") else "windows"
    if isinstance(is_causal := data.get("is_causal", own.get("causal")), bool):
        return "all" if is_causal else "none"
    return "windows"


def mtp_part(data: Data) -> dict[str, Any] | None:
    """The flat configuration of the multi-token prediction in the files of a target, of its own flat configuration;
    None for a target that has none that is read."""
    names = data.get("architectures")
    name = f"{names[0]}{MTP}" if isinstance(names, list) and names else ""
    if name not in HEADS:
        return None
    count = data.get("num_nextn_predict_layers", data.get("mtp_num_hidden_layers", data.get("num_mtp_layers", 1)))
    if count == 0:
        return None
    first = data.get("num_hidden_layers") if name.removesuffix(MTP) in _WITH_LATER else 0
    one = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_only_layers": [], "tie_word_embeddings": False}
    flat = {name: value for name, value in data.items() if name not in ("layer_types", "mlp_layer_types")}
    types = {"layer_types": ["full_attention"]} if "layer_types" in data or "full_attention_interval" in data else {}
    head = {"kind": "mtp", "first_layer": first}
    return {**flat, **one, **types, "architectures": [name], "draft_head": head}


def _speculators_mtp(data: Data) -> dict[str, Any]:
    flat = _layers(data)
    kinds = {family.model_type: name.removesuffix(MTP) for name, family in HEADS.items() if name.endswith(MTP)}
    name = kinds.get(flat.get("model_type", ""), f"multi-token prediction of {flat.get('model_type')!r}")
    return mtp_part({**flat, "architectures": [name]}) or {**flat, "architectures": [name], "draft_head": {}}
