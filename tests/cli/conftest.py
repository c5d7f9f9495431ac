"""A tiny checkpoint with random weights and a byte-level tokenizer, and the command line, called in two ways."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from jaxinfer.cli.main import app

HIDDEN, LAYERS, FFN, HEADS, KV_HEADS, HEAD_DIM = 32, 2, 64, 4, 2, 8
MAX_LENGTH = 96
# Tests that run in the background ignore Ctrl-C, and their children would too.
START = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from jaxinfer.cli.main import main; main()"
)
SPECIAL = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# A model that exists as a configuration only.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}


def write_checkpoint(path: Path, *, chat_template: str | None = CHAT_TEMPLATE, seed: int = 0, **config: Any) -> Path:
    """A Llama with weights large enough that its answers vary."""
    path.mkdir(parents=True)
    backend = tokenizers.Tokenizer(
        models.BPE({char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    backend.save(str(path / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]}
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    vocab_size = 256 + len(SPECIAL)
    files = {
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": {"eos_token_id": 256, "max_new_tokens": 8},
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": HIDDEN,
            "intermediate_size": FFN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "max_position_embeddings": MAX_LENGTH,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "eos_token_id": 256,
            "torch_dtype": "float32",
            **config,
        },
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    random = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (vocab_size, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (HIDDEN,),
            f"{name}.post_attention_layernorm.weight": (HIDDEN,),
            f"{name}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{name}.mlp.gate_proj.weight": (FFN, HIDDEN),
            f"{name}.mlp.up_proj.weight": (FFN, HIDDEN),
            f"{name}.mlp.down_proj.weight": (HIDDEN, FFN),
        }
    tensors = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else random.normal(0, 3 / np.sqrt(shape[1]), shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny"))


@pytest.fixture(scope="session")
def model_without_template(tmp_path_factory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "plain", chat_template=None))


@pytest.fixture
def jaxinfer() -> Callable[..., Any]:
    """Calls the command line in this process: fast, since programs stay compiled."""

    def call(*arguments: Any, input: str = ""):
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=input)

    return call


@pytest.fixture
def jaxinfer_process() -> Callable[..., subprocess.Popen]:
    """Starts the command line as a process of its own."""

    def start(*arguments: Any, **options: Any) -> subprocess.Popen:
        environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", **options.pop("env", {})}
        paths = environment.pop("PYTHONPATH", "").split(os.pathsep)
        # The compilers of other chips write to standard error when they are found.
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if not (Path(path) / "libtpu").exists())
        return subprocess.Popen(
            [sys.executable, "-c", START, *map(str, arguments)],
            env=environment,
            text=True,
            stdin=options.pop("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        )

    return start


@pytest.fixture
def json_lines() -> Callable[[str], list[dict[str, Any]]]:
    """Reads JSON lines strictly: Python's own NaN and Infinity are refused."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return lambda text: [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.fixture
def llm(model) -> Iterator[Any]:
    """The library on the same checkpoint: what the command line must agree with."""
    from jaxinfer import LLM

    with LLM(model) as llm:
        yield llm


@pytest.fixture
def config_alone(tmp_path):
    """A folder with nothing but CONFIG."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path
