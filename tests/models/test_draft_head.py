"""Draft heads against the libraries that publish them, from tests/oracle/golden/heads (`make golden-heads`)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints_convert
from jaxinfer.models import bind_draft_head
from jaxinfer.models.draft_head import DraftHead
from jaxinfer.speculative.drafts import HeadDraft, head_for
from tests.oracle.head_cases import (
    HEAD_CASES,
    NUM_STATES,
    NUM_STEPS,
    ROWS,
    SEEDS,
    HeadCase,
    golden,
    inputs,
    write_checkpoint,
    write_target,
)
from tests.pallas_kernels.quick import quick

TOLERANCE = 1e-5
CASES = {case.name: case for case in HEAD_CASES}


def dense(mask: np.ndarray, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """Attention of queries [T, Hq, K] to keys [S, Hkv, K] that the mask [T, S] shows; keys may be wider than values."""
    groups = q.shape[-2] // k.shape[-2]
    k, v = (jnp.repeat(x, groups, axis=-2) for x in (k, v))
    scores = jnp.einsum("thk,shk->hts", q, k, precision="highest") * options.get("scale", q.shape[-1] ** -0.5)
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hts,shk->thk", weights, v, precision="highest")


class Chains:
    """`attend` of the chains after each row: those of step 0 see the rows before, a later step of a row its own too."""

    def __init__(self):
        self.keys, self.places, self.steps = {}, [], []

    def begin(self, positions):
        self.places.append(np.asarray(positions))

    def __call__(self, layer, q, k, v, window, **options):
        keys = self.keys.setdefault(layer, [])
        keys.append((k, v))
        k, v = (jnp.concatenate([part[i] for part in keys]) for i in range(2))
        rows, at = self.places[0], self.places[len(keys) - 1]
        masks = [rows[None] <= rows[:, None], *[np.eye(len(rows), dtype=bool)] * (len(keys) - 1)]
        if window is not None:
            places = self.places[: len(keys)]
            masks = [mask & (place > at[:, None] - window) for mask, place in zip(masks, places, strict=True)]
        return dense(np.concatenate(masks, axis=1), q, k, v, **options)


def opened(case: HeadCase, seed: int, folder) -> DraftHead:
    """The head with what it takes of its target, as programs have it."""
    write_checkpoint(folder / "head", case, seed)
    if case.kind == "mtp" and case.form != "speculators":
        with checkpoints_convert.open_checkpoint(folder / "head", dtype="float32", is_mtp=True) as checkpoint:
            config, params = checkpoint.config, checkpoints_convert.load_params(checkpoint)
        target = checkpoints_convert.load(folder / "head", dtype="float32")
    else:
        config, params = checkpoints_convert.load(folder / "head", dtype="float32")
        target = checkpoints_convert.load(write_target(folder / "target", case, seed), dtype="float32")
    config, taps = head_for(config, target[0])
    if case.kind != "mtp":
        wanted = tuple("embed" if tap == 0 else f"layers.{tap - 1}.residual" for tap in case.taps)
        assert taps == wanted
    ((config, params),) = HeadDraft(case.name, config, params, taps).models(*target)
    return bind_draft_head(config, params)


def drafted(head, tokens, states) -> tuple[np.ndarray, np.ndarray]:
    """Logits [steps, T, Vd] and states of chains after each row: a step pairs the next token with what came out."""
    logits, outputs, attend, rows = [], [], Chains(), np.arange(NUM_STATES)
    for step in range(NUM_STEPS):
        attend.begin(rows + step)
        own = jnp.asarray(tokens[step + 1 : step + 1 + NUM_STATES])
        out, states = head.pairs(own, states, jnp.asarray(rows + step), attend)
        logits.append(head.logits(out))
        outputs.append(states)
    return np.asarray(logits), np.asarray(outputs)


def log_softmax(logits) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))


PAIRS = [name for name, case in CASES.items() if case.kind in ("eagle3", "mtp")]
BLOCKS = [name for name, case in CASES.items() if case.kind in ("dflash", "dflash2", "dspark")]


@pytest.mark.matrix("eagle3_llama-0", "eagle3_norms-0", "eagle3_norm_before_residual-0", "mtp_qwen3_5_speculators-0")
@pytest.mark.parametrize("seed", quick(SEEDS, 0))
@pytest.mark.parametrize("name", PAIRS)
def test_chains_of_pairs(tmp_path, name, seed):
    case = CASES[name]
    head = opened(case, seed, tmp_path)
    given, (_, wanted) = inputs(case, seed), golden(case)
    if case.kind == "mtp":
        states = head.states([jnp.asarray(given["states"])])
    else:
        states = head.states(jnp.split(jnp.asarray(given["taps"]), len(case.taps), axis=1))
    rows = np.array(ROWS) if case.kind == "mtp" else np.arange(NUM_STATES)
    logits, outputs = (x[:, rows] for x in drafted(head, given["tokens"], states))
    kind = "chain" if case.kind == "mtp" else "position_logits" if f"{seed}.position_logits" in wanted else "logits"
    assert np.abs(log_softmax(logits) - log_softmax(wanted[f"{seed}.{kind}"])).max() <= TOLERANCE
    of_states = wanted[f"{seed}.{'position_states' if kind == 'position_logits' else 'states'}"]
    assert np.abs(outputs - of_states).max() <= TOLERANCE * np.abs(of_states).max()


def block_attend(head, context: int, anchor: int, size: int, keys):
    """`attend` of a block at an anchor to the keys of the context before it."""

    def attend(layer, q, k, v, window, **options):
        is_causal = layer in head.head.causal_layers
        stored = [x[:context] for x in keys[layer]]
        k, v = (jnp.concatenate([old, new[0]]) for old, new in zip(stored, (k, v), strict=True))
        at, own = np.arange(anchor + size), np.arange(anchor, anchor + size)
        mask = (at[None] <= own[:, None]) if is_causal else np.ones((size, anchor + size), bool)
        if window is not None:
            mask &= (at[None] > own[:, None] - window) if is_causal else (at[None] >= anchor - window)
        return dense(mask, q[0], k, v, **options)[None]

    return attend


class Stored:
    def __init__(self):
        self.keys = {}

    def store(self, layer, k, v):
        self.keys[layer] = k, v


def blocks_after(head, tokens, states):
    """A function of an anchor: the states [B, D] of its block, after the states of all tokens."""
    stored, size = Stored(), head.head.block_size
    head.store_context(states, jnp.arange(NUM_STATES), stored)

    def hidden(anchor):
        own = np.full(size, head.head.mask_token)
        own[0] = tokens[anchor]
        attend = block_attend(head, anchor, anchor, size, stored.keys)
        return head.block(jnp.asarray(own)[None], anchor + jnp.arange(size)[None], attend)[0]

    return hidden


@pytest.mark.matrix("dflash-0", "dflash2-0", "dspark_gated-0", "dspark_rnn-0")
@pytest.mark.parametrize("seed", quick(SEEDS, 0))
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(tmp_path, name, seed):
    case = CASES[name]
    head = opened(case, seed, tmp_path)
    given, (_, wanted) = inputs(case, seed), golden(case)
    states, size = head.states(jnp.split(jnp.asarray(given["taps"]), len(case.taps), axis=1)), head.head.block_size
    hidden_of = blocks_after(head, given["tokens"], states)
    # A window of causal layers is counted from each token, others from the root.
    kind = "position_logits" if head.head.causal_layers and f"{seed}.position_logits" in wanted else "logits"
    for number, anchor in enumerate(case.anchors):
        hidden = hidden_of(anchor)
        logits, true = head.logits(hidden), given["tokens"][anchor : anchor + size]
        before = jnp.asarray(true if head.head.drafts_at_root else np.array([true[0], *true[:-1]]))
        if head.markov is not None:
            memory, rows = head.markov.start(hidden[0]), []
            embedded = head.markov.embedding(before, hidden.dtype)
            for slot in range(size):
                memory, bias = head.markov(memory, embedded[slot], hidden[slot])
                rows.append(logits[slot] + bias)
            logits = jnp.stack(rows)
            confidence = head.confidence(hidden, embedded)
            assert np.abs(confidence - wanted[f"{seed}.confidence"][number]).max() <= TOLERANCE * 10
        assert np.abs(log_softmax(logits) - log_softmax(wanted[f"{seed}.{kind}"][number])).max() <= TOLERANCE
        if head.selector is not None and kind == "logits":
            scored = np.asarray(head.selector(logits, hidden, before))
            at = wanted[f"{seed}.candidates"][number]
            difference = np.take_along_axis(scored, at, -1) - wanted[f"{seed}.scores"][number]
            assert np.abs(difference).max() <= TOLERANCE * 10
            best = np.argsort(-scored, axis=-1)[:, : at.shape[1]]
            assert np.array_equal(np.sort(best, axis=-1), np.sort(at, axis=-1))
