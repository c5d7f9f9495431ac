"""A policy in one file, plugged in without a change of the product: the proof of `CachePolicy`.

"halves(N)" keeps a number beside the keys of each page (the mean of its values, which later pages add to what they
attend to), drops tokens at page borders in odd layers (a window of N) and at a prompt's end in even ones (all but the
first page and the last, about N tokens), there in a pass of its own. One answer: alone and together, however prompts
are cut, with prefix hits, preemption, n-gram drafts and the host tier; and on the scheduler's fake device.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.cache.paged import LeafedPages, visible_tables
from jaxinfer.cache.policy import kinds
from jaxinfer.cache.policy.contract import CachePolicy, EndWork, LayerPages, SlotRows, StepRows
from jaxinfer.cache.policy.row_parts import row_places
from jaxinfer.cache.ragged import AttentionByLayer
from jaxinfer.engine.cache_groups import CacheGroup, most_pages
from jaxinfer.engine.scheduler import RequestTooLargeError, Scheduler, SchedulerOptions
from jaxinfer.engine.tiers import host_pages
from pallas_kernels.paged_attention.layout import from_stored, gather, page_shape
from tests.engine import random_work
from tests.engine.fake_device import Engine
from tests.engine.test_policies import NUM_PROMPTS, answers, check_everything, model_of, open_llm
from tests.engine.test_windows import check_idle

POLICY, WEIGHT = "halves(24)", 0.5


@dataclass(frozen=True)
class HalvesEnd:
    """A `PromptEnd`: the first page and the last `num_kept` tokens without it, or less than a page more."""

    num_kept: int
    page_size: int
    num_observed: int = 5
    name: str = "halves"
    order: int = 0

    def num_dropped(self, num_prompt: int) -> int:
        return max(num_prompt - self.num_kept, 0) // self.page_size

    @property
    def most_pages(self) -> int:
        return self.num_kept // self.page_size + 2

    def kept_places(self, numbers) -> list[int]:
        """For the fake device."""
        first = self.page_size * (1 + self.num_dropped(len(numbers)))
        return [*range(self.page_size), *range(first, len(numbers))]


@dataclass(frozen=True)
class Halves(CachePolicy):
    budget: int

    drops: ClassVar[bool] = True
    is_same_in_prompts: ClassVar[bool] = False
    leaves_name: ClassVar[str] = "means"

    def __str__(self) -> str:
        return f"halves({self.budget})"

    def layers(self, config) -> tuple[LayerPages, ...]:
        ended = LayerPages("ended", at_end=HalvesEnd(self.budget, self.page_size))
        return tuple(LayerPages("windowed", self.budget) if layer % 2 else ended for layer in range(config.num_layers))

    def page_leaves(self, config, layer: int, pages: Any, dtype: str, layout: str) -> Any:
        num_pages = jax.tree.leaves(pages)[0].shape[0]
        return jax.ShapeDtypeStruct((num_pages, config.num_kv_heads_of(layer), config.head_dim_of(layer)), jnp.float32)

    def attend_step(self, config, cache, page_tables, rows: StepRows) -> Any:
        attend = super().attend_step(config, cache.bare, page_tables, rows)
        found = row_places(rows.token_slots, rows.query_starts, rows.lengths, rows.ends)
        seen = visible_tables(cache, page_tables, rows.ends, rows.lengths)
        return MeanAttention(
            self, attend, cache, _by_group(*seen, rows.ends, found.slot, found.position, found.is_real)
        )

    def attend_slots(self, config, cache, page_tables, rows: SlotRows) -> Any:
        attend = super().attend_slots(config, cache.bare, page_tables, rows)
        slot = jnp.repeat(jnp.arange(rows.lengths.shape[0]), rows.count)
        offset = jnp.tile(jnp.arange(rows.count), rows.lengths.shape[0])
        ends = rows.positions + rows.lengths
        seen = visible_tables(cache, page_tables, ends, rows.lengths)
        places = rows.positions[slot] + offset, offset < rows.lengths[slot]
        return MeanAttention(self, attend, cache, _by_group(*seen, ends, slot, *places))

    def attend_end(self, work: EndWork) -> Any:
        nothing = jnp.zeros_like(work.positions)
        rows = [GroupRows(one.page_table[None], nothing, work.positions, nothing == 0) for one in work.prompts]
        return MovingAttention(self, work.attend(work.cache.bare), work.cache, rows, work.prompts)


class GroupRows(NamedTuple):
    """T rows in a group of layers: page tables [S, P], each row's slot and place in its table, whether it counts."""

    table: jax.Array
    slot: jax.Array
    place: jax.Array
    is_real: jax.Array


