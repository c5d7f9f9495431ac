"""Distillation: it resumes exactly, starts from true copies, and refuses what cannot work."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

import checkpoints_convert
from jaxinfer.models import ModelConfig, RopeConfig, abstract_params, init_params
from jaxinfer.training import corpus, texts
from jaxinfer.training.distill import (
    DistillOptions,
    Documents,
    distill,
    draft_config,
    projected_draft,
    pruned_draft,
    spread_layers,
)
from jaxinfer.training.head_data import HeadTexts
from jaxinfer.training.head_rows import DraftedText
from tests.engine.test_states import MODELS
from tests.engine.test_windows import WINDOWS, model_of
from tests.training.process import run_python

TARGET = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=3, num_heads=2,
    num_kv_heads=1, head_dim=8, rope=RopeConfig(rotary_dim=8), tie_word_embeddings=True, max_position_embeddings=64,
)  # fmt: skip
OPTIONS = DistillOptions(
    num_steps=12, batch_size=4, length=16, num_texts=300, min_prompt=2, max_prompt=6, on_policy=0.75, held_out_texts=4,
    checkpoint_every=4, evaluate_every=6, warmup_steps=2, learning_rate=1e-2,
)  # fmt: skip


@cache
def target_params():
    return jax.tree.map(lambda leaf: 5 * leaf if leaf.ndim > 1 else leaf, init_params(TARGET, jax.random.key(7)))


def documents() -> Documents:
    random = np.random.default_rng(0)
    return Documents.divide([random.integers(2, 32, size=40).tolist() for _ in range(20)], separator=0)


def generate(requests):
    """Counts up from the prompt's last token: quick, and a function of the request alone."""
    return [[(one.prompt[-1] + 1 + i) % 32 for i in range(one.num_tokens)] for one in requests]


def run(folder, options=OPTIONS, generate=generate, data=None):
    params = target_params()
    config = draft_config(TARGET, num_layers=1, hidden_size=8)
    initial = projected_draft(TARGET, params, config, jax.random.key(0))
    return distill(
        TARGET, params, config, initial, data or documents(), generate, options, work_dir=folder, show_progress=False
    )  # fmt: skip


def kill_process(folder, monkeypatch):
    """Ends a process in its seventh step."""
    code = f"""
        import os
        from tests.training import test_distill as t
        from jaxinfer.training import corpus, texts
        original = corpus.rows_at
        def rows_at(num_rows, step, *more):
            if step == 7:
                os._exit(9)
            return original(num_rows, step, *more)
        corpus.rows_at = rows_at
        from pathlib import Path
        t.run(Path({str(folder)!r}))
    """
    assert run_python(code).returncode == 9


def interrupt(folder, monkeypatch):
    """Raises in the seventh step."""
    original = corpus.rows_at

    def rows_at(num_rows, step, *more):
        if step == 7:
            raise KeyboardInterrupt
        return original(num_rows, step, *more)

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "rows_at", rows_at)
        with pytest.raises(KeyboardInterrupt):
            run(folder)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [interrupt, pytest.param(kill_process, marks=pytest.mark.slow)])
def test_a_run_that_was_stopped_ends_as_one_never_stopped(tmp_path, monkeypatch, stop):
    whole = run(tmp_path / "whole")
    stop(tmp_path / "killed", monkeypatch)

    def forbidden(requests):
        raise RuntimeError("all texts are there already")

    resumed = run(tmp_path / "killed", generate=forbidden)
    assert resumed.history == whole.history
    assert (resumed.before, resumed.after) == (whole.before, whole.after)
    for first, second in zip(jax.tree.leaves(whole.params), jax.tree.leaves(resumed.params), strict=True):
        np.testing.assert_array_equal(first, second)
    assert [step for step, values in whole.history if "acceptance" in values] == [6, 12]


def test_texts_written_before_an_interruption_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "CHUNK", 256)
    asked = []

    def breaks(requests):
        asked.append(len(requests))
        if len(asked) == 3:  # held out, 256 texts, then the other 44
            raise KeyboardInterrupt
        return generate(requests)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, generate=breaks)
    assert asked == [4, 256, 44]
    asked.clear()
    run(tmp_path, generate=lambda requests: (asked.append(len(requests)), generate(requests))[1])
    assert asked == [44]


@pytest.mark.slow
def test_another_run_is_not_mixed_in(tmp_path):
    run(tmp_path)
    with pytest.raises(ValueError, match=r"temperature=0\.6, not 1\.0"):
        run(tmp_path, replace(OPTIONS, temperature=1.0))


def test_a_short_text_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"a text of \d+ tokens where 16"):
        run(tmp_path, generate=lambda requests: [[1]] * len(requests))


def test_pruned_copies_are_exact():
    params = target_params()
    config, pruned = pruned_draft(TARGET, params, [0, 2])
    assert config == replace(TARGET, num_layers=2)
    for mine, its in ((pruned["layers"]["0"], params["layers"]["0"]), (pruned["layers"]["1"], params["layers"]["2"])):
        jax.tree.map(np.testing.assert_array_equal, mine, its)
    np.testing.assert_array_equal(pruned["embed"], params["embed"])
    windowed = replace(TARGET, sliding_windows=(None, 8, 4))
    assert pruned_draft(windowed, params, [2, 0])[0].sliding_windows == (4, None)
    with pytest.raises(ValueError, match=r"no layer 3: the target has layers 0\.\.2"):
        pruned_draft(TARGET, params, [0, 3])


