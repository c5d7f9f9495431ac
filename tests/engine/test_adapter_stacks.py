"""A served adapter of each kind is the model with the adapter merged; rows without one have the bits of the base."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert.adapters import merged, save_adapter
from jaxinfer import LLM, SamplingParams, parallel
from jaxinfer.engine.adapter_slots import AdapterSizes
from jaxinfer.engine.adapter_stacks import AdapterStacks
from jaxinfer.models import MLAConfig, ModelConfig, MoEConfig, init_params, parameter_shardings
from jaxinfer.models.adapter import Adapter, LowRank, TokenRows
from jaxinfer.models.sharding import leaf_shardings
from jaxinfer.quantization import dequantize_params, quantize_params
from tests import tiny
from tests.tiny import TINY

TIED = replace(TINY, tie_word_embeddings=True)
LATENT_EXPERTS = replace(
    TINY,
    architecture="DeepseekV3ForCausalLM",
    num_kv_heads=1,
    head_dim=24,
    attention_scale=20**-0.5,
    moe=MoEConfig(4, 2, 24, (1,), "sigmoid", has_correction_bias=True, shared_size=24),
    mla=MLAConfig(latent_size=16, rope_size=8, nope_size=12, value_size=10, query_rank=20),
)
# Without reuse, equal prompts run beside each other as those of several adapters do.
OPTIONS = {**tiny.OPTIONS, "prefix_cache": False}
PROMPTS = [list(range(3, 50)), [5, 9, 2, 44, 7, 9, 9, 1, 60, 33, 12]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=0)


def random_params(config: ModelConfig):
    params = init_params(config, jax.random.key(5))

    def scaled(path, leaf):
        return leaf + 0.5 if path[-1].key == "bias" else leaf * 8 if leaf.ndim > 1 else leaf

    return jax.tree_util.tree_map_with_path(scaled, params)


def random_adapter(params, seed: int, rank: int = 4, names=lambda name: "_proj" in name or "_up" in name, **fields):
    """An adapter with pairs for weights whose names are chosen."""
    rng, pairs = np.random.default_rng(seed), {}

    def normal(*shape: int) -> np.ndarray:
        return (0.2 * rng.normal(size=shape)).astype(np.float32)

    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys = [key.key for key in path]
        name = ".".join(keys).removesuffix(".weight")
        if leaf.ndim < 2 or not names(name) or "router" in name:
            continue
        *lead, inputs, outputs = leaf.shape
        a = normal(inputs, rank) if keys[-2:-1] in (["k_up"], ["v_up"]) else normal(*lead, inputs, rank)
        pairs[name] = LowRank(a, normal(*lead, rank, outputs), 1.5)
    return Adapter(pairs, **fields)


def scores(llm: LLM, adapter=None):
    return [[*score.raw] for score in llm.score(PROMPTS, adapter=adapter)]


def check(config: ModelConfig, params, adapters: dict[str, Adapter], atol: float = 2e-4, **options) -> None:
    """Compares answers and scores with those of merged models, and the base's with an engine without adapters."""
    names = [None, *adapters]
    with LLM((config, params), **OPTIONS) as llm:
        plain = llm.generate(PROMPTS * len(names), GREEDY)[:2], scores(llm)
    with LLM((config, params), adapters=adapters, **OPTIONS, **options) as llm:
        answers = llm.generate(PROMPTS * len(names), GREEDY, adapter=[name for name in names for _ in PROMPTS])
        own = {name: scores(llm, name) for name in names}
    answers = {name: answers[2 * number : 2 * number + 2] for number, name in enumerate(names)}
    assert own[None] == plain[1]
    for one, other in zip(answers[None], plain[0], strict=True):
        assert (one.outputs[0].token_ids, one.outputs[0].logprobs) == (
            other.outputs[0].token_ids,
            other.outputs[0].logprobs,
        )
    for name, adapter in adapters.items():
        own_config, changed = merged(config, dequantize_params(params), adapter)
        with LLM((own_config, jax.tree.map(jnp.asarray, changed)), **OPTIONS) as llm:
            want = llm.generate(PROMPTS, GREEDY)
            for got, wanted in zip(own[name], scores(llm), strict=True):
                np.testing.assert_allclose(got, wanted, atol=atol)
        for got, wanted, base in zip(answers[name], want, plain[0], strict=True):
            assert got.outputs[0].token_ids == wanted.outputs[0].token_ids
            assert got.outputs[0].token_ids != base.outputs[0].token_ids


