"""A draft changes no answer of a quantized model over a quantized cache, greedy and seeded, whatever drafts."""

import jax
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.models import ModelConfig, RopeConfig, init_params
from jaxinfer.quantization import quantize_params

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope=RopeConfig(rotary_dim=16),
    max_position_embeddings=128,
)
PROMPTS = [[5, 3, 9, 11], list(range(40)), [95], [7, 8] * 12]
SAMPLING = [
    SamplingParams(max_tokens=16, temperature=0),
    SamplingParams(max_tokens=16, seed=1, repetition_penalty=1.1),
    SamplingParams(max_tokens=16, seed=2, temperature=0.7, top_p=0.9),
    SamplingParams(max_tokens=16, temperature=0),
]
SLOW = pytest.mark.slow
CASES = [
    pytest.param("int8", "fp8_e4m3", marks=SLOW),
    pytest.param("int4-g32-asym", "int8", marks=SLOW),
    pytest.param("w8a8", "int8", marks=SLOW),
    pytest.param("nf4-dq", "fp8_e5m2", marks=SLOW),
]


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, init_params(CONFIG, jax.random.key(0)))


def answers(params, **options):
    with LLM((CONFIG, params), max_seqs=4, max_model_len=64, page_size=16, num_pages=40, **options) as llm:
        outputs = llm.generate(PROMPTS, SAMPLING, use_tqdm=False)
        stats = llm.speculation_stats()
        return [output.outputs[0].token_ids for output in outputs], stats


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("recipe", "kv_dtype"), CASES)
def test_a_draft_changes_no_answer(params, recipe, kv_dtype, monkeypatch, request):
    # Without float32 copies, so that the quantized products themselves are what verifies.
    monkeypatch.setattr("jaxinfer.quantization.on_device.float32_copies.__defaults__", (0,))
    quantized = quantize_params(params, recipe)
    plain, _ = answers(quantized, kv_dtype=kv_dtype)
    model = (CONFIG, quantize_params(params, "int4-g32"))
    drafts = [{"draft": model, "num_draft_tokens": 3}]
    if request.config.getoption("--slow"):
        drafts += [{"draft": "layers:1", "num_draft_tokens": 2}, {"draft": "ngram", "num_draft_tokens": 4}]
        drafts += [{"draft": model, "draft_tree": (2, 2), "draft_kv_dtype": "float32"}]
    for drafting in drafts:
        found, stats = answers(quantized, kv_dtype=kv_dtype, **drafting)
        assert found == plain, drafting
        assert stats.proposed > 0 or drafting["draft"] == "ngram"  # which may find nothing