def test_projected_embeddings_keep_what_can_be_kept():
    params = target_params()
    config = draft_config(TARGET, num_layers=1, hidden_size=16)
    whole = np.asarray(projected_draft(TARGET, params, config, jax.random.key(0))["embed"])
    np.testing.assert_allclose(whole @ whole.T, params["embed"] @ params["embed"].T, atol=1e-4)
    with pytest.raises(ValueError, match="width 12 is not a multiple of the target's head width 8"):
        draft_config(TARGET, num_layers=1, hidden_size=12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_draft_of_a_model_with_recurrent_layers_is_a_llama(kind):
    """Also where it has fewer layers than the target, each of which has a kind."""
    target = MODELS[kind]
    config = draft_config(target, num_layers=1, hidden_size=16)
    assert (config.architecture, config.vocab_size, config.recurrent_layers) == ("LlamaForCausalLM", 64, ())
    params = projected_draft(target, init_params(target, jax.random.key(0)), config, jax.random.key(1))
    assert jax.tree.map(lambda leaf: leaf.shape, params) == jax.tree.map(
        lambda leaf: leaf.shape, abstract_params(config)
    )


@pytest.mark.slow
def test_a_draft_of_layers_that_differ_is_a_llama(tmp_path):
    """Gemma 4's: with shared keys, two head widths and inputs of each layer. It is written and read as one."""
    target, params = model_of(WINDOWS["shared keys"])
    config = draft_config(target, num_layers=1, hidden_size=2 * target.head_dim)
    assert (config.architecture, config.kv_sources, config.layer_inputs) == ("LlamaForCausalLM", (), None)
    draft = projected_draft(target, params, config, jax.random.key(1))
    checkpoints_convert.save_huggingface(config, draft, tmp_path / "draft", "float32")
    assert checkpoints_convert.open_checkpoint(tmp_path / "draft").config == config


def test_documents_are_held_out_whole_and_by_what_they_say():
    texts = [[i] * 10 for i in range(1, 41)]
    found, again = Documents.divide(texts), Documents.divide(texts[::-1])
    assert len(found.held_out) == 2
    assert len(found.train) == 38
    for one, other in zip(found.held_out, again.held_out, strict=True):
        np.testing.assert_array_equal(one, other)
    single = Documents.divide([list(range(100))])
    assert (len(single.train[0]), len(single.held_out[0])) == (95, 5)
    np.testing.assert_array_equal(Documents.divide([[1, 2], [3]], separator=9).stream()[:1], [9])
    with pytest.raises(ValueError, match="no tokens"):
        Documents.divide([[]])


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"on_policy": 1.5}, "on_policy must be in 0..1, got 1.5"),
        ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
        ({"max_prompt": 16}, r"prompts of 2\.\.16 tokens must be shorter than length=16"),
        ({"num_texts": 2}, "num_texts=2 do not fill the 3"),
        ({"loss": "js"}, "loss='js' is none of fkl, rkl, tv"),
        ({"temperature": 0.0}, "temperature must be positive, got 0"),
    ],
)
def test_options_out_of_range_are_refused(change, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        run(tmp_path, replace(OPTIONS, **change))


@pytest.mark.slow
def test_held_out_files_are_in_a_fixed_order_and_no_tests():
    from jaxinfer.training.corpus import held_out_files

    files = held_out_files(40)
    assert held_out_files(30) == files[:30]
    names = [name for name, _ in files]
    assert names[0].startswith("lib/")
    assert len(set(names)) == 40
    assert not any("test" in name for name in names)
    assert not any(text.startswith("#") for _, text in files)
    with pytest.raises(ValueError, match="1000000 held-out files asked for"):
        held_out_files(1_000_000)


def test_what_the_target_wrote_already_is_learned(tmp_path):
    """Texts of different lengths, after prompts of different lengths; nothing is asked of the target."""
    random = np.random.default_rng(4)
    texts = [
        DraftedText(np.arange(size, dtype=np.int32) % 32, first) for size, first in random.integers(3, 16, (40, 2))
    ]
    texts = [text for text in texts if text.first < len(text.tokens)]
    asked, written = replace(OPTIONS, on_policy=1.0), HeadTexts(tuple(texts[4:]), tuple(texts[:4]))
    made, longer = (
        run(tmp_path / str(size), replace(asked, length=size), data=written, generate=None) for size in (16, 24)
    )
    losses = [values["loss"] for _, values in made.history]
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_allclose(losses, [values["loss"] for _, values in longer.history], rtol=1e-3)
    assert made.after.num_tokens == sum(len(text.tokens) - text.first for text in texts[:4])
    assert made.held_out == tuple(texts[:4])
    with pytest.raises(ValueError, match=r"on_policy=0\.75, and all the data are what the target wrote"):
        run(tmp_path / "other", data=written)


def test_layers_are_spread_from_the_first_to_the_last():
    assert spread_layers(30, 4) == [0, 10, 19, 29]
    assert (spread_layers(3, 1), spread_layers(3, 3)) == ([2], [0, 1, 2])
    with pytest.raises(ValueError, match="4 layers are more than the target's 3"):
        spread_layers(3, 4)
