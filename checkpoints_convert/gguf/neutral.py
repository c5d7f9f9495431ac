"""Keys of a GGUF file below `{architecture}.` that nothing here computes with: which of them may be passed over.

A key that is not known here and was not read is an error, since it may change what the model computes. The names are
those of gguf-py's constants.py and of llama.cpp's loader.
"""

import math
from collections.abc import Mapping
from typing import Any

from checkpoints_convert.gguf.metadata import Metadata

# Whatever their value: the tensors' shapes say the same, or they are notes on the file and its conversion.
_NOTES = (
    "vocab_size",  # the embedding's rows
    "tensor_data_layout",
    "features_length",
    "expert_used_count",  # read wherever there are experts
    "expert_feed_forward_length",  # the experts' shapes
    "expert_shared_feed_forward_length",
    "attention.layer_norm_epsilon",  # of the sort of norm that the architecture does not have
    "attention.layer_norm_rms_epsilon",
    "rope.scaling.finetuned",  # whether the model was trained with its scaling
    "rope.scaling.yarn_beta_fast",  # read wherever there is yarn
    "rope.scaling.yarn_beta_slow",
    "decoder_start_token_id",  # of models with an encoder
)
# Keys and the values at which they change nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),  # and what is computed anyway, see `refuse_unread`
    "attention.output_scale": (0, 1),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attention.sliding_window": (0,),
    "attention.shared_kv_layers": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "router_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "expert_weights_scale": (0, 1),
    "expert_weights_norm": (False,),
    "expert_count": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "leading_dense_block_count": (0,),
    "expert_gating_func": (0, 1),  # softmax
    "expert_group_scale": (0, 1),
    "moe_every_n_layers": (0, 1),
    "interleave_moe_layer_step": (0, 1),
    "n_deepstack_layers": (0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "rope.scaling.alpha": (0,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "swin_norm": (False,),
    "rescale_every_n_layers": (0,),
}


def refuse_unread(metadata: Metadata, values: Mapping[str, Any]) -> None:
    """Notes a problem for every key that was not read and may mean something.

    Args:
      values: the config.json that was made of those read.
    """
    computed = {}
    if "kv_lora_rank" not in values:
        computed["attention.scale"] = values["head_dim"] ** -0.5
    if values["architectures"][0].startswith("Gemma"):
        computed["embedding_scale"] = values["hidden_size"] ** 0.5
    for key in metadata.index.keys:
        name = key.removeprefix(metadata.prefix)
        if name == key or name in metadata.seen or name in _NOTES or _is_neutral(metadata, key, name):
            continue
        value = metadata.index.scalar(key)
        if name in computed and value is not None and math.isclose(value, computed[name], rel_tol=1e-5):
            continue
        known = _NEUTRAL.get(name)
        only = f", only {' or '.join(map(repr, known))} is read" if known else ""
        metadata.problem(name, f"is {metadata.index.describe(key)}, which is not supported here{only}")


def _is_neutral(metadata: Metadata, key: str, name: str) -> bool:
    if name not in _NEUTRAL:
        return False
    value = metadata.index.text(key)
    return (metadata.index.scalar(key) if value is None else value) in _NEUTRAL[name]
