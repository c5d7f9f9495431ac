"""Programs compiled before their first use: several at once, each once, under their names."""

import threading
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxinfer import LLM, SamplingParams, compilation_cache
from jaxinfer.engine import compiling
from jaxinfer.engine.compiling import LargeProgram, Program, compile_programs, default_jobs
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.options import EngineOptions
from jaxinfer.models.adapter import Adapter, LowRank
from pallas_kernels import ahead_of_time
from pallas_kernels.gpu_launches import compile_with_plan
from pallas_kernels.hbm_traffic import HloProgram
from tests.engine.sequences import make_sequence
from tests.tiny import OPTIONS


def fake(name: str, compiles: Any) -> Program:
    return Program(name, lambda: SimpleNamespace(compile=compiles))  # type: ignore[arg-type]


def test_as_many_are_compiled_at_once_as_there_are_jobs():
    together = threading.Barrier(2)
    names: list[str] = []
    compile_programs([fake(str(number), lambda: together.wait(20)) for number in range(6)], 2, names.append)
    assert sorted(names) == list("012345")


def test_one_job_compiles_in_turn():
    order: list[str] = []
    programs = [fake(name, lambda name=name: order.append(name)) for name in "abc"]
    compile_programs(programs, 1, lambda name: order.append(f"{name} is reported"))
    assert order == ["a", "a is reported", "b", "b is reported", "c", "c is reported"]


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_an_error_ends_all(num_jobs):
    started: list[str] = []

    def fail():
        raise RuntimeError("no room for the program")

    programs = [fake("a", fail), *(fake(name, lambda name=name: started.append(name)) for name in "bcdefgh")]
    with pytest.raises(RuntimeError, match="no room"):
        compile_programs(programs, num_jobs)
    assert len(started) < 7


@pytest.mark.parametrize(("num_cores", "num_jobs"), [(1, 1), (3, 3), (64, 8)])
def test_there_is_a_job_for_each_core(monkeypatch, num_cores, num_jobs):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(num_cores)), raising=False)
    assert default_jobs() == num_jobs


@pytest.mark.slow
def test_warm_up_compiles_each_program_once(tiny):
    """What is traced and compiled ahead is what calls then find: for the sizes of every kind of program."""
    jax.clear_caches()  # of what earlier tests compiled
    engine = Engine(*tiny, EngineOptions(**OPTIONS))
    names: list[str] = []
    with compilation_cache.counting() as counts:
        num_programs = engine.warm_up(2, names.append)
    assert counts.compiled + counts.hits == num_programs
    assert sorted(names) == sorted(engine.program_names)
    assert len(set(names)) == len(names) == num_programs - 6
    with compilation_cache.counting() as counts:
        engine.add(make_sequence([1, 2, 3], max_tokens=4))
        while engine.has_work:
            engine.step()
    assert counts.compiled + counts.hits == 0
    engine.close()


def test_warm_up_compiles_what_writes_adapters_and_overwrites_none(tiny):
    jax.clear_caches()
    pairs = [LowRank(np.full((32, 2), sign, np.float32), np.ones((2, 32), np.float32), 1.0) for sign in (1, -1)]
    layers = [f"layers.{layer}.attention.o_proj" for layer in range(2)]
    adapters = {name: Adapter(dict.fromkeys(layers, pair)) for name, pair in zip("ab", pairs, strict=True)}
    with LLM(tiny, adapters=adapters, max_adapters=1, **OPTIONS) as llm:
        with compilation_cache.counting() as counts:
            num_programs = llm.warm_up()
        assert counts.compiled + counts.hits == num_programs == len(llm.engine.program_names) + 8
        params, prompt = SamplingParams(temperature=0, max_tokens=4), [1, 2, 3]
        with compilation_cache.counting() as counts:
            before = [llm.generate(prompt, params, adapter=name)[0].outputs[0].token_ids for name in (None, *"ab")]
        assert counts.compiled + counts.hits == 0
        assert len(set(map(tuple, before))) == 3
        llm.warm_up()  # the second adapter is in the slot
        assert llm.generate(prompt, params, adapter="b")[0].outputs[0].token_ids == before[2]
        assert llm.engine.engines[0].scheduler.adapters.num_moved == 2


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_programs_are_run_in_order_once_they_are_compiled(num_jobs):
    order: list[str] = []
    second_is_compiled = threading.Event()
    waiting = second_is_compiled.wait if num_jobs == 2 else lambda _: True
    compiling = {"a": lambda: waiting(20), "b": second_is_compiled.set, "c": lambda: None}
    programs = [
        Program(name, lambda call=call: SimpleNamespace(compile=call), lambda name=name: order.append(name))  # type: ignore[arg-type]
        for name, call in compiling.items()
    ]
    compile_programs(programs, num_jobs, runs=True)
    assert order == ["a", "b", "c"]


