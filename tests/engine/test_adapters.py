"""Rows with adapters have the same answers alone, beside others, in chunks, from a cached prefix and with drafts; rows
without one have the bits of an engine without adapters."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.adapter_slots import AdapterSizes
from jaxinfer.engine.adapter_stacks import AdapterStacks
from jaxinfer.engine.adapters import TooManyAdaptersError
from jaxinfer.models import MLAConfig, MoEConfig, abstract_params, init_params
from jaxinfer.models.adapter import Adapter, LowRank
from jaxinfer.quantization import dequantize_params, quantize_params
from jaxinfer.quantization.tree import is_quantized
from tests.tiny import CONTIGUOUS_OPTIONS, OPTIONS, TINY

NAMES = [f"a{number}" for number in range(9)]
RANKS = (1, 2, 3, 4, 5, 8, 8, 3, 2)
ROWS = [None, *NAMES[:5], None, *NAMES[5:]]
PARAMS = SamplingParams(temperature=0, max_tokens=10, logprobs=0)
# One text, of which no part is another adapter's or the base's.
PROMPT = [3, 9, 4, 31, 7, 8, 9, 7, 8, 9, 50, 61, 7, 8, 9, 12, 2, 96, 3, 9, 4, 31, 7]


def random_adapter(params, seed: int, rank: int) -> Adapter:
    """Pairs of all linear layers."""
    random = np.random.default_rng(seed)
    pairs = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        *parts, last = (key.key for key in path)
        if last == "weight" and parts[-1].endswith("_proj"):
            inputs, outputs = leaf.shape
            a, b = (random.normal(0, 0.4, shape).astype(np.float32) for shape in ((inputs, rank), (rank, outputs)))
            pairs[".".join(parts)] = LowRank(a, b, 0.5)
    return Adapter(pairs)


@pytest.fixture(scope="module")
def adapters(tiny):
    return {
        name: random_adapter(tiny[1], seed, rank) for seed, (name, rank) in enumerate(zip(NAMES, RANKS, strict=True))
    }


def answers(llm: LLM, rows, prompt=PROMPT):
    """For each row, its tokens and their log-probabilities."""
    outputs = llm.generate([prompt] * len(rows), PARAMS, adapter=rows, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def tokens(found):
    return [own for own, _ in found]


@pytest.fixture(scope="module")
def expected(tiny, adapters):
    """Tokens by adapter, each of a request that runs alone."""
    with LLM(tiny, adapters=adapters, **OPTIONS) as llm:
        found = {name: answers(llm, [name])[0][0] for name in (None, *NAMES)}
    # The check would see the wrong adapter.
    assert len(set(map(tuple, found.values()))) == len(found)
    return found


WAYS = {
    "paged": OPTIONS,
    "contiguous": CONTIGUOUS_OPTIONS,
    "chunks": {**OPTIONS, "prefill_chunk": 5},
    "many rows": {**OPTIONS, "max_seqs": 12},
    "ngram": {**OPTIONS, "draft": "ngram", "num_draft_tokens": 3},
    "deterministic": {**OPTIONS, "deterministic": True},
}


@pytest.mark.slow
@pytest.mark.matrix("chunks", "ngram")
@pytest.mark.parametrize("way", WAYS)
def test_rows_beside_others_have_the_tokens_that_they_have_alone(tiny, adapters, expected, way):
    with LLM(tiny, adapters=adapters, **WAYS[way]) as llm:
        first, again = answers(llm, ROWS), answers(llm, ROWS)
        single = answers(llm, ["a1"])
        stats = llm.speculation_stats()
    with LLM(tiny, **WAYS[way]) as llm:
        base = answers(llm, [None] * len(ROWS)), answers(llm, [None] * len(ROWS))
    assert tokens(first) == tokens(again) == [expected[name] for name in ROWS]
    assert tokens(single) == [expected["a1"]]
    assert way != "ngram" or stats.proposed > 0
    bases = [row for row, name in enumerate(ROWS) if name is None]
    for own, plain in zip((first, again), base, strict=True):
        assert [own[row] for row in bases] == [plain[row] for row in bases]


@pytest.mark.slow
def test_fewer_slots_than_adapters(tiny, adapters, expected):
    with LLM(tiny, adapters=adapters, max_adapters=2, **OPTIONS) as llm:
        for rows in (ROWS, ROWS[::-1]):
            assert tokens(answers(llm, rows)) == [expected[name] for name in rows]


def test_no_more_are_loaded_than_the_hosts_memory_has_room_for(tiny, adapters):
    given = {name: adapters[name] for name in NAMES[:2]}
    with LLM(tiny, adapters=given, max_adapters=1, max_loaded_adapters=2, max_adapter_rank=8, **OPTIONS) as llm:
        facts = llm.explain().groups["adapters"]
        own = [adapter.host.num_bytes for adapter in llm.adapters.values()]
        assert (facts["loaded"], facts["loaded, host bytes"], facts["loaded, at most"]) == (2, sum(own), 2)
        # A slot has room for a rank of 8.
        assert max(own) < facts["adapter bytes"] == facts["host bytes, at most"] / 2
        with pytest.raises(TooManyAdaptersError, match="'a5': 2 adapters are loaded, and max_loaded_adapters=2 may be"):
            llm.load_adapter("a5", "a folder that is not read")
        llm.load_adapter("a1", adapters["a5"], replace=True)
        assert llm.explain().groups["adapters"]["loaded, host bytes"] == own[0] + llm.adapters["a1"].host.num_bytes
        llm.unload_adapter("a0")
        llm.load_adapter("a6", adapters["a6"])
        assert list(llm.adapters) == ["a1", "a6"]

        # Another is loaded while this one is prepared.
        llm.unload_adapter("a1")
        stacks = llm.engine.engines[0].adapter_stacks
        prepared = stacks.prepared

        def while_others_load(*arguments, **keywords):
            stacks.prepared = prepared
            llm.load_adapter("a7", adapters["a7"])
            return prepared(*arguments, **keywords)

        stacks.prepared = while_others_load
        with pytest.raises(TooManyAdaptersError, match="2 adapters are loaded"):
            llm.load_adapter("a8", adapters["a8"])
        assert list(llm.adapters) == ["a6", "a7"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_adapters": 4, "max_loaded_adapters": 3}, "max_loaded_adapters=3 is less than max_adapters=4"),
        ({"max_adapters": 4, "max_loaded_adapters": 0}, "max_loaded_adapters must be a positive integer, got 0"),
        ({"max_adapters": 0, "max_loaded_adapters": 4}, "max_loaded_adapters=4 is for adapters, and max_adapters is 0"),
        ({"max_loaded_adapters": 4}, "max_loaded_adapters=4 is for adapters: give some"),
        (
            {"max_loaded_adapters": 1, "adapters": {"a": "x", "b": "y"}},
            "2 adapters are given, and max_loaded_adapters=1",
        ),
        ({"max_cpu_loras": 4}, "max_loaded_adapters=, beyond which loading one is refused and none makes room"),
    ],
)
def test_what_the_limit_of_loaded_adapters_cannot_be(tiny, options, told):
    with pytest.raises((ValueError, TypeError), match=re.escape(told)):
        LLM(tiny, **options)


@pytest.mark.slow
def test_a_cached_prefix_is_that_of_its_adapter(tiny, adapters, expected):
    with LLM(tiny, adapters=adapters, page_size=4, **OPTIONS) as llm:
        for name in (None, "a3", "a4"):
            cold, warm = (llm.generate(PROMPT, PARAMS, adapter=name)[0] for _ in range(2))
            assert (cold.num_cached_tokens, warm.num_cached_tokens > 0) == (0, True)
            assert cold.outputs[0].token_ids == warm.outputs[0].token_ids == expected[name]


MLA = MLAConfig(latent_size=16, rope_size=8, nope_size=12, value_size=10, query_rank=20)
LATENT_EXPERTS = replace(
    TINY,
    architecture="DeepseekV3ForCausalLM",
    num_kv_heads=1,
    head_dim=24,
    attention_scale=0.2,
    mla=MLA,
    moe=MoEConfig(4, 2, 24, (1,), "sigmoid", has_correction_bias=True, shared_size=24),
)


def test_what_heads_cannot_have_is_refused():
    params = abstract_params(LATENT_EXPERTS)
    heads, inputs, outputs = params["layers"]["0"]["attention"]["k_up"]["weight"].shape
    pair = LowRank(np.ones((inputs, 2)), np.ones((heads, 2, outputs)), 1.0, bias=np.ones((heads, outputs)))
    stacks = AdapterStacks(LATENT_EXPERTS, params, AdapterSizes(1, 8, parts=frozenset(("dora", "bias"))))
    with pytest.raises(ValueError, match="k_up has biases, which are not served"):
        stacks.prepared(Adapter({"layers.0.attention.k_up": pair}), params, what="'a'")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embed", "lm_head", "layers.0.attention.k_up", "layers.1.mlp.experts.up_proj"])
def test_factors_of_magnitudes(name):
    """m / ||W + scale A B||, in float64."""
    params, random = init_params(LATENT_EXPERTS, jax.random.key(1)), np.random.default_rng(0)
    weight = params if name in params else params["layers"]
    for part in name.removeprefix("layers.").split("."):
        weight = weight[part]
    weight = np.asarray(weight if name in params else weight["weight"], np.float64)
    *lead, inputs, outputs = weight.shape
    own = lead if "experts" in name else []
    a, b = random.normal(size=(*own, inputs, 3)), random.normal(size=(*lead, 3, outputs))
    magnitude = random.random((*lead, outputs))
    parts = frozenset(("dora", "experts", "embed", "lm_head"))
    stacks = AdapterStacks(LATENT_EXPERTS, jax.eval_shape(lambda: params), AdapterSizes(1, 8, parts=parts))
    host = stacks.prepared(Adapter({name: LowRank(a, b, 0.5, magnitude)}), params, what="'a'")
    stack = host.stacks[name] if name not in params else getattr(host.stacks[name], name)
    wanted = magnitude / np.linalg.norm(weight + 0.5 * a @ b, axis=-2) - 1
    np.testing.assert_allclose(stack.columns, wanted, rtol=1e-5, atol=1e-6)
    assert host.depends_on_base


@pytest.mark.slow
@pytest.mark.matrix("int4-g128")
@pytest.mark.parametrize("recipe", ["int8", "int4-g128"])
def test_a_quantized_base_is_its_integers(recipe):
    config = replace(TINY, hidden_size=256, intermediate_size=256)
    params = init_params(config, jax.random.key(3))
    params = jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim == 2 else leaf, params)
    adapters = {name: random_adapter(params, seed, 4) for seed, name in enumerate(("a", "b"))}
    quantized = quantize_params(params, recipe)
    found = {}
    for kind, base, options in (
        ("integers", params, {"quantize": recipe}),
        ("floats", dequantize_params(quantized), {}),
    ):
        with LLM((config, base), adapters=adapters, **OPTIONS, **options) as llm:
            assert any(map(is_quantized, jax.tree.leaves(llm.params, is_leaf=is_quantized))) == (kind == "integers")
            found[kind] = [
                np.array(llm.score([PROMPT], adapter=name, use_tqdm=False)[0].raw) for name in (None, "a", "b")
            ]
    differences = [np.abs(one - other).max() for one, other in zip(*found.values(), strict=True)]
    print(f"{recipe}: max |difference| {max(differences):.1e}")
    assert max(differences) <= 1e-4
    assert np.abs(found["integers"][1] - found["integers"][0]).max() > 0.1
