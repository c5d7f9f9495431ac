"""One answer, whatever the mesh: the tokens of one device, greedy and seeded, in float32.

Models: dense with two key-value heads, dense with tied embeddings and odd sizes, a mixture of experts, a layer with a
window; plain and quantized; with and without a draft.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import pytest

from jaxinfer import LLM
from jaxinfer.models import ModelConfig, MoEConfig, RopeConfig, init_params
from tests.engine.mixed_requests import mixed_params, random_prompts

pytestmark = pytest.mark.alone

GROUPED = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    rope=RopeConfig(rotary_dim=8),
    max_position_embeddings=128,
)
TIED = replace(
    GROUPED, num_heads=9, num_kv_heads=3, intermediate_size=70, tie_word_embeddings=True, qkv_bias=True, mlp_bias=True
)
MIXTURE = replace(GROUPED, architecture="Qwen3MoeForCausalLM", qk_norm=True, moe=MoEConfig(8, 2, 24, (0, 1)))
WINDOWED = replace(GROUPED, sliding_windows=(7, None))
MODELS = {"grouped": GROUPED, "tied": TIED, "mixture": MIXTURE, "windowed": WINDOWED}
MESHES = (
    *("model=1", "model=2", "model=4", "model=8", "data=2", "data=2,model=2", "expert=4"),
    *("sequence=4", "sequence=2,model=2"),
)
NUM_PROMPTS, MAX_MODEL_LEN = 9, 64
PROMPTS = random_prompts(NUM_PROMPTS, 40, seed=3)
PARAMS = [replace(mixed_params(number), max_tokens=6 + number) for number in range(NUM_PROMPTS)]
OPTIONS = {"max_seqs": 4, "max_model_len": MAX_MODEL_LEN, "prefill_chunk": 28}


@dataclass(frozen=True)
class Case:
    """A model on a mesh; `options` are those of `LLM`."""

    model: str
    mesh: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return " ".join([self.model, self.mesh, *map(str, self.options.values())])


def _cases():
    quick = {("grouped", "data=2,model=2", "int8", "layers:1"), ("windowed", "sequence=4", None, "layers:1")}
    for model in MODELS:
        for mesh in MESHES:
            if (mesh.startswith("expert") and model != "mixture") or (model == "tied" and mesh == "expert=4"):
                continue
            for quantize in (None, "int8", "int4-g32"):
                for draft in (None, "layers:1"):
                    options = {} if quantize is None else {"quantize": quantize}
                    options |= {} if draft is None else {"draft": draft, "num_draft_tokens": 3}
                    marks = [] if (model, mesh, quantize, draft) in quick else [pytest.mark.slow]
                    yield pytest.param(Case(model, mesh, options), marks=marks, id=str(Case(model, mesh, options)))


@cache
def params_of(model: str):
    params = init_params(MODELS[model], jax.random.key(1))
    return jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, params)


def answers(model: str, **options) -> list[list[int]]:
    with LLM((MODELS[model], params_of(model)), **OPTIONS, **options) as llm:
        found = [one.outputs[0] for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        assert all(one.error is None for one in found)
        return [one.token_ids for one in found]


@cache
def expected(model: str, quantize: str | None) -> list[list[int]]:
    """Those of one device, without a draft."""
    found = answers(model, **({} if quantize is None else {"quantize": quantize}))
    assert len({tuple(one) for one in found}) > 7  # different enough to tell a mistake
    return found


@pytest.mark.parametrize("case", [*_cases()])
def test_the_tokens_are_those_of_one_device(case):
    found = answers(case.model, mesh=case.mesh, **case.options)
    assert found == expected(case.model, case.options.get("quantize"))


@pytest.mark.slow
def test_a_fault_in_a_share_shows(monkeypatch):
    """The check can fail: key-value heads beside the wrong query heads."""
    from jaxinfer.models import MeshFit

    right = MeshFit.index

    def wrong(self, name, length):
        index = right(self, name, length)
        return index[::-1].copy() if name == "kv_heads" and index is not None else index

    monkeypatch.setattr(MeshFit, "index", wrong)
    assert answers("grouped", mesh="model=8") != expected("grouped", None)


def test_what_a_mesh_cannot_run_says_so():
    between = replace(GROUPED, num_heads=14)  # in groups of seven, of which half is not a number
    with pytest.raises(ValueError, match=r"o_proj.*num_heads=14"):
        LLM((between, init_params(between, jax.random.key(0))), mesh="model=4", quantize="int8")
    with pytest.raises(ValueError, match="num_experts=8 cannot be cut into 3"):
        LLM((MIXTURE, params_of("mixture")), mesh="expert=3")
    with pytest.raises(ValueError, match="page_size=16 is not a multiple of 3"):
        LLM((GROUPED, params_of("grouped")), mesh="sequence=3")
    with pytest.raises(ValueError, match=r"draft_tree=\(2, 1\) cannot have branches .* sequence=2"):
        LLM((GROUPED, params_of("grouped")), mesh="sequence=2", draft="layers:1", draft_tree=(2, 1))


@pytest.mark.slow
def test_a_contiguous_cache_lies_on_a_mesh_too():
    assert answers("grouped", mesh="model=2", cache="contiguous", num_pages=None) == expected("grouped", None)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "bfloat16", "int4"])
def test_divided_pages_of_few_bits(kv_dtype):
    """What a token stores is a function of its own key and value, wherever it lies."""
    assert answers("grouped", mesh="sequence=4", kv_dtype=kv_dtype) == answers("grouped", kv_dtype=kv_dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk": 16},
        {"num_pages": 14},
        {"steps_per_dispatch": 1},
        {"draft": "ngram"},
        {"page_size": 64},
        {"deterministic": True},
    ],
    ids=str,
)
def test_divided_pages_in_every_schedule(options):
    """Chunks, preemption by 13 pages for four sequences of up to 4, and drafts."""
    with LLM((WINDOWED, params_of("windowed")), mesh="sequence=4", **(OPTIONS | options)) as llm:
        for _ in range(2):  # the second time with cached prefixes
            found = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
            assert found == expected("windowed", None)


@pytest.mark.slow
def test_a_long_prompt_in_parts():
    config = replace(WINDOWED, max_position_embeddings=4096, sliding_windows=(300, None))
    prompt = [token % 97 for token in random_prompts(1, 4000, seed=8)[0] * 90][:3000]
    found = []
    for mesh in (None, "sequence=8"):
        with LLM((config, params_of("windowed")), mesh=mesh, max_seqs=2, max_model_len=4096, prefill_chunk=512) as llm:
            outputs = llm.generate([prompt, prompt[:1777]], PARAMS[:2], use_tqdm=False)
            found.append([one.outputs[0].token_ids for one in outputs])
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2,model=2", "data=2,sequence=2"])
def test_nothing_is_compiled_after_warm_up(mesh):
    with LLM((GROUPED, params_of("grouped")), mesh=mesh, **OPTIONS) as llm:
        llm.warm_up(use_tqdm=False)
        with jax.no_tracing():
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            llm.generate(PROMPTS[:3], PARAMS[:3], use_tqdm=False)


def test_answers_to_one_prompt_and_prefixes_stay_on_a_replica():
    """Second requests go where their prompt is known."""
    with LLM((GROUPED, params_of("grouped")), mesh="data=2", max_seqs=2, max_model_len=64, prefill_chunk=30) as llm:
        prompts = [list(range(20)), list(range(40, 60))]
        llm.generate(prompts, PARAMS[0], use_tqdm=False)
        engines = llm.engine.engines
        before = [engine.scheduler.counters.reused_tokens for engine in engines]
        llm.generate([*reversed(prompts)], PARAMS[0], use_tqdm=False)
        gained = [engine.scheduler.counters.reused_tokens - was for engine, was in zip(engines, before, strict=True)]
        assert gained == [16, 16]
        assert "replicas" in str(llm.explain())
