"""A disk tier: prompts' pages are there after a restart, where everything is the same; answers never differ."""

import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.tiers.prefix_store import PrefixStore, _checksum
from tests.engine.test_saved_states import MIXED
from tests.engine.test_states import random_params
from tests.engine.test_windows import WINDOWS, model_of
from tests.engine.tiers.test_host_tier import GIB, GREEDY, random_tokens
from tests.pallas_kernels.quick import quick

OPTIONS = {"max_seqs": 4, "max_model_len": 128, "prefill_chunk": 32, "num_pages": 60, "page_size": 4}
PROMPTS = [random_tokens(60, seed) for seed in range(3)]
STORES = {
    "plain": {},
    "int8": {"kv_dtype": "int8"},
    "fp8": {"kv_dtype": "fp8_e4m3"},
    "int4": {"kv_dtype": "int4"},
    "mesh": {"mesh": "model=2"},
    "sequence": {"mesh": "sequence=2"},
    "host": {"offload": 1},
}


def run(model, folder, prompts=PROMPTS, gib=GIB, params=GREEDY, **options):
    """A process's life: the answers with their log-probabilities, and the tokens that were read from the disk."""
    params = replace(params, logprobs=1)
    with LLM(model, **{**OPTIONS, **options}, host_cache_gib=gib, prefix_store=str(folder)) as llm:
        found = []
        for prompt in prompts:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            found.append([(one.token_ids, one.logprobs) for one in output.outputs])
            llm.engine.scheduler.check()
        return found, llm.engine.scheduler.counters.disk_read_tokens


def test_pages_of_weights_before_are_not_copied():
    """A sequence goes on with other weights and the keys that it has."""
    asked = []
    store = PrefixStore.__new__(PrefixStore)
    store._scheduler, store._page_size = SimpleNamespace(can_reuse=lambda sequence: True), 4
    store.fingerprint = SimpleNamespace(value=b"weights")
    pages = {"num_prompt": 8, "num_confirmed": 8, "salt": "", "keys": lambda *args: asked.append(args) or ()}
    for is_retained in (True, False):
        store._runner = SimpleNamespace(host_pages=SimpleNamespace(read=lambda *args: ()), caches=())
        store.save(SimpleNamespace(slot=0, pages=[], is_retained=is_retained, **pages))
        assert asked == ([] if is_retained else [(4, 8)])


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(STORES, "plain", "int8"))
def test_prompts_are_there_after_a_restart(tiny, tmp_path, name):
    expected, num_read = run(tiny, tmp_path / "pages", **STORES[name])
    assert num_read == 0
    longer = [[*prompt, 5] for prompt in PROMPTS]
    found, num_read = run(tiny, tmp_path / "pages", **STORES[name])
    assert [[tokens for tokens, _ in one] for one in found] == [[tokens for tokens, _ in one] for one in expected]
    assert num_read == 3 * 56  # all full pages but the one with the last token
    assert run(tiny, tmp_path / "pages", longer, **STORES[name])[1] == 3 * 60


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_system_prompt_of_10_000_tokens_is_there_after_a_restart(tiny, tmp_path):
    config = replace(tiny[0], max_position_embeddings=11_000)
    options = {"max_model_len": 10_100, "num_pages": 700, "page_size": 16, "prefill_chunk": 512, "max_seqs": 1}
    system = random_tokens(10_000, seed=7)
    prompts = [[*system, *random_tokens(5, seed)] for seed in (1, 2)]
    expected, _ = run((config, tiny[1]), tmp_path / "pages", prompts, 8 * GIB, **options)
    found, num_read = run((config, tiny[1]), tmp_path / "pages", prompts[1:], 8 * GIB, **options)
    assert num_read == 10_000
    assert found[0][0][0] == expected[1][0][0]


def test_other_weights_layouts_and_salts_find_nothing(tiny, tmp_path):
    run(tiny, tmp_path / "pages")
    config, params = tiny
    leaves, structure = jax.tree.flatten(params)
    leaves[3] = leaves[3].at[(0,) * leaves[3].ndim].add(1e-3)
    other = config, jax.tree.unflatten(structure, leaves)
    assert run(other, tmp_path / "pages")[1] == 0
    for options in ({"page_size": 8}, {"kv_dtype": "bfloat16"}, {"deterministic": True}):
        assert run(tiny, tmp_path / "pages", **options)[1] == 0, options
    assert run(tiny, tmp_path / "pages")[1] > 0


def test_damaged_files_are_computed_again(tiny, tmp_path):
    expected, _ = run(tiny, tmp_path / "pages")
    paths = sorted((tmp_path / "pages").glob("*/*.page"))
    for number, path in enumerate(paths):
        data = bytearray(path.read_bytes())
        data[-1 - 7 * number % len(data)] ^= 4
        path.write_bytes(data[:-1] if number % 3 == 0 else data)
    found, num_read = run(tiny, tmp_path / "pages")
    assert num_read == 0
    assert [[tokens for tokens, _ in one] for one in found] == [[tokens for tokens, _ in one] for one in expected]
    assert run(tiny, tmp_path / "pages")[1] == 3 * 56


