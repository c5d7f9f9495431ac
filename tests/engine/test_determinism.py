"""Whether an engine is deterministic, and the rows of its passes: by chip, weights and options, never by load."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer import LLM
from jaxinfer.engine.options import EngineOptions, parse_deterministic
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models import abstract_params, init_params
from jaxinfer.quantization import quantize_params
from jaxinfer.speculative import NO_DRAFT, LayersDraft
from tests.planning.plan_models import LLAMA_3_8B
from tests.tiny import OPTIONS, TINY


@cache
def params_of(weights: str):
    params = abstract_params(LLAMA_3_8B, jnp.bfloat16)
    return params if weights == "bfloat16" else jax.eval_shape(partial(quantize_params, how=weights), params)


def spec_of(
    chip: str | None, weights: str = "bfloat16", platform: str = "tpu", draft=None, **options: Any
) -> EngineSpec:
    values: dict[str, Any] = {"max_seqs": 64, "max_model_len": 1536, **options}
    how = EngineOptions(**values)
    return EngineSpec(LLAMA_3_8B, params_of(weights), how, platform, draft=draft or NO_DRAFT, chip=chip)


# FLOP/s over bytes/s of the chip is the rows at which products take as long as reading weights of two bytes: 240, 560,
# 313 and 295; half of that for one byte. Below, in steps of 32 on a TPU and of 64 on a GPU, and on a TPU where the
# bundles take at most 0.95 of the time: 92 % of the FLOP/s are reached on a v6e. 128 is what 64 slots and a chunk of a
# prompt need.
@pytest.mark.matrix("v6e-bfloat16-480-True", "v6e-int4-g128-128-False")
@pytest.mark.parametrize(
    ("chip", "weights", "num_rows", "is_on"),
    [
        ("v5e", "bfloat16", 224, False),
        ("v6e", "bfloat16", 480, True),
        ("tpu7x", "bfloat16", 288, True),
        ("h100", "bfloat16", 256, False),
        ("v6e", "int8", 224, True),
        ("v6e", "int4-g128", 128, False),
        ("h100", "int8", 128, False),
        ("v5e", "int8", 128, False),
        ("tpu7x", "int8", 128, False),
        ("h100", "int4-g128", 128, False),
    ],
)
def test_the_rows_are_those_at_the_ridge(chip, weights, num_rows, is_on):
    spec = spec_of(chip, weights, platform="gpu" if chip == "h100" else "tpu", deterministic=True)
    assert spec.token_buckets == (num_rows,)
    assert spec.is_deterministic
    found = replace(spec, determinism=None, options=replace(spec.options, deterministic="auto")).determinism
    assert (found.is_on, found.num_rows) == (is_on, num_rows)
    assert found.cost is not None
    assert (found.cost <= 1.02) == is_on
    assert f"{found.cost:.3f} of the time" in str(found)


def test_rows_are_at_least_what_slots_chunks_and_drafts_need():
    assert spec_of("v5e", deterministic=True, max_seqs=256).token_buckets == (320,)
    assert spec_of("v5e", deterministic=True, prefill_chunk=500).token_buckets == (576,)
    drafted = spec_of("v5e", deterministic=True, draft=LayersDraft(1), num_draft_tokens=7)
    assert drafted.token_buckets == (512,)
    assert spec_of(None, deterministic=True).token_buckets == (256,)


def test_variants_for_counting_keep_the_decision():
    """Models of fewer layers, which a planner compiles, have a larger output layer by comparison."""
    spec = spec_of("h100", platform="gpu")
    assert spec.with_layers([0]).determinism is spec.with_pages(9).determinism is spec.determinism


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"chip": None}, "figures of this chip are not known"),
        ({"platform": "cpu"}, "on a CPU a step takes longer the more rows it has"),
        ({"draft": LayersDraft(1), "draft_tree": (2, 2)}, r"draft_tree=\(2, 2\)"),
        ({"kv_policy": "h2o(256)"}, r"kv_policy='h2o\(256\)'"),
    ],
)
def test_auto_is_off_with_a_reason(changes, reason):
    found = spec_of(**{"chip": "v6e", **changes}).determinism
    assert not found.is_on
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(str(found))


def test_auto_is_the_default_and_explained():
    assert EngineOptions().deterministic == "auto"
    options: dict[str, Any] = {**OPTIONS}
    with LLM((TINY, init_params(TINY, jax.random.key(0))), **options) as llm:
        said = llm.explain().groups["programs"]["deterministic"]
    assert said.startswith("off: auto, on a CPU")


def test_what_is_written_on_a_command_line():
    assert [parse_deterministic(text) for text in ("auto", "on", "off")] == ["auto", True, False]
    with pytest.raises(ValueError, match="auto, on or off, got 'yes'"):
        parse_deterministic("yes")
    with pytest.raises(ValueError, match="deterministic must be True, False or 'auto'"):
        EngineOptions(deterministic="on")  # type: ignore[arg-type]
