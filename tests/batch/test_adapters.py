"""Rows that name adapters: in every form, what is refused, what a line says, and with whose weights a job continues."""

import inspect
import json
from dataclasses import fields

import pytest

from jaxinfer.api.async_engine import AsyncEngine
from jaxinfer.batch import BatchError, open_job
from jaxinfer.batch.rows import BadRow, parse_row
from jaxinfer.engine.request import RequestOptions

ADAPTERS = {"fr": "f" * 64, "de": "d" * 64}


def openai(custom_id, model, form="completions", **body):
    return {"custom_id": custom_id, "url": f"/v1/{form}", "body": {"model": model, **body}}


def texts(record):
    """The texts of a line of any form."""
    if "outputs" in record:
        return [one["text"] for one in record["outputs"]]
    return [one.get("text") or one["message"]["content"] for one in record["response"]["body"]["choices"]]


@pytest.fixture
def llm(fake_llm):
    return lambda order=0, **adapters: fake_llm(order=order, adapters=adapters or ADAPTERS)


def test_rows_of_every_form_name_adapters(write_rows, run, llm, outcome, tmp_path):
    messages = [{"role": "user", "content": "x"}]
    rows = [
        {"custom_id": "base", "prompt": "x", "adapter": None, "seed": 1},
        {"custom_id": "plain", "prompt": "x", "adapter": "fr", "seed": 1},
        {"custom_id": "messages", "messages": messages, "adapter": "de", "seed": 1},
        openai("completion", "fr", prompt="x", seed=1),
        openai("chat", "de", "chat/completions", messages=messages, seed=1, max_tokens=16),
        openai("other", "gpt-4o", prompt="x", seed=1),
    ]
    summary = run(write_rows(rows), llm=llm())
    assert (summary.ok, summary.failed, summary.other_models) == (6, 0, {"gpt-4o": 1})
    found = outcome(tmp_path)
    named = {"plain": "fr", "messages": "de", "completion": "fr", "chat": "de"}
    for custom_id, record in found.items():
        wanted = {"name": (name := named[custom_id]), "fingerprint": ADAPTERS[name]} if custom_id in named else None
        assert record.get("adapter") == wanted
    assert texts(found["plain"]) == texts(found["completion"]) != texts(found["base"]) == texts(found["other"])
    assert texts(found["messages"]) == texts(found["chat"])
    assert found["completion"]["response"]["body"]["model"] == "fr"


def test_rows_of_a_table_name_adapters_in_a_column(run, llm, outcome, tmp_path):
    path = tmp_path / "in.csv"
    path.write_text("text,language\nx,fr\nx,\nx, de \nx,nl\n")
    options = {"prompt_column": "text", "adapter_column": "language", "keep": ["language"]}
    summary = run(path, llm=llm(), **options)
    assert (summary.ok, summary.failed) == (3, 1)
    found = outcome(tmp_path)
    assert [found[f"row-{number}"].get("adapter", {}).get("name") for number in (1, 2, 3)] == ["fr", None, "de"]
    assert found["row-4"]["error"] == {
        "message": "no adapter 'nl' is loaded: fr, de are",
        "param": "adapter",
        "line": 4,
    }
    assert found["row-4"]["columns"] == {"language": "nl"}
    with pytest.raises(BatchError, match=r"adapter_column of the table \(was language, is not given\)"):
        run(path, llm=llm(), prompt_column="text", keep=["language"])
    with pytest.raises(BatchError, match=r"--adapter-column: .* has no column 'lang'"):
        run(path, llm=llm(), prompt_column="text", adapter_column="lang")


def test_a_name_that_is_not_loaded_fails_its_row_alone(write_rows, run, llm, outcome, tmp_path):
    rows = [{"prompt": "x", "adapter": "frr"}, {"prompt": "x", "adapter": "fr"}, {"prompt": "x"}]
    assert run(write_rows(rows), llm=llm()).failed == 1
    error = outcome(tmp_path)["row-1"]["error"]
    assert error == {"message": "no adapter 'frr' is loaded: did you mean 'fr'?", "param": "adapter", "line": 1}


@pytest.mark.parametrize("value", ["", 3, ["fr"], {"name": "fr"}, True])
def test_what_is_no_name_is_told_before_anything_runs(value):
    row = parse_row(json.dumps({"prompt": "x", "adapter": value}).encode(), 1)
    assert isinstance(row, BadRow)
    assert "adapter must be the name of a loaded adapter, got " in str(row.error)


