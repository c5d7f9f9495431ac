"""The config.json of a GGUF file, rebuilt from its metadata."""

import math
import re
from collections import Counter
from typing import Any

import numpy as np

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.gguf.architectures import ARCHITECTURES, Architecture
from checkpoints_convert.gguf.blocks import dequantize
from checkpoints_convert.gguf.index import GGUFIndex, Metadata, refuse_unread
from checkpoints_convert.gguf.tokenizer import end_token_ids, token_id
from checkpoints_convert.huggingface.families import FAMILIES

_ARCHITECTURE = "general.architecture"
# The rope scaling of Llama 3.1 to 3.3, of which files have only the resulting divisors.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

_OF_LAYER = re.compile(r"blk\.(\d{1,6})\.")
_FEWEST_TENSORS = 4  # a norm, projections before and after attention, the MLP's


def architecture_of(index: GGUFIndex) -> Architecture:
    """The architecture of a file. Raises CheckpointError for an unsupported one, by name."""
    name = index.text(_ARCHITECTURE)
    if name is None:
        raise CheckpointError(index.path, f"{_ARCHITECTURE} is {index.describe(_ARCHITECTURE)}, not a name")
    if name not in ARCHITECTURES or ARCHITECTURES[name].huggingface not in FAMILIES:
        known = ", ".join(name for name, entry in ARCHITECTURES.items() if entry.huggingface in FAMILIES)
        raise CheckpointError(
            index.path, f"the architecture {name!r} is not supported; `jaxinfer models` lists those that are: {known}"
        )
    return ARCHITECTURES[name]


def huggingface_config(index: GGUFIndex) -> dict[str, Any]:
    """The config.json of a file. Raises CheckpointError for an unsupported architecture, and for all keys that are
    missing, of the wrong type, or larger than the tensors allow."""
    architecture, problems = architecture_of(index), []
    metadata = Metadata(index, f"{index.text(_ARCHITECTURE)}.", problems)
    values = {**_common(metadata, architecture), **architecture.values(metadata)}
    values = {**values, **_rope(metadata, values)}
    refuse_unread(metadata, values)
    for name in ("bos_token_id", "pad_token_id"):
        values[name] = token_id(index, "padding_token_id" if name.startswith("pad") else name)
    ends = end_token_ids(index)
    values["eos_token_id"] = list(ends) if len(ends) > 1 else next(iter(ends), None)
    if problems:
        raise CheckpointError(index.path, *problems)
    name = values["architectures"][0]
    if name not in FAMILIES:
        raise CheckpointError(
            index.path, f"the architecture {name!r} is not supported; `jaxinfer models` lists those that are"
        )
    family = FAMILIES[name]
    names = {"rope_theta": family.rope.theta_name, "partial_rotary_factor": family.rope.partial_name, **family.names}
    renamed = {names.get(key, key): value for key, value in values.items()}
    return {"model_type": family.model_type, **{key: value for key, value in renamed.items() if key}}


