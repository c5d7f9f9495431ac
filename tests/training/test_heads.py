"""Training heads: it lowers the loss, resumes exactly, and what it saves drafts for its target."""

import os
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

import checkpoints_convert
from jaxinfer import LLM, SamplingParams
from jaxinfer.training import corpus, texts
from jaxinfer.training.head_data import HeadTextOptions, HeadTexts, answers
from jaxinfer.training.head_meter import acceptance_of
from jaxinfer.training.heads import HeadOptions, HeadTraining, is_stalled, train_head
from tests.pallas_kernels.quick import quick
from tests.random_params import random_params
from tests.tiny import TINY
from tests.training.process import run_python

TARGET = replace(TINY, num_layers=3, tie_word_embeddings=True)
OPTIONS = HeadOptions(
    "eagle3", num_steps=24, batch_size=4, length=32, draft_vocab_size=60, unroll=3, learning_rate=1e-2, warmup_steps=2,
    checkpoint_every=4, evaluate_every=12,
)  # fmt: skip
BLOCKS = replace(OPTIONS, kind="dflash", draft_vocab_size=0, block_size=4, num_layers=2)
TEXTS = HeadTextOptions(length=32, sampled=0.5, held_out_texts=8)
KINDS = {"eagle3": OPTIONS, "dflash": BLOCKS}


@cache
def target_params():
    """Large enough that its choices are not close."""
    params = jax.tree.map(lambda leaf: 4 * leaf if leaf.ndim > 1 else leaf, random_params(TARGET, 7))
    return {**params, "embed": 8 * params["embed"]}


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls(trained, kind):
    result = trained[kind]
    assert result.history[-1][1]["loss"] < 0.7 * result.history[0][1]["loss"]
    assert [step for step, values in result.history if "acceptance" in values] == [12, 24]
    assert len(result.after.by_position) == 3
    assert result.num_steps == 24
    assert acceptance_of(result.drafted) == result.after
    assert sum(len(text.tokens) for text in result.drafted) == result.after.num_tokens


@pytest.mark.slow
def test_what_is_drafted_is_listed_by_text(trained, tmp_path):
    held_out = texts_in(tmp_path).held_out
    listed = sorted(text.tokens.tolist() for text in trained["eagle3"].drafted)
    assert listed == sorted(text.tokens[text.first :].tolist() for text in held_out)


@pytest.mark.parametrize("kind", quick(KINDS, "eagle3"))
def test_bfloat16_learns_as_float32_does(trained, kind, tmp_path):
    """The loss curve to a few percent; what is trained is float32, and is not rounded between steps."""
    result = run(tmp_path, replace(KINDS[kind], compute_dtype="bfloat16", stores_states=True))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(result.params)} <= {"float32", "int32"}
    assert any((leaf != leaf.astype("bfloat16").astype("float32")).any() for leaf in jax.tree.leaves(result.params))
    own, other = ([values["loss"] for _, values in one.history] for one in (result, trained[kind]))
    assert own != other
    np.testing.assert_allclose(own, other, rtol=0.1)


def test_the_first_steps_learn_one_token(tmp_path):
    """As a run whose chains have one step; then chains unroll."""
    by_share, alone = (
        run(tmp_path / name, replace(OPTIONS, **change))
        for name, change in (("by_share", {"one_step": 0.5}), ("alone", {"unroll": 1}))
    )
    shared, first = (dict(result.history) for result in (by_share, alone))
    assert shared[10] == first[10]
    assert set(shared[10]) == {"loss", "agreement_1"}
    assert {"agreement_1", "agreement_2", "agreement_3"} < set(shared[20])
    assert shared[20]["loss"] != first[20]["loss"]


