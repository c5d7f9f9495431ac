"""A random mixture of experts in Qwen3-MoE's form, stored as llama.cpp's Q4_K_M.

gguf-py does not round to K-quants, so the blocks themselves are random: codes are uniform, and scales are chosen so
that weights have a mean of about 0 and the standard deviation of a fresh model. As in files that llama.cpp's quantizer
wrote, the largest scale of a block is the largest number that its bits can hold. The tokenizer has the 256 bytes, and
filler tokens that no text contains.
"""

from pathlib import Path

import numpy as np

# A smaller Qwen3-30B-A3B: 128 experts, of which 8 are chosen, and as wide heads and experts.
SHAPE = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "expert_size": 768,
    "num_layers": 6,
    "num_heads": 16,
    "num_kv_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_token": 8,
}
MAX_POSITIONS = 4096
WEIGHT_SCALE = 0.02  # standard deviation
ROUTER_SCALE = 0.2  # experts differ clearly, so that rounding seldom changes who is chosen
BLOCK = 256  # weights of a block of K-quants
_Q4_SCALES, _Q6_SCALES = (32, 64), (64, 128)  # from, and up to but not including
_Q4_LARGEST, _Q6_LARGEST = 63, -128  # what quantize_row_q4_K and _q6_K of ggml-quants.c make of a block's largest scale


def write_mixture(file: Path, shape: dict[str, int] = SHAPE, seed: int = 0) -> int:
    """Writes the model; returns the bytes of the weights that a decode step of one token reads.

    Widths must be multiples of 256. Raises ImportError without the gguf package (in the extra `oracle`).
    """
    import gguf

    writer = gguf.GGUFWriter(str(file), "qwen3moe")
    _write_metadata(writer, shape)
    numbers, num_read = np.random.default_rng(seed), 0
    for name, (kind, dims) in tensors(shape).items():
        num_values = int(np.prod(dims))
        if kind == "F32":
            array = _floats(numbers, name, dims)
        else:
            blocks = {"Q4_K": q4_k_blocks, "Q6_K": q6_k_blocks}[kind](numbers, num_values // BLOCK)
            array = blocks.reshape(*dims[:-1], -1)
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType[kind])
        if "_exps" in name:
            num_read += array.nbytes * shape["num_experts_per_token"] // shape["num_experts"]
        elif name != "token_embd.weight":
            num_read += array.nbytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return num_read