def _by_group(tables, lengths, ends, slot, position, is_real) -> list[GroupRows]:
    lengths = lengths if isinstance(lengths, tuple) else (lengths,) * len(tables)
    return [
        GroupRows(table, slot, position - (ends - length)[slot], is_real)
        for table, length in zip(tables, lengths, strict=True)
    ]


class MeanAttention(AttentionByLayer):
    def __init__(self, policy: Halves, attend, cache, rows: list[GroupRows]):
        self._policy, self._attend, self._before, self._layers = policy, attend, cache, list(cache.layers)
        self._rows = rows

    def of_layer(self, layer: int):
        window = self._policy.budget if layer % 2 else None
        rows = self._rows[self._before.group_of(layer)]
        return MeanLayer(
            self._attend.of_layer(layer), self._layers[layer].leaves, rows, (window, self._policy.page_size)
        )

    def update(self, layer: int, state: LeafedPages) -> None:
        self._layers[layer] = state
        self._attend.update(layer, state.pages)

    @property
    def cache(self):
        return self._attend.cache.with_leafed(self._layers)


class MovingAttention(MeanAttention):
    def __init__(self, *arguments):
        *arguments, self._prompts = arguments
        super().__init__(*arguments)

    @property
    def cache(self):
        cache = super().cache
        return replace(cache, layers=tuple(self._moved(cache, *pair) for pair in enumerate(cache.layers)))

    def _moved(self, cache, layer: int, pages: LeafedPages) -> LeafedPages:
        prompt = self._prompts[cache.group_of(layer)]
        if not (count := prompt.targets.shape[0]):
            return pages
        number = jnp.arange(count)
        column = jnp.where(number == 0, 0, number + prompt.num_dropped)
        sources = prompt.page_table.at[column].get(mode="clip")
        return jax.tree.map(lambda leaf: leaf.at[prompt.targets].set(leaf[sources], mode="drop"), pages)


