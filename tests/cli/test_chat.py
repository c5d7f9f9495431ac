"""`jaxinfer chat`: piped sessions, the /commands, and a session at a terminal."""

import io
import json
import os
import signal
import subprocess
import sys
import termios
import threading

import pytest

from jaxinfer.cli.chat import PROMPT, ChatSession, Terminal, history_file, read_message
from jaxinfer.sampling import SamplingParams


@pytest.mark.slow
def test_each_line_of_a_pipe_is_a_turn_with_what_came_before(jaxinfer, json_lines, model, llm):
    result = jaxinfer("chat", "-m", model, "--temperature", "0", "--max-tokens", "4", "--json", input="hi\n\nyou\n")
    assert (result.exit_code, result.stderr) == (0, "")
    turns = json_lines(result.stdout)
    assert [turn["turn"] for turn in turns] == [0, 1]
    messages = []
    for turn, text in zip(turns, ("hi", "you"), strict=True):
        messages.append({"role": "user", "content": text})
        expected = llm.chat(messages, SamplingParams(temperature=0, max_tokens=4))[0]
        assert turn["input"] == text
        assert turn["message"] == {"role": "assistant", "content": expected.outputs[0].text}
        assert turn["token_ids"] == expected.outputs[0].token_ids
        assert turn["num_prompt_tokens"] == len(expected.prompt_token_ids)
        messages.append(turn["message"])
    assert turns[1]["num_messages"] == 4


@pytest.mark.slow
def test_piped_text_has_answers_only_on_standard_output(jaxinfer, json_lines, model):
    options = ["-m", model, "--temperature", "0", "--max-tokens", "4"]
    text = jaxinfer("chat", *options, input="hi\n/set temperature 0\n")
    [turn] = json_lines(jaxinfer("chat", *options, "--json", input="hi\n").stdout)
    assert text.stdout == turn["message"]["content"] + "\n"
    assert text.stderr == "temperature = 0.0\n"


def test_commands(jaxinfer, json_lines, model, tmp_path):
    saved = tmp_path / "chat.json"
    lines = [
        "/system Be brief.",
        "one",
        f"/save {saved}",
        "/reset",
        "/set max-tokens 2",
        "/set ignore_eos true",
        "two",
        f"/save {saved}",  # again: it is this session's own file
        "/params",
        "/help",
        "/quit",
        "never read",
    ]
    result = jaxinfer("chat", "-m", model, "--json", "--seed", "1", "--max-tokens", "3", input="\n".join(lines))
    assert result.exit_code == 0
    turns = json_lines(result.stdout)
    assert [turn["input"] for turn in turns] == ["one", "two"]
    assert turns[1]["num_messages"] == 3  # system, user, assistant
    assert len(turns[1]["token_ids"]) == 2
    for words in ("system message: Be brief.", "cleared 1 turn", "max_tokens = 2", "temperature ", "/reset"):
        assert words in result.stderr
    content = json.loads(saved.read_text())
    assert [message["role"] for message in content["messages"]] == ["system", "user", "assistant"]
    assert content["messages"][1]["content"] == "two"
    assert content["params"]["seed"] == 1


def test_a_conversation_that_is_too_long_says_so_and_goes_on_after_reset(jaxinfer, json_lines, model):
    lines = ["short", "x" * 90, "/reset", "short"]
    result = jaxinfer("chat", "-m", model, "--json", "--max-tokens", "2", input="\n".join(lines))
    assert result.exit_code == 3
    first, failed, last = json_lines(result.stdout)
    assert failed["error"] in result.stderr
    assert "max_model_len=96" in failed["error"]
    assert "/reset" in failed["error"]
    num_tokens = first["num_prompt_tokens"] + len(first["token_ids"]) + 90
    assert abs(int(failed["error"].split(" has ")[1].split()[0]) - num_tokens) <= 8
    assert last["num_prompt_tokens"] == first["num_prompt_tokens"]
    alone = jaxinfer("chat", "-m", model, "--max-tokens", "2", input="x" * 200)
    assert (alone.exit_code, alone.stdout) == (1, "")


