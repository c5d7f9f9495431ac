"""A model without weights: its tokens are a hash of prompt and seed, and its answers end in an order of their own."""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.batch import BatchSummary, open_job
from jaxinfer.engine.adapter_slots import LoadedAdapter
from jaxinfer.engine.request import CompletionOutput, Logprob, RequestOutput
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.seeds import sample_seed
from jaxinfer.tool_calls import AnswerFormat

MAX_MODEL_LEN = 64


class FakeLLM:
    """The part of a model that a job needs. `order` decides which answers end first; `weights` which tokens come, and
    `adapters`, fingerprints by name, where a row names one."""

    tokenizer = None
    adapter: str | None = None  # of the request that is answered
    max_model_len = MAX_MODEL_LEN

    def __init__(
        self,
        *,
        seed: int = 0,
        order: int = 0,
        weights: str = "a",
        num_slots: int = 8,
        tool_parser: str = "auto",
        adapters: Mapping[str, str] | None = None,
        **defaults: Any,
    ):
        self.answer_format = AnswerFormat(None, tool_parser)
        self.name, self.seed, self.weights = "fake", seed, weights
        self.default_params = SamplingParams(**defaults)
        self.num_slots = num_slots
        self.adapters = {name: LoadedAdapter(name, text, None) for name, text in (adapters or {}).items()}
        self._random = random.Random(order)

    def fingerprint(self) -> str:
        return hashlib.sha256(self.weights.encode()).hexdigest()

    def text_model(self, adapter):
        return self

    @property
    def client(self):
        return self

    def tokenize(self, prompt, add_special_tokens=True, *, what="the prompt"):
        return (prompt, list(prompt.encode())) if isinstance(prompt, str) else (None, list(prompt))

    def tokenize_chat(self, messages, tools, template_kwargs) -> list[int]:
        if any("refuse" in str(message.get("content")) for message in messages):
            raise ValueError("the chat template refuses this")
        return list(json.dumps([messages, tools, template_kwargs]).encode())[:40]

    def generate_each(self, requests, *, max_queued=None) -> Iterator[tuple[Any, Any]]:
        requests = iter(requests)
        running: list[tuple[Any, Any, SamplingParams, str | None]] = []
        while True:
            while len(running) < self.num_slots and (request := next(requests, None)) is not None:
                name = request[3].adapter
                running.append((*request[:3], None if name is None else self.adapters[name].fingerprint))
            if not running:
                return
            key, prompt, params, self.adapter = running.pop(self._random.randrange(len(running)))
            yield key, self._answer(prompt, params)

    @property
    def _weights(self) -> list[str]:
        return [self.weights] if self.adapter is None else [self.weights, self.adapter]

    def _answer(self, prompt, params: SamplingParams) -> RequestOutput | ValueError:
        ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        if len(ids) + (params.max_tokens or 1) > MAX_MODEL_LEN:
            return ValueError(f"the prompt: {len(ids)} prompt tokens are too many")
        answers = [self._completion(ids, params, index) for index in range(params.n)]
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *({token: Logprob(-1.0, 3, chr(token), chr(token).encode())} for token in ids[1:])]
        text = prompt if isinstance(prompt, str) else None
        return RequestOutput("0", text, ids, answers, True, prompt_logprobs=prompt_logprobs)

    def _completion(self, ids: list[int], params: SamplingParams, index: int) -> CompletionOutput:
        seed = sample_seed(params.seed or 0, index)
        material = hashlib.sha256(repr((*self._weights, ids, seed, params.temperature)).encode()).digest()
        tokens = [97 + byte % 26 for byte in material][: params.max_tokens]
        logprobs = None
        if params.logprobs is not None:
            logprobs = [
                {t: Logprob(-0.5, 2, chr(t), chr(t).encode()), 35: Logprob(float("-inf"), 1, "#")} for t in tokens
            ]
        is_broken = b"broken" in bytes(token % 256 for token in ids)
        return CompletionOutput(
            index=index,
            text="".join(map(chr, tokens)),
            token_ids=tokens,
            seed=seed,
            finish_reason="error" if is_broken else "length",
            error="the logits hold NaN" if is_broken else None,
            logprobs=logprobs,
            cumulative_logprob=-0.5 * len(tokens) if logprobs else None,
        )


def mixed_rows(count: int, adapters: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Rows of every form, one in eight of which fails; with `adapters`, those that are sound name them in turn."""
    rows: list[dict[str, Any]] = []
    for number in range(count):
        body: dict[str, Any] = {"model": "m", "max_tokens": 1 + number % 5}
        if number % 8 == 7:
            rows.append({"custom_id": f"bad-{number}", "prompt": "x", "no_such_field": 1})
        elif number % 3 == 0:
            body["messages"] = [{"role": "user", "content": f"question {number}"}]
            rows.append({"custom_id": f"chat-{number}", "url": "/v1/chat/completions", "body": body})
        elif number % 3 == 1:
            body |= {"prompt": [f"one {number}", f"two {number}"], "n": 2}
            rows.append({"custom_id": f"text-{number}", "url": "/v1/completions", "body": body})
        else:
            rows.append({"prompt": f"plain {number}"})
        if adapters and number % 8 != 7:
            name, row = adapters[number % len(adapters)], rows[-1]
            row.update({"adapter": name} if "prompt" in row else {"body": {**row["body"], "model": name}})
    return rows


@pytest.fixture
def write_rows(tmp_path) -> Callable[..., Path]:
    """Writes an input; a text stays the line that it is."""

    def write(rows: list[Any], name: str = "in.jsonl") -> Path:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return write


@pytest.fixture
def run(tmp_path) -> Callable[..., BatchSummary]:
    """Runs a job with a fake model; `options` are those of `open_job`."""

    def run(path_in: Path, path_out: Path | None = None, llm: FakeLLM | None = None, params=None, **options: Any):
        with open_job(path_in, path_out or tmp_path / "out.jsonl", **options) as job:
            return job.run(llm or FakeLLM(), params, use_tqdm=False)  # type: ignore[arg-type]

    return run


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, each whole and strict JSON; none where there is no file."""
    data = path.read_bytes() if path.exists() else b""
    assert not data or data.endswith(b"\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in data.splitlines()]


def by_id(*paths: Path) -> dict[str, dict[str, Any]]:
    """The records of all files by custom_id, none twice, without the time in them."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        for record in read_records(path):
            assert record["custom_id"] not in found
            ((record.get("response") or {}).get("body") or {}).pop("created", None)
            found[record["custom_id"]] = record
    return found


@pytest.fixture
def outcome() -> Callable[..., dict[str, dict[str, Any]]]:
    """What a job left: the records of results and errors by custom_id."""
    return lambda folder, name="out": by_id(folder / f"{name}.jsonl", folder / f"{name}.errors.jsonl")


@pytest.fixture
def records() -> Callable[[Path], list[dict[str, Any]]]:
    return read_records


@pytest.fixture
def fake_llm() -> type[FakeLLM]:
    return FakeLLM


@pytest.fixture
def mixed() -> Callable[..., list[dict[str, Any]]]:
    return mixed_rows