@pytest.fixture(scope="module")
def params():
    return random_params(TINY)


def with_magnitudes(params, adapter: Adapter) -> Adapter:
    rng = np.random.default_rng(9)

    def changed(pair: LowRank) -> LowRank:
        shape = (*pair.b.shape[:-2], pair.b.shape[-1])
        return replace(pair, magnitude=(1 + rng.random(shape)).astype(np.float32))

    return replace(adapter, low_rank={name: changed(pair) for name, pair in adapter.low_rank.items()})


def test_linear_layers():
    """Pairs of several ranks, magnitudes, and biases of the pair and of the base."""
    config = replace(TINY, qkv_bias=True)
    params, rng = random_params(config), np.random.default_rng(3)
    adapters = {"four": random_adapter(params, 1), "two": random_adapter(params, 2, rank=2)}
    adapters["queries"] = random_adapter(params, 3, rank=8, names=lambda name: name.endswith("q_proj"))
    adapters["dora"] = with_magnitudes(params, random_adapter(params, 4))
    bias = {"layers.0.attention.k_proj.bias": rng.normal(size=16).astype(np.float32)}
    adapters["trained"] = random_adapter(params, 5, replaced=bias)
    pairs = {
        name: replace(pair, bias=rng.normal(size=pair.b.shape[-1]).astype(np.float32))
        for name, pair in random_adapter(params, 6).low_rank.items()
        if name.endswith(("q_proj", "v_proj"))
    }
    adapters["of the pair"] = Adapter(pairs)
    check(config, params, adapters)


def test_latent_attention_and_experts():
    params = random_params(LATENT_EXPERTS)
    adapters = {"one": random_adapter(params, 1), "dora": with_magnitudes(params, random_adapter(params, 2, rank=2))}
    assert any(".experts." in name for name in adapters["one"].low_rank)
    check(LATENT_EXPERTS, params, adapters, atol=5e-4)


@pytest.mark.matrix("untied")
@pytest.mark.parametrize("config", [TIED, TINY], ids=["tied", "untied"])
def test_embedding_and_head(config):
    params, rng = random_params(config), np.random.default_rng(0)
    tables = random_adapter(params, 1, names=lambda name: name in ("embed", "lm_head"))
    head = {"lm_head": LowRank(*(rng.normal(size=shape).astype(np.float32) for shape in ((32, 3), (3, 97))), 0.5)}
    rows = TokenRows((9, 44, 96), rng.normal(size=(3, 32)).astype(np.float32))
    of_embed = {"embed": rows} if not config.tie_word_embeddings else {"embed": rows, "lm_head": rows}
    whole = {"embed": rng.normal(size=(97, 32)).astype(np.float32)}
    if not config.tie_word_embeddings:
        whole["lm_head"] = rng.normal(size=(32, 97)).astype(np.float32)
    adapters = {
        "pairs": tables,
        "dora": with_magnitudes(params, tables),
        "of the head": Adapter(head),
        "tokens": random_adapter(params, 2, token_rows=of_embed),
        "tokens of the head": Adapter({}, token_rows={"lm_head": rows}),
        "whole": random_adapter(params, 3, replaced=whole),
    }
    check(config, params, adapters)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("recipe", ["int4-g128", "int8"])
def test_quantized_bases(params, recipe):
    adapters = {"one": random_adapter(params, 1), "dora": with_magnitudes(params, random_adapter(params, 2))}
    check(TINY, quantize_params(params, recipe), adapters)


