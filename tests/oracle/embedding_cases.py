"""Tiny models that embed texts or score pairs, of each kind that sentence-transformers knows of our families: their
files, written without torch, and the texts that `make_embedding_golden.py` and the tests give them."""

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

FILE = Path(__file__).parent / "golden" / "embeddings.safetensors"
WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS, LONGEST = 32, 4, 2, 8, 48, 2, 512
SPECIAL = ("<|begin|>", "<|end|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
WORDS = ("yes", "no")
VOCAB = 256 + len(WORDS) + len(SPECIAL)
QUERY = "Instruct: find what answers it\nQuery:"
TEXTS = (
    "The cat sat on the mat.",
    "",
    "x",
    "Ein Satz mit Umlauten: äöü, und 漢字.",
    "A longer text, in many chunks: " + "one two three four five six seven eight nine ten " * 7,
    "The cat sat on the mat.",
    "  two\nlines  ",
)
SCORED = ("what is a cat?", ("A cat is an animal that purrs.", "", "The sun is a star. " * 5, "yes", "A cat."))
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_DENSE = 20  # width of a layer over the vectors


@dataclass(frozen=True)
class EmbeddingCase:
    """A kind of model.

    Attributes:
      kind: model_type. architecture: as config.json names it. more: other fields of config.json.
      pooling: their name; None for a reranker. is_legacy: whether 1_Pooling has the fields of versions before 5.5.
      ends: whether the tokenizer adds the first and the last special token.
      dense: whether there is a layer with this activation over the vectors. prompts, default: of the checkpoint.
    """

    kind: str
    architecture: str
    pooling: str | None = "lasttoken"
    ends: tuple[bool, bool] = (False, True)
    is_legacy: bool = True
    includes_prompt: bool = True
    normalizes: bool = True
    dense: str | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default: str | None = None
    max_length: int | None = None
    more: dict[str, Any] = field(default_factory=dict)


CASES = {
    "qwen3_last": EmbeddingCase("qwen3", "Qwen3ForCausalLM", prompts={"query": QUERY, "document": ""}),
    "mistral_last": EmbeddingCase("mistral", "MistralModel", ends=(True, True), more={"sliding_window": 24}),
    "gemma2_last": EmbeddingCase("gemma2", "Gemma2Model", ends=(True, True), more={"query_pre_attn_scalar": 8}),
    "llama_mean": EmbeddingCase("llama", "LlamaModel", "mean", (True, False), normalizes=False),
    "llama_mean_of_text": EmbeddingCase(
        "llama", "LlamaModel", "mean", includes_prompt=False, prompts={"query": QUERY}, default="query"
    ),
    "qwen2_cls": EmbeddingCase("qwen2", "Qwen2Model", "cls", is_legacy=False, dense="Tanh"),
    "qwen2_short": EmbeddingCase("qwen2", "Qwen2Model", is_legacy=False, dense="Identity", max_length=24),
    "qwen3_reranker": EmbeddingCase("qwen3", "Qwen3ForCausalLM", None, (False, False)),
}


def write(folder: Path, case: EmbeddingCase) -> Path:
    """Writes the files of a case's model."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _config(case))
    save_file(_tensors(case), folder / "model.safetensors", {"format": "pt"})
    tokenizer(case.ends).save(str(folder / "tokenizer.json"))
    limit = {} if case.max_length is None else {"model_max_length": case.max_length}
    tokens = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "pad_token": SPECIAL[2]}
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **limit})
    if case.pooling is not None:
        _write_modules(folder, case)
    return folder


def tokenizer(ends: tuple[bool, bool]) -> Tokenizer:
    """One token for each byte, `WORDS`, and `SPECIAL`."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("y", "e"), ("ye", "s"), ("n", "o")]
    vocab = {name: number for number, name in enumerate([*names[:-1], "ye", *WORDS, names[-1]])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    first, last = (f"{SPECIAL[i]} " if ends[i] else "" for i in range(2))
    ids = [(name, made.token_to_id(name)) for name in SPECIAL]
    made.post_processor = processors.TemplateProcessing(single=f"{first}$A {last}".strip(), special_tokens=ids)
    return made


def _config(case: EmbeddingCase) -> dict[str, Any]:
    return {
        "architectures": [case.architecture],
        "model_type": case.kind,
        "vocab_size": VOCAB + 1,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": LONGEST,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": case.architecture.endswith("CausalLM"),
        "torch_dtype": "float32",
        **case.more,
    }


def _tensors(case: EmbeddingCase) -> dict[str, np.ndarray]:
    """Random weights, large enough for each token to matter. A reranker's names have the prefix of a whole model."""
    prefix = "model." if case.pooling is None else ""
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCAB + 1, WIDTH), "norm": (WIDTH,)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if case.kind == "gemma2":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for number in range(LAYERS):
        own: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (WIDTH,))
        own |= {"self_attn.q_proj": (queries, WIDTH), "self_attn.o_proj": (WIDTH, queries)}
        own |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (keys, WIDTH))
        own |= {"mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER)}
        if case.kind == "qwen3":
            own |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (HEAD_DIM,))
        shapes |= {f"layers.{number}.{name}": shape for name, shape in own.items()}
    found = {f"{prefix}{name}.weight": _random(name, shape) for name, shape in shapes.items()}
    if case.kind == "qwen2":
        for name, shape in shapes.items():
            if name.endswith(("q_proj", "k_proj", "v_proj")):
                found[f"{name}.bias"] = _random(f"{name}.bias", shape[:1])
    return found