def test_an_answer_cut_by_the_models_length_is_told(jaxinfer, json_lines, model):
    result = jaxinfer("chat", "-m", model, "--json", "--ignore-eos", "--max-tokens", "96", input="hello\n")
    [turn] = json_lines(result.stdout)
    assert turn["is_out_of_room"]
    assert turn["num_prompt_tokens"] + len(turn["token_ids"]) == 96
    assert "reached max_model_len=96" in result.stderr


def test_a_model_without_chat_template_is_refused(jaxinfer, model_without_template):
    result = jaxinfer("chat", "-m", model_without_template, input="hi\n")
    assert result.exit_code == 1
    assert "has no chat template" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_model_is_given_by_position_or_by_name(jaxinfer, model):
    result = jaxinfer("chat", model, input="/set temp 0.5\n")
    assert (result.exit_code, result.stderr) == (0, "temperature = 0.5\n")
    for arguments in ([], [model, "-m", model]):
        result = jaxinfer("chat", *arguments)
        assert result.exit_code == 2
        assert "such as jaxinfer chat demo" in result.stderr


def test_one_answer_a_turn(jaxinfer):
    result = jaxinfer("chat", "-m", "/nowhere", "--n", "2")
    assert result.exit_code == 2
    assert "--n is for jaxinfer generate" in result.stderr


@pytest.fixture
def session():
    return ChatSession("m", SamplingParams(max_tokens=None), 100)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/nope", "/nope is not a command"),
        ("/set", "/set needs a name and a value"),
        ("/set temperature", "/set needs a name and a value"),
        ("/set temperature -1", "temperature must be"),
        ("/set temperatur 1", "did you mean 'temperature'"),
        ("/set n 2", "n stays 1"),
        ("/save", "/save needs the name"),
    ],
)
def test_wrong_commands_change_nothing(session, line, message):
    before = session.params
    with pytest.raises(ValueError, match=message):
        session.command(line)
    assert session.params is before


def test_set_takes_json_and_words(session):
    for line, name, value in [
        ("/set stop END", "stop", ("END",)),
        ('/set stop ["a", "b"]', "stop", ("a", "b")),
        ("/set stop none", "stop", ()),
        ("/set max_tokens none", "max_tokens", None),
        ("/set ignore-eos True", "ignore_eos", True),
        ('/set logit_bias {"3": 1.5}', "logit_bias", {3: 1.5}),
        ("/set logprobs 0", "logprobs", 0),
    ]:
        session.command(line)
        assert getattr(session.params, name) == value


def test_save_leaves_files_of_others_alone(session, tmp_path):
    path = tmp_path / "mine"
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="exists already"):
        session.command(f"/save {path}")
    assert path.read_text() == "precious"


def test_room_for_an_answer(session):
    assert session.fit(60) == (SamplingParams(max_tokens=40), True)
    session.params = SamplingParams(max_tokens=10)
    assert session.fit(90) == (session.params, False)
    assert session.fit(91) == (SamplingParams(max_tokens=9), True)
    session.params = SamplingParams(max_tokens=10, min_tokens=5)
    with pytest.raises(ValueError, match="96 tokens and min_tokens=5 do not fit: that leaves no room"):
        session.fit(96)


class Keyboard:
    """A terminal on which lines are typed, and keys with them."""

    def __init__(self, monkeypatch, *lines):
        self.lines = iter(lines)
        self.shown = []  # to be edited
        terminal = io.StringIO()
        terminal.isatty = lambda: True
        monkeypatch.setattr("sys.stdin", terminal)
        monkeypatch.setattr("jaxinfer.cli.chat.Terminal", lambda: self)

    def read(self, prompt: str, text: str = "") -> str:
        self.shown.append(text)
        line = next(self.lines, EOFError)
        if isinstance(line, type):
            raise line
        return line

    def message(self) -> str:
        return read_message(self.read)