def test_the_body_of_openais_form_names_an_adapter_as_its_model():
    row = parse_row(json.dumps(openai("a", "fr", prompt="x", adapter="fr")).encode(), 1)
    assert isinstance(row, BadRow)
    assert "unknown field 'adapter'" in str(row.error)


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({"fr": "0" * 64, "de": "d" * 64}, r"adapter 'fr' \(was ffffffffffffffff, is 0000000000000000\)"),
        ({"de": "d" * 64}, r"adapter 'fr' \(was ffffffffffffffff, is not loaded\)"),
        (
            {"fr": "d" * 64, "de": "f" * 64},
            r"adapter 'de' \(was dddddddddddddddd, is ffffffffffffffff\); adapter 'fr' \(was ffffffffffffffff, is d+\)",
        ),
    ],
)
def test_a_job_continues_with_the_same_adapters_only(write_rows, run, llm, mixed, outcome, tmp_path, now, told):
    path_in = write_rows(mixed(24, ["fr", "de", "fr"]))
    run(path_in, llm=llm())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "out.jsonl").write_bytes(before["out.jsonl"][:-9])
    with pytest.raises(BatchError, match=f"results of another job; differences: {told}. Choose"):
        run(path_in, llm=llm(**now))
    assert (tmp_path / "out.jsonl").read_bytes() == before["out.jsonl"][:-9]
    assert run(path_in, llm=llm(**ADAPTERS, others="0" * 64)).resumed == 23  # those that no row names do not count
    assert len(outcome(tmp_path)) == 24
    run(path_in, llm=llm(**now), overwrite=True)


def test_rows_whose_model_became_an_adapter_are_of_another_job(write_rows, run, llm, tmp_path):
    """They have the answers of the base."""
    for more in ([], [{"prompt": "x", "adapter": "nl"}]):
        path_in = write_rows([openai("a", "nl", prompt="x"), *more])
        assert run(path_in, llm=llm(), overwrite=True).other_models == {"nl": 1}
        with pytest.raises(BatchError, match=r"adapter 'nl' \(was not loaded, is aaaaaaaaaaaaaaaa\)"):
            run(path_in, llm=llm(nl="a" * 64), retry_errors=True)


def test_rows_that_failed_without_their_adapter_are_tried_again_with_it(write_rows, run, llm, outcome, tmp_path):
    path_in = write_rows([{"prompt": "x", "adapter": "nl"}, {"prompt": "y", "adapter": "fr"}, {"prompt": "z"}])
    assert run(path_in, llm=llm()).failed == 1
    more = {**ADAPTERS, "nl": "a" * 64}
    summary = run(path_in, llm=llm(**more), retry_errors=True)
    assert (summary.ok, summary.failed, summary.resumed) == (3, 0, 2)
    assert outcome(tmp_path)["row-1"]["adapter"] == {"name": "nl", "fingerprint": "a" * 64}
    assert run(path_in, llm=llm(**more)).resumed == 3
    for other in ({**ADAPTERS, "nl": "b" * 64}, ADAPTERS):
        with pytest.raises(BatchError, match=r"adapter 'nl' \(was aaaaaaaaaaaaaaaa, is "):
            run(path_in, llm=llm(**other))


def test_a_job_without_adapters_is_what_it_was(write_rows, run, llm, fake_llm, tmp_path):
    path_in = write_rows([{"prompt": "x"}])
    run(path_in, llm=fake_llm())
    assert "adapters" not in json.loads((tmp_path / "out.jsonl.job.json").read_text())
    assert run(path_in, llm=llm()).resumed == 1


def test_an_adapter_that_is_replaced_under_the_job_stops_it(write_rows, run, llm, records, tmp_path):
    path_in = write_rows([{"prompt": f"{number}", "adapter": "fr"} for number in range(30)])
    model, prompts = llm(), []
    answer = model._answer

    def replacing(prompt, params):
        prompts.append(prompt)
        if len(prompts) == 9:
            model.adapters.update(llm(fr="0" * 64).adapters)
        return answer(prompt, params)

    model._answer = replacing
    with pytest.raises(BatchError, match=r"adapter 'fr' was replaced or unloaded while the job ran, at line \d+ of"):
        run(path_in, llm=model)
    assert {one["adapter"]["fingerprint"] for one in records(tmp_path / "out.jsonl")} == {"f" * 64}
    with open_job(path_in, tmp_path / "out.jsonl") as job:
        assert 0 < job.num_done < 30
    assert run(path_in, llm=llm()).ok == 30


def test_workers_take_every_option_of_a_request():
    """`RayPool` gives them to `AsyncEngine.generate` by name."""
    options = {field.name for field in fields(RequestOptions)}
    assert options <= inspect.signature(AsyncEngine.generate).parameters.keys()
