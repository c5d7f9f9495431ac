"""What newcomers type, from the README, from docs/ and from memory of other engines: it works, or ends with a sentence
that says what to do. The examples are read from the documents themselves."""

import ast
import contextlib
import json
import re
import shlex
import socket
from pathlib import Path

import pytest
import typer.main

import jaxinfer
from jaxinfer.cli.main import app
from jaxinfer.extras import install_hint
from tests import silence
from tests.cli.conftest import write_checkpoint

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PLACEHOLDER = re.compile(r"PATH_OR_HUB_ID|\b(MODEL|DRAFT)\b|\./(checkpoint|model|llama|mixtral|draft)[\w.-]*")


def fences(page, *languages):
    return [text for language, text in FENCE.findall(page.read_text()) if language in languages]


def documented_commands():
    """(page, command) of each line of a page that begins with jaxinfer, without comments."""
    found = []
    for page in PAGES:
        for text in fences(page, "", "bash", "sh", "console"):
            for line in text.replace("\\\n", "").splitlines():
                line = line.strip().removeprefix("$ ").removeprefix("JAX_PLATFORMS=cpu ")
                if line.startswith("jaxinfer "):
                    found.append((page.relative_to(ROOT), line.partition("   #")[0].partition(" # ")[0].strip()))
    return found