@pytest.mark.parametrize("num_host_pages", quick([1, 5, 14], 5))
def test_host_memory_for_less_than_the_prompt(tiny, tmp_path, num_host_pages):
    """As much of the beginning as there is room for."""
    expected, _ = run(tiny, tmp_path / "pages")
    with LLM(tiny, **OPTIONS, host_cache_gib=GIB) as llm:
        size = llm.engine.runner.host_pages.sizes[0].page_bytes
    gib = (num_host_pages + 0.99) * size / 2**30
    found, num_read = run(tiny, tmp_path / "pages", gib=gib)
    assert num_read >= 4 * num_host_pages
    assert [[tokens for tokens, _ in one] for one in found] == [[tokens for tokens, _ in one] for one in expected]


# Answers prompts with a store until it is killed.
SERVER = """
import sys
import jax
from jaxinfer import LLM
from jaxinfer.models import init_params
from tests.engine.tiers.test_host_tier import GIB, GREEDY, random_tokens
from tests.engine.tiers.test_prefix_store import OPTIONS, PROMPTS
from tests.tiny import TINY
params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, init_params(TINY, jax.random.key(0)))
with LLM((TINY, params), **OPTIONS, host_cache_gib=GIB, prefix_store=sys.argv[1]) as llm:
    llm.warm_up()
    print("ready", flush=True)
    for seed in range(10**6):
        llm.generate([*PROMPTS, random_tokens(50, 100 + seed)], GREEDY, use_tqdm=False)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_that_is_killed_leaves_whole_pages(tiny, tmp_path):
    """Killed while it writes; the next one reads what there is, and answers as if nothing had happened."""
    folder, numbers = tmp_path / "pages", random.Random(0)
    expected, _ = run(tiny, tmp_path / "others")
    for _ in range(5):
        arguments = [sys.executable, "-c", SERVER, str(folder)]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(numbers.uniform(0.05, 0.5))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        sizes = {path.stat().st_size for path in folder.glob("*/*.page")}
        assert len(sizes) == 1
        found, num_read = run(tiny, folder)
        assert num_read > 0
        assert [[tokens for tokens, _ in one] for one in found] == [[tokens for tokens, _ in one] for one in expected]
        for path in folder.glob("*/*.page"):
            if numbers.random() < 0.5:
                path.unlink()


def test_together_with_several_answers_and_few_pages(tiny, tmp_path):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, n=2, ignore_eos=True)
    with LLM(tiny, **OPTIONS, prefix_cache=False) as llm:
        expected = [[one.token_ids for one in output.outputs] for output in llm.generate(PROMPTS, params)]
    for _ in range(2):
        with LLM(tiny, **{**OPTIONS, "num_pages": 26}, host_cache_gib=GIB, prefix_store=str(tmp_path / "a")) as llm:
            outputs = llm.generate(PROMPTS, params)
            assert [[one.token_ids for one in output.outputs] for output in outputs] == expected
            llm.engine.scheduler.check()


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "int4", "uint32"])
def test_a_checksum_sees_any_change(dtype):
    values = jnp.asarray(np.arange(48).reshape(4, 12) % 7, dtype)
    sums = {tuple(np.asarray(_checksum(values)).tolist())}
    for place in range(0, 48, 5):
        changed = values.at[divmod(place, 12)].set(values[divmod(place, 12)] + jnp.asarray(1, dtype))
        sums.add(tuple(np.asarray(_checksum(changed)).tolist()))
    sums.add(tuple(np.asarray(_checksum(values[::-1])).tolist()))
    assert len(sums) == 12


# Refusals.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_store": "x"}, "prefix_store='x': give a folder, and host_cache_gib"),
        ({"prefix_store": "", "host_cache_gib": 1}, "prefix_store=''"),
        ({"prefix_store": "x", "host_cache_gib": 1, "prefix_store_gib": 0}, "prefix_store_gib must be .*, got 0"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        EngineOptions(**options)


def test_models_whose_pages_do_not_hold_a_prompt_are_refused_by_name(tiny, tmp_path):
    windows, states = model_of(WINDOWS["two windows and full"]), (MIXED, random_params(MIXED))
    for model, more, message in (
        (windows, {}, "has layers with windows of 20, 8"),
        (states, {"page_size": 8, "max_model_len": 128}, "has layers that keep a state"),
        (tiny, {"draft": tiny}, "cannot be combined with a draft model"),
        (tiny, {"kv_policy": "sinks(4)+window(8)"}, r"cannot be combined with kv_policy='sinks\(4\)\+window\(8\)'"),
    ):
        options = {**OPTIONS, **more, "host_cache_gib": 16 * GIB, "prefix_store": str(tmp_path / "pages")}
        with pytest.raises(ValueError, match=message):
            LLM(model, **options)
