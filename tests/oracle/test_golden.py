"""Parity of every family with Hugging Face Transformers, from the golden files that `make golden` writes."""

import json
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from safetensors import safe_open

from jaxinfer.models import ModelConfig, Params
from tests.oracle import parity
from tests.oracle.cases import CASES, FOLDER, Case, prompt_tokens
from tests.oracle.parity import TOLERANCE, max_error
from tests.oracle.recurrent_cases import RECURRENT_CASES

# Families differ little in how the engine gets at a token: dense, and latent attention with experts.
THROUGH_THE_ENGINE = ("llama", "deepseek_v3")
# tests/models/test_rope.py compares their rotations.
ROTATIONS = ("llama_head_dim", "llama_linear", "llama_dynamic", "llama_llama3", "llama_yarn", "llama_longrope_short")
DENSE = [name for name, case in CASES.items() if case.model_type in ("llama", "mistral", "qwen2", "qwen3")]
# A window, and a rotation that depends on the length.
THROUGH_THE_CACHE = (("mistral", 37), ("llama_longrope_long", 37), ("llama", 1))


def quick(names, chosen):
    """Parameters of a test of which `make test` runs those that are chosen."""
    return [
        pytest.param(*(name if isinstance(name, tuple) else (name,)), marks=() if name in chosen else pytest.mark.slow)
        for name in names
    ]


@cache
def golden(case: Case) -> tuple[dict, dict[str, np.ndarray]]:
    """The metadata of the file, and its tensors."""
    with safe_open(FOLDER / f"{case.name}.safetensors", "numpy") as file:
        return json.loads(file.metadata()["made"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def kind_of(tied: bool) -> str:
    return "tied" if tied else "untied"


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint(case, tied, seed): through files under Transformers' names."""

    def make(case: Case, tied: bool | None = None, seed: int = 0) -> tuple[ModelConfig, Params]:
        made, _ = golden(case)
        kind = kind_of(case.ties[0] if tied is None else tied)
        folder = tmp_path / f"{kind}{seed}"
        return parity.load(
            parity.write_checkpoint(folder, made["configs"][kind], made["shapes"][kind], seed, case), case
        )

    return make


def error(case: Case, config: ModelConfig, params: Params, tied: bool, seed: int = 0) -> float:
    """Largest difference from the stored hidden states and logits."""
    _, stored = golden(case)
    positions = list(case.positions if tied == case.ties[0] else case.positions[1::2])
    hidden = parity.states(config, params, prompt_tokens(seed)[: case.num_tokens])[:, positions]
    of_logits = max_error(parity.logits(config, params, hidden[-1]), stored[f"{kind_of(tied)}.{seed}.logits"])
    return max(of_logits, max_error(hidden, stored[f"{seed}.hidden"])) if tied == case.ties[0] else of_logits


def error_of(case: Case, config: ModelConfig, params: Params) -> float:
    return error(case, config, params, case.ties[0])


@pytest.mark.matrix(
    *("llama", "gemma4", "gemma4_shared", "glm_moe_dsa", "hunyuan_dense", "olmoe", "gpt_oss", "deepseek_v3")
)
@pytest.mark.parametrize("name", quick(CASES, CASES.keys() - set(ROTATIONS)))
def test_hidden_states_and_logits(name, checkpoint):
    case = CASES[name]
    config, params = checkpoint(case)
    assert (config.architecture, config.tie_word_embeddings) == (case.architecture, case.ties[0])
    assert error_of(case, config, params) <= TOLERANCE


@pytest.mark.matrix
@pytest.mark.parametrize("name", quick(CASES, ("llama", "gpt2")))
def test_other_seeds_and_the_other_kind_of_head(name, checkpoint):
    case = CASES[name]
    worst = 0.0
    for tied in case.ties:
        for seed in case.seeds:
            config, params = checkpoint(case, tied, seed)
            assert config.tie_word_embeddings == tied
            worst = max(worst, error(case, config, params, tied, seed))
    print(f"{name}: max |difference| {worst:.1e}")
    assert worst <= TOLERANCE


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "chunk"), quick([(name, chunk) for name in DENSE for chunk in (37, 1)], THROUGH_THE_CACHE)
)
def test_logits_through_the_cache(name, chunk, checkpoint):
    case = CASES[name]
    config, params = checkpoint(case)
    found = parity.cached_logits(config, params, prompt_tokens(0)[: case.num_tokens], chunk)
    stored = golden(case)[1][f"{kind_of(case.ties[0])}.0.logits"]
    assert max_error(np.asarray(found)[list(case.positions)], stored) <= TOLERANCE