def test_at_a_terminal_ctrl_c_stops_an_answer_but_not_the_session(monkeypatch, capsys, model):
    from jaxinfer.cli import chat as module
    from jaxinfer.cli.options import SamplingOptions

    Keyboard(monkeypatch, "hello", KeyboardInterrupt, "/nope", "", "again", EOFError)
    written = []

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 3:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    seen = []
    keep = ChatSession.keep
    monkeypatch.setattr(module, "write_text", write)
    monkeypatch.setattr(ChatSession, "keep", lambda self, *turn, **_: (seen.append(turn[1]), keep(self, *turn)))
    monkeypatch.setattr("jaxinfer.engine.engine.Engine.compile_ahead", lambda self, is_stopped: None)
    monkeypatch.setattr(module, "note", lambda text: written.append(f"<{text}>"))
    code = module.chat(
        module.ChatModelOptions(model=model),
        SamplingOptions(max_tokens="20", ignore_eos=True, seed=2),
        module.ChatOptions(),
    )
    assert code == 0
    assert signal.getsignal(signal.SIGINT) is before
    stopped, whole = seen
    assert stopped == "".join(written[1:3])  # after the greeting
    assert "<stopped; the partial answer stays in the conversation>" in written
    assert "<Ctrl-D or /quit leaves>" in written
    assert any("20 tokens" in text for text in written)
    assert len(whole) > 0
    assert "/nope is not a command" in capsys.readouterr().err


def test_programs_are_compiled_behind_the_conversation(monkeypatch, model):
    """The first message waits for nothing, and programs are compiled while nobody waits for an answer."""
    from jaxinfer import LLM
    from jaxinfer.cli import chat as module
    from jaxinfer.cli.options import SamplingOptions

    order, compiled = [], threading.Event()

    def compile_ahead(self, is_stopped):
        order.append("begins")
        while not is_stopped():
            order.append("compiled")
            compiled.set()

    keyboard = Keyboard(monkeypatch, "one", EOFError)
    read, stream = keyboard.read, module.stream_answer

    def wait_and_read(*rest):
        if "answered" in order:
            assert compiled.wait(30)
        return read(*rest)

    monkeypatch.setattr(keyboard, "read", wait_and_read)
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.2)
    monkeypatch.setattr(
        module, "stream_answer", lambda *rest, **more: (stream(*rest, **more), order.append("answered"))[0]
    )
    monkeypatch.setattr("jaxinfer.engine.engine.Engine.compile_ahead", compile_ahead)
    monkeypatch.setattr(LLM, "warm_up", lambda self, **_: pytest.fail("all programs are compiled first"))
    module.chat(module.ChatModelOptions(model=model), SamplingOptions(max_tokens="2"), module.ChatOptions())
    assert order[:3] == ["begins", "answered", "compiled"]
    assert not any(thread.name == "jaxinfer compile" for thread in threading.enumerate())


def test_the_last_message_is_answered_again_or_edited(jaxinfer, json_lines, model):
    lines = ["/regen", "one", "/regen", "/edit other", "/edit", "two"]
    result = jaxinfer("chat", model, "--json", "--max-tokens", "3", "--seed", "1", input="\n".join(lines))
    assert result.exit_code == 3
    none_yet, first, again, edited, no_text, second = json_lines(result.stdout)
    assert "there is no message yet" in none_yet["error"]
    assert "/edit needs the new text" in no_text["error"]
    assert (first["num_messages"], again["num_messages"], edited["num_messages"]) == (2, 2, 2)
    assert again["token_ids"] == first["token_ids"]  # of one seed
    assert edited["num_prompt_tokens"] > first["num_prompt_tokens"]  # "other" in place of "one"
    assert second["num_messages"] == 4


def test_an_edit_at_a_terminal_begins_with_the_last_message(monkeypatch, capsys, model):
    from jaxinfer.cli import chat as module
    from jaxinfer.cli.options import SamplingOptions
    from jaxinfer.engine.engine import Engine

    kept = []
    keep = ChatSession.keep

    def spy(self, messages, answer, **more):
        kept.append(messages[-1]["content"])
        keep(self, messages, answer, **more)

    keyboard = Keyboard(monkeypatch, "one", "/edit", KeyboardInterrupt, "/edit", "two", EOFError)
    monkeypatch.setattr(ChatSession, "keep", spy)
    monkeypatch.setattr(Engine, "compile_ahead", lambda self, is_stopped: None)
    module.chat(module.ChatModelOptions(model=model), SamplingOptions(max_tokens="2"), module.ChatOptions())
    assert kept == ["one", "two"]
    assert [text for text in keyboard.shown if text] == ["one", "one"]
    assert "nothing is changed" in capsys.readouterr().err


