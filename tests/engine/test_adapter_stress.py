"""Many adapters through few slots, while they are loaded, replaced and unloaded: every answer is that of its adapter.

Oracle: each adapter alone in an engine that reuses nothing; the answers of a few are those of merged models too.
"""

import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints_convert.adapters import merged
from jaxinfer import LLM, SamplingParams, compilation_cache
from jaxinfer.engine.request import RequestOptions
from jaxinfer.models.adapter import Adapter, LowRank
from jaxinfer.models.host_layers import all_layers
from jaxinfer.quantization.side_by_side import weight_at

MODULES = {"attention": ("q_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "down_proj")}
RANK, NUM_SLOTS, NUM_TOKENS = 2, 8, 5
OPTIONS: dict[str, Any] = {"max_seqs": 12, "max_model_len": 64, "num_pages": 60, "page_size": 8, "prefill_chunk": 32}
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
GROWTH = 48 * 2**20  # bytes of the process over the second half of the requests
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def shapes(llm: LLM) -> dict[str, tuple[int, int]]:
    """[in, out] of each weight that the adapters change."""
    params, found = all_layers(llm.params), {}
    for layer in range(llm.config.num_layers):
        for part, modules in MODULES.items():
            for module in modules:
                path = ("layers", str(layer), part, module)
                inputs, outputs = weight_at(params, (*path, "weight")).shape
                found[".".join(path)] = (inputs, outputs)
    return found


def make_adapter(seed: int, sizes: dict[str, tuple[int, int]]) -> Adapter:
    """Changes every layer by about half of what its weights give, so that keys, values and answers are others."""
    rng = np.random.default_rng(seed)

    def pair(inputs: int, outputs: int) -> LowRank:
        a, b = rng.normal(size=(inputs, RANK)) / inputs**0.5, rng.normal(size=(RANK, outputs))
        return LowRank(a.astype(np.float32), b.astype(np.float32), 1.0)

    return Adapter({name: pair(*size) for name, size in sizes.items()})


def make_prompts(rng: random.Random, count: int, vocab_size: int) -> list[list[int]]:
    """They share beginnings of several pages."""
    beginnings = [[rng.randrange(5, vocab_size) for _ in range(30)] for _ in range(2)]
    return [[*rng.choice(beginnings)[: rng.choice([9, 30])], *(rng.randrange(5, vocab_size) for _ in range(5))]
            for _ in range(count)]  # fmt: skip


def tokens_of(output: Any) -> tuple[int, ...]:
    return tuple(output.outputs[0].token_ids)


def answers_alone(
    model: Any, adapters: Sequence[Adapter], prompts: Sequence[list[int]]
) -> dict[tuple[str | None, int], tuple[int, ...]]:
    """The answers to each prompt with each adapter, by its fingerprint, and without one."""
    found: dict[tuple[str | None, int], tuple[int, ...]] = {}
    # As many slots as below, though one is used, so that the programs are the same.
    options = {**OPTIONS, "prefix_cache": False}
    with LLM(model, max_adapters=NUM_SLOTS, max_adapter_rank=RANK, **options) as llm:
        for adapter in (None, *adapters):
            if adapter is not None:
                llm.load_adapter("one", adapter, replace=True)
            name = None if adapter is None else "one"
            outputs = llm.generate(list(prompts), PARAMS, adapter=name, use_tqdm=False)
            key = None if adapter is None else adapter.fingerprint
            found |= {(key, number): tokens_of(output) for number, output in enumerate(outputs)}
    return found


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * PAGE_BYTES


@dataclass
class Traffic:
    """Requests for adapters by name, and what becomes of these names meanwhile.

    Attributes:
      adapters: all that are loaded at some time. names: that they get. prompts: of requests.
      expected: of each request that was sent, the fingerprint of its adapter and the number of its prompt.
    """

    llm: LLM
    adapters: Sequence[Adapter]
    names: Sequence[str]
    prompts: Sequence[list[int]]
    rng: random.Random
    loaded: dict[str, Adapter] = field(default_factory=dict)
    expected: dict[int, tuple[str | None, int]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    resident: list[int] = field(default_factory=list)
    num_replaced: int = 0
    num_unloaded: int = 0

    def load_each(self) -> None:
        for name in self.names:
            self.load(name)

    def load(self, name: str) -> None:
        adapter = self.rng.choice(self.adapters)
        self.llm.load_adapter(name, adapter, replace=name in self.loaded, keep_on_device=self.rng.random() < 0.02)
        self.loaded[name] = adapter

    def change_names(self) -> None:
        """Loads, replaces or unloads an adapter, sometimes."""
        action, name = self.rng.random(), self.rng.choice(self.names)
        if action < 0.3:
            self.num_replaced += name in self.loaded
            self.load(name)
        elif action < 0.4 and len(self.loaded) > 1 and name in self.loaded:
            self.llm.unload_adapter(name)
            del self.loaded[name]
            self.num_unloaded += 1

    def requests(self, count: int) -> Iterator[tuple[int, list[int], SamplingParams, RequestOptions]]:
        for number in range(count):
            self.change_names()
            name = self.rng.choice([*self.loaded, None, None])
            prompt = self.rng.randrange(len(self.prompts))
            fingerprint = None if name is None else self.loaded[name].fingerprint
            self.expected[number] = fingerprint, prompt
            self.used |= set() if fingerprint is None else {fingerprint}
            if number % 100 == 0:
                self.llm.engine.engines[0].scheduler.check()
                self.resident.append(resident_bytes())
            yield number, self.prompts[prompt], PARAMS, RequestOptions(adapter=name)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "num_adapters", "num_requests"),
    [("tiny", 20, 60), pytest.param("demo", 200, 2000, marks=[pytest.mark.slow, pytest.mark.alone])],
)
def test_every_answer_is_that_of_its_adapter(tiny, name, num_adapters, num_requests):
    model, rng = tiny if name == "tiny" else name, random.Random(7)
    with LLM(model, max_adapters=NUM_SLOTS, max_adapter_rank=RANK, seed=1, **OPTIONS) as llm:
        sizes = shapes(llm)
        adapters = [make_adapter(number, sizes) for number in range(num_adapters)]
        prompts = make_prompts(rng, 4, llm.config.vocab_size)
        started = time.perf_counter()
        alone = answers_alone(model, adapters, prompts)
        for prompt in range(len(prompts)):  # another adapter is noticed
            every = {alone[key, prompt] for key in (None, *(one.fingerprint for one in adapters))}
            assert len(every) > 0.98 * num_adapters
        told = f"{num_adapters} adapters alone: {time.perf_counter() - started:.1f} s"
        names = [f"name {number}" for number in range(max(num_adapters // 5, 2 * NUM_SLOTS))]
        traffic = Traffic(llm, adapters, names, prompts, rng)
        llm.warm_up()
        traffic.load_each()
        started, answered = time.perf_counter(), dict[int, tuple[int, ...]]()
        with compilation_cache.counting() as counts:
            for number, output in llm.generate_each(traffic.requests(num_requests), max_queued=40):
                assert not isinstance(output, ValueError), output
                assert number not in answered, "an answer came twice"
                answered[number] = tokens_of(output)
                expected = alone[traffic.expected[number]]
                assert answered[number] == expected, f"request {number} has the answer of another adapter"
        seconds = time.perf_counter() - started
        assert len(answered) == num_requests
        assert counts.compiled + counts.hits == 0
        scheduler = llm.engine.engines[0].scheduler
        scheduler.check()
        assert not scheduler.adapters.running
        assert not [one.name for one in scheduler.adapters.resident if one.is_unloaded]
        assert scheduler.counters.reused_tokens > 0
        assert scheduler.adapters.num_moved > NUM_SLOTS
        half, end = traffic.resident[len(traffic.resident) // 2], resident_bytes()
        print(
            f"{told}; {num_requests} requests with {len(traffic.used)} of them through {NUM_SLOTS} slots: "
            f"{seconds:.1f} s, {num_requests / seconds:.0f} requests/s, {scheduler.adapters.num_moved} moves, "
            f"{traffic.num_replaced} replaced, {traffic.num_unloaded} unloaded, "
            f"resident {half / 2**20:.0f} MiB at half, {end / 2**20:.0f} MiB at the end"
        )
        assert end - half < GROWTH
        if num_adapters == 200:
            assert len(traffic.used) > 150
            assert min(traffic.num_replaced, traffic.num_unloaded) > 50


@pytest.mark.slow
def test_an_adapter_alone_answers_as_its_merged_model(tiny):
    """The answers that those above are compared with."""
    config, params = tiny
    with LLM(tiny, **OPTIONS) as llm:
        adapters = [make_adapter(number, shapes(llm)) for number in range(2)]
    prompts = make_prompts(random.Random(3), 3, config.vocab_size)
    alone = answers_alone(tiny, adapters, prompts)
    for adapter in adapters:
        with LLM(merged(config, params, adapter), **OPTIONS) as llm:
            outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert [tokens_of(one) for one in outputs] == [alone[adapter.fingerprint, number] for number in range(3)]