# (what is typed, exit code, a phrase of what is printed); standard input may follow <<<.
ANSWERS = [
    # Other engines' commands.
    ("jaxinfer launch demo", 2, "jaxinfer serve MODEL"),
    ("jaxinfer download llama3", 2, "jaxinfer pull NAME"),
    ("jaxinfer ls", 2, "jaxinfer list lists the models that are here"),
    ("jaxinfer info demo", 2, "jaxinfer show MODEL"),
    ("jaxinfer version", 2, "jaxinfer --version"),
    ("jaxinfer help", 0, "Usage: jaxinfer"),
    ("jaxinfer help score", 0, "Usage: jaxinfer score"),
    ("jaxinfer bench demo", 2, "as in jaxinfer bench latency demo"),
    ("jaxinfer --model demo generate hi", 2, "options follow the command: jaxinfer generate ... --model"),
    # Something is missing or wrong.
    ("jaxinfer", 2, "Usage: jaxinfer"),
    ("jaxinfer generate hi", 2, "a Hugging Face hub id or a short name (qwen3:0.6b), an alias, or demo"),
    ("jaxinfer generate demo hi", 2, "Missing option '--model'"),
    ("jaxinfer generate -m demo", 2, "no prompt: standard input is empty"),
    ("jaxinfer plan demo", 2, "Missing option '--on'. Chips, such as v6e:2x2"),
    ("jaxinfer chat", 2, "such as jaxinfer chat demo"),
    ("jaxinfer score -m demo", 2, "score needs --prompt and --continuation, or --file"),
    ("jaxinfer batch none.jsonl out.jsonl -m demo", 1, "none.jsonl: No such file"),
    ("jaxinfer run qwen3:0.6b hi", 1, "Qwen/Qwen3-0.6B"),
    ("jaxinfer run qwen3:9b hi", 1, "qwen3 has no tag '9b', but qwen3:"),
    ("jaxinfer run qwenn3 hi", 1, "did you mean"),
    ("jaxinfer batch table.csv out.jsonl -m demo", 1, "no column 'prompt': its columns are 'text'"),
    ("jaxinfer batch table.csv out.jsonl -m demo --prompt {txt}", 1, "did you mean 'text'"),
    ("jaxinfer batch array.jsonl out.jsonl -m demo", 1, "is a JSON array"),
    ("jaxinfer generate hi -m nowhere/model", 1, "not in the local cache"),
    ("jaxinfer generate hi -m ./none", 1, "no such directory"),
    ("jaxinfer generate hi -m demo --max-tokens ten", 2, "'ten' is not a number of tokens"),
    ("jaxinfer generate hi -m demo --max-token 8", 2, "--max-tokens"),
    ("jaxinfer generate hi -m demo --temperature 3000", 2, "temperature must be 0 (greedy) or"),
    ("jaxinfer generate hi -m demo --max-model-len 100000", 1, "more than the 1024 tokens the model declares"),
    ("jaxinfer generate hi -m demo --do-sample --temperature 0", 2, "--temperature 0 is greedy"),
    ("jaxinfer generate hi -m demo --quantize awq", 1, "`jaxinfer quantize SRC DST --method awq`"),
    ("jaxinfer generate hi -m demo --quantization awq", 1, "`jaxinfer quantize SRC DST --method awq`"),
    ("jaxinfer quantize demo out --bits 4", 2, "needs --calibration PATH"),
    ("jaxinfer verify demo", 1, "name another checkpoint with --against, or convert it"),
    # Flags of other engines that have no counterpart.
    ("jaxinfer generate hi -m demo --stream", 2, "the answer to a single prompt is streamed"),
    ("jaxinfer generate hi -m demo --verbose", 2, "a terminal shows times and rates"),
    ("jaxinfer generate hi -m demo --enforce-eager", 2, "jaxinfer warm"),
    ("jaxinfer generate hi -m demo --trust-remote-code", 2, "code of a checkpoint is never run"),
    ("jaxinfer generate hi -m demo --port 8000", 2, "jaxinfer serve MODEL"),
    ("jaxinfer serve demo --api-key secret", 2, "--api-keys FILE"),
    ("jaxinfer serve demo --host 0.0.0.0", 1, "give api_keys (--api-keys FILE)"),
    ("jaxinfer serve demo --api-keys none.txt", 1, "none.txt: No such file"),
    ("jaxinfer serve demo --otlp-endpoint localhost:4318", 1, "is not a URL such as http://localhost:4318"),
    ("jaxinfer serve --model a=demo --model a=demo-draft", 1, "would both be served as 'a': name one of them"),
    ("jaxinfer serve =demo", 1, "'=demo' is no NAME=MODEL: a name has 1 to 200"),
    ("jaxinfer serve demo --model a=./none", 2, "./none is not on this machine"),
    ("jaxinfer serve --model a=demo --pin b", 2, "b is not on this machine"),
    ("jaxinfer serve --model a=demo --keep-alive b=5m", 2, "--keep-alive b: requests cannot name it; add --model b"),
    ("jaxinfer serve demo --model a=demo-draft --served-model-name b", 2, "named as in --model NAME=MODEL"),
    ("jaxinfer serve demo --pooling max", 2, "'max' is not one of 'last', 'mean', 'cls'"),
    ("jaxinfer serve demo --ssl-keyfile key.pem", 2, "put a proxy such as nginx in front"),
    ("jaxinfer generate hi -m demo -ngl 99", 2, "no option here means the same; see --offload"),
    ("jaxinfer generate hi -m demo --load-in-4bit", 2, "--quantize rounds plain weights"),
    ("jaxinfer generate hi -m demo --guided-json {}", 2, "say what the answer must match"),
    ("jaxinfer generate hi -m demo --tensor-parallel-size 64", 1, "mesh 'model=64' needs 64 devices"),
    # Flags that mean what ours do.
    ("jaxinfer generate -p hi -m demo --temp 0 --max-new-tokens 3", 0, ""),
    ("jaxinfer generate hi --model-path demo --no-do-sample -n 1 --num-predict 3", 0, ""),
    ("jaxinfer generate hi -m demo --max-num-seqs 16 --gpu-memory-utilization 0.5 --max-tokens 3 --top-k -1", 0, ""),
    ("jaxinfer generate - -m demo --max-tokens 3 --temperature 0 --json <<< hi", 0, '"text": "'),
    ("jaxinfer chat demo --max-tokens 2 <<< hi\n/?\n/clear\n/bye\nnever", 0, "cleared 1 turn"),
    ("jaxinfer score -m demo -p 'import ' -c os -c re --json", 0, '"continuation": "re"'),
    ("jaxinfer score -m demo --text 'import os'", 0, "perplexity"),
    ("jaxinfer batch table.csv out.jsonl -m demo --prompt-column text --max-tokens 2", 0, "1 ok, 0 failed"),
    ('jaxinfer batch - - -m demo --max-tokens 2 <<< {"prompt": "hi"}', 0, '"custom_id"'),
    ("jaxinfer models", 0, "LlamaForCausalLM"),
    ("jaxinfer --version", 0, "jaxinfer "),
    ("jaxinfer plan demo --on v6e:2x4 --no-compile", 0, "demo fits on v6e:2x4"),
]


