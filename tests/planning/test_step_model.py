"""The model of a step: its formula by hand, and what it says of Llama-3-8B."""

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.chips import chips
from jaxinfer.planning import make_plan
from jaxinfer.planning.counted import count
from jaxinfer.planning.step_model import COSTS, KEYS, StepCosts, predict, predicted_steps
from jaxinfer.quantization import quantize_params
from tests.planning.plan_models import LLAMA_3_8B


@pytest.fixture(scope="module")
def params():
    from jaxinfer.models import abstract_params

    return abstract_params(LLAMA_3_8B, jnp.bfloat16)


def predicted(ask, params, place="h100x1", *, recipe=None, batch=1, context=1536, **options):
    """The prediction, and the least seconds that the bytes take."""
    if recipe is not None:
        params = jax.eval_shape(lambda params: quantize_params(params, recipe), params)
    request = ask(LLAMA_3_8B, place, params, max_model_len=8192, max_seqs=batch, **options)
    spec, chip = request.spec(), request.place.chip
    counted = count(spec, spec.config, spec.placed_params, spec.cache)
    least = counted.read_weight_bytes(batch) + batch * counted.read_cache_bytes(context)
    return predict(chip, spec, counted, batch, context), least / chip.hbm_bandwidth


def test_by_hand(ask, params):
    """15.0 GB of weights and 0.2 of cache, 129 products, 32 attention calls, 4 small kernels a layer and 32 beside."""
    found, _ = predicted(ask, params)
    costs = COSTS["h100"]
    weights = 2 * (32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 128256) / costs.product
    assert found.weights == pytest.approx(weights + 129 * 1.8e-6, rel=1e-3)
    assert found.attention == pytest.approx(1536 * 131072 / (0.87 * 3e12) + 32 * 7e-6, rel=1e-6)
    assert found.small == pytest.approx((32 * 4 + 32) * 2.3e-6)
    assert found.launches == 9 * 32 + 33
    assert found.seconds == found.weights + found.attention + found.small


@pytest.mark.parametrize(
    ("recipe", "batch", "share"),
    [(None, 1, 0.72), ("int8", 1, 0.66), ("int4-g128", 1, 0.52), (None, 64, 0.70)],
)
def test_shares_of_the_roofline_of_an_h100(ask, params, recipe, batch, share):
    found, least = predicted(ask, params, recipe=recipe, batch=batch)
    assert least / found.seconds >= share


def test_share_of_the_roofline_of_a_v6e_with_determinism(ask, params):
    for deterministic in (True, False):
        step, least = predicted(ask, params, "v6e:1x1", deterministic=deterministic)
        assert least / step.seconds >= 0.84
        assert step.launches == 0


def test_issue_slots_bound_attention():
    """7,000 slots for a block of 64 keys, of 1e12 in a second."""
    costs = StepCosts(3e12, 3e12, 3e12, 0, 0, 0, attention=0.9, slots=1e12, block_slots={"int8": 7000, "bf16": 100})
    assert costs.attention_rate("int8", 16_900) == pytest.approx(1e12 / 7000 * 16_900)
    assert costs.attention_rate("bf16", 32_768) == costs.attention_rate("unknown", 1) == 0.9 * 3e12


@pytest.mark.parametrize(("kv_dtype", "bits", "share"), [("int8", 8, 0.8), ("int4", 4, 0.45)])
def test_caches_of_few_bits_are_read_at_a_share_of_the_copy(kv_dtype, bits, share):
    """On an H100; a key or a value of 128 numbers has a float32 scale."""
    costs = COSTS["h100"]
    assert costs.attention_rate(kv_dtype, KEYS * 2 * (128 * bits / 8 + 4)) >= share * costs.copy


def test_blocks_of_keys_are_counted(ask, params):
    block = KEYS * 2 * (128 + 4)  # int8 keys and values of a head with a float32 scale each
    found, _ = predicted(ask, params, kv_dtype="int8", batch=64)
    costs = COSTS["h100"]
    cache = 64 * 1536 * 32 * 8 * block / KEYS
    assert found.attention == pytest.approx(cache / costs.attention_rate("int8", block) + 32 * 7e-6, rel=1e-3)


def test_chips_without_costs_and_meshes_have_none(ask, params):
    assert predicted(ask, params, "l4x1")[0] is None
    assert predicted(ask, params, "h100x2", mesh="model=2")[0] is None
    assert set(COSTS) <= set(chips())


def test_a_plan_shows_it(ask, params):
    plan = make_plan(ask(LLAMA_3_8B, "h100x1", params, max_model_len=1536, max_seqs=64), compiles=False)
    point = plan.to_dict()["roofline"][0]
    assert point["predicted"]["share"] == pytest.approx(point["seconds"] / point["predicted"]["seconds"])
    header = next(line for line in plan.to_text().splitlines() if "predicted ms" in line)
    assert header.split()[-4:] == ["of", "the", "roofline", "launches"]
    row = plan.to_text().splitlines()[plan.to_text().splitlines().index(header) + 1 :]
    assert any(line.split()[:1] == ["1"] and line.split()[-1] == "321" for line in row)


def test_steps_in_words(ask, params):
    request = ask(LLAMA_3_8B, "h100x1", params, max_model_len=1536, max_seqs=64)
    steps = predicted_steps(request.place.chip, request.spec())
    assert list(steps) == ["1 of 1536 tokens", "64 of 1536 tokens"]
    assert steps["1 of 1536 tokens"].endswith("ms, 74% of the rate of the memory, 321 launches")
    assert predicted_steps(chips()["l4"], request.spec()) == {}
