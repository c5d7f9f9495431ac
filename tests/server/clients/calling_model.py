"""A checkpoint whose answers are known: it calls the function add, and after the result it says the sum."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.cli.conftest import SPECIAL, write_checkpoint

CALL = ("<tool_call>", '\n{"name": "add", ', '"arguments":{"a":1,"b":2}}', "\n</tool_call>")
ANSWER = "The sum is 3."
TEMPLATE = (
    "{% if tools %}<|system|>Answer with <tool_call>: {{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}"
    "{{ message['content'] }}{% for call in message['tool_calls'] or [] %}{{ call | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if messages[-1]['role'] == 'tool' %}={% endif %}{% endif %}"
)


def write_calling_checkpoint(path: Path) -> Path:
    """A Llama whose next token depends on the last one only: its layer adds nothing, its head is a table."""
    width, texts = 512, (*CALL, ANSWER)
    first = 256 + len(SPECIAL)
    config = {
        "hidden_size": width,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
    }
    config |= {"vocab_size": first + len(texts)}
    write_checkpoint(path, chat_template=TEMPLATE, **config)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    for number, text in enumerate(texts, start=first):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
        tokenizer["added_tokens"].append({"id": number, "content": text, **flags})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))

    end, assistant, equals = 256, 256 + SPECIAL.index("<|assistant|>"), tokenizer["model"]["vocab"]["="]
    following = {assistant: first, equals: first + len(CALL), first + len(CALL) - 1: end, first + len(CALL): end}
    following |= {token: token + 1 for token in range(first, first + len(CALL) - 1)}
    head = np.zeros((config["vocab_size"], width), np.float32)
    for token in range(config["vocab_size"]):
        head[following.get(token, end), token] = 10
    layer = "model.layers.0"
    shapes = {"q_proj": (32, width), "k_proj": (16, width), "v_proj": (16, width), "o_proj": (width, 32)}
    tensors = {f"{layer}.self_attn.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    shapes = {"gate_proj": (64, width), "up_proj": (64, width), "down_proj": (width, 64)}
    tensors |= {f"{layer}.mlp.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    norms = ("model.norm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    tensors |= {f"{name}.weight": np.ones(width, np.float32) for name in norms}
    tensors["model.embed_tokens.weight"] = np.eye(config["vocab_size"], width, dtype=np.float32)
    save_file({**tensors, "lm_head.weight": head}, path / "model.safetensors", metadata={"format": "pt"})
    return path