@pytest.fixture(name="command_line")
def _command_line(jaxinfer):
    return jaxinfer


@pytest.fixture(scope="module")
def small_pair(tmp_path_factory):
    """Models of two layers in place of demo and demo-draft."""
    path = tmp_path_factory.mktemp("embedded")
    for name in ("demo", "demo-draft"):
        write_checkpoint(path / name, max_position_embeddings=1024)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch, small_pair):
    """A working directory with the files that the examples name; demo is a smaller model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("jaxinfer.data.__file__", str(small_pair / "__init__.py"))
    rows = [
        {"custom_id": "a", "prompt": "def f(", "max_tokens": 2},
        {"custom_id": "b", "prompt": "class A", "max_tokens": 2},
    ]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "array.jsonl").write_text(json.dumps(rows))
    (tmp_path / "table.csv").write_text("text\nimport os\n")
    return tmp_path


def check(result, code, phrase=""):
    assert result.exit_code == code, result.output
    assert phrase in re.sub(r"[\s│]+", " ", result.output) or phrase in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    if code not in (0, 3) and "Usage:" not in result.output:
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


@pytest.mark.matrix
@pytest.mark.parametrize(("typed", "code", "phrase"), ANSWERS, ids=lambda value: str(value)[:60])
def test_what_is_typed_works_or_says_what_to_do(command_line, folder, typed, code, phrase):
    command, _, given = typed.partition(" <<< ")
    check(command_line(*shlex.split(command)[1:], input=given), code, phrase)


@pytest.mark.parametrize(("page", "command"), documented_commands(), ids=str)
def test_commands_of_the_documents_have_only_options_that_exist(page, command):
    """They are parsed, not run."""
    words = shlex.split(PLACEHOLDER.sub("demo", command))[1:]
    current = typer.main.get_command(app)
    while words and words[0] in getattr(current, "commands", ()):
        current = current.commands[words.pop(0)]
    assert not getattr(current, "commands", ()), f"{page}: {command}"
    with current.make_context(current.name, words, resilient_parsing=False) as context:
        assert context.params


IS_QUICK = re.compile(r"jaxinfer (generate|score|batch|chat) (?!.*--draft)")
# A server does not end by itself: tests/server/test_life.py starts it.
OF_README = [
    command
    for page, command in documented_commands()
    if page.name == "README.md" and not command.startswith("jaxinfer serve ")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [pytest.param(command, marks=() if IS_QUICK.match(command) else pytest.mark.slow) for command in OF_README],
)
def test_commands_of_the_readme_run(command_line, folder, command):
    texts = ROOT / "jaxinfer" / "option_names.py"
    words = shlex.split(PLACEHOLDER.sub("demo", command).replace("texts.txt", str(texts)))[1:]
    result = command_line(*words, input="hi\n")
    if words[0] == "plan" and result.exit_code == 1:  # without the compilers
        check(result, 1, install_hint("aot"))
    else:
        check(result, 0)


def test_there_are_enough_commands():
    assert len(ANSWERS) + len(SNIPPETS) + len(OF_README) >= 60
    assert len(documented_commands()) >= 30


# (what is typed in Python, the error or None, a phrase of what it gives). llm is LLM("demo").
SNIPPETS = [
    ("llm.generate('hi', SamplingParams(max_tokens=2))[0].outputs[0].finish_reason", None, "length"),
    ("llm.generate(prompts=['hi'], sampling_params=SamplingParams(max_new_tokens=2, temp=0.5))", None, "RequestOutput"),
    ("llm.chat([{'role': 'user', 'content': 'hi'}], SamplingParams(max_tokens=2))", None, "RequestOutput"),
    ("list(llm.stream('hi', SamplingParams(max_tokens=2)))[-1].finish_reason", None, "length"),
    ("llm.get_tokenizer().encode('hi')", None, "[71, 72]"),
    ("llm", None, "max_model_len=1024"),
    ("LLM()", TypeError, "LLM takes one model, a folder"),
    ("LLM('demo', 'bf16')", TypeError, "options by name"),
    ("LLM('demo', max_model_length=1024)", TypeError, "did you mean 'max_model_len'"),
    ("LLM('demo', dtype='int8')", ValueError, "'bfloat16'"),
    ("LLM('demo', trust_remote_code=True)", TypeError, "code of a checkpoint is never run"),
    ("LLM('demo', quantization='gptq')", ValueError, "jaxinfer quantize SRC DST --method gptq"),
    ("LLM('demo', quantization='fp8')", ValueError, 'quantize="fp8"'),
    ("LLM(pretrained_model_name_or_path='demo', device_map='auto', quantization=None).close()", None, "None"),
    ("llm.generate('hi', max_tokens=4)", TypeError, "SamplingParams(max_tokens=64)"),
    ("llm.generate('hi', {'max_tokens': 4})", TypeError, "SamplingParams.from_dict"),
    ("llm.generate([{'prompt': 'x'}])", TypeError, "pass what its 'prompt' is"),
    ("llm.generate([True])", ValueError, "ids are integers"),
    ("llm.generate('')", ValueError, "it needs at least 1 token"),
    ("llm.generate('hi', SamplingParams(n=257))", ValueError, "in 1..256"),
    ("llm.generate('hi', stream=True)", TypeError, "llm.stream"),
    ("llm.chat('hi')", TypeError, "generate takes texts"),
    ("llm.chat([{'role': 'user'}])", ValueError, "content is missing"),
    ("llm.stream(['hi'])", TypeError, "a text or a list of token ids"),
    ("llm.score('a', ['b', 'c'])", ValueError, "[prompt] * 2"),
    ("llm.score('a', 'b', 'c', 'd')", TypeError, "the call is score(prompts, continuations"),
    ("llm.score('')", ValueError, "a score needs at least 2 tokens, got 0"),
    ("list(llm.generate_each([('a', 'b')]))", TypeError, "(key, prompt, params)"),
    ("llm.generate_file('none.jsonl', 'out.jsonl')", FileNotFoundError, "none.jsonl"),
    ("llm.create_chat_completion([])", AttributeError, "its methods are generate, chat"),
    ("jaxinfer.load('demo')", AttributeError, "it has LLM, AsyncEngine"),
    ("SamplingParams(grammar='root ::= a')", TypeError, "see structured="),
    ("SamplingParams(max_token=3)", TypeError, "did you mean 'max_tokens'"),
]


@pytest.fixture(scope="module")
def llm(small_pair):
    import jaxinfer.data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxinfer.data, "__file__", str(small_pair / "__init__.py"))
        llm = jaxinfer.LLM("demo")
    with llm:
        yield llm


@pytest.mark.slow
@pytest.mark.parametrize(("code", "error", "phrase"), SNIPPETS, ids=lambda value: str(value)[:60])
def test_what_is_typed_in_python_works_or_says_what_to_do(folder, llm, code, error, phrase):
    scope = {"llm": llm, "LLM": jaxinfer.LLM, "SamplingParams": jaxinfer.SamplingParams, "jaxinfer": jaxinfer}
    if error is None:
        assert phrase in repr(eval(code, scope))  # noqa: S307 - our own table
        return
    with pytest.raises(error, match=re.escape(phrase)) as caught:
        eval(code, scope)  # noqa: S307
    assert "\n" not in str(caught.value)


def documented_snippets():
    pages = [page for page in PAGES if page.name != "models.md"]  # whose blocks are a model's answers
    return [(page.relative_to(ROOT), text) for page in pages for text in fences(page, "python")]


def test_snippets_of_the_documents_are_python():
    found = documented_snippets()
    assert len(found) >= 12
    for page, text in found:
        ast.parse(text, str(page))


@pytest.mark.parametrize(
    ("page", "text"),
    [
        pytest.param(page, text, marks=pytest.mark.slow if "draft=" in text or "Async" in text else (), id=f"{page}")
        for page, text in documented_snippets()
        if 'LLM("demo"' in text or 'AsyncEngine("demo"' in text
    ],
)
def test_snippets_of_the_documents_run(folder, llm, monkeypatch, page, text):
    if 'LLM("demo")' in text:
        monkeypatch.setattr(jaxinfer, "LLM", lambda model: Borrowed(llm), raising=False)
    exec(compile(text, str(page), "exec"), {})  # noqa: S102 - our own pages


class Borrowed(contextlib.AbstractContextManager):
    """A loaded model that a snippet leaves open."""

    def __init__(self, llm):
        self._llm = llm

    def __getattr__(self, name):
        return getattr(self._llm, name)

    def __enter__(self):
        return self._llm

    def __exit__(self, *exception):
        return None


# A process that runs a command as a terminal does: to import is a part of what one waits for.
TYPED = """
import sys
sys.argv[0] = "jaxinfer"
print("typed", file=sys.stderr, flush=True)
from jaxinfer.cli.main import main
main()
"""
# Beside a server, what somebody else does with it: curl without a content type, one model after the other.
VISITOR = """
import json, os, signal, sys, threading, time, urllib.error, urllib.request

