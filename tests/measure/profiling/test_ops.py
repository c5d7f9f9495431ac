"""Operations by their program's text: kinds, parts, layers, and what a program found by its instructions says."""

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.measure.profiling import ops
from pallas_kernels.hbm_traffic import HloProgram

SCOPES = {
    "jit(decode)/while/body/embed/gather": ("embed", None),
    "jit(decode)/while/body/layers.11/attention/q_proj/dot_general": ("q k v o, rope", 11),
    "jit(step)/layers.0/attention/attend/while/body/exp": ("attend", 0),
    "jit(step)/layers.2/mlp/down_proj/dot_general": ("mlp", 2),
    "jit(step)/layers.2/mul": ("norms, residuals", 2),
    "jit(step)/final_norm/mul": ("norms, residuals", None),
    "jit(step)/logits/dot_general": ("logits", None),
    "jit(step)/sampler/cond/branch_1_fun/sort": ("sampler", None),
    "jit(decode)/while": ("engine, loops", None),
    "": ("engine, loops", None),
    "jit(speculate)/while/body/draft/while/body/layers.3/mlp/up_proj/dot_general": ("draft mlp", None),
    "jit(f)/vmap(layers.4)/attention/vmap(attend)/add": ("attend", 4),
}


@pytest.mark.parametrize("scope", SCOPES)
def test_scopes_name_parts_and_layers(scope):
    assert ops.place_of(scope) == SCOPES[scope]


LAYER = "jit(step)/layers.0/mlp/up_proj/dot_general"
CASES = [
    (("dot", LAYER), ops.PRODUCTS),
    (("fusion", LAYER, ["parameter", "dot", "multiply"]), ops.PRODUCTS),
    (("fusion", LAYER, ["parameter", "multiply", "tanh"]), ops.OTHER),
    (("fusion", LAYER, ["parameter", "transpose", "copy", "bitcast"]), ops.MOVES),
    (("gather", "jit(step)/layers.0/attention/attend/gather"), ops.MOVES),
    (("dot", "jit(step)/layers.0/attention/attend/dot_general"), ops.ATTENTION),
    (("custom-call", "jit(step)/layers.0/attention/attend/pallas_call", (), "tpu_custom_call"), ops.ATTENTION),
    (("custom-call", LAYER, (), "__cublas$gemm"), ops.PRODUCTS),
    (("custom-call", "jit(step)/sampler/top_k", (), "TopK"), ops.SAMPLING),
    (("sort", "jit(step)/sampler/sort"), ops.SAMPLING),
    (("all-reduce-start", LAYER), ops.COLLECTIVES),
    (("all-gather", ""), ops.COLLECTIVES),
    (("add", ""), ops.OTHER),
]


@pytest.mark.parametrize(("arguments", "kind"), CASES)
def test_kinds(arguments, kind):
    assert ops.op_of(*arguments).kind == kind


TEXT = """HloModule jit_step, is_scheduled=true

%fused_product (p0: f32[2,4], p1: f32[4,4]) -> f32[2,4] {
  %p0 = f32[2,4]{1,0} parameter(0)
  %p1 = f32[4,4]{1,0} parameter(1)
  ROOT %dot.1 = f32[2,4]{1,0} dot(%p0, %p1), metadata={op_name="jit(step)/layers.1/mlp/up_proj/dot_general"}
}

%body (arg: f32[2,4]) -> f32[2,4] {
  %arg = f32[2,4]{1,0} parameter(0)
  ROOT %copy.7 = f32[2,4]{1,0} copy(%arg)
}

%condition (arg.1: f32[2,4]) -> pred[] {
  %arg.1 = f32[2,4]{1,0} parameter(0)
  ROOT %constant.3 = pred[] constant(true)
}

ENTRY %main (a: f32[2,4], b: f32[4,4]) -> f32[2,4] {
  %a = f32[2,4]{1,0} parameter(0)
  %b = f32[4,4]{1,0} parameter(1)
  %copy.9 = f32[4,4]{0,1} copy(%b)
  %ynn_fusion.2 = f32[2,4]{1,0} fusion(%a, %copy.9), kind=kCustom, calls=%fused_product
  ROOT %while.5 = f32[2,4]{1,0} while(%ynn_fusion.2), condition=%condition, body=%body, METADATA
}
""".replace("METADATA", 'metadata={op_name="jit(step)/layers.1/attention/attend/while"}')


def test_what_has_no_name_takes_that_of_what_it_holds_or_runs_in():
    found = ops.ops_of(HloProgram(TEXT))
    assert "dot.1" not in found  # fused: it never runs by itself
    assert (found["ynn_fusion.2"].part, found["ynn_fusion.2"].layer) == (ops.MLP, 1)
    assert found["ynn_fusion.2"].kind == ops.PRODUCTS
    assert (found["copy.7"].part, found["copy.7"].kind) == (ops.ATTEND, ops.MOVES)
    assert (found["copy.9"].part, found["copy.9"].kind) == (ops.MLP, ops.MOVES)  # of what uses it
    assert found["while.5"].is_control
    assert not found["copy.7"].is_control


RENAMED = """HloModule jit_decode, is_scheduled=true

ENTRY %main (a: f32[2,4], b: f32[4,4]) -> f32[2,4] {
  %a = f32[2,4]{1,0} parameter(0)
  %b = f32[4,4]{1,0} parameter(1)
  %norm = f32[2,4]{1,0} multiply(%a, %a), metadata={op_name="jit(decode)/layers.0/mul"}
  %values = f32[2,4]{1,0} dot(%norm, %b)
  %attended = f32[2,4]{1,0} exponential(%values), metadata={op_name="jit(decode)/layers.0/attention/attend/exp"}
  %view = f32[2,4]{1,0} bitcast(%attended)
  %output = f32[2,4]{1,0} dot(%view, %b)
  %sum = f32[2,4]{1,0} add(%a, %output), metadata={op_name="jit(decode)/layers.0/add"}
  %up = f32[2,4]{1,0} dot(%sum, %b)
  %gated = f32[2,4]{1,0} tanh(%up), metadata={op_name="jit(decode)/layers.0/mlp/tanh"}
  %down = f32[2,4]{1,0} dot(%gated, %b)
  ROOT %end = f32[2,4]{1,0} add(%sum, %down), metadata={op_name="jit(decode)/layers.0/add"}
}
"""


def test_products_without_a_name_are_known_by_what_is_beside_them():
    found = ops.ops_of(HloProgram(RENAMED))
    parts = {name: found[name].part for name in ("values", "output", "up", "down")}
    assert parts == {"values": ops.PROJECTIONS, "output": ops.PROJECTIONS, "up": ops.MLP, "down": ops.MLP}
    assert {found[name].layer for name in parts} == {0}


def test_a_program_is_found_among_those_of_its_name_by_its_instructions():
    def measured(x):
        with jax.named_scope("layers.6"), jax.named_scope("mlp"):
            return jnp.tanh(x) @ x

    def of_other_shape(x):
        with jax.named_scope("layers.7"):
            return jnp.sort(jnp.exp(x) + 1.0)

    of_other_shape.__name__ = of_other_shape.__qualname__ = "measured"
    first = jax.jit(measured).lower(jnp.ones((8, 8))).compile()
    other = jax.jit(of_other_shape).lower(jnp.ones((8,))).compile()
    for compiled, layer in ((first, 6), (other, 7)):
        wanted = ops.ops_of(HloProgram(compiled.as_text()))
        found = ops.Programs().find("jit_measured", set(wanted))
        assert found == wanted
        assert layer in {op.layer for op in found.values()}
    assert ops.Programs().find("jit_nowhere", {"add"}) == {}
