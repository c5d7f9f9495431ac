"""What is measured: named shapes and models on a chip, and tiny ones that run the same code on a CPU."""

from dataclasses import dataclass, field
from typing import Any

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA_3_8B = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA_3_1B = LLAMA_3_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,  # of 128 each: the kernels' width
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
MIXTURE_7B = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "clip_qkv": None,
    "norm_topk_prob": False,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
_TINY = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
_TINY |= {"vocab_size": 256, "max_position_embeddings": 256, "torch_dtype": "float32"}


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
      configs: config.json of each model. shapes: names in `paged_attention.shapes.MODELS` for kernels.
      q_dtype, cache_dtypes: of kernels. page_sizes: in tokens, of comparisons.
      parity_context, parity_batch: tokens and sequences of comparisons. contexts, batches: of measured kernels.
      model_batches: sequences of whole models, in the order of their worth.
      new_tokens: of a sequence in a call of a kernel.
      prompt_tokens, answer_tokens: of whole models. prefill_tokens: of one long prompt.
      quantized: recipes of weights. kv_dtypes: of caches. products: rows of quantized products.
      repeats: measured batches of each size. has_goals: whether shares have a least value.
      rate_sizes: of the arrays by which rates are measured, as in `jaxinfer.measure.bench.rates`; {}: large ones.
      layers: whose caches a measured kernel reads in turn; None: as many as exceed the chip's cache.
      engine: options of every engine, which replace a piece's.
      parity_programs: names of `parity.paged_shapes`. trace_steps: decode steps whose kernels are listed.
    """

    configs: dict[str, dict[str, Any]]
    shapes: tuple[str, ...]
    q_dtype: str
    cache_dtypes: tuple[str, ...]
    page_sizes: tuple[int, ...]
    parity_batch: int
    parity_context: int
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    model_batches: tuple[int, ...]
    prompt_tokens: int
    answer_tokens: int
    prefill_tokens: int
    new_tokens: tuple[int, ...] = (1, 8)
    quantized: tuple[str, ...] = ("int8", "int4-g128", "fp8")
    kv_dtypes: tuple[str, ...] = ("int8", "fp8_e4m3", "int4")
    product_rows: tuple[int, ...] = (1, 8, 64)
    product_shapes: tuple[tuple[int, int], ...] = ((4096, 4096), (4096, 14336), (14336, 4096))
    prompts_of_kernels: tuple[int, ...] = (2048, 8192)
    repeats: int = 2
    has_goals: bool = True
    allowed_ids: tuple[int, ...] = (1, 2, 4)
    rate_sizes: dict[str, int] = field(default_factory=dict)
    layers: int | None = None
    trace_steps: int = 16
    parity_programs: tuple[str, ...] = ("decode", "verify", "prefill", "mixed")
    engine: dict[str, Any] = field(default_factory=dict)
    is_tiny: bool = False


def sizes_for(platform: str, *, is_tiny: bool) -> Sizes:
    """The sizes of a platform, "gpu", "tpu" or "cpu"."""
    if is_tiny:
        mixture = MIXTURE_7B | _TINY | {"intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
        dense = LLAMA_3_8B | _TINY | {"intermediate_size": 128}
        return Sizes(
            configs={"8b": dense, "1b": dense, "mixture": mixture},
            shapes=("qwen3-0.6b",),
            q_dtype="float32",
            cache_dtypes=("float32", "int8"),
            page_sizes=(16,),
            parity_batch=2,
            parity_context=48,
            contexts=(64,),
            batches=(2,),
            model_batches=(2,),
            trace_steps=2,
            parity_programs=("decode", "mixed"),
            prompt_tokens=24,
            answer_tokens=12,
            prefill_tokens=48,
            new_tokens=(1,),
            quantized=("int8",),
            kv_dtypes=("int8",),
            product_rows=(1,),
            product_shapes=((256, 128),),
            prompts_of_kernels=(64,),
            repeats=1,
            has_goals=False,
            allowed_ids=(1,),
            engine={"max_seqs": 2, "max_model_len": 256, "prefill_chunk": 30},  # programs of one are those of all
            is_tiny=True,
            rate_sizes={"num_bytes": 2**20, "size": 128},
            layers=1,
        )
    if platform == "cpu":
        raise ValueError("no chip found: this machine has only a CPU; give --tiny to run the same pieces on tiny sizes")
    return Sizes(
        configs={"8b": LLAMA_3_8B, "1b": LLAMA_3_1B, "mixture": MIXTURE_7B},
        shapes=("llama-3-8b", "qwen3-0.6b", "qwen3-32b"),
        q_dtype="bfloat16",
        cache_dtypes=("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4"),
        page_sizes=(16, 32, 64),
        parity_batch=16,
        parity_context=1000,
        contexts=(1536, 8192),
        batches=(64, 1),
        model_batches=(1, 64, 8),
        prompt_tokens=1500,
        answer_tokens=64,
        prefill_tokens=7000,
    )