def test_an_invoked_adapter_starts_at_its_tokens(params):
    """Tokens before the invocation are the base's, and so are their pages, which adapters and the base share."""
    invoked = random_adapter(params, 1, invocation_tokens=(60, 61))
    plain = replace(invoked, invocation_tokens=())
    prompt = [*range(3, 36), 60, 61, *range(62, 82)]  # of which the third page is changed from its second token on
    twice = [60, 61, *prompt]  # the last occurrence counts
    adapters = {"invoked": invoked, "plain": plain, "other": random_adapter(params, 2, invocation_tokens=(60, 61))}
    with LLM((TINY, params), adapters=adapters, **tiny.OPTIONS) as llm:

        def score(name: str | None, tokens=prompt) -> list[float]:
            return [*llm.score([tokens], adapter=name)[0].raw]

        base, own, all_of_it = score(None), score("invoked"), score("plain")
        assert own[:33] == base[:33]
        assert not np.allclose(own[33:], base[33:], atol=1e-2)
        assert not np.allclose(own[33:], all_of_it[33:], atol=1e-2)
        np.testing.assert_allclose(score("invoked", twice)[:34], score(None, twice)[:34], rtol=0)
        assert score("invoked", prompt[:33]) == score(None, prompt[:33])

        answers = {name: llm.generate(prompt, GREEDY, adapter=name)[0] for name in (None, "invoked", "other")}
        counters = llm.engine.scheduler.counters
        before = counters.reused_tokens
        again = {name: llm.generate(prompt, GREEDY, adapter=name)[0] for name in answers}
        assert again[None].outputs[0].token_ids == answers[None].outputs[0].token_ids
        assert counters.reused_tokens - before == 3 * 48
    with LLM((TINY, params), adapters=adapters, **OPTIONS) as llm:
        for name, answer in answers.items():
            [alone] = llm.generate(prompt, GREEDY, adapter=name)
            assert alone.outputs[0].token_ids == answer.outputs[0].token_ids == again[name].outputs[0].token_ids
    assert len({tuple(answer.outputs[0].token_ids) for answer in answers.values()}) == 3


@pytest.mark.alone
@pytest.mark.parametrize("mesh", ["model=2", pytest.param("data=2,model=2", marks=pytest.mark.slow)])
def test_a_mesh_gives_the_tokens_of_one_device(mesh):
    config = replace(TINY, vocab_size=96)
    params = random_params(config)
    tokens = TokenRows((9, 44), np.random.default_rng(1).normal(size=(2, 32)).astype(np.float32))
    adapters = {
        "dora": with_magnitudes(params, random_adapter(params, 1)),
        "tables": random_adapter(params, 2, names=lambda name: name in ("embed", "lm_head")),
        "tokens": random_adapter(params, 3, rank=2, token_rows={"embed": tokens, "lm_head": tokens}),
    }
    names = [None, *adapters] * 2

    def answers(mesh: str | None) -> list[list[int]]:
        with LLM((config, params), adapters=adapters, max_adapters=2, mesh=mesh, **OPTIONS) as llm:
            runner = llm.engine.engines[0].runner
            parts = {len(array.sharding.device_set) for array in runner.weights.value}
            assert parts == {1 if mesh is None else 2}
            return [one.outputs[0].token_ids for one in llm.generate([PROMPTS[1]] * len(names), GREEDY, adapter=names)]

    assert answers(mesh) == answers(None)


@pytest.mark.alone
def test_experts_on_a_mesh_have_the_tokens_of_one_device():
    config = replace(LATENT_EXPERTS, vocab_size=96)
    params = random_params(config)
    adapters = {"one": random_adapter(params, 1), "two": random_adapter(params, 2, rank=2)}
    names = [None, *adapters, None]

    def answers(mesh: str | None):
        with LLM((config, params), adapters=adapters, mesh=mesh, **OPTIONS) as llm:
            pairs = [array for array in llm.engine.engines[0].runner.weights.value if array.shape[:3] == (2, 4, 8)]
            assert {array.addressable_shards[0].data.shape[1] for array in pairs} == {4 if mesh is None else 2}
            outputs = llm.generate([PROMPTS[1]] * len(names), GREEDY, adapter=names)
            return [one.outputs[0].token_ids for one in outputs], scores(llm, "one")

    (own, own_scores), (wanted, wanted_scores) = answers("model=2"), answers(None)
    assert own == wanted
    assert len(set(map(tuple, own))) == 3
    for one, other in zip(own_scores, wanted_scores, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-4)


@pytest.mark.alone
def test_a_tied_head_alone_is_cut_as_the_embedding():
    """By tokens on two devices, as the head of a model that has one."""
    sizes, specs = AdapterSizes(2, 8, parts=frozenset(("lm_head",))), []
    for tied in (True, False):
        config = replace(TINY, vocab_size=96, tie_word_embeddings=tied)
        mesh = parallel.make_mesh("model=2")
        params = jax.device_put(init_params(config, jax.random.key(0)), parameter_shardings(mesh, config))
        params = AdapterStacks(config, params, sizes, mesh).on(params)
        table = params["embed" if tied else "lm_head"]
        own = table.stack.lm_head
        specs.append([array.sharding.shard_shape(array.shape) for array in (own.a, own.b)])
        shardings = leaf_shardings(table, table.base.sharding)
        assert shardings.stack.lm_head.b == own.b.sharding
    assert specs[0] == specs[1] == [(2, 8, 32), (2, 8, 48)]


