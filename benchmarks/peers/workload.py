"""What every system is given: a random Llama of the SmolLM2-135M shape, and requests by measure.

Nothing here needs torch, jax or jaxinfer: the environment of any peer can import it.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
WEIGHT_SCALE = 0.02  # standard deviation, as Transformers initialises a Llama
MIXED_PROMPTS, MIXED_ANSWERS = (16, 256), (32, 128)  # tokens, from and to, uniform
DECODE_PROMPT, DECODE_TOKENS = 16, 96
PREFILL_TOKENS, FIRST_TOKENS = 1024, 128
PAIR_PROMPT, PAIR_ANSWER, PAIR_FILES = 128, 128, 8
MAX_MODEL_LEN = 1152  # the longest prompt and its answer, with room
MAX_SEQS = 32
CACHE_TOKENS = MAX_SEQS * (MIXED_PROMPTS[1] + MIXED_ANSWERS[1])  # of every system that is told

# What a measure is called, what is counted, and whether more is better.
TITLES = {
    "decode": "decode at batch 1, tokens/s",
    "mixed8": "8 mixed requests, tokens/s",
    "mixed32": "32 mixed requests, tokens/s",
    "prefill": "prompt of 1,024, tokens/s",
    "first": "first token of a prompt of 128, s",
    "pair": "embedded model, one answer at a time, tokens/s",
}


@dataclass(frozen=True)
class Measure:
    """Requests, and how they are timed.

    Attributes:
      prompts: token ids. lengths: tokens of each answer, exactly.
      kind: "decode" (a whole answer less one of one token: seconds a token), "batch" (all at once), "each" (one after
        the other).
      repeats: in each process.
    """

    prompts: list[list[int]]
    lengths: list[int]
    kind: str
    repeats: int

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def random_prompts(lengths: list[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths. The same seed makes the same prompts."""
    numbers = random.Random(seed)
    return [[numbers.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def measures(vocab_size: int = SHAPE["vocab_size"], seed: int = 0) -> dict[str, Measure]:
    """All measures of the random model. The same seed makes the same requests."""
    numbers = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [numbers.randrange(3, vocab_size) for _ in range(length)]

    def mixed(count: int) -> Measure:
        prompts = [prompt(numbers.randint(*MIXED_PROMPTS)) for _ in range(count)]
        return Measure(prompts, [numbers.randint(*MIXED_ANSWERS) for _ in range(count)], "batch", 1)

    return {
        "decode": Measure([prompt(DECODE_PROMPT)], [DECODE_TOKENS], "decode", 3),
        "mixed8": mixed(8),
        "mixed32": mixed(32),
        "prefill": Measure([prompt(PREFILL_TOKENS)], [1], "batch", 3),
        "first": Measure([prompt(FIRST_TOKENS)], [1], "batch", 3),
    }


def make_checkpoint(folder: Path, shape: dict = SHAPE, seed: int = 0, dtype: str = "float32") -> None:
    """A random Llama as Hugging Face lays it out: config.json and model.safetensors, tied embeddings.

    dtype: float32, or bfloat16, which needs the ml_dtypes package.
    """
    from safetensors.numpy import save_file

    numbers = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return numbers.standard_normal((rows, columns), np.float32) * np.float32(WEIGHT_SCALE)

    width, inner = shape["hidden_size"], shape["intermediate_size"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    tensors = {"model.embed_tokens.weight": matrix(shape["vocab_size"], width), "model.norm.weight": _ones(width)}
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns) in {
            "self_attn.q_proj": (queries, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, queries),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }.items():
            tensors[f"{prefix}{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = _ones(width)
    folder.mkdir(parents=True, exist_ok=True)
    if dtype != "float32":
        import ml_dtypes

        tensors = {name: tensor.astype(getattr(ml_dtypes, dtype)) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def num_weight_bytes(shape: dict = SHAPE) -> int:
    """float32 bytes that a decode step reads: all weights, of which the tied embedding is the output projection."""
    width, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    per_layer = 2 * width * queries + 2 * width * keys + 3 * width * inner + 2 * width
    return 4 * (layers * per_layer + shape["vocab_size"] * width + width)


def _ones(size: int) -> np.ndarray:
    return np.ones(size, np.float32)