def _random(name: str, shape: tuple[int, ...]) -> np.ndarray:
    random = np.random.default_rng(zlib.crc32(name.encode()))
    noise = random.standard_normal(shape)
    if len(shape) == 1:
        return np.asarray(0.1 * noise if name.endswith("bias") else 1 + 0.1 * noise, np.float32)
    return np.asarray(noise * (1.0 if name == "embed_tokens" else 1.5 * shape[1] ** -0.5), np.float32)


def _write_modules(folder: Path, case: EmbeddingCase) -> None:
    names = ["Transformer", "Pooling", *(["Dense"] if case.dense else []), *(["Normalize"] if case.normalizes else [])]
    paths = ["", *(f"{number}_{name}" for number, name in enumerate(names) if number)]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in paths[1:]:
        (folder / path).mkdir(exist_ok=True)
    width = {"word_embedding_dimension" if case.is_legacy else "embedding_dimension": WIDTH}
    flags = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    mode: dict[str, Any] = {"pooling_mode": case.pooling}
    if case.is_legacy:
        mode = {f"pooling_mode_{flag}": flag.partition("_t")[0] == case.pooling for flag in flags}
    _write_json(folder / "1_Pooling" / "config.json", {**width, **mode, "include_prompt": case.includes_prompt})
    if case.dense:
        has_bias = case.dense == "Tanh"
        activation = f"torch.nn.modules.{'activation.Tanh' if has_bias else 'linear.Identity'}"
        sizes = {"in_features": WIDTH, "out_features": _DENSE, "bias": has_bias, "activation_function": activation}
        _write_json(folder / "2_Dense" / "config.json", sizes)
        tensors = {"linear.weight": _random("dense", (_DENSE, WIDTH))}
        tensors |= {"linear.bias": _random("dense.bias", (_DENSE,))} if has_bias else {}
        save_file(tensors, folder / "2_Dense" / "model.safetensors", {"format": "pt"})
    prompts = {"prompts": case.prompts, "default_prompt_name": case.default, "similarity_fn_name": "cosine"}
    _write_json(folder / "config_sentence_transformers.json", {"model_type": "SentenceTransformer", **prompts})
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": case.max_length, "do_lower_case": False})


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n")