@pytest.mark.slow
def test_stored_states_train_as_those_that_are_computed_again(trained, tmp_path):
    """Up to their rounding; they are computed once, also over an interruption."""
    options = replace(OPTIONS, stores_states=True)
    stored = run(tmp_path, options)
    first, again = (result.history[0][1]["loss"] for result in (trained["eagle3"], stored))
    assert first == pytest.approx(again, rel=0.05)
    assert first != again
    files = sorted((tmp_path / "states").iterdir())
    written = [path.stat().st_mtime_ns for path in files]
    files[-1].unlink()
    repeated = run(tmp_path, options)
    assert [path.stat().st_mtime_ns for path in files[:-1]] == written[:-1]
    jax.tree.map(np.testing.assert_array_equal, repeated.params, stored.params)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_run_that_is_stopped_while_it_writes_files_makes_nothing_twice(trained, tmp_path, monkeypatch):
    """Between writing a file and its name: of texts, and of a checkpoint."""
    asked, replace_file = [], os.replace

    def keep(requests):
        asked.extend(requests)
        return generate(requests)

    def stop_before(name):
        def replaced(source, path):
            if Path(path).name == name:
                raise KeyboardInterrupt
            replace_file(source, path)

        return replaced

    monkeypatch.setattr(texts, "CHUNK", 16)
    for name in ("000016.npy", "00000008.npz"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", stop_before(name))
            with pytest.raises(KeyboardInterrupt):
                run(tmp_path, generate=keep)
    resumed, whole = run(tmp_path, generate=keep), trained["eagle3"]
    assert resumed.history == whole.history
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    again = [one for one, count in Counter(asked).items() if count > 1]
    assert len(again) == 16, "the texts of the file that was not there"
    assert len(set(asked)) == whole.num_texts + len(list(np.load(tmp_path / "held_out" / "000000.npy")))


@pytest.mark.slow
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


def test_training_ends_where_acceptance_has_not_risen():
    def history(*values):
        return [(10 * i, {"loss": 1.0, "tokens_per_round": value}) for i, value in enumerate(values)]

    assert not is_stalled(history(1.0, 1.2, 1.1), 2)
    assert is_stalled(history(1.2, 1.2, 1.1), 2)
    assert not is_stalled(history(1.2, 1.2, 1.1), 0)
    assert not is_stalled([], 1)


@pytest.mark.slow
def test_a_run_ends_early_and_stays_ended(tmp_path):
    options = replace(OPTIONS, num_steps=200, evaluate_every=2, patience=1, learning_rate=1e-9)
    first = run(tmp_path, options)
    assert first.num_steps < 10
    assert run(tmp_path, options).history == first.history


@pytest.mark.slow
def test_the_steps_of_a_time_are_chosen_once(tmp_path):
    options = replace(OPTIONS, num_steps=None, minutes=0.1)
    training = HeadTraining(TARGET, target_params(), texts_in(tmp_path), options)
    with pytest.raises(ValueError, match=r"0 s of 0\.1 minutes are left, and a step takes .* s: give more"):
        train_head(training, work_dir=tmp_path, show_progress=False, began=0.0)
    (tmp_path / "schedule.json").write_text('{"num_steps": 11}')
    assert train_head(training, work_dir=tmp_path, show_progress=False, began=0.0).num_steps == 11


def test_memory_is_estimated(trained, tmp_path):
    training = HeadTraining(TARGET, target_params(), texts_in(tmp_path), OPTIONS)
    parts = training.memory()
    own = sum(leaf.nbytes for leaf in jax.tree.leaves(trained["eagle3"].params) if leaf.dtype == "float32")
    assert parts["the head, its gradients and its optimizer"] == pytest.approx(5 * own, rel=0.05)
    assert parts["the target as float32"] == 0


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "medusa"}, "kind='medusa' is none of eagle3, dflash"),
        ({"draft_vocab_size": 98}, "98 tokens is more than the target's 97"),
        ({"taps": (0, 1, 4)}, "taps=0,1,4: the target has states 0 to 3"),
        ({"length": 1000}, "length=1000 is more than the 128"),
        ({"minutes": 1.0}, "give num_steps or minutes"),
        ({"unroll": 0}, "unroll must be positive, got 0"),
        ({"num_layers": 2}, "has one layer, got num_layers=2"),
    ],
)
def test_options_out_of_range_are_refused(change, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        HeadTraining(TARGET, target_params(), texts_in(tmp_path), replace(OPTIONS, **change))


@pytest.mark.slow
def test_another_run_is_not_mixed_in(tmp_path):
    run(tmp_path, replace(OPTIONS, num_steps=1))
    with pytest.raises(ValueError, match="unroll=3, not 2"):
        run(tmp_path, replace(OPTIONS, num_steps=1, unroll=2))
    with pytest.raises(ValueError, match="of a run with target='tiny', not 'other'"):
        answers(prompts(), generate, TEXTS, tmp_path, target="other", show=False)


def test_answers_leave_room_and_are_sampled_by_share(tmp_path):
    asked = []

    def keep(requests):
        asked.extend(requests)
        return generate(requests)

    long = [list(range(2, 30))]
    options = replace(TEXTS, num_answers=100)
    texts = answers([*prompts(), *long], keep, options, tmp_path, target="tiny", show=False)
    training = [one for one in asked if one.seed >= 0][len(texts.held_out) :]
    assert len(training) == 100
    assert not any(len(one.prompt) > 24 for one in asked)
    assert all(one.num_tokens == 32 - len(one.prompt) for one in asked)
    first, others = training[:56], training[56:]
    assert 10 < sum(one.temperature > 0 for one in first) < 46
    assert all(one.temperature > 0 for one in others)  # a prompt's second answer
    assert all(one.temperature == 0 for one in asked[: len(texts.held_out)])


def test_what_draft_tokens_weigh():
    np.testing.assert_allclose(OPTIONS.step_weights, [1, 0.8, 0.64], rtol=1e-6)
    np.testing.assert_allclose(replace(BLOCKS, block_size=4).step_weights, np.exp([0, -0.5, -1.0]), rtol=1e-6)


def test_memory_counts_a_copy_of_the_target_in_another_dtype(tmp_path):
    """Its own arrays are used where they have the dtype; an unknown dtype is refused."""
    by_dtype = {
        dtype: HeadTraining(TARGET, target_params(), texts_in(tmp_path), replace(OPTIONS, compute_dtype=dtype)).memory()
        for dtype in ("float32", "bfloat16")
    }
    params = jax.tree.map(jax.numpy.asarray, target_params())
    own = HeadTraining(TARGET, params, texts_in(tmp_path), OPTIONS).memory()
    assert own["the target as float32"] == 0
    in_bfloat16 = replace(OPTIONS, compute_dtype="bfloat16")
    copied = HeadTraining(TARGET, params, texts_in(tmp_path), in_bfloat16).memory()["the target as bfloat16"]
    assert copied == by_dtype["bfloat16"]["the target as bfloat16"]
    assert copied == 2 * sum(leaf.size for leaf in jax.tree.leaves(params))
    with pytest.raises(ValueError, match="compute_dtype='float16' is neither float32 nor bfloat16"):
        replace(OPTIONS, compute_dtype="float16")
