"""Training heads: it lowers the loss, resumes exactly, and what it saves drafts for its target."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

import checkpoints_convert
from jaxinfer import LLM, SamplingParams
from jaxinfer.training import corpus
from jaxinfer.training.head_data import HeadTextOptions, HeadTexts, answers
from jaxinfer.training.heads import HeadOptions, HeadTraining, train_head
from tests.random_params import random_params
from tests.tiny import TINY
from tests.training.process import run_python

TARGET = replace(TINY, num_layers=3, tie_word_embeddings=True)
OPTIONS = HeadOptions(
    "eagle3", num_steps=12, batch_size=4, length=32, draft_vocab_size=60, unroll=3, learning_rate=1e-2, warmup_steps=2,
    checkpoint_every=4, evaluate_every=6,
)  # fmt: skip
BLOCKS = replace(OPTIONS, kind="dflash", draft_vocab_size=0, block_size=4, num_layers=2)
TEXTS = HeadTextOptions(length=32, sampled=0.5, held_out_texts=4)
KINDS = {"eagle3": OPTIONS, "dflash": BLOCKS}


@cache
def target_params():
    return jax.tree.map(lambda leaf: 4 * leaf if leaf.ndim > 1 else leaf, random_params(TARGET, 7))


def prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(2, 97, size=random.integers(3, 9)).tolist() for _ in range(60)]


def generate(requests):
    """Counts up from the prompt's last token: quick, and a function of the request alone."""
    return [[(one.prompt[-1] + 1 + i) % 97 for i in range(one.num_tokens)] for one in requests]


def texts_in(folder, generate=generate) -> HeadTexts:
    return answers(prompts(), generate, TEXTS, folder, target="tiny", show=False)


def run(folder, options=OPTIONS, generate=generate):
    training = HeadTraining(TARGET, target_params(), texts_in(folder, generate), options)
    return train_head(training, work_dir=folder, show_progress=False)


def kill_process(folder, monkeypatch):
    """Ends a process in its seventh step."""
    code = f"""
        import os
        from tests.training import test_heads as t
        from jaxinfer.training import corpus
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return {kind: run(tmp_path_factory.mktemp(kind), options) for kind, options in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls_and_more_drafts_are_accepted(trained, kind):
    result = trained[kind]
    assert result.history[-1][1]["loss"] < 0.8 * result.history[0][1]["loss"]
    assert [step for step, values in result.history if "acceptance" in values] == [6, 12]
    assert len(result.after.by_position) == 3


@pytest.mark.parametrize("stop", [interrupt, pytest.param(kill_process, marks=pytest.mark.slow)])
def test_a_run_that_was_stopped_ends_with_the_same_weights(trained, tmp_path, monkeypatch, stop):
    stop(tmp_path, monkeypatch)

    def forbidden(requests):
        raise RuntimeError("all texts are there already")

    resumed, whole = run(tmp_path, generate=forbidden), trained["eagle3"]
    assert resumed.history == whole.history
    assert (resumed.before, resumed.after) == (whole.before, whole.after)
    for first, second in zip(jax.tree.leaves(whole.params), jax.tree.leaves(resumed.params), strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_head_opens_and_changes_no_answer(trained, tmp_path, kind):
    result = trained[kind]
    checkpoints_convert.save_huggingface(result.config, result.params, tmp_path / "head", "float32")
    config, params = checkpoints_convert.load(tmp_path / "head", dtype="float32")
    assert config == result.config
    jax.tree.map(np.testing.assert_array_equal, params, result.params)
    options = {"max_seqs": 4, "max_model_len": 64, "page_size": 8}
    asked = prompts()[:6], SamplingParams(max_tokens=20, temperature=0.0)
    with LLM((TARGET, target_params()), **options) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(*asked, use_tqdm=False)]
    with LLM((TARGET, target_params()), draft=str(tmp_path / "head"), num_draft_tokens=3, **options) as llm:
        drafted = [output.outputs[0].token_ids for output in llm.generate(*asked, use_tqdm=False)]
        assert llm.speculation_stats().proposed > 20
    assert drafted == plain