def _common(metadata: Metadata, architecture: Architecture) -> dict[str, Any]:
    index = metadata.index
    embedding = index.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(index.path, "there is no tensor 'token_embd.weight' with two dimensions")
    num_layers = metadata.integer("block_count", is_width=False)
    _check_layers(metadata, num_layers)
    hidden, heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    head_dim = metadata.integer("attention.key_length", max(1, hidden // heads))
    is_latent = metadata.has("attention.kv_lora_rank")
    if not is_latent and metadata.integer("attention.value_length", head_dim) != head_dim:
        metadata.problem("attention.value_length", f"differs from the key length {head_dim}, which is not supported")
    kind = "layer_norm_epsilon" if architecture.has_layer_norm else "layer_norm_rms_epsilon"
    epsilon = metadata.number(f"attention.{kind}")
    return {
        "architectures": [architecture.huggingface],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer("context_length", is_width=False),
        "rms_norm_eps": epsilon,
        "tie_word_embeddings": "output.weight" not in index.tensors,
    }


def _check_layers(metadata: Metadata, num_layers: int) -> None:
    """Reports a number of layers for which the file has no tensors, before anything of that size is made."""
    tensors = metadata.index.tensors
    counts = Counter(int(match[1]) for name in tensors if (match := _OF_LAYER.match(name)))
    lacking = [layer for layer in range(min(num_layers, len(tensors) + 1)) if counts[layer] < _FEWEST_TENSORS]
    if lacking:
        held = f"layer {lacking[0]} has {counts[lacking[0]]} of the file's {len(tensors)} tensors"
        metadata.problem("block_count", f"is {num_layers}, but {held}, too few for a layer")


def _rope(metadata: Metadata, values: dict[str, Any]) -> dict[str, Any]:
    head_dim = values["head_dim"]
    rotary_dim = metadata.integer("rope.dimension_count", head_dim)
    if rotary_dim > head_dim:
        metadata.problem("rope.dimension_count", f"is {rotary_dim}, heads have {head_dim} dimensions")
        rotary_dim = head_dim
    partial = rotary_dim / head_dim
    if int(head_dim * partial) != rotary_dim:  # rounded down
        partial = math.nextafter(partial, 1)
    theta = metadata.number("rope.freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_theta": theta, "rope_scaling": _scaling(metadata, theta, rotary_dim, values)}
    return rope if rotary_dim == head_dim else {**rope, "partial_rotary_factor": partial}


def _scaling(metadata: Metadata, theta: float, rotary_dim: int, values: dict[str, Any]) -> dict[str, Any] | None:
    index = metadata.index
    length = values["max_position_embeddings"]
    original = metadata.integer("rope.scaling.original_context_length", None, is_width=False)
    has_divisors, has_factors = (f"rope_{name}.weight" in index.tensors for name in ("freqs", "factors_long"))
    kind = metadata.text("rope.scaling.type", "linear")
    factor = _scaling_factor(metadata)
    if kind not in ("none", "linear", *(["longrope"] if has_factors else ["yarn"])):
        known = "none, linear or longrope, beside tensors of factors" if has_factors else "none, linear or yarn"
        metadata.problem("rope.scaling.type", f"{kind!r} is not {known}")
        return None
    if kind == "none":
        factor = 1.0  # as in llama.cpp
    if has_factors:
        if factor != 1:
            metadata.problem("rope.scaling.factor", f"is {factor}, beside a tensor of factors: not supported")
        return _longrope(metadata, rotary_dim, original or length, length)
    if has_divisors and kind == "yarn":
        metadata.problem("rope.scaling.type", "'yarn' beside the tensor rope_freqs.weight is not supported")
        return None
    if kind == "yarn":
        return _yarn(metadata, factor, original or length, values["architectures"][0])
    if has_divisors:
        return _from_divisors(metadata, theta, rotary_dim, length, factor)
    return None if factor == 1 else {"rope_type": "linear", "factor": factor}


def _scaling_factor(metadata: Metadata) -> float:
    """The scaling factor, by default 1; 0 means 1. Files of 2023 have another key."""
    factor = 1.0
    for name in ("rope.scale_linear", "rope.scaling.factor"):  # the later one takes precedence
        if metadata.has(name):
            factor = 1.0 if metadata.is_zero(name) else metadata.number(name)
    return factor


def _yarn(metadata: Metadata, factor: float, original: int, architecture: str) -> dict[str, Any]:
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for name in ("beta_fast", "beta_slow"):
        if metadata.has(f"rope.scaling.yarn_{name}"):
            scaling[name] = metadata.number(f"rope.scaling.yarn_{name}")
    multiplier = "rope.scaling.yarn_log_multiplier"
    if metadata.has(multiplier) and not metadata.is_zero(multiplier):
        # The file has 0.1 * mscale_all_dim, which equals mscale in DeepSeek's. For other models llama.cpp gives this
        # key another meaning: it is refused.
        mscale = float(f"{10 * metadata.number(multiplier):.7g}")
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
        if not architecture.startswith("Deepseek"):
            metadata.problem(multiplier, "is supported for deepseek2 only")
    metadata.expect("rope.scaling.yarn_ext_factor", 1, -1)  # -1 is llama.cpp's "not set", which is 1
    # Some files have the total factor of cos and sin, others an additional factor.
    total = 1.0 if factor <= 1 or "mscale" in scaling else 0.1 * math.log(factor) + 1.0
    metadata.expect("rope.scaling.attn_factor", 1, total)
    metadata.expect("rope.scaling.yarn_attn_factor", total)
    if architecture == "GptOssForCausalLM":
        scaling["truncate"] = False
    return scaling


def _from_divisors(
    metadata: Metadata, theta: float, rotary_dim: int, length: int, linear: float
) -> dict[str, Any] | None:
    """The scaling that divides each frequency by its number in `rope_freqs.weight` and by `linear`: Llama 3's, or one
    expressed as longrope."""
    divisors = _factors(metadata, "rope_freqs.weight", rotary_dim)
    if divisors is None:
        return None
    factor = float(divisors.max())
    is_llama3 = factor > 1 and np.allclose(divisors, llama3_divisors(theta, rotary_dim, factor), rtol=1e-5)
    if is_llama3 and linear == 1:
        return {"rope_type": "llama3", "factor": factor, **LLAMA3}
    listed = (divisors * linear).tolist()
    return {
        "rope_type": "longrope",
        "short_factor": listed,
        "long_factor": listed,
        "attention_factor": 1.0,
        "original_max_position_embeddings": length,
    }


def llama3_divisors(theta: float, rotary_dim: int, factor: float) -> np.ndarray:
    """float64 [rotary_dim / 2]: the divisors of the frequencies in Llama 3's rope scaling."""
    low, high, original = LLAMA3.values()
    wavelengths = 2 * np.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    smooth = (original / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelengths < original / high, 1.0, np.where(wavelengths > original / low, factor, between))


def _longrope(metadata: Metadata, rotary_dim: int, original: int, length: int) -> dict[str, Any] | None:
    long = _factors(metadata, "rope_factors_long.weight", rotary_dim)
    short = _factors(metadata, "rope_factors_short.weight", rotary_dim)
    if long is None or short is None:
        return None
    scaling = {"rope_type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist()}
    given = metadata.number("rope.scaling.attn_factor", None)
    computed = math.sqrt(1 + math.log(length / original) / math.log(original)) if length > original > 1 else 1.0
    if given is not None and not math.isclose(given, computed, rel_tol=1e-5):
        scaling["attention_factor"] = given
    return scaling


def _factors(metadata: Metadata, name: str, rotary_dim: int) -> np.ndarray | None:
    """float64 [rotary_dim / 2] of a tensor of factors; None, with a problem, if it is missing or malformed."""
    entry = metadata.index.tensors.get(name)
    if entry is None or entry.shape != (rotary_dim // 2,) or entry.kind.is_quantized:
        actual = "missing" if entry is None else f"{entry.kind.name}{list(entry.shape)}"
        metadata.problems.append(f"tensor {name!r} is {actual}, not {rotary_dim // 2} numbers")
        return None
    values = dequantize(entry.kind.name, metadata.index.read(name)).reshape(-1)
    if not (np.isfinite(values) & (values > 0)).all():
        metadata.problems.append(f"tensor {name!r} has values that are not positive numbers")
        return None
    # The shortest decimal of a float32 is the number of config.json: 1.05, not 1.0499999523.
    return np.array([float(str(value)) for value in values])