def tensors(shape: dict[str, int]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and dimensions of each tensor by name, with the types that llama.cpp's Q4_K_M chooses."""
    width, inner, experts = shape["hidden_size"], shape["expert_size"], shape["num_experts"]
    queries, keys = shape["num_heads"] * shape["head_dim"], shape["num_kv_heads"] * shape["head_dim"]
    found: dict[str, tuple[str, tuple[int, ...]]] = {"token_embd.weight": ("Q4_K", (shape["vocab_size"], width))}
    for layer in range(shape["num_layers"]):
        finer = "Q6_K" if has_more_bits(layer, shape["num_layers"]) else "Q4_K"
        of_layer = {
            "attn_norm": ("F32", (width,)),
            "attn_q": ("Q4_K", (queries, width)),
            "attn_k": ("Q4_K", (keys, width)),
            "attn_v": (finer, (keys, width)),
            "attn_q_norm": ("F32", (shape["head_dim"],)),
            "attn_k_norm": ("F32", (shape["head_dim"],)),
            "attn_output": ("Q4_K", (width, queries)),
            "ffn_norm": ("F32", (width,)),
            "ffn_gate_inp": ("F32", (experts, width)),
            "ffn_gate_exps": ("Q4_K", (experts, inner, width)),
            "ffn_up_exps": ("Q4_K", (experts, inner, width)),
            "ffn_down_exps": (finer, (experts, width, inner)),
        }
        found |= {f"blk.{layer}.{name}.weight": one for name, one in of_layer.items()}
    return found | {"output_norm.weight": ("F32", (width,)), "output.weight": ("Q6_K", (shape["vocab_size"], width))}


def has_more_bits(layer: int, num_layers: int) -> bool:
    """Whether Q4_K_M stores a layer's attn_v and ffn_down as Q6_K (`use_more_bits` of llama.cpp's llama-quant.cpp)."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def q4_k_blocks(numbers: np.random.Generator, count: int) -> np.ndarray:
    """uint8 [count, 144]: float16 d and dmin, 8 scales and 8 minima of 6 bits, 256 codes of 4 bits."""
    blocks = numbers.integers(0, 256, (count, 144), dtype=np.uint8)
    scales = numbers.integers(*_Q4_SCALES, (count, 8), dtype=np.uint8)
    scales[np.arange(count), numbers.integers(0, 8, count)] = _Q4_LARGEST
    # weight = d * scale * code - dmin * minimum; codes are 7.5 on average, so equal minima make the mean 0.
    unit = np.float16(WEIGHT_SCALE / (np.sqrt((16**2 - 1) / 12) * np.mean(_Q4_SCALES)))
    blocks[:, :4] = np.array([unit, np.float16(7.5) * unit], np.float16).view(np.uint8)
    first, rest = scales[:, :4], scales[:, 4:]
    blocks[:, 4:8] = blocks[:, 8:12] = first & 63 | rest >> 4 << 6
    blocks[:, 12:16] = rest & 15 | (rest & 15) << 4
    return blocks


def q6_k_blocks(numbers: np.random.Generator, count: int) -> np.ndarray:
    """uint8 [count, 210]: 256 codes of 6 bits, less 32, 16 scales of int8, float16 d."""
    blocks = numbers.integers(0, 256, (count, 210), dtype=np.uint8)
    scales = numbers.integers(*_Q6_SCALES, (count, 16), dtype=np.int8)
    scales = np.where(numbers.random((count, 16)) < 0.5, -scales, scales)
    scales[np.arange(count), numbers.integers(0, 16, count)] = _Q6_LARGEST
    blocks[:, 192:208] = scales.view(np.uint8)
    unit = np.float16(WEIGHT_SCALE / (np.sqrt((64**2 - 1) / 12) * np.mean(_Q6_SCALES)))
    blocks[:, 208:] = np.array([unit], np.float16).view(np.uint8)
    return blocks


def _floats(numbers: np.random.Generator, name: str, dims: tuple[int, ...]) -> np.ndarray:
    if "norm" in name:
        return np.ones(dims, np.float32)
    return numbers.standard_normal(dims, np.float32) * np.float32(ROUTER_SCALE)


def _write_metadata(writer, shape: dict[str, int]) -> None:
    import gguf

    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_context_length(MAX_POSITIONS)
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_layers"])
    writer.add_feed_forward_length(shape["expert_size"] * shape["num_experts_per_token"])
    writer.add_head_count(shape["num_heads"])
    writer.add_head_count_kv(shape["num_kv_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(shape["num_experts"])
    writer.add_expert_used_count(shape["num_experts_per_token"])
    writer.add_expert_feed_forward_length(shape["expert_size"])
    writer.add_vocab_size(shape["vocab_size"])
    letters = _byte_letters()
    tokens = ["<|end|>", *letters, "ab"]  # a merge, since llama.cpp wants at least one
    tokens += [f"<|unused_{id}|>" for id in range(len(tokens), shape["vocab_size"])]
    normal, control, unused = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.UNUSED
    kinds = [control, *[normal] * (len(letters) + 1)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds + [unused] * (len(tokens) - len(kinds)))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def _byte_letters() -> list[str]:
    """GPT-2's letter of each byte (Radford et al. 2019): printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    spelled = {byte: chr(256 + number) for number, byte in enumerate(others)}
    return [spelled.get(byte, chr(byte)) for byte in range(256)]
