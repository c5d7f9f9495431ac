"""Adapters that the PEFT library makes for tiny models of five families, and the texts that they are compared on.

Plain data and NumPy: `peft_reference.py` builds these adapters with the library, which runs in a process of its own, in
the environment `.venv-peft`.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from tests.oracle.case import GOLDEN, Case
from tests.oracle.cases import CASES
from tests.oracle.recurrent_cases import RECURRENT_CASES

ROOT = Path(__file__).parents[2]
FOLDER = GOLDEN / "adapters"
PYTHON = Path(os.environ.get("PEFT_PYTHON", ROOT / ".venv-peft" / "bin" / "python"))
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
NUM_TOKENS = 40  # windows are of 24 tokens
TOLERANCE = 1e-5
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
EMBEDDING, HEAD = "embed_tokens", "lm_head"
_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_SMALL = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48}


@dataclass(frozen=True, eq=False)
class Family:
    """Attributes:
    case: the base. Norms within layers magnify rounding less with smaller weights. is_tied: of its head.
    attention: names of Linears of its mixers. has_experts, has_biases: whether adapters of those exist.
    kinds: names of the kinds of adapters that are compared; () for all.
    """

    case: Case
    is_tied: bool = False
    attention: tuple[str, ...] = ATTENTION
    has_experts: bool = False
    has_biases: bool = False
    kinds: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def tables(self) -> list[str]:
        return [EMBEDDING] if self.is_tied else [EMBEDDING, HEAD]


def _small(case: Case, name: str, **options: Any) -> Case:
    return replace(case, name=name, gain=0.7, options={**case.options, **_SMALL, **options})


_DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
FAMILIES = {
    family.name: family
    for family in (
        Family(replace(CASES["llama"], gain=0.7)),
        Family(replace(CASES["llama_bias"], gain=0.7), has_biases=True),
        Family(replace(CASES["gemma3"], gain=0.5), is_tied=True),
        Family(replace(CASES["qwen3_moe"], gain=0.7), has_experts=True),
        Family(replace(RECURRENT_CASES["qwen3_5"], gain=0.2), attention=(*ATTENTION, *_DELTA)),
        Family(replace(CASES["deepseek_v3"], gain=0.7), attention=_LATENT, has_experts=True),
    )
}
# Their adapters and results are in golden/adapters.
GOLDEN_FAMILIES = {
    family.name: family
    for family in (
        Family(_small(CASES["llama_bias"], "dense"), has_biases=True),
        Family(
            _small(
                CASES["deepseek_v3"],
                "latent_experts",
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_group=2,
                topk_group=1,
            ),
            attention=_LATENT,
            has_experts=True,
            kinds=("lora", "experts", "all_linear"),
        ),
    )
}


@dataclass(frozen=True, eq=False)
class Kind:
    """Adapters of one kind, that are together in one model.

    Attributes:
      adapters: fields of `LoraConfig`, by the adapter's name.
      is_mixed: whether the library takes rows of different ones in one batch. vocab_size: of the base.
      invocations: tokens that a text has, by the number of its row: (first position, tokens).
    """

    name: str
    adapters: Mapping[str, Mapping[str, Any]]
    is_mixed: bool = True
    vocab_size: int = 0
    invocations: Mapping[int, tuple[tuple[int, tuple[int, ...]], ...]] = field(default_factory=dict)

    @property
    def rows(self) -> list[str | None]:
        """The adapter of each row: each adapter twice, and the base between them."""
        names = list(self.adapters)
        return [*names, None, *names[::-1], None]

    @property
    def tokens(self) -> np.ndarray:
        """int32 [rows, NUM_TOKENS]."""
        random = np.random.default_rng([11, *self.name.encode()])
        tokens = random.integers(0, self.vocab_size, (len(self.rows), NUM_TOKENS), dtype=np.int32)
        for row, places in self.invocations.items():
            for start, invocation in places:
                tokens[row, start : start + len(invocation)] = invocation
        return tokens


def kinds_of(family: Family) -> dict[str, Kind]:
    """The kinds of adapters that are compared on a family, by name."""
    attention, tables = list(family.attention), family.tables
    # Of models with experts, the library takes names of an MLP for its experts, in dense layers too.
    linears = attention if family.has_experts else [*attention, *MLP]
    first, second = (7, 8, 9), (20, 21)
    output = next(name for name in attention if name.startswith("o"))
    query = next(name for name in attention if name.startswith("q_"))
    # The library's aLoRA fails on the Linear of latent attention's keys, whose input has four axes; biases and
    # magnitudes of it are not served.
    plain = [name for name in linears if name != "kv_b_proj"]
    kinds = [
        Kind(
            "lora",
            {
                "a": {"r": 4, "lora_alpha": 8, "target_modules": attention},
                "b": {"r": 7, "lora_alpha": 5, "target_modules": attention[1:] if family.has_experts else list(MLP)},
                "c": {"r": 2, "lora_alpha": 3, "target_modules": [output] if family.has_experts else "all-linear"},
            },
        ),
        Kind(
            "rslora",
            {
                "a": {"r": 4, "lora_alpha": 3, "target_modules": linears, "use_rslora": True},
                "b": {"r": 9, "lora_alpha": 4, "target_modules": [query, linears[-1]], "use_rslora": True},
            },
        ),
        Kind(
            "patterns",
            {
                "a": {
                    "r": 4,
                    "lora_alpha": 8,
                    "target_modules": linears,
                    "rank_pattern": {linears[1]: 2, rf".*\.layers\.1\..*{output}": 6},
                    "alpha_pattern": {output: 3, query: 11},
                },
                "b": {
                    "r": 3,
                    "lora_alpha": 4,
                    "target_modules": linears,
                    "layers_to_transform": [1],
                    "rank_pattern": {query: 5},
                },
            },
        ),
        Kind(
            "alora",
            {
                "a": {"r": 4, "lora_alpha": 8, "target_modules": plain, "alora_invocation_tokens": list(first)},
                "b": {"r": 6, "lora_alpha": 6, "target_modules": plain[:3], "alora_invocation_tokens": list(second)},
                "c": {"r": 3, "lora_alpha": 6, "target_modules": plain},
            },
            # The last occurrence counts; row 5 has none, row 4 one at its very end.
            invocations={0: ((5, first), (18, first)), 1: ((0, second),), 4: ((38, second),), 3: ((10, first),)},
        ),
        Kind(
            "embeddings",
            {
                "a": {"r": 4, "lora_alpha": 8, "target_modules": [query, *tables]},
                "b": {"r": 6, "lora_alpha": 9, "target_modules": tables},
            },
        ),
        Kind(
            "saved",
            {
                "a": {"r": 4, "lora_alpha": 8, "target_modules": [query], "modules_to_save": tables},
                "b": {"r": 2, "lora_alpha": 8, "target_modules": [output], "modules_to_save": tables},
            },
        ),
        Kind(
            "tokens",
            {
                "a": {"r": 4, "lora_alpha": 8, "target_modules": [query], "trainable_token_indices": [3, 100, 17]},
                "b": {"r": 2, "lora_alpha": 8, "target_modules": [output], "trainable_token_indices": [5, 17]},
            },
        ),
        Kind(
            "lora_bias",
            {
                "a": {"r": 4, "lora_alpha": 8, "target_modules": plain, "lora_bias": True},
                "b": {"r": 2, "lora_alpha": 3, "target_modules": [query], "lora_bias": True},
            },
        ),
        Kind(
            "dora",
            {
                "a": {"r": 4, "lora_alpha": 8, "target_modules": plain, "use_dora": True},
                "b": {"r": 2, "lora_alpha": 3, "target_modules": [query, plain[-1]], "use_dora": True},
            },
            is_mixed=False,
        ),
    ]
    if family.has_experts:
        experts = {
            "a": {"r": 4, "lora_alpha": 8, "target_modules": [query], "target_parameters": list(_EXPERTS)},
            "b": {"r": 2, "lora_alpha": 3, "target_modules": [], "target_parameters": list(_EXPERTS)},
        }
        kinds.append(Kind("experts", experts, is_mixed=False))
        one = {"a": {"r": 2, "lora_alpha": 3, "target_modules": [], "target_parameters": [_EXPERTS[1]]}}
        kinds.append(Kind("one_of_the_experts", one, is_mixed=False))
        named = {"a": {"r": 3, "lora_alpha": 6, "target_modules": [*attention, *MLP]}}
        kinds.append(Kind("experts_as_modules", named, is_mixed=False))
        everything = {"a": {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"}}
        kinds.append(Kind("all_linear", everything, is_mixed=False))
    if family.has_biases:
        for bias in ("lora_only", "all"):
            kinds.append(
                Kind(
                    f"bias_{bias}",
                    {"a": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "bias": bias}},
                    is_mixed=False,
                )
            )
    vocab_size = family.case.config(family.is_tied)["vocab_size"]
    kinds = [replace(kind, vocab_size=vocab_size) for kind in kinds]
    return {kind.name: kind for kind in kinds if kind.name in (family.kinds or [kind.name])}


def adapter_values(name: str, shape: tuple[int, ...], adapter: str, current: np.ndarray) -> np.ndarray:
    """float32 values of an adapter's parameter by its name in the library's model: nothing is left as it starts."""
    noise = np.random.default_rng([5, *adapter.encode(), *name.encode()]).standard_normal(shape, np.float32)
    if "magnitude" in name:
        return current * (np.float32(1) + np.float32(0.2) * noise)
    if "lora_embedding_A" in name or "lora_A" in name:
        return noise * np.float32(shape[-1] ** -0.5 if "lora_A" in name else 0.3)
    if "lora_embedding_B" in name or ("lora_B" in name and name.endswith("weight")):
        return noise * np.float32(0.3 * shape[-1] ** -0.5)
    if name.endswith("bias"):
        return current + np.float32(0.2) * noise
    return current + np.float32(0.1) * noise  # saved modules and trained tokens


def library(*arguments: Any) -> str:
    """Runs `peft_reference.py`; returns what it prints. Raises RuntimeError with its errors."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
    command = [PYTHON, "-m", "tests.oracle.peft_reference", *arguments]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return done.stdout


def read_tensors(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The metadata and tensors of a file of `peft_reference.py` or of a golden file."""
    with safe_open(path, "numpy") as file:
        return json.loads(file.metadata()["made"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
