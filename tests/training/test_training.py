"""Training learns, resumes exactly, and reads its data as promised."""

import jax
import numpy as np
import pytest

from jaxinfer.models import ModelConfig, RopeConfig, init_params
from jaxinfer.training import corpus
from jaxinfer.training.loop import TrainOptions, make_optimizer, train
from jaxinfer.training.objectives import next_token
from tests.training.process import run_python
from tools.train_demo.training import mean_loss, train_tokenizer

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2,
    num_kv_heads=1, head_dim=8, rope=RopeConfig(rotary_dim=8), tie_word_embeddings=True,
)  # fmt: skip
OPTIONS = TrainOptions(num_steps=30, warmup_steps=2, learning_rate=1e-2, checkpoint_every=10, log_every=5)


def batches(step: int) -> np.ndarray:
    """Counting sequences: the next token is the last plus one."""
    starts = np.random.default_rng(step).integers(32, size=(8, 1))
    return ((starts + np.arange(17)) % 32).astype(np.int32)


def run(folder, options=OPTIONS):
    return train(
        init_params(CONFIG, jax.random.key(0)), next_token(CONFIG), batches, options,
        checkpoint_dir=folder, show_progress=False,
    )  # fmt: skip


@pytest.mark.slow
def test_training_learns(tmp_path):
    losses = [metrics["loss"] for _, metrics in run(tmp_path).history]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_parameters(tmp_path):
    whole = run(tmp_path / "whole")
    code = f"""
        import os
        from tests.training import test_training as t
        original = t.batches
        def batches(step):
            if step == 17:
                os._exit(9)
            return original(step)
        t.batches = batches
        from pathlib import Path
        t.run(Path({str(tmp_path / "killed")!r}))
    """
    killed = run_python(code)
    assert killed.returncode == 9
    resumed = run(tmp_path / "killed")
    assert resumed.history == whole.history
    for first, second in zip(jax.tree.leaves(whole.params), jax.tree.leaves(resumed.params), strict=True):
        np.testing.assert_array_equal(first, second)


def test_checkpoints_that_a_killed_run_did_not_remove_go_at_the_next_start(tmp_path):
    whole = run(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    (tmp_path / "00000010.npz").write_bytes((tmp_path / names[0]).read_bytes())
    assert run(tmp_path).history == whole.history
    assert sorted(path.name for path in tmp_path.iterdir()) == names == ["00000020.npz", "00000030.npz"]


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    params = jax.tree.map(lambda leaf: leaf * np.nan, init_params(CONFIG, jax.random.key(0)))
    with pytest.raises(FloatingPointError, match="step 4"):
        train(params, next_token(CONFIG), batches, OPTIONS, checkpoint_dir=tmp_path, show_progress=False)


def test_batches_depend_on_their_step_alone_and_cover_an_epoch():
    stream = np.arange(1000, dtype=np.int32)
    options = {"batch_size": 4, "length": 10, "seed": 0}
    per_epoch = (1000 - 20) // 10 // 4
    first_epoch = np.concatenate([corpus.batch_at(stream, step, **options) for step in range(per_epoch)])
    np.testing.assert_array_equal(corpus.batch_at(stream, 3, **options), first_epoch[12:16])
    assert len(np.unique(first_epoch[:, 0])) == len(first_epoch)
    assert not np.array_equal(corpus.batch_at(stream, per_epoch, **options), first_epoch[:4])
    with pytest.raises(ValueError, match="too few"):
        corpus.batch_at(stream[:30], 0, **options)


def test_corpus_holds_files_out_by_name_and_the_tokenizer_is_exact(tmp_path):
    for number in range(120):
        (tmp_path / f"module_{number}.py").write_text(f"def function_{number}(x):\n    return x + {number}\n" * 8)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_x.py").write_text("assert True\n" * 50)
    data = corpus.standard_library(tmp_path)
    again = corpus.standard_library(tmp_path)
    assert data == again
    assert 0 < len(data.held_out) < 12
    assert len(data.train) + len(data.held_out) == 120
    tokenizer = train_tokenizer(data.train, 300)
    text = "def f():\n    return 'naïve \U0001f600 \t\n\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    with pytest.raises(FileNotFoundError, match="no Python source"):
        corpus.standard_library(tmp_path / "test")


def test_mean_loss_of_a_uniform_model_is_the_log_of_the_vocabulary():
    params = jax.tree.map(lambda leaf: leaf * 0, init_params(CONFIG, jax.random.key(0)))
    stream = np.arange(200, dtype=np.int32) % 32
    assert mean_loss(next_token(CONFIG), params, stream, batch_size=2, length=8) == pytest.approx(np.log(32), abs=1e-5)


@pytest.mark.slow
def test_the_vocabulary_head_is_trained_slower():
    params = {"lm_head": np.ones((4, 6), np.float32), "layers": {"0": {"weight": np.ones((4, 4), np.float32)}}}
    gradients = jax.tree.map(lambda leaf: 0.1 * leaf, params)
    updates = []
    for rate in (1.0, 0.1):
        optimizer = make_optimizer(TrainOptions(10, warmup_steps=0, lm_head_rate=rate))
        updates.append(optimizer.update(gradients, optimizer.init(params), params)[0])
    np.testing.assert_allclose(updates[1]["lm_head"], 0.1 * np.asarray(updates[0]["lm_head"]), rtol=1e-5)
    np.testing.assert_array_equal(updates[1]["layers"]["0"]["weight"], updates[0]["layers"]["0"]["weight"])