@pytest.mark.alone
def test_a_mesh_that_changes_shapes_is_refused(params):
    with pytest.raises(ValueError, match=r"adapters have the model's own shapes, .*: num_kv_heads 2 become 4"):
        LLM((TINY, params), mesh="model=4", max_adapters=2, **OPTIONS)


def test_copies_of_the_bases_tables_take_no_room(tmp_path):
    """PEFT saves them beside an adapter that has pairs for them."""
    params = random_params(TIED)
    own = np.asarray(params["embed"])
    changed = own.copy()
    changed[5] += 1
    names = {"copy": {"embed": own, "lm_head": own.T}, "other": {"embed": changed, "lm_head": own.T}}
    for name, tables in names.items():
        save_adapter(random_adapter(params, 1, replaced=tables), tmp_path / name, TIED)
    with LLM((TIED, params), adapters={"copy": tmp_path / "copy"}, **OPTIONS) as llm:
        assert not llm.engine.spec.options.adapter_parts
        with pytest.raises(
            ValueError, match=r"no room for embed as a whole: adapter_parts=\('saved_embed',\) makes some"
        ):
            llm.load_adapter("other", tmp_path / "other")
        assert list(llm.adapters) == ["copy"]
    with LLM((TIED, params), adapters={"other": tmp_path / "other"}, **OPTIONS) as llm:
        assert llm.engine.spec.options.adapter_parts == ("saved_embed",)


@pytest.mark.slow
def test_arrays_are_copied_and_hashed_as_they_are(params):
    """A training loop may go on in the arrays that it gave."""
    adapter = random_adapter(params, 1)
    with LLM((TINY, params), adapters={"mine": adapter}, **tiny.OPTIONS) as llm:
        before, hashed = scores(llm, "mine"), llm.adapters["mine"].fingerprint
        llm.generate(PROMPTS, GREEDY, adapter="mine")
        for pair in adapter.low_rank.values():
            pair.b[...] *= -1
        assert scores(llm, "mine") == before
        llm.load_adapter("mine", adapter, replace=True)
        assert llm.adapters["mine"].fingerprint != hashed
        [answer, _] = llm.generate(PROMPTS, GREEDY, adapter="mine")
    with LLM((TINY, params), adapters={"new": adapter}, **OPTIONS) as llm:
        assert llm.generate(PROMPTS[0], GREEDY, adapter="new")[0].outputs[0].token_ids == answer.outputs[0].token_ids


def test_names_that_are_no_weights(params):
    pair = next(iter(random_adapter(params, 1).low_rank.values()))
    wrong = {
        "layers.0.attention.qproj": r"no weight 'layers.0.attention.qproj': did you mean '?layers.0.attention.q_proj"
    }
    wrong["layers.0.attention_norm"] = "there is no room for adapters of layers.0.attention_norm"
    with LLM((TINY, params), max_adapters=1, **OPTIONS) as llm:
        for name, message in wrong.items():
            with pytest.raises(ValueError, match=message):
                llm.load_adapter("mine", Adapter({name: pair}))
        with pytest.raises(ValueError, match=r"there is room for 16: max_adapter_rank=17 makes some"):
            llm.load_adapter("mine", random_adapter(params, 1, rank=17))
        assert not llm.adapters


@pytest.mark.slow
def test_preempted_requests_have_their_adapters_again(params):
    adapters = {f"a{seed}": random_adapter(params, seed) for seed in range(4)}
    names = [None, *adapters] * 2
    longer = SamplingParams(temperature=0, max_tokens=40)
    prompts = [PROMPTS[0][number:] for number in range(len(names))]
    with LLM((TINY, params), adapters=adapters, max_adapters=2, **OPTIONS) as llm:
        wanted = [
            llm.generate(*pair, adapter=name)[0] for *pair, name in zip(prompts, [longer] * 10, names, strict=True)
        ]
    few = {**tiny.OPTIONS, "num_pages": 14}
    with LLM((TINY, params), adapters=adapters, max_adapters=2, **few) as llm:
        answers = llm.generate(prompts, longer, adapter=names)
        assert llm.engine.scheduler.counters.num_preemptions > 2
    assert [one.outputs[0].token_ids for one in answers] == [one.outputs[0].token_ids for one in wanted]


