"""A Hugging Face Llama as a GGUF file of floats, for llama.cpp. Without a tokenizer: requests are token ids."""

import json
from pathlib import Path

import numpy as np

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}


def write_gguf(folder: Path, file: Path, kind: str = "F32") -> None:
    """Converts `folder`, one safetensors file with tied embeddings or an lm_head, to `file`: matrices as `kind`, F32,
    F16 or BF16, and norms in float32.

    Raises ImportError without the gguf package (in the extra `oracle`), KeyError for a tensor that no Llama has.
    """
    import gguf
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
    for name, array in _tensors(folder / "model.safetensors", safe_open):
        if ".q_proj" in name:
            array = _interleaved(array, heads)
        elif ".k_proj" in name:
            array = _interleaved(array, kv_heads)
        of_tensor = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(array, of_tensor), raw_dtype=of_tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(file: Path, safe_open):
    """Names and float32 arrays. NumPy has no bfloat16 of its own: safetensors gives ml_dtypes' where it is imported."""
    import ml_dtypes  # noqa: F401

    with safe_open(file, "np") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a mapping
            yield name, np.ascontiguousarray(tensors.get_tensor(name).astype(np.float32))


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def _interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a head as GGUF's Llamas rotate them: pairs side by side, where Hugging Face has halves."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
