"""Adapters on the command line: the one that answers, and the room for them."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import checkpoints_convert
from checkpoints_convert import open_checkpoint
from checkpoints_convert.adapters import Adapter, LowRank, save_adapter
from jaxinfer import LLM, SamplingParams
from jaxinfer.api.options import parse_adapters

PROMPT = "What is it?"
SHORT = ("--temperature", "0", "--max-tokens", "6")


@pytest.fixture(scope="module")
def folders(tmp_path_factory, model):
    """Two adapters of the tiny model, one of which calls its base another name."""
    with open_checkpoint(model) as checkpoint:
        config = checkpoint.config
    root = tmp_path_factory.mktemp("lora")
    for seed, (name, base) in enumerate({"one": "owner/tiny", "two": "owner/other"}.items()):
        random, width = np.random.default_rng(seed), config.num_heads * config.head_dim
        a, b = (random.standard_normal(shape).astype(np.float32) for shape in ((config.hidden_size, 4), (4, width)))
        pairs = {f"layers.{layer}.attention.q_proj": LowRank(a, b, 2.0) for layer in range(config.num_layers)}
        save_adapter(Adapter(pairs, base_model=base), root / name, config)
    return root


@pytest.fixture(scope="module")
def expected(model, folders):
    """The library's answers and scores, by the adapter's name."""
    adapters = {"one": folders / "one", "two": folders / "two"}
    with LLM(model, base_model="owner/tiny") as llm:
        base = llm.generate(PROMPT, SamplingParams(max_tokens=6, temperature=0))[0].outputs[0].text
    found: dict[str | None, str] = {None: base}
    for name, folder in adapters.items():
        with LLM(model, adapters={name: folder}, base_model=f"owner/{'tiny' if name == 'one' else 'other'}") as llm:
            params = SamplingParams(max_tokens=6, temperature=0)
            found[name] = llm.generate(PROMPT, params, adapter=name)[0].outputs[0].text
    assert len(set(found.values())) == 3
    return found


@pytest.mark.slow
def test_one_adapter_answers(jaxinfer, json_lines, model, folders, expected):
    for name, *more in (("one",), ("two", "--base-model", "owner/other")):
        given = ("--adapter", folders / name, *more)
        result = jaxinfer("generate", PROMPT, "-m", model, *SHORT, *given)
        assert (result.exit_code, result.stdout) == (0, expected[name] + "\n")
        [row] = json_lines(jaxinfer("generate", PROMPT, "-m", model, *SHORT, *given, "--json").stdout)
        assert row["outputs"][0]["text"] == expected[name]
    assert jaxinfer("generate", PROMPT, "-m", model, *SHORT).stdout == expected[None] + "\n"


@pytest.mark.slow
def test_run_and_chat_talk_with_it(jaxinfer, json_lines, model, folders):
    one, answers = ("--adapter", folders / "one"), {}
    for name, more in {"base": (), "one": one}.items():
        [turn] = json_lines(jaxinfer("chat", model, "--json", *SHORT, *more, input="hi\n").stdout)
        [answer] = json_lines(jaxinfer("run", model, "hi", "--json", *SHORT, *more).stdout)
        assert answer["message"] == turn["message"]
        answers[name] = turn["message"]["content"]
    assert answers["base"] != answers["one"]


@pytest.mark.slow
def test_run_without_a_template_continues_with_it(jaxinfer, model_without_template, folders):
    texts = [
        jaxinfer("run", model_without_template, PROMPT, *SHORT, *more, "--base-model", "owner/tiny").stdout
        for more in ((), ("--adapter", folders / "one"))
    ]
    assert texts[0] != texts[1]


@pytest.mark.slow
def test_score_is_under_it(jaxinfer, json_lines, model, folders):
    one, scores = ("--adapter", folders / "one"), []
    for more in ((), one):
        [row] = json_lines(jaxinfer("score", "-m", model, "--text", "some words", "--json", *more).stdout)
        scores.append(row["raw_total"])
    with LLM(model, adapters={"one": folders / "one"}) as llm:
        assert [score.raw_total for score in llm.score(["some words"], adapter="one")] == pytest.approx(scores[1:])
    assert scores[0] != scores[1]


@pytest.mark.slow
def test_of_several_one_is_chosen(jaxinfer, tmp_path, model, folders, expected):
    two = tmp_path / "two"
    save = json.loads((folders / "two" / "adapter_config.json").read_text())
    two.mkdir()
    (two / "adapter_config.json").write_text(json.dumps({**save, "base_model_name_or_path": "tiny"}))
    (two / "adapter_model.safetensors").write_bytes((folders / "two" / "adapter_model.safetensors").read_bytes())
    several = ("--adapter", f"a={folders / 'one'}", "--adapter", f"b={two}", "--max-adapters", "1")
    for name, text in {"a": expected["one"], "b": expected["two"]}.items():
        result = jaxinfer("generate", PROMPT, "-m", model, *SHORT, *several, "--use-adapter", name)
        assert (result.exit_code, result.stdout) == (0, text + "\n")
    for more, told in (
        (several, "--use-adapter says which of a, b answers"),
        ((*several, "--use-adapter", "c"), "--use-adapter c: there is no such adapter, only a, b"),
        (("--use-adapter", "c"), "--adapter NAME=DIR gives one"),
    ):
        for command in (("generate", "x", "-m", model), ("score", "--text", "x", "-m", model), ("run", model, "x")):
            result = jaxinfer(*command, *more)
            assert (result.exit_code, result.stdout) == (2, "")
            assert told in result.stderr


def test_lines_of_a_file_name_their_adapters(jaxinfer, json_lines, model, folders, expected, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": PROMPT, "adapter": "one"}, {"prompt": PROMPT, "adapter": None}, {"prompt": PROMPT}]
    path.write_text("\n".join(map(json.dumps, lines)))
    given = ("--file", path, "-m", model, *SHORT, "--adapter", folders / "one")
    rows = json_lines(jaxinfer("generate", *given, "--json").stdout)
    assert [row["outputs"][0]["text"] for row in rows] == [expected["one"], expected[None], expected["one"]]
    assert [row.get("adapter", {}).get("name") for row in rows] == ["one", None, "one"]
    assert "=== 2/3, no adapter: " in jaxinfer("generate", *given).stdout


def test_lines_of_scores_name_their_adapters(jaxinfer, json_lines, model, folders, tmp_path):
    path = tmp_path / "scored.jsonl"
    one, texts, totals = ("--adapter", folders / "one"), [{"text": "some words"}], []
    for adapter in ("one", None):
        path.write_text("\n".join(json.dumps({**text, "adapter": adapter}) for text in texts * 2))
        rows = json_lines(jaxinfer("score", "-m", model, "--texts", path, "--json", *one).stdout)
        assert [row.get("adapter", {}).get("name") for row in rows] == [adapter] * 2
        totals.append(rows[0]["raw_total"])
    assert totals[0] != totals[1]
    pair = {"prompt": "some", "continuation": " words"}
    path.write_text("\n".join(map(json.dumps, [{**pair, "adapter": None}, {**pair, "adapter": "one"}])))
    result = jaxinfer("score", "-m", model, "--file", path, *one)
    assert (result.exit_code, " adapter " in result.stdout, " one " in result.stdout) == (0, True, True)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"prompt": "a", "adapter": "c"}', "line 2: adapter 'c': there is no such adapter, only a, b"),
        ('{"prompt": "a", "adapter": ["a"]}', "line 2: adapter must be the name of an adapter or null, got ['a']"),
        ('{"prompt": "a", "adapter": ""}', "line 2: adapter must be the name of an adapter or null, got ''"),
        ('{"prompt": "a"}', "line 2 names no adapter: --use-adapter says which of a, b answers"),
    ],
)
def test_an_adapter_that_is_not_known_is_refused_before_the_model_is_loaded(jaxinfer, tmp_path, line, told):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "adapter": "a"}\n' + line + "\n")
    several = ("-m", tmp_path / "no model", "--adapter", f"a={tmp_path}", "--adapter", f"b={tmp_path}")
    result = jaxinfer("generate", "--file", path, *several)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{path} {told}" in result.stderr
    path.write_text(path.read_text().replace('"prompt"', '"text"'))
    result = jaxinfer("score", "--texts", path, *several)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{path} {told}" in result.stderr


def test_show_tells_what_an_adapter_is(jaxinfer, json_lines, model, folders, tmp_path):
    [facts] = json_lines(jaxinfer("show", folders / "one", "--base", model, "--json").stdout)
    assert (facts["kind"], facts["rank"], facts["scales"], facts["modules"]) == ("adapter", 4, [2.0], {"q_proj": 2})
    assert (facts["base model"], facts["base here"], facts["refused"]) == ("owner/tiny", model, [])
    result = jaxinfer("show", folders / "one")
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split(maxsplit=1) for line in result.stdout.splitlines()]
    assert {"modules q_proj x 2", "tensors 4"} <= {" ".join(row) for row in rows}
    assert "base here          no: tensors are not compared with it (--base MODEL)" in result.stdout

    # What every base refuses, what this one does, and what is only merged.
    config = json.loads((folders / "one" / "adapter_config.json").read_text())
    tensors = load_file(folders / "one" / "adapter_model.safetensors")
    for name, changes, more, told in (
        ("a", {"use_bdlora": True}, {}, "use_bdlora (block-diagonal pairs) is not supported, and is True"),
        ("b", {"r": 8}, {}, "has shape (4, 32), not (8, 32) (rank 8)"),
        ("c", {"modules_to_save": ["model.norm"]}, {"base_model.model.model.norm.weight": np.ones(32)}, "--merge-lora"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({**config, **changes}))
        save_file({**tensors, **more}, tmp_path / name / "adapter_model.safetensors")
        [facts] = json_lines(jaxinfer("show", tmp_path / name, "--base", model, "--json").stdout)
        assert any(told in reason for reason in facts["refused"]), facts["refused"]
        result = jaxinfer("show", tmp_path / name, "--base", model)
        assert (result.exit_code, "refused: " in result.stdout) == (0, True)
    for arguments, told in (
        (("show", folders / "one", "--template"), "is an adapter: its base has the chat template"),
        (("show", model, "--base", model), "--base is for adapters"),
        (("show", folders / "one", "--base", "owner/none"), "owner/none is not here"),
    ):
        result = jaxinfer(*arguments)
        assert result.exit_code in (1, 2)
        assert told in result.stderr


def test_errors_are_one_sentence(jaxinfer, model, folders, tmp_path):
    for more, told in (
        (("--adapter", tmp_path / "none"), "is not a folder"),
        (("--adapter", folders / "two"), "--base-model owner/other"),
        (("--adapter", folders / "one", "--max-adapter-rank", "2"), "its rank is 4, and there is room for 2"),
        (("--adapter", folders / "one", "--adapter-modules", "v_proj"), "no room for adapters of"),
        (("--adapter", folders / "one", "--max-adapters", "0"), "max_adapters=0"),
        (("--adapter", "x="), "is no [NAME=]DIR"),
        (("--adapter", "a=x", "--adapter", "a=y"), "both named 'a'"),
    ):
        result = jaxinfer("generate", "x", "-m", model, *more)
        assert (result.exit_code in (1, 2), result.stdout, result.stderr.count("\n")) == (True, "", 1), result.stderr
        assert told in result.stderr


def test_names_of_adapters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b").mkdir()
    assert parse_adapters(["x/lora/", "n=y", "a=b"]) == {"lora": "x/lora/", "n": "y", "a=b": "a=b"}


def test_serve_refuses_what_cannot_be_served_first(jaxinfer, model, tmp_path, monkeypatch):
    monkeypatch.delenv("JAXINFER_ADMIN_KEY", raising=False)
    for arguments, told in (
        ((model, "--adapter", "tiny=x"), "would have a name of the model itself"),
        ((model, "--served-model-name", "name", "--adapter", "name=x"), "would have a name of the model itself"),
        (("--model", model, "--adapter", "a=x"), "are for a server of one model"),
        (("--model", model, "--max-adapters", "4"), "are for a server of one model"),
        ((model, "--adapter-routes"), "--adapter-root DIR"),
        ((model, "--adapter-root", tmp_path), "is for adapter_routes"),
        ((model, "--adapter-routes", "--adapter-root", tmp_path / "none"), "is no folder"),
        ((model, "--adapter-routes", "--adapter-root", tmp_path), "--admin-keys FILE"),
    ):
        result = jaxinfer("serve", *arguments)
        assert result.exit_code in (1, 2), result.stderr
        assert told in result.stderr
        assert "listening" not in result.stderr


@pytest.fixture(scope="module")
def with_tokens(tmp_path_factory, model):
    """An adapter with two tokens of its own, and a tokenizer and chat template that have them; the second ends
    answers."""
    config, params = checkpoints_convert.load(model)
    folder, random = tmp_path_factory.mktemp("added") / "tools", np.random.default_rng(1)
    rows = random.standard_normal((2, config.hidden_size)).astype(np.float32)
    table = np.concatenate([np.asarray(params["embed"], np.float32), rows])
    save_adapter(Adapter({}, {"embed": table, "lm_head": table.T}, base_model="owner/tiny"), folder, config)
    flags = {"special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    written = json.loads((Path(model) / "tokenizer.json").read_text())
    written["added_tokens"] += [
        {"id": config.vocab_size + number, "content": text, **flags} for number, text in enumerate(("<tool>", "<end>"))
    ]
    (folder / "tokenizer.json").write_text(json.dumps(written))
    template = "<tool>{{ messages[0]['content'] }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": template}))
    return folder, config.vocab_size


@pytest.mark.slow
def test_an_adapter_with_its_own_tokens_has_its_own_tokenizer(jaxinfer, json_lines, model, with_tokens):
    folder, size = with_tokens
    short, chat = {"max_tokens": 2, "temperature": 0, "logprobs": 0}, [{"role": "user", "content": "hi"}]
    writes = SamplingParams(**short, logit_bias={size: 100.0}, skip_special_tokens=False)
    with LLM(model, adapters={"tools": folder}, max_seqs=4) as llm:
        options = llm.engine.spec.options
        assert (options.max_adapter_tokens, options.adapter_parts) == (2, ())  # the other rows are the base's
        llm.load_adapter("texts", folder, uses_tokenizer=False)
        assert llm.adapters["texts"].identity != llm.adapters["tools"].identity
        ends = SamplingParams(**short, logit_bias={size + 1: 100.0})
        answers = llm.generate(["hi <tool>"] * 4, [writes, writes, ends, ends], adapter=["tools", "texts"] * 2)
        own, texts, ended, goes_on = (answer.outputs[0] for answer in answers)
        assert [max(answer.prompt_token_ids) - size >= 0 for answer in answers] == [True, False] * 2
        assert (own.text, texts.text, texts.token_ids) == ("<tool>" * 2, "", [size] * 2)
        assert own.logprobs[0][size].decoded_token == "<tool>"
        assert (ended.finish_reason, len(ended.token_ids), goes_on.finish_reason) == ("stop", 1, "length")
        [answer] = llm.chat(chat, writes, adapter="tools")
        assert answer.prompt_token_ids == llm.chat_prompt(chat, adapter="tools")
        assert (answer.prompt_token_ids[0], size in llm.chat_prompt(chat)) == (size, False)
    with LLM(model, max_adapters=1) as llm, pytest.raises(ValueError, match="max_adapter_tokens=2 makes some"):
        llm.load_adapter("tools", folder)
    [row] = json_lines(jaxinfer("score", "-m", model, "--text", "<tool>hi", "--json", "--adapter", folder).stdout)
    assert [token["token"] for token in row["tokens"]] == ["h", "i"]
    written = json.loads((folder / "tokenizer.json").read_text())
    written["added_tokens"].append({**written["added_tokens"][-1], "id": size + 2, "content": "<more>"})
    (folder / "tokenizer.json").write_text(json.dumps(written))
    with LLM(model, max_adapters=1) as llm, pytest.raises(ValueError, match=f"'<more>' with the id {size + 2}, the"):
        llm.load_adapter("tools", folder)
