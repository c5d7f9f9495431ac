"""`jaxinfer train-head`: a head that drafts for its target, from a target and prompts or texts."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxinfer import LLM, SamplingParams
from jaxinfer.cli.command import UsageError
from jaxinfer.cli.prompts import read_chats

SMALL = ["--length", 32, "--batch-size", 2, "--steps", 4, "--held-out", 2, "--dtype", "float32"]
SMALL += ["--concurrency", "1"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"say {number}\n" for number in range(12)))
    return path


@pytest.mark.slow
def test_a_head_is_trained_on_answers_and_opens(jaxinfer, json_lines, model, prompts, tmp_path):
    out = tmp_path / "head"
    arguments = ["train-head", model, "--prompts", prompts, "--out", out, "--draft-vocab-size", 100, *SMALL]
    result = jaxinfer(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    assert "training needs about" in result.stderr
    [report] = json_lines(result.stdout)
    assert report["num_steps"] == 4
    for when in ("before", "after", "rounds"):
        assert set(report[when]) == {"acceptance", "tokens_per_round", "acceptance_by_position", "num_tokens"}
    assert report["speedup"]["1"] > 0
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 100
    assert load_file(out / "model.safetensors")["d2t"].shape == (100,)
    card = (out / "README.md").read_text()
    assert card.startswith("# head\n")
    for words in ("EAGLE-3", "answered prompts first", "in rounds of the engine", "4 steps of", "fingerprint"):
        assert words in card
    asked = ["say 3"], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    with LLM(model) as plain, LLM(model, draft=str(out), num_draft_tokens=3) as drafted:
        answers = [llm.generate(*asked, use_tqdm=False)[0].outputs[0].token_ids for llm in (plain, drafted)]
        assert drafted.speculation_stats().proposed > 5
    assert answers[0] == answers[1]

    again = jaxinfer(*arguments)
    assert (again.exit_code, again.stdout) == (1, "")
    assert "--overwrite replaces it" in again.stderr
    other = jaxinfer(*arguments, "--overwrite", "--loss", "lk")
    assert other.exit_code == 1
    assert "of a run with loss='kl', not 'lk'" in other.stderr


def test_a_head_is_written_as_the_speculators_library_does(jaxinfer, model, prompts, tmp_path):
    """With the target's embedding and its folder; the head opens here as well."""
    out = tmp_path / "head"
    arguments = ["--out", out, "--format", "speculators", "--taps", "0,1,2", "--draft-vocab-size", 100, *SMALL]
    result = jaxinfer("train-head", model, "--prompts", prompts, *arguments, "--unroll", 3)
    assert result.exit_code == 0, result.stderr
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["speculators_config"]["verifier"] == {"name_or_path": model, "architectures": ["LlamaForCausalLM"]}
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    embedding = load_file(f"{model}/model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(tensors["embed_tokens.weight"], embedding)
    assert "layers.0.self_attn.q_proj.weight" in tensors
    with LLM(model, draft=str(out), num_draft_tokens=3) as drafted:
        drafted.generate(["say 3"], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True), use_tqdm=False)
        assert drafted.speculation_stats().proposed > 5


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--answers", 8)])
def test_blocks_are_trained_on_texts(jaxinfer, model, tmp_path, more):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"line {number} of text\n" * 5)
    out = tmp_path / "made" / "head"
    arguments = ["--texts", *sorted(tmp_path.glob("*.txt"))[:1], "--texts", tmp_path / "1.txt", "--kind", "dflash"]
    result = jaxinfer("train-head", model, *arguments, "--out", out, "--block-size", 4, "--store-states", *SMALL, *more)
    assert result.exit_code == 0, result.stderr
    assert "tokens a round" in result.stdout
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["num_hidden_layers"] == 2
    assert ("continued texts" if more else "Texts as they are") in (out / "README.md").read_text()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (["--taps", "1,x"], 2, "'1,x' is not a list of states"),
        (["--kind", "medusa"], 2, "'medusa' is not one of"),
        (["--format", "gguf"], 2, "'gguf' is not one of"),
        (["--texts", "here"], 2, "one option, not by --prompts and --texts"),
        (["--own-prompts", "8"], 2, "one option, not by --prompts and --own-prompts"),
        (["--minutes", "1"], 2, "--steps or --minutes, not both"),
        (["--layers", "2"], 2, "an eagle3 head has one layer"),
        (["--kind", "dflash", "--one-step", "0.5"], 2, "--one-step is for eagle3"),
        (["--draft-vocab-size", "500"], 1, "a draft vocabulary of 500 tokens is more than the target's 260"),
        (["--taps", "0,1,9"], 1, "the target has states 0 to 2"),
        (["--prompts", "missing"], 1, "missing: No such file"),
        (["--sampled", "2"], 1, "sampled must be in 0..1, got 2.0"),
    ],
)
def test_wrong_use_is_told(jaxinfer, model, prompts, tmp_path, change, code, words):
    result = jaxinfer("train-head", model, "--prompts", prompts, "--out", tmp_path / "head", *SMALL, *change)
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in result.stderr
    assert not (tmp_path / "head").exists()