@pytest.fixture
def pty():
    """Both ends of a terminal: what is typed is written to the first, and what is shown is read from it."""
    first, second = os.openpty()
    termios.tcsetwinsize(second, (40, 200))
    yield first, second
    os.close(first)
    os.close(second)


def test_a_text_is_edited_at_a_real_terminal(monkeypatch, pty):
    from prompt_toolkit.input.vt100 import Vt100Input
    from prompt_toolkit.output.vt100 import Vt100_Output

    monkeypatch.setenv("JAXINFER_CHAT_HISTORY", "")
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")  # nobody answers where the cursor is
    first, second = pty

    def type_keys():
        """Once the text to edit is shown: before, the terminal is not yet in raw mode."""
        shown = b""
        while b"text" not in shown:
            shown += os.read(first, 65536)
        os.write(first, b" more\x01not \r")  # Ctrl-A: to the beginning

    typist = threading.Thread(target=type_keys, daemon=True)
    with os.fdopen(os.dup(second), "r") as keys, os.fdopen(os.dup(second), "w") as screen:
        terminal = Terminal(input=Vt100Input(keys), output=Vt100_Output.from_pty(screen, "xterm"))
        typist.start()
        assert terminal.read(PROMPT, "text") == "not text more"


@pytest.mark.slow
def test_a_conversation_at_a_real_terminal(pty, model, tmp_path):
    first, second = pty
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "JAXINFER_CHAT_HISTORY": "", "TERM": "xterm"}
    command = [sys.executable, "-m", "jaxinfer.cli", "chat", model, "--max-tokens", "3"]
    saved = tmp_path / "saved.json"
    typed = (
        (">>>", "one"),
        ("ended by", "/edit"),
        (">>> one", " and two"),
        ("ended by", f"/save {saved}"),
        ("saved 2 messages", "/quit"),
    )
    process = subprocess.Popen(
        command, env=environment, stdin=second, stdout=second, stderr=second, start_new_session=True
    )
    try:
        for marker, text in typed:
            shown = ""
            while marker not in shown:
                shown += os.read(first, 65536).decode(errors="replace")
            os.write(first, f"{text}\r".encode())
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
    messages = json.loads(saved.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[0]["content"] == "one and two"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["plain"], "plain"),
        (["a\\", "b\\", "c"], "a\nb\nc"),
        (['"""one"""'], "one"),
        (['"""', "one", "  two", '"""'], "one\n  two"),
        (['"""one', 'two"""'], "one\ntwo"),
    ],
)
def test_messages_of_several_lines(lines, message):
    typed = iter(lines)
    assert read_message(lambda prompt: next(typed)) == message
    assert list(typed) == []


def test_a_pasted_text_is_one_message_and_history_is_kept(monkeypatch, tmp_path):
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("JAXINFER_CHAT_HISTORY", raising=False)
    up = "\x1b[A"
    with create_pipe_input() as keys:
        keys.send_text("\x1b[200~def f():\n    pass\x1b[201~\r")
        assert Terminal(input=keys, output=DummyOutput()).message() == "def f():\n    pass"
    path = history_file()
    assert path is not None
    assert path.stat().st_mode & 0o077 == 0
    with create_pipe_input() as keys:
        keys.send_text(f"{up}{up}\r")  # to the first of its lines
        assert Terminal(input=keys, output=DummyOutput()).message() == "def f():\n    pass"
    monkeypatch.setenv("JAXINFER_CHAT_HISTORY", "")
    assert history_file() is None
    monkeypatch.setenv("JAXINFER_CHAT_HISTORY", "/proc/none/history")  # not to be written: kept in memory
    with create_pipe_input() as keys:
        keys.send_text("hi\r")
        assert Terminal(input=keys, output=DummyOutput()).message() == "hi"