@jax.tree_util.register_pytree_node_class
class MeanLayer:
    def __init__(self, attend, means, rows: GroupRows, static):
        self._attend, self._means, self._rows, self._static = attend, means, rows, static

    def tree_flatten(self):
        return (self._attend, self._means, self._rows), self._static

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(*children, static)

    @property
    def state(self) -> LeafedPages:
        return LeafedPages(self._attend.state, self._means)

    def __call__(self, q, k, v, window, **options):
        window, size = self._static
        out = self._attend(q, k, v, window, **options)
        padding = q.shape[0] - self._rows.slot.shape[0]
        table, slot, place, is_real = self._rows.table, *(jnp.pad(x, (0, padding)) for x in self._rows[1:])
        pages = self._attend.state
        shape = page_shape(pages, *k.shape[-2:])
        own, is_full = place // size, is_real & (place % size == size - 1)
        ids = table.at[slot, own].get(mode="clip")
        stored = gather(pages, jnp.where(is_full, ids, 0), shape)
        scales = None if stored.v_scales is None else stored.v_scales.swapaxes(1, 2)
        mean = from_stored(stored.v, scales).mean(axis=1)
        self._means = self._means.at[jnp.where(is_full, ids, shape.num_pages)].set(mean, mode="drop")
        column = jnp.arange(table.shape[1])
        is_seen = column < own[:, None]
        if window is not None:
            is_seen &= column * size > place[:, None] - window
        found = jnp.where(is_seen[:, :, None, None], self._means[table[slot]], 0)
        extra = found.sum(axis=1) / jnp.maximum(is_seen.sum(axis=1), 1)[:, None, None]
        return out + WEIGHT * jnp.repeat(extra, q.shape[1] // k.shape[1], axis=1).astype(out.dtype)


@pytest.fixture(scope="module", autouse=True)
def registered():
    kinds.register(("halves",), Halves)
    yield
    kinds._KINDS.pop(("halves",))


@pytest.fixture(scope="module")
def model():
    return model_of((None, None, None))


def open_toy(model, **options):
    return open_llm(model, **{"kv_policy": POLICY, **options})


@pytest.fixture(scope="module")
def expected(model, registered):
    with open_toy(model, prefill_chunk=128) as llm:
        return [answers(llm, [number])[0] for number in range(NUM_PROMPTS)]


def least_pages(pools) -> list[int]:
    """Pages that the longest sequence needs, and while its prompt moves."""
    return [max(pools.least_pages(128, prompt)[group] for prompt in (1, 100)) for group in range(len(pools.all))]


VARIANTS = {
    "chunks of 16": {"prefill_chunk": 16},
    "n-grams, chunks of 5": {"prefill_chunk": 5, "draft": "ngram", "num_draft_tokens": 4},
    "a model": {"draft": (None,), "num_draft_tokens": 3},
    "deterministic": {"deterministic": True},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "variant", [pytest.param(one, marks=[] if "n-grams" in one else pytest.mark.slow) for one in VARIANTS]
)
def test_one_answer(model, expected, variant):
    with open_toy(model, **VARIANTS[variant]) as llm:
        assert llm.explain().to_dict()["cache"]["  of these means"] > 0
        check_everything(llm, expected, least_of=least_pages)
    assert len({str(one) for one in expected}) > 9


def from_host_memory(model) -> list:
    with open_toy(model, host_cache_gib=0.01, num_pages=40, max_seqs=2) as llm:
        for _ in range(2):
            found = [answers(llm, [number])[0] for number in range(NUM_PROMPTS)]
        assert llm.engine.scheduler.counters.host_hit_tokens > 100
        check_idle(llm)
    return found


@pytest.mark.slow
def test_pages_come_back_from_host_memory_with_their_means(model, expected, monkeypatch):
    assert from_host_memory(model) == expected
    scatter = host_pages.scatter_pages

    def is_leafed(part) -> bool:
        return isinstance(part, LeafedPages)

    def without_means(mesh, parts, rows, ids):
        parts = scatter(mesh, parts, rows, ids)

        def forget(one):
            return one._replace(leaves=one.leaves.at[ids].set(0, mode="drop")) if is_leafed(one) else one

        return jax.tree.map(forget, parts, is_leaf=is_leafed)

    monkeypatch.setattr(host_pages, "scatter_pages", without_means)
    assert from_host_memory(model) != expected


@pytest.mark.slow
def test_it_is_no_other_policy(model, expected):
    for policy in (None, "sinks(8)+window(16)", "halves(40)"):
        with open_toy(model, kv_policy=policy) as llm:
            assert answers(llm, range(NUM_PROMPTS)) != expected


def with_halves(options, rng):
    """Groups of both kinds, some as small as can be."""
    size = options.page_size
    window, end = rng.choice([5, 9, 17]), HalvesEnd(size + 5 + rng.randint(0, 12), size)
    least = most_pages(window, 70, end.num_observed, size) + 1
    others = (CacheGroup(rng.choice([least, 2 * least, 60]), window),)
    return replace(options, policy=Halves(window, page_size=size), at_end=end, more_groups=others)


def test_the_end_of_a_prompt_needs_room_in_every_group():
    """Its last tokens are computed together: a window's pool that is a page too small for them is refused, where the
    prompt would wait for ever."""

    def options(num_pages: int) -> SchedulerOptions:
        own = {"policy": Halves(5, page_size=1), "at_end": HalvesEnd(8, 1), "more_groups": (CacheGroup(num_pages, 5),)}
        return SchedulerOptions(num_pages=90, page_size=1, max_seqs=1, prefill_chunk=4, **own)

    least = most_pages(5, 49, HalvesEnd.num_observed, 1) + 1
    with pytest.raises(
        RequestTooLargeError, match=f"need {least - 1} pages of 1 tokens, but the cache has {least - 2}"
    ):
        Scheduler(options(least - 1)).check_fits(40, 10)
    Scheduler(options(least)).check_fits(40, 10)
    engine = Engine(options(least))
    engine.add([*range(1, 41)], 10)
    engine.drain()
    assert engine.num_compacted == 1


def run_random_work(monkeypatch, seeds, num_operations: int) -> None:
    monkeypatch.setattr(random_work, "with_budgets", with_halves)
    done = moved = preemptions = reused = back = 0
    for seed in seeds:
        work = random_work.RandomWork(seed, has_budgets=True, has_host=seed % 3 == 0)
        engine = work.run(num_operations // len(seeds))
        done, moved, back = done + engine.num_operations, moved + engine.num_compacted, back + engine.num_back
        preemptions += engine.scheduler.counters.num_preemptions
        reused += engine.scheduler.counters.reused_tokens
    assert done >= num_operations
    assert min(moved, preemptions, reused, back) > 0


@pytest.mark.slow
def test_random_work_gives_one_answer(monkeypatch):
    run_random_work(monkeypatch, range(40), 10_000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_operations_give_one_answer(monkeypatch):
    run_random_work(monkeypatch, range(1000, 1400), 1_000_000)