def test_a_form_that_cannot_be_written_is_told_before_training(jaxinfer, model, prompts, tmp_path):
    arguments = ["--out", tmp_path / "head", "--format", "speculators", "--taps", "1,1,2", *SMALL]
    result = jaxinfer("train-head", model, "--prompts", prompts, *arguments)
    assert result.exit_code == 1
    assert "the speculators library reads no state of a target twice, as 1,1,2 does" in result.stderr
    assert not (tmp_path / "head.training").exists()


def test_a_mesh_that_does_not_divide_the_rows_is_told(jaxinfer, model, prompts, tmp_path):
    arguments = ["train-head", model, "--prompts", prompts, "--out", tmp_path / "head", *SMALL]
    result = jaxinfer(*arguments, "--mesh", "data=2", "--batch-size", 3)
    assert result.exit_code == 1
    assert "batch_size=3 rows cannot be cut into 2 equal parts" in result.stderr


@pytest.mark.slow
def test_a_head_is_trained_on_a_mesh(jaxinfer, json_lines, model, prompts, tmp_path):
    found = []
    for name, mesh in (("alone", ()), ("mesh", ("--mesh", "data=2"))):
        arguments = ["train-head", model, "--prompts", prompts, "--out", tmp_path / name, *SMALL, *mesh, "--json"]
        result = jaxinfer(*arguments)
        assert result.exit_code == 0, result.stderr
        found.append(json_lines(result.stdout)[0]["history"])
    for alone, mesh in zip(*found, strict=True):
        assert mesh["loss"] == pytest.approx(alone["loss"], rel=1e-4)


def test_no_data_is_told(jaxinfer, model, tmp_path):
    result = jaxinfer("train-head", model, "--out", tmp_path / "head")
    assert result.exit_code == 2
    assert "no data: --prompts takes a file of prompts" in result.stderr
    result = jaxinfer("train-head", model, "--own-prompts", 8, "--out", tmp_path / "head", *SMALL)
    assert result.exit_code == 1, "a random model hardly ever ends a message"
    assert "of 8 prompts that the model wrote itself ended within" in result.stderr


def test_what_does_not_fit_is_told_with_the_numbers(jaxinfer, model, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxinfer.cli.train_head.free_memory", lambda: 2**20)
    result = jaxinfer("train-head", model, "--prompts", prompts, "--out", tmp_path / "head", *SMALL)
    assert result.exit_code == 1
    assert "1 MiB of memory are free" in result.stderr


def test_chats_are_read_from_lines(tmp_path):
    lines, objects = tmp_path / "a.txt", tmp_path / "b.jsonl"
    lines.write_text("Hello\n\nWho?\n")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    objects.write_text(json.dumps({"prompt": "One"}) + "\n" + json.dumps({"messages": chat, "id": 3}) + "\n")
    said = [[{"role": "user", "content": text}] for text in ("Hello", "Who?", "One")]
    assert read_chats([lines, objects]) == [*said, chat]
    objects.write_text('{"text": "no"}\n')
    with pytest.raises(UsageError, match=r'b\.jsonl line 1 has no "prompt"'):
        read_chats([objects])
