"""JSON without infinities, text that cannot drive a terminal, files that appear whole."""

import contextlib
import io
import itertools
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxinfer import progress
from jaxinfer.cli.output import json_ready, logprob_data, open_output, stream_answer, write_json, write_text
from jaxinfer.engine.request import Logprob, StreamDelta
from jaxinfer.sampling import SamplingParams


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_json_has_no_infinity(json_lines):
    file = io.StringIO()
    write_json({"a": float("-inf"), "b": [float("inf"), float("nan"), 1.5], "c": "ü"}, file)
    assert file.getvalue().isascii()
    assert json_lines(file.getvalue()) == [{"a": "-Infinity", "b": ["Infinity", "NaN", 1.5], "c": "ü"}]
    assert json_ready({1: (True, None)}) == {"1": [True, None]}


def test_control_characters_are_shown_on_a_terminal_and_kept_in_a_pipe():
    text = "a\tb\n\x1b[31mred\x9b\x7f\r"
    terminal, pipe = Terminal(), io.StringIO()
    write_text(text, terminal)
    write_text(text, pipe)
    assert terminal.getvalue() == "a\tb\n␛[31mred�␡␍"
    assert pipe.getvalue() == text


@pytest.mark.parametrize(
    ("is_terminal", "is_cold", "is_slow"),
    [(True, False, False), (True, True, False), (False, True, False), (True, False, True), (False, False, True)],
)
def test_a_first_token_that_waits_for_programs_is_written_with_the_second(monkeypatch, is_terminal, is_cold, is_slow):
    events, counts = [], itertools.count()

    def stream(prompt, params, adapter):
        for text in "abc":
            events.append(f"made {text}")
            yield StreamDelta(0, text, [0])

    monkeypatch.setattr(progress, "is_shown", lambda: is_terminal)
    if is_slow:
        monkeypatch.setattr("jaxinfer.cli.output._SLOW_FIRST_TOKEN", 0.0)
    monkeypatch.setattr(progress, "num_compiled", lambda: next(counts) if is_cold else 0)
    text, output = stream_answer(SimpleNamespace(stream=stream), "x", SamplingParams(), events.append)
    assert (text, output) == ("abc", None)
    first = ["made a", "made b", "a", "b"] if is_terminal and (is_cold or is_slow) else ["made a", "a", "made b", "b"]
    assert events == [*first, "made c", "c"]


def test_logprob_data_orders_the_best():
    entry = {7: Logprob(-3.0, 5, "x"), 2: Logprob(-0.5, 1, "y"), 4: Logprob(-1.0, 2, "z")}
    data = logprob_data(entry, 2)
    assert (data["token_id"], data["rank"]) == (7, 5)
    assert [one["token_id"] for one in data["top"]] == [2, 4]
    assert "top" not in logprob_data(entry, 0)
    chosen_is_best = {2: Logprob(-0.5, 1, "y"), 4: Logprob(-1.0, 2, "z")}
    assert [one["token_id"] for one in logprob_data(chosen_is_best, 2)["top"]] == [2, 4]


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("before")
    with contextlib.suppress(KeyboardInterrupt), open_output(path) as file:
        file.write("half")
        raise KeyboardInterrupt
    assert path.read_text() == "before"
    with open_output(path) as file:
        file.write("ünd so")
        file.flush()
        assert path.read_text() == "before"
    assert path.read_text(encoding="utf-8") == "ünd so"
    assert [one.name for one in tmp_path.iterdir()] == ["out.txt"]


def test_a_file_keeps_its_mode_and_a_link_its_target(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    with open_output(link) as file:
        file.write("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_device_is_written_to_and_not_replaced():
    with open_output(Path(os.devnull)) as file:
        file.write("gone")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_missing_folder_is_told_at_once(jaxinfer, model, tmp_path):
    result = jaxinfer("generate", "hi", "-m", model, "-o", tmp_path / "no" / "out.txt")
    assert result.exit_code == 1
    assert "No such file or directory" in result.stderr