@pytest.fixture
def answers(checkpoint):
    """answers(name): the case, its checkpoint, prompts, and Transformers' greedy tokens."""

    def make(name: str):
        case, (made, stored) = CASES[name], golden(CASES[name])
        seed = made["greedy"]["seed"]
        prompts = [prompt_tokens(seed)[:length].tolist() for length in case.greedy_lengths]
        expected = [stored[f"greedy.{i}"].tolist() for i in range(len(prompts))]
        return case, *checkpoint(case, seed=seed), prompts, expected

    return make


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", quick(CASES, THROUGH_THE_ENGINE))
def test_greedy_tokens_through_the_paged_engine(name, answers):
    case, config, params, prompts, expected = answers(name)
    assert parity.greedy(config, params, case, prompts) == expected


WAYS = (
    *("llama", "llama_longrope_long", "mistral", "qwen2_window", "gemma2", "gpt2", "smollm3"),
    *("hunyuan_dense", "apertus", "exaone4", "glm4_moe", "mistral4", "olmoe", "phimoe", "llama4", "seed_oss"),
    *("ernie4_5", "arcee", "glm4_moe_lite", "minimax_m2", "ernie4_5_moe", "hunyuan_moe"),
    *("deepseek_v32", "glm_moe_dsa"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_other_ways_of_generating_give_the_same(name, answers):
    """One request at a time, one token at a time, more prompts than slots, drafts, and a contiguous cache."""
    case, config, params, prompts, expected = answers(name)
    with parity.engine(config, params, case, deterministic=False) as llm:
        assert config.block in str(llm.explain())
        assert parity.one_by_one(llm, prompts) == expected
        assert parity.streamed(llm, prompts) == expected
        assert parity.regrown(llm, prompts[0], 16) == expected[0][:16]
    for options in (
        {"max_seqs": 1},
        {"draft": "layers:1", "num_draft_tokens": 3},
        {"cache": "contiguous"},
        {"prefill_chunk": 16},
        {"prefill_chunk": 64},
    ):
        assert parity.greedy(config, params, case, prompts, deterministic=False, **options) == expected


@pytest.mark.slow
def test_a_fault_shows_in_the_greedy_tokens(answers):
    case, config, params, prompts, expected = answers("llama")
    params["final_norm"] = {"weight": params["final_norm"]["weight"].at[3].multiply(1.5)}
    assert parity.greedy(config, params, case, prompts) != expected


# The check itself: a fault in any one field of the configuration must show.
FAULTS = {
    "activation": ("gemma", {"activation": "gelu"}),
    "attention_scale": ("gemma3", {"attention_scale": 0.23}),
    "attention_softcap": ("gemma2", {"attention_softcap": 3.05}),
    "block": ("gpt_neox", {"block": "pre_norm"}),
    "embedding_multiplier": ("gemma", {"embedding_multiplier": 8.01}),
    "local_rope": ("gemma3", {"local_rope": None}),
    "logit_scale": ("cohere", {"logit_scale": 0.501}),
    "logit_softcap": ("gemma2", {"logit_softcap": 10.05}),
    "norm": ("gemma", {"norm": "rms_float32"}),
    "norm_eps": ("falcon", {"norm_eps": 1e-4}),
    "residual_multiplier": ("granite", {"residual_multiplier": 0.2201}),
    "is_qk_norm_after_rotation": ("hunyuan_dense", {"is_qk_norm_after_rotation": False}),
    "qkv_clip": ("olmoe", {"qkv_clip": 1.105}),
    "query_temperature": ("llama4", {"query_temperature": 0.31}),
    "query_temperature_period": ("llama4", {"query_temperature_period": 17}),
    "relu2": ("arcee", {"activation": "relu"}),
    "rotated_layers": ("smollm3", {"rotated_layers": ()}),
    "sliding_windows": ("cohere2", {"sliding_windows": (25, None)}),
    "qwen2_window": ("qwen2_window", {"sliding_windows": (None, None, 24)}),
}
# Of rotations, mixtures and latent attention, by the name of the part.
PART_FAULTS = {
    "theta": ("llama", "rope", {"theta": 10050.0}),
    "rotary_dim": ("llama_head_dim", "rope", {"rotary_dim": 30}),
    "factor": ("llama_linear", "rope", {"factor": 4.01}),
    "sequence_length": ("llama_dynamic", "rope", {"sequence_length": 298}),
    "low_freq_factor": ("llama_llama3", "rope", {"low_freq_factor": 1.01}),
    "truncate": ("llama_yarn", "rope", {"truncate": False}),
    "short_factor": ("llama_longrope_short", "rope", {"short_factor": (1.0, 1.2, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0)}),
    "attention_factor": ("llama_longrope_long", "rope", {"attention_factor": 1.0}),
    "query_scale_beta": ("ministral3", "rope", {"query_scale_beta": 0.305}),
    "clamp": ("gpt_oss", "moe", {"clamp": 0.81}),
    "clamp_slope": ("gpt_oss", "moe", {"clamp_slope": 1.71}),
    "group_score": ("deepseek_v3", "moe", {"group_score": "max"}),
    "normalize": ("qwen3_moe", "moe", {"normalize": False}),
    "num_chosen_groups": ("deepseek_v2", "moe", {"num_chosen_groups": 4}),
    "scale": ("deepseek_v2", "moe", {"scale": 1.51}),
    "scoring": ("mixtral", "moe", {"scoring": "sigmoid"}),
    "scoring_of_chosen": ("llama4", "moe", {"scoring": "softmax_of_chosen"}),
    "scales_input": ("llama4", "moe", {"scales_input": False}),
    "jitter": ("phimoe", "moe", {"jitter": 0.09}),
    "sparsemixer": ("phimoe", "moe", {"scoring": "softmax"}),
    "short_mscale": ("phimoe_longrope", "rope", {"short_mscale": 1.21}),
    "query_scale_of_latent_attention": ("mistral4", "rope", {"query_scale_beta": 0.305}),
    "group_score_of_softmax": ("mistral4", "moe", {"group_score": "max"}),
    "is_interleaved": ("deepseek_v3", "mla", {"is_interleaved": False}),
    "latent_norm_eps": ("deepseek_v2_lite", "mla", {"norm_eps": 1e-3}),
}


@pytest.mark.matrix
@pytest.mark.parametrize("field", quick(FAULTS, ("attention_softcap", "sliding_windows")))
def test_a_fault_in_the_config_shows(field, checkpoint):
    name, change = FAULTS[field]
    config, params = checkpoint(CASES[name])
    assert error_of(CASES[name], replace(config, **change), params) > 2 * TOLERANCE


@pytest.mark.matrix
@pytest.mark.parametrize("field", quick(PART_FAULTS, ("theta", "scale")))
def test_a_fault_in_a_part_shows(field, checkpoint):
    name, part, change = PART_FAULTS[field]
    config, params = checkpoint(CASES[name])
    config = replace(config, **{part: replace(getattr(config, part), **change)})
    assert error_of(CASES[name], config, params) > 2 * TOLERANCE


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "name",
    quick(
        ("llama_bias", "qwen3_mqa", "gpt_oss", "deepseek_v3", "apertus", "llama4", "phimoe"), ("qwen3_mqa", "gpt_oss")
    ),
)
def test_a_fault_in_any_one_parameter_shows(name, checkpoint):
    case = CASES[name]
    config, params = checkpoint(case)
    leaves, tree = jax.tree.flatten(params)
    noise = np.random.default_rng(0)
    paths = [".".join(key.key for key in path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for i, path in enumerate(paths):
        if not path.startswith("layers.0"):
            # Not one factor for all: of what a norm reads it would not show.
            size = 1 if path.endswith("correction") else 0.1  # of which only the order of sums shows
            factors = 1 + size * noise.standard_normal(leaves[i].shape, np.float32)
            faulty = jax.tree.unflatten(tree, [leaf * factors if j == i else leaf for j, leaf in enumerate(leaves)])
            assert error_of(case, config, faulty) > TOLERANCE, path


def test_files_are_small():
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert set(sizes) == {f"{name}.safetensors" for name in (*CASES, *RECURRENT_CASES)}
    assert max(sizes.values()) < 100_000
