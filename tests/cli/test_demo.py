"""`jaxinfer demo` and `python -m tools.train_demo`."""

import shutil

import numpy as np
import pytest

from jaxinfer import LLM
from jaxinfer.cli.demo import PROMPTS
from jaxinfer.extras import install_hint


def test_demo_reports_json(jaxinfer, json_lines, model):
    options = ["--model", model, "--max-tokens", "5", "-p", "def f", "-p", "x", "--temperature", "1", "--seed", "3"]
    result = jaxinfer("demo", "--json", *options)
    assert (result.exit_code, result.stderr) == (0, "")
    [data] = json_lines(result.stdout)
    assert [one["prompt"] for one in data["prompts"]] == ["def f", "x"]
    assert all(len(one["token_ids"]) <= 5 and one["seed"] == 3 for one in data["prompts"])
    assert data["total"]["num_tokens"] == sum(len(one["token_ids"]) for one in data["prompts"])
    assert data["total"]["decode_tokens_per_second"] > 0
    assert data["compile_seconds"] > 0
    assert data["device"]["platform"] == "cpu"
    [again] = json_lines(jaxinfer("demo", "--json", *options).stdout)
    assert [one["token_ids"] for one in again["prompts"]] == [one["token_ids"] for one in data["prompts"]]


def test_demo_shows_text_and_speed(jaxinfer, model):
    result = jaxinfer("demo", "--model", model, "--max-tokens", "3")
    assert (result.exit_code, result.stderr) == (0, "")
    for prompt in PROMPTS:
        assert prompt in result.stdout
    for words in ("loaded in", "compiled in", "decode", "tokens/s", "first token", "in total"):
        assert words in result.stdout
    assert "\x1b" not in result.stdout


def test_demo_of_one_token_has_no_rate(jaxinfer, model):
    result = jaxinfer("demo", "--model", model, "--max-tokens", "1", "-p", "x")
    assert "too short to measure" in result.stdout


def test_demo_samples_as_the_checkpoint_says(jaxinfer, model, monkeypatch, tmp_path):
    path = tmp_path / "cooler"
    shutil.copytree(model, path)
    (path / "generation_config.json").write_text('{"temperature": 0.25, "max_new_tokens": 99}')
    seen = []
    generate = LLM.generate

    def remember(self, prompts, params, **more):
        seen.append(params)
        return generate(self, prompts, params, **more)

    monkeypatch.setattr(LLM, "generate", remember)
    arguments = ["demo", "--json", "--model", path, "-p", "x", "--max-tokens", "2"]
    assert jaxinfer(*arguments).exit_code == 0
    assert jaxinfer(*arguments, "--temperature", "0").exit_code == 0
    assert [(params.temperature, params.max_tokens) for params in seen] == [(0.25, 2), (0.0, 2)]


def test_demo_refuses_bad_values(jaxinfer, tmp_path):
    assert jaxinfer("demo", "--temperature", "-1").exit_code == 2
    result = jaxinfer("demo", "--model", tmp_path / "none")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1


def test_scaled_phases_keep_their_shares():
    from tools.train_demo.command import scaled
    from tools.train_demo.training import TrainingPhase

    phases = (TrainingPhase(200, 24, 256), TrainingPhase(760, 12, 256), TrainingPhase(140, 6, 512))
    assert scaled(phases, None) == phases
    assert scaled(phases, 1100) == phases
    assert scaled(phases, 110) == (TrainingPhase(20, 24, 256), TrainingPhase(76, 12, 256), TrainingPhase(14, 6, 512))
    for num_steps in (1, 2, 3, 57, 4000):
        found = scaled(phases, num_steps)
        assert sum(phase.num_steps for phase in found) == num_steps
        assert all(phase.num_steps > 0 for phase in found)


@pytest.fixture
def quick_training(monkeypatch):
    """Training that returns random weights of a small model at once."""
    import jax

    from jaxinfer.cli.main import app
    from jaxinfer.models import ModelConfig, RopeConfig, init_params
    from jaxinfer.training.acceptance import Acceptance
    from jaxinfer.training.distill import DistillResult, Documents
    from jaxinfer.training.loop import TrainOptions, TrainResult
    from tools.train_demo import training as demo
    from tools.train_demo.command import register

    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        rope=RopeConfig(rotary_dim=16),
        tie_word_embeddings=True,
        max_position_embeddings=256,
    )

    def load_data(work_dir):
        work_dir.mkdir(parents=True, exist_ok=True)
        tokenizer = demo.train_tokenizer(("def f(x):\n    return x\n" * 9,), 300)
        tokenizer.save(str(work_dir / "tokenizer.json"))
        empty = np.zeros(9, np.int32)
        return demo.DemoData(tokenizer, empty, empty, 9, Documents((empty,), (empty,)))

    def train_model(name, _, phases, data, work_dir):
        params = init_params(config, jax.random.key(0))
        options = TrainOptions(sum(phase.num_steps for phase in phases))
        return demo.DemoModel(name, config, options, phases, TrainResult(params, ()), 1.5, len(data.train))

    def distill_draft(target, target_params, start, documents, generate, options, work_dir):
        acceptance = Acceptance(0.75, 6, 10, 4, 12)
        return DistillResult(start.config, start.result.params, ((1, {"loss": 1.0}),), acceptance, acceptance)

    monkeypatch.setattr(demo, "load_data", load_data)
    monkeypatch.setattr(demo, "distill_draft", distill_draft)
    monkeypatch.setattr(demo, "train_model", train_model)
    register()
    yield
    app.registered_commands.pop()


@pytest.mark.slow
def test_train_demo_writes_models_that_load(jaxinfer, json_lines, quick_training, tmp_path):
    pytest.importorskip("matplotlib", reason=f"the model cards have plots: {install_hint('plot')}")
    arguments = ["train-demo", "--work-dir", tmp_path / "work", "--out", tmp_path / "out", "--steps", "7"]
    result = jaxinfer(*arguments, "--draft-steps", "5", "--json")
    assert result.exit_code == 0
    [data] = json_lines(result.stdout)
    assert [(one["name"], one["num_steps"]) for one in data["models"]] == [("demo", 7), ("demo-draft", 5)]
    for one in data["models"]:
        with LLM(one["path"]) as llm:
            assert llm.tokenizer.decode(llm.tokenizer.encode("def f(x):")) == "def f(x):"
            assert llm.eos_token_ids == (llm.tokenizer.token_to_id("<|endoftext|>"),)
    again = jaxinfer(*arguments)
    assert (again.exit_code, again.stdout) == (1, "")
    assert "--overwrite replaces it" in again.stderr
    told = jaxinfer(*arguments, "--overwrite").stdout
    assert "held-out loss 1.500" in told
    assert "60.0% of its proposals accepted" in told
