"""Parity of every dense family with Transformers, from the golden files that `make golden` writes."""

import json
from dataclasses import replace
from functools import cache

import family_parity as parity
import jax
import numpy as np
import pytest
from family_cases import CASES, FOLDER, GREEDY_LENGTHS, POSITIONS, SEEDS, Case, prompt_tokens
from family_parity import TOLERANCE, max_error
from safetensors import safe_open

from jaxinfer.models import ModelConfig, Params

# Of the first four families test_golden.py has greedy answers, in more ways.
ELSEWHERE = ("llama", "mistral", "qwen2", "qwen3")
FIRST_OF_FAMILY = {case.model_type: name for name, case in reversed(CASES.items()) if name not in ELSEWHERE}


@cache
def golden(case: Case) -> tuple[dict, dict[str, np.ndarray]]:
    """What the file says about itself, and its tensors."""
    with safe_open(FOLDER / f"{case.name}.safetensors", "numpy") as file:
        return json.loads(file.metadata()["made"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.fixture(autouse=True, scope="module")
def _quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint(case, tied, seed): through files under Transformers' names."""

    def make(case: Case, tied: bool, seed: int) -> tuple[ModelConfig, Params]:
        made, _ = golden(case)
        kind = "tied" if tied else "untied"
        folder = tmp_path / f"{kind}{seed}"
        return parity.load(parity.write_checkpoint(folder, made["configs"][kind], made["shapes"][kind], seed, case))

    return make


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_logits(name, checkpoint):
    case, (_, stored) = CASES[name], golden(CASES[name])
    worst = 0.0
    for tied in case.ties:
        for seed in SEEDS:
            config, params = checkpoint(case, tied, seed)
            assert (config.architecture, config.tie_word_embeddings) == (case.architecture, tied)
            positions = list(POSITIONS if tied == case.ties[0] else POSITIONS[1::2])
            hidden = parity.states(config, params, prompt_tokens(seed))[:, positions]
            if tied == case.ties[0]:
                worst = max(worst, max_error(hidden, stored[f"{seed}.hidden"]))
            logits = parity.logits(config, params, hidden[-1])
            worst = max(worst, max_error(logits, stored[f"{'tied' if tied else 'untied'}.{seed}.logits"]))
    print(f"{name}: max |difference| {worst:.1e}")
    assert worst <= TOLERANCE


@pytest.mark.parametrize(
    "name",
    [name if name in FIRST_OF_FAMILY.values() else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_greedy_tokens_through_the_paged_engine(name, checkpoint):
    case, (made, stored) = CASES[name], golden(CASES[name])
    seed = made["greedy"]["seed"]
    config, params = checkpoint(case, case.ties[0], seed)
    prompts = [prompt_tokens(seed)[:length].tolist() for length in GREEDY_LENGTHS]
    found = parity.greedy(config, params, prompts)
    for i, output in enumerate(found):
        assert output == stored[f"greedy.{i}"].tolist()


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
    "rotated_layers": ("smollm3", {"rotated_layers": ()}),
    "sliding_windows": ("cohere2", {"sliding_windows": (25, None)}),
}


@pytest.mark.parametrize("field", FAULTS)
def test_a_fault_in_the_config_shows(field, checkpoint):
    name, change = FAULTS[field]
    case, (_, stored) = CASES[name], golden(CASES[name])
    config, params = checkpoint(case, case.ties[0], 0)
    config = replace(config, **change)
    hidden = parity.states(config, params, prompt_tokens(0))[:, list(POSITIONS)]
    kind = "tied" if case.ties[0] else "untied"
    assert max_error(parity.logits(config, params, hidden[-1]), stored[f"{kind}.0.logits"]) > 2 * TOLERANCE


def test_a_fault_in_the_growth_of_queries_shows(checkpoint):
    case, (_, stored) = CASES["ministral3"], golden(CASES["ministral3"])
    config, params = checkpoint(case, False, 0)
    config = replace(config, rope=replace(config.rope, query_scale_beta=0.305))
    hidden = parity.states(config, params, prompt_tokens(0))[:, list(POSITIONS)]
    assert max_error(hidden, stored["0.hidden"]) > 2 * TOLERANCE


# Of mixtures and latent attention, by the name of the part.
PART_FAULTS = {
    "clamp": ("gpt_oss", "moe", {"clamp": 0.81}),
    "clamp_slope": ("gpt_oss", "moe", {"clamp_slope": 1.71}),
    "group_score": ("deepseek_v3", "moe", {"group_score": "max"}),
    "normalize": ("qwen3_moe", "moe", {"normalize": False}),
    "num_chosen_groups": ("deepseek_v2", "moe", {"num_chosen_groups": 4}),
    "scale": ("deepseek_v2", "moe", {"scale": 1.51}),
    "scoring": ("mixtral", "moe", {"scoring": "sigmoid"}),
    "is_interleaved": ("deepseek_v3", "mla", {"is_interleaved": False}),
    "latent_norm_eps": ("deepseek_v2_lite", "mla", {"norm_eps": 1e-3}),
}


@pytest.mark.parametrize("field", PART_FAULTS)
def test_a_fault_in_a_part_shows(field, checkpoint):
    name, part, change = PART_FAULTS[field]
    case, (_, stored) = CASES[name], golden(CASES[name])
    config, params = checkpoint(case, False, 0)
    config = replace(config, **{part: replace(getattr(config, part), **change)})
    hidden = parity.states(config, params, prompt_tokens(0))[:, list(POSITIONS)]
    assert max_error(hidden, stored["0.hidden"]) > 2 * TOLERANCE


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_a_fault_in_any_one_parameter_of_a_layer_shows(name, checkpoint):
    case, (_, stored) = CASES[name], golden(CASES[name])
    config, params = checkpoint(case, False, 0)
    leaves, tree = jax.tree.flatten(params)
    noise = np.random.default_rng(0)
    paths = [".".join(key.key for key in path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for i, path in enumerate(paths):
        if path.startswith("layers.1"):
            # Not one factor for all: of what a norm reads it would not show.
            size = 1 if path.endswith("correction") else 0.1  # of which only the order of sums shows
            factors = 1 + size * noise.standard_normal(leaves[i].shape, np.float32)
            faulty = jax.tree.unflatten(tree, [leaf * factors if j == i else leaf for j, leaf in enumerate(leaves)])
            hidden = parity.states(config, faulty, prompt_tokens(0))[:, list(POSITIONS)]
            assert max_error(hidden, stored["0.hidden"]) > TOLERANCE, path


def test_files_are_small():
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert set(sizes) == {f"{name}.safetensors" for name in CASES}
    assert max(sizes.values()) < 100_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "gpt2", "smollm3"])
def test_other_ways_of_generating_give_the_same(name, checkpoint):
    """Speculation by the model's first layer, and the engine over a contiguous cache."""
    from jaxinfer import LLM

    case, (made, stored) = CASES[name], golden(CASES[name])
    seed = made["greedy"]["seed"]
    config, params = checkpoint(case, case.ties[0], seed)
    prompts = [prompt_tokens(seed)[:length].tolist() for length in GREEDY_LENGTHS]
    for options in ({"draft": "layers:1", "num_draft_tokens": 3}, {"cache": "contiguous"}):
        with LLM((config, params), max_model_len=128, max_seqs=2, **options) as llm:
            assert config.block in str(llm.explain())
            outputs = llm.generate(prompts, parity.GREEDY, use_tqdm=False)
        for i, output in enumerate(outputs):
            assert output.outputs[0].token_ids == stored[f"greedy.{i}"].tolist()