@pytest.mark.slow
def test_programs_are_compiled_in_another_thread_while_requests_run(tiny):
    """Answers are those of an engine that compiled nothing ahead, and then nothing is left to compile."""

    def answer(engine: Engine) -> list[int]:
        engine.add(sequence := make_sequence([1, 2, 3], max_tokens=12))
        while engine.has_work:
            engine.step()
        return list(sequence.tokens)

    alone = Engine(*tiny, EngineOptions(**OPTIONS))
    expected = answer(alone)
    alone.close()
    engine = Engine(*tiny, EngineOptions(**OPTIONS))
    thread = threading.Thread(target=engine.compile_ahead, args=(lambda: False,))
    thread.start()
    while thread.is_alive():
        assert answer(engine) == expected
    with compilation_cache.counting() as counts:
        num_programs = engine.warm_up(1)
    assert counts.compiled + counts.hits <= num_programs - len(engine.program_names)  # the small ones
    stopped = iter([False, True])
    engine.compile_ahead(lambda: next(stopped))
    engine.close()


def test_compiling_ahead_waits_while_weights_are_replaced(tiny):
    engine, failed = Engine(*tiny, EngineOptions(**OPTIONS)), []

    def compile_ahead() -> None:
        try:
            engine.compile_ahead(lambda: False)
        except Exception as error:
            failed.append(error)

    engine.weights.begin()
    engine.weights.write({"lm_head": tiny[1]["lm_head"] * 2}, copies=True)
    thread = threading.Thread(target=compile_ahead)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    engine.weights.finish()
    thread.join()
    assert not failed
    engine.close()


def test_a_gpu_sums_each_product_at_once():
    """XLA:GPU cuts the sums of a product with few columns into parts, each of them an array as large as the result."""
    if (reason := ahead_of_time.missing_compiler("h100")) is not None:
        pytest.skip(reason)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 4096), (4096, 1024))]

    def moved(program: Any) -> int:
        found = ahead_of_time.compile_for("h100", program, *shapes)
        return sum(move.num_bytes for move in HloProgram(found.program.as_text()).moves())

    read_and_written = 2 * (256 * 4096 + 4096 * 1024 + 256 * 1024)
    assert moved(LargeProgram(lambda x, w: x @ w)) == read_and_written
    assert moved(jax.jit(lambda x, w: x @ w)) > 1.5 * read_and_written


def test_a_loop_on_a_gpu_is_one_graph():
    if (reason := ahead_of_time.missing_compiler("h100")) is not None:
        pytest.skip(reason)

    def steps(x):
        return lax.while_loop(lambda x: x[0] < 9, lambda x: jnp.sin(x) + x.sum(), x)

    _, plan = compile_with_plan("h100", LargeProgram(steps), jax.ShapeDtypeStruct((256,), jnp.float32))
    assert (plan.num_graphs, plan.num_waits) == (1, 0)


def test_options_that_a_compiler_does_not_know_are_left_out(monkeypatch):
    known = "xla_cpu_parallel_codegen_split_count"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(compiling.COMPILER_OPTIONS, "gpu", {"xla_gpu_of_another_release": 1, known: 1})
    compiling.compiler_options.cache_clear()
    try:
        with pytest.warns(UserWarning, match="does not know xla_gpu_of_another_release"):
            assert compiling.compiler_options("gpu") == {known: 1}
    finally:
        compiling.compiler_options.cache_clear()
