"""Writes rope_reference.json: what Transformers computes from fragments of config.json. Run with its environment."""

import copy
import json
from pathlib import Path

SHORT, LONG = [1.0 + 0.125 * i for i in range(8)], [1.0 + i for i in range(8)]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
MODEL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}


def yarn(**settings):
    return {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, **settings}}


# name, fragment, tokens of the longest sequence (what dynamic and longrope depend on)
CASES = [
    ("theta only", {"rope_theta": 500000.0}, None),
    ("nothing", {}, None),
    ("null scaling", {"rope_theta": 1e6, "rope_scaling": None}, None),
    ("old linear, type", {"rope_scaling": {"type": "linear", "factor": 4.0}}, None),
    ("integer factor", {"rope_scaling": {"type": "linear", "factor": 2}}, None),
    ("old dynamic within", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, None),
    ("old dynamic beyond", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 700),
    (
        "dynamic ignores the original length",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}},
        700,
    ),
    (
        "llama3",
        {"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 128}},
        None,
    ),
    (
        "llama3 v5",
        {
            "rope_parameters": {
                **LLAMA3,
                "rope_theta": 500000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 128,
            }
        },
        None,
    ),
    ("llama3 without original length", {"rope_scaling": LLAMA3}, None),
    (
        "qwen yarn",
        {
            "rope_theta": 1e6,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 128, "type": "yarn"},
        },
        None,
    ),
    ("yarn null factor", yarn(factor=None, original_max_position_embeddings=64), None),
    ("yarn without original length", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None),
    ("yarn top-level original length wins", {"original_max_position_embeddings": 64, **yarn()}, None),
    ("yarn mscale", yarn(factor=40.0, mscale=1.0, mscale_all_dim=0.707, beta_fast=16, beta_slow=2), None),
    ("yarn mscale_all_dim 0", yarn(factor=40.0, mscale=1.0, mscale_all_dim=0), None),
    ("yarn mscale 0 and betas 0", yarn(factor=40.0, mscale=0, mscale_all_dim=1.0, beta_fast=0, beta_slow=0), None),
    ("yarn original length as a float", yarn(original_max_position_embeddings=32.0), None),
    ("yarn no truncation", {"rope_theta": 150000.0, **yarn(factor=32.0, truncate=False)}, None),
    ("yarn attention factor", yarn(attention_factor=0.9), None),
    ("longrope short", {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 128}}, None),
    ("longrope long", {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 128}}, 300),
    (
        "longrope top-level original length, attention factor",
        {"original_max_position_embeddings": 128, "rope_scaling": {**LONGROPE, "attention_factor": 1.25}},
        300,
    ),
    (
        "longrope factor",
        {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 128, "factor": 8.0}},
        300,
    ),
    (
        "scaling beside parameters wins",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rope_scaling": {"rope_type": "linear", "factor": 3.0, "rope_theta": 20000.0},
        },
        None,
    ),
    (
        "scaling beside parameters, theta of the top",
        {
            "rope_theta": 30000.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rope_scaling": {"rope_type": "linear", "factor": 3.0},
        },
        None,
    ),
    ("both type names", {"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 3.0}}, None),
    ("empty parameters", {"rope_parameters": {}, "rope_theta": 77777.0}, None),
]


def main() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rows = []
    for name, fragment, length in CASES:
        config = LlamaConfig.from_dict(copy.deepcopy({**MODEL, **fragment}))
        kind = config.rope_parameters["rope_type"]
        if kind == "default":
            frequencies, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
        else:
            frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=length)
        row = {"name": name, "config": fragment, "length": length, "kind": kind}
        rows.append(row | {"inverse_frequencies": frequencies.tolist(), "factor": float(factor)})
    lines = ",\n".join(" " + json.dumps(row) for row in rows)
    (Path(__file__).parent / "rope_reference.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