@pytest.mark.slow
def test_weights_that_adapters_were_computed_from_are_not_replaced(params):
    adapters = {"plain": random_adapter(params, 1), "dora": with_magnitudes(params, random_adapter(params, 1))}
    other = jax.tree.map(lambda leaf: 1.1 * leaf, params)
    with LLM((TINY, params), adapters=adapters, **OPTIONS) as llm:
        with pytest.raises(ValueError, match="adapter 'dora' has magnitudes or biases for the weights as they are"):
            llm.engine.weights.replace(other)
        llm.unload_adapter("dora")
        llm.engine.weights.replace(other)
        replaced = scores(llm, "plain")
    with LLM((TINY, other), adapters={"plain": adapters["plain"]}, **OPTIONS) as llm:
        assert scores(llm, "plain") == replaced


@pytest.mark.slow
def test_scores_of_a_late_adapter_follow_its_rows(params):
    """The prompt invokes, not its continuation, and the head is the adapter's from there on, in the middle of a
    chunk too."""
    head = random_adapter(params, 1, names=lambda name: name == "lm_head", invocation_tokens=(60,))
    prompt, continuation = [*range(3, 30), 60, 7, 8], [9, 60, 5]
    with LLM((TINY, params), adapters={"late": head}, **OPTIONS) as llm:
        for processed in (SamplingParams(), SamplingParams(temperature=0.5)):
            [score] = llm.score([prompt], params=processed, adapter="late")
            if processed.temperature == 1.0:
                assert score.raw == score.processed
            base = llm.score([prompt], params=processed)[0]
            assert score.processed[:27] == base.processed[:27]
            assert score.processed[27:] != base.processed[27:]
        [score] = llm.score([prompt], [continuation], adapter="late")
        plain = replace(head, invocation_tokens=())
        llm.load_adapter("plain", plain)
        assert score.raw == llm.score([prompt], [continuation], adapter="plain")[0].raw


@pytest.mark.slow
def test_a_store_is_of_the_base(params, tmp_path):
    """Pages on the disk have the names that they have without adapters in slots, and each adapter's are found again."""
    options = {**tiny.OPTIONS, "host_cache_gib": 0.1, "prefix_store": str(tmp_path)}
    adapters = {"one": random_adapter(params, 1), "two": random_adapter(params, 2)}
    prompt = list(range(3, 90))
    answers = []
    for first in ("one", "two"):
        with LLM((TINY, params), adapters=adapters, max_adapters=1, **options) as llm:
            llm.generate([5, 6, 7], GREEDY, adapter=first)
            before = llm.engine.scheduler.counters.reused_tokens
            answers.append([llm.generate(prompt, GREEDY, adapter=name)[0].outputs[0] for name in (None, "one", "two")])
            reused = llm.engine.scheduler.counters.reused_tokens - before
    assert reused == 3 * 80
    assert [one.token_ids for one in answers[0]] == [one.token_ids for one in answers[1]]


@pytest.mark.matrix("tied")
@pytest.mark.parametrize("config", [TIED, TINY], ids=["tied", "untied"])
def test_tables_of_the_adapter_before_are_cleared(config):
    params, rng = random_params(config), np.random.default_rng(0)
    rows = TokenRows((9, 44), rng.normal(size=(2, 32)).astype(np.float32))
    whole = {
        "embed": rng.normal(size=(97, 32)).astype(np.float32),
        "lm_head": rng.normal(size=(32, 97)).astype(np.float32),
    }
    pairs = {"lm_head": LowRank(np.ones((32, 2), np.float32), np.ones((2, 97), np.float32), 1.0)}
    pairs["embed"] = LowRank(np.ones((97, 2), np.float32), np.ones((2, 32), np.float32), 1.0)
    pairs = with_magnitudes(params, Adapter(pairs)).low_rank
    adapters = {
        "plain": random_adapter(params, 1),
        "pairs": Adapter(pairs),
        "tokens": Adapter({}, token_rows={"embed": rows, "lm_head": rows}),
        "whole": Adapter({}, replaced=whole),
    }
    with LLM((config, params), adapters=adapters, max_adapters=1, **OPTIONS) as llm:
        llm.warm_up()
        first = scores(llm, "plain")
        for before in ("pairs", "tokens", "whole"):
            assert scores(llm, before) != first
            assert scores(llm, "plain") == first