def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", data, timeout=200) as answer:
        return json.load(answer)

def visit():
    while True:
        time.sleep(0.1)
        try:
            ask("/ready")
            break
        except OSError:
            pass
    loaded = [one["id"] for one in ask("/v1/models")["data"] if one["status"]["value"] == "ready"]
    texts = []
    for model in ("mine", "demo-draft"):
        found = ask("/v1/completions", {"model": model, "prompt": "def f(", "max_tokens": 2, "temperature": 0})
        texts.append(found["choices"][0]["text"])
    print(json.dumps({"loaded": loaded, "texts": texts}), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=visit, daemon=True).start()
"""
MOST_SILENT_SECONDS = 2.0  # of a processor
LONG = [
    "jaxinfer run demo hi --max-tokens 3",
    "jaxinfer generate hi -m demo --max-tokens 3",
    "jaxinfer chat demo",
    "jaxinfer score -m demo -p a -c b",
    "jaxinfer list",
    "jaxinfer show demo",
    "jaxinfer doctor",
    "jaxinfer batch requests.jsonl answers.jsonl -m demo",
    "jaxinfer plan demo --on v6e:1x1 --no-compile",
]


@pytest.mark.slow
@pytest.mark.parametrize("typed", LONG)
def test_nothing_that_is_typed_is_silent_for_long(folder, typed):
    """The first time, with no program compiled, on a terminal."""
    found = silence.watch(
        TYPED, *shlex.split(typed)[1:], on_terminal=True, variables={"JAXINFER_CACHE_DIR": str(folder / "cache")}
    )
    assert found.returncode == 0, found.stderr
    assert found.busy_silence < MOST_SILENT_SECONDS, found.after


@pytest.mark.slow
def test_a_server_says_what_its_first_visitors_wait_for(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    typed = f"serve --model mine=demo --model demo-draft --port {port} --model-memory 8GiB"
    found = silence.watch(f"PORT = {port}\n{VISITOR}\n{TYPED}", *typed.split(), on_terminal=True)
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)
    assert told["loaded"] == ["mine"]  # the first one, before the server was ready
    assert len(told["texts"]) == 2
    lines = [line for line in found.drawings if not line.startswith(("loading demo", "compiling"))]
    first, ready, waits = (
        next(number for number, line in enumerate(lines) if text in line)
        for text in (
            "; loading mine",
            "ready: mine; the chat page is at /",
            "waits for demo-draft, which is loaded now",
        )
    )
    assert first < ready < waits
    assert found.busy_silence < MOST_SILENT_SECONDS, found.after
