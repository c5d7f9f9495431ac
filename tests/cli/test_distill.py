"""`jaxinfer distill`: a draft that loads, from a target and a folder of texts."""

import json

import pytest

from jaxinfer import LLM
from jaxinfer.cli.command import UsageError
from jaxinfer.cli.training_data import read_documents

# The checkpoint of these tests has heads of 8 dimensions, in which codes do not fit.
SMALL = ["--no-copying", "--layers", 1, "--width", 16, "--steps", 4, "--texts", 8, "--length", 16, "--batch-size", 4]
SMALL += ["--concurrency", "1"]


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"line {number} of text\n" * 5)
    (folder / "image.png").write_bytes(b"\x89PNG\xff")
    (folder / ".hidden").write_text("no")
    return folder


@pytest.mark.slow
def test_a_draft_is_made_and_opens(jaxinfer, json_lines, model, data, tmp_path):
    arguments = ["distill", model, "--data", data, "--out", tmp_path / "draft", *SMALL]
    result = jaxinfer(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    [report] = json_lines(result.stdout)
    assert report["num_steps"] == 4
    for when in ("before", "after", "rounds"):
        assert set(report[when]) == {"agreement", "acceptance", "tokens_per_round"}
    assert report["speedup"].keys() == {"1"}
    assert 0 <= report["after"]["acceptance"] <= 1
    with LLM(model) as target, LLM(tmp_path / "draft") as draft:
        assert (draft.config.num_layers, draft.config.hidden_size) == (1, 16)
        assert draft.config.vocab_size == target.config.vocab_size
        assert draft.tokenizer.encode("text") == target.tokenizer.encode("text")
        assert draft.eos_token_ids == target.eos_token_ids
    card = (tmp_path / "draft" / "README.md").read_text()
    assert card.startswith("# draft\n")
    for words in ("forward KL", "accepted of proposed", "4 steps of 4 sequences of 16 tokens"):
        assert words in card
    assert (tmp_path / "draft.training" / "distill.json").exists()

    again = jaxinfer(*arguments)
    assert (again.exit_code, again.stdout) == (1, "")
    assert "--overwrite replaces it" in again.stderr
    repeated = jaxinfer(*arguments, "--overwrite")  # all is there already
    assert repeated.exit_code == 0, repeated.stderr
    assert "tokens per round" in repeated.stdout
    other = jaxinfer(*arguments, "--overwrite", "--loss", "tv")
    assert other.exit_code == 1
    assert "of a run with loss='fkl', not 'tv'" in other.stderr


@pytest.mark.slow
@pytest.mark.parametrize("layers", [("--init-layers", "1"), ("--layers", 1)])
def test_layers_of_the_target_learn_its_answers(jaxinfer, json_lines, model, tmp_path, layers):
    out, prompts = tmp_path / "draft", tmp_path / "prompts.txt"
    prompts.write_text("".join(f"say {number}\n" for number in range(12)))
    sizes = ["--steps", 4, "--length", 32, "--batch-size", 4, "--dtype", "float32"]
    arguments = ["distill", model, "--prompts", prompts, "--out", out, *sizes, *layers, "--concurrency", "1,2"]
    result = jaxinfer(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    [report] = json_lines(result.stdout)
    assert set(report["speedup"]) == {"1", "2"}
    assert report["rounds"]["tokens_per_round"] >= 1
    config = json.loads((out / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (1, 32)
    card = " ".join((out / "README.md").read_text().split())
    assert "| 2 | " in card
    assert "11 texts, 25% of them sampled at temperature 1, the others greedy" in card


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (["--init-layers", "0,x"], 2, "'0,x' is not a list of layers"),
        (["--width", "12"], 1, "width 12 is not a multiple of the target's head width 8"),
        (["--on-policy", "2"], 1, "on_policy must be in 0..1, got 2.0"),
        (["--copying"], 2, "--no-copying omits these heads"),
        (["--own-prompts", "8"], 2, "one option, not by --data and --own-prompts"),
        (["--init-layers", "0"], 2, "--init-layers says which layers are copied: omit --layers"),
        (["--concurrency", "0"], 2, "--concurrency"),
        (["--loss", "js"], 2, "'js' is not one of"),
        (["--data", "missing"], 2, "--data missing: there is no such file or folder"),
    ],
)
def test_wrong_use_is_told(jaxinfer, model, data, tmp_path, change, code, words):
    result = jaxinfer("distill", model, "--data", data, "--out", tmp_path / "draft", *SMALL, *change)
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in result.stderr
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize("option", [("--inner", 8), ("--copying",), ("--no-copying",)])
def test_options_of_a_narrower_draft_want_its_width(jaxinfer, model, data, tmp_path, option):
    result = jaxinfer("distill", model, "--data", data, "--out", tmp_path / "draft", *option)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is of a narrower draft: give its --width" in result.stderr


def test_copied_layers_have_the_width_of_the_model(jaxinfer, model, data, tmp_path):
    arguments = "distill", model, "--data", data, "--out", tmp_path / "draft", "--init-layers", "0", "--width", 16
    result = jaxinfer(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--init-layers copies layers of the model, which have its width: omit --width" in result.stderr


def test_documents_are_files_of_text(data):
    assert len(read_documents([data])) == 6
    assert read_documents([data / "3.txt"]) == ["line 3 of text\n" * 5]
    with pytest.raises(UsageError, match="is not text in UTF-8"):
        read_documents([data / "image.png"])
