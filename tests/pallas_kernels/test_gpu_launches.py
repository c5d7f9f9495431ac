"""Launches, graphs and waits in a plan as XLA writes it, and in that of a small program."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_kernels import ahead_of_time
from pallas_kernels.gpu_launches import LaunchPlan, compile_with_plan, read_thunks

PLAN = """\
001: kCopy         [source       | next=002 (7)] kCopy
002: kCustomKernel [source       | next=003 (6)] fill grid: [4, 2, 1] threads: [8, 1, 1]  shared_memory: 0 bytes
003: kWhile        [prev=002 (1) | sink        ]
condition:
    004: kCustomKernel [source | sink] less grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    005: kCustomCall [source        | next=006 (79)] kCustomCall
    012: kConditional  [prev=005 (1)  | next=013 (1) ]
      false_branch:
        006: kCustomKernel [source       | next=007 (1)] a grid: [63, 1, 1] threads: [256, 1, 1]  shared_memory: 0 bytes
        009: kConditional  [prev=006 (1) | sink        ]
          branch_0:
            No thunks.
          branch_1:
            008: kCustomKernel [source | sink] b grid: [1, 1, 1] threads: [32, 1, 1]  shared_memory: 0 bytes
        010: kCustomKernel [source       | sink] c grid: [1, 1, 1] threads: [256, 1, 1]  shared_memory: 0 bytes
      true_branch:
        011: kCopy [source | sink] kCopy
    013: kCustomKernel [prev=012 (1)  | sink] d grid: [1, 1, 1] threads: [256, 1, 1]  shared_memory: 0 bytes
"""
FORMED = """\
000: kCommandBuffer [source       | next=003 (1)]
    001: kCopy         [source | sink] kCopy
003: kWhile        [prev=000 (1) | sink        ]
condition:
    004: kCustomKernel [source | sink] less grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    000: kCommandBuffer [source       | next=012 (1)]
        005: kCustomCall [source        | sink] kCustomCall
        012: kConditional  [prev=005 (1)  | next=013 (1) ]
          true_branch:
            011: kCopy [source | sink] kCopy
    014: kConditional  [prev=012 (1) | sink        ]
      true_branch:
        No thunks.
"""


def test_a_plan_is_read():
    plan = LaunchPlan(read_thunks(PLAN), read_thunks(FORMED))
    assert [thunk.kind for thunk in plan.thunks] == ["Copy", "CustomKernel", "While"]
    assert plan.thunks[1].blocks == 8
    assert [launch.name for launch in plan.loop] == ["less", "kCustomCall", "kCopy", "d"]
    branches = plan.thunks[2].branches["body"][1].branches
    assert [thunk.name for thunk in branches["false_branch"]] == ["a", "", "c"]
    assert [len(nodes) for nodes in branches["false_branch"][1].branches.values()] == [0, 1]
    assert plan.num_graphs == 2
    assert plan.num_waits == 2  # the loop's predicate and the conditional outside a graph


def test_a_program_s_loop_is_in_a_graph_only_with_the_option():
    if (reason := ahead_of_time.missing_compiler("h100")) is not None:
        pytest.skip(reason)

    def steps(x):
        return lax.while_loop(lambda x: x[0] < 9, lambda x: jnp.sin(x) + x.sum(), x)

    def plan(kinds):
        options = {"xla_gpu_enable_command_buffer": kinds, "xla_gpu_graph_min_graph_size": 1}
        program = jax.jit(steps, compiler_options=options)
        return compile_with_plan("h100", program, jax.ShapeDtypeStruct((4096,), jnp.float32))[1]

    with_loop, without = plan("FUSION,WHILE"), plan("")
    assert (with_loop.num_graphs, with_loop.num_waits) == (1, 0)
    assert (without.num_graphs, without.num_waits) == (0, 1)
    assert len(with_loop.loop) == len(without.loop) == 3  # predicate, sum, the rest
