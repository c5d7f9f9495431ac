"""What is damaged, and what has to happen then: one class for each kind of file.

A damaged file is refused, with one error that names it, or is harmless: it opens, and where there are checksums its
values are those of the whole file. Everything else is a failure.
"""

import csv
import hashlib
import json
import logging
import os
import re
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.mutations import Random, change_value, mutate_bytes, mutate_json, mutate_template

Damage = tuple[str, Mapping[str, bytes | None]]  # what was done; files to write, None to remove
TEXTS = ("hello world, it's 3 o'clock", "naïve café 你好 🎉\n\n  x", "<|user|></s>" + "a" * 300, "")
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <|user|> 1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And\n2 + 2?"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
MAX_MESSAGE = 8000  # characters


class Refusal(Exception):
    """The damage was found: an error of the kinds that loading documents, which names the file."""


@dataclass(frozen=True)
class Kind:
    """Attributes:
    name: in the table. prepare: writes the undamaged files into the folder, with a subfolder for each variant, of which
      there are at most as many.
    damage: of a variant's folder. check: opens what is damaged; returns if that is harmless, raises otherwise.
    named: pattern of how messages name the file, beside its path.
    """

    name: str
    prepare: Callable[[Path, int], None]
    damage: Callable[[Path, Random], Damage]
    check: Callable[[Path], None]
    named: str = r"(?!)"


def outcome(kind: Kind, folder: Path) -> tuple[str, str]:
    """("harmless" or "refused" or "failed", message). Exceptions that end a process are not caught."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", RuntimeWarning)
            kind.check(folder)
    except (ValueError, OSError, Refusal) as error:
        message = str(error)
        if problem := _unclear(kind, folder, message):
            return "failed", f"{problem}: {type(error).__name__}: {message:.400}"
        return "refused", message
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return "failed", f"{_place_of(error)}: {type(error).__name__}: {error!s:.400}"
    return "harmless", ""


def _unclear(kind: Kind, folder: Path, message: str) -> str:
    if str(folder) not in message and not re.search(kind.named, message):
        return "the message does not name the file"
    if len(message) > MAX_MESSAGE:
        return f"the message has {len(message)} characters"
    return "the message holds a traceback" if "Traceback" in message else ""


def _place_of(error: BaseException) -> str:
    """The innermost line of the product that an exception passed."""
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "site-packages" not in file and "/tests/" not in file:
            place = f"{Path(file).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


# Checkpoints.


def open_model(folder: Path, **options: Any) -> None:
    """What a user does first with a checkpoint, except for what compiles."""
    from jaxinfer import LLM
    from jaxinfer.loading import load_shapes

    with LLM(folder, max_seqs=2, **options) as llm:
        repr(llm)
        str(llm.explain())
        llm.fingerprint()
        if llm.tokenizer is not None:
            use_tokenizer(llm.tokenizer)
            if llm.tokenizer.chat_template is not None:
                llm.chat_prompt(MESSAGES[1:2])
    load_shapes(folder)


def use_tokenizer(tokenizer: Any) -> None:
    for text in TEXTS:
        tokenizer.decode(tokenizer.encode(text))
        tokenizer.decode(tokenizer.encode_content(text), skip_special_tokens=False)


def write_tiny(folder: Path) -> Path:
    from tests.cli.conftest import write_checkpoint

    return write_checkpoint(folder)


def _of_file(name: str, mutate: Callable[[bytes, Random], tuple[str, bytes]]) -> Callable[[Path, Random], Damage]:
    """Damage of one file."""

    def damage(folder: Path, random: Random) -> Damage:
        what, raw = mutate((folder / name).read_bytes(), random)
        return f"{name}: {what}", {name: raw}

    return damage


def _prepare_safetensors(folder: Path, most: int) -> None:
    """Floats, and formats whose weights are several tensors."""
    from tests.checkpoints_convert.formats.tiny import tiny

    write_tiny(folder / "plain")
    for name in ("gptq-act-order", "awq", "nf4-nested", "packed-asym", "w8a8", "fp8-block")[: most - 1]:
        tiny(name).write(folder / name)
    for path in folder.glob("*/model.safetensors"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        path.with_name("model.safetensors.sha256").write_text(f"{digest}  model.safetensors\n")


def _damage_safetensors(raw: bytes, random: Random) -> tuple[str, bytes]:
    """Bytes anywhere, the header's JSON, or its length."""
    kind, length = random.random(), int.from_bytes(raw[:8], "little")
    if kind < 0.4:
        return mutate_bytes(raw, random)
    what, header = mutate_json(raw[8 : 8 + length], random)
    if kind < 0.9:
        return f"header: {what}", len(header).to_bytes(8, "little") + header + raw[8 + length :]
    return f"header without its length: {what}", raw[:8] + header + raw[8 + length :]


def _check_safetensors(folder: Path) -> None:
    open_model(folder)
    listed = (folder / "model.safetensors.sha256").read_text().split()[0]
    if hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == listed:
        return
    try:
        open_model(folder, verify=True)
    except ValueError as error:
        if "SHA-256" not in str(error):
            raise
    else:
        raise AssertionError("damage that the *.sha256 file shows was not found by verify=True")


_GENERATION = (
    {"eos_token_id": 256, "max_new_tokens": 8},
    {"bos_token_id": 1, "do_sample": True, "eos_token_id": [256, 2], "max_length": 20, "min_p": 0.1, "num_beams": 1,
     "pad_token_id": 0, "repetition_penalty": 1.1, "temperature": 0.6, "top_k": 50, "top_p": 0.9,
     "transformers_version": "4.45.0"},
    {"_from_model_config": True, "do_sample": False, "eos_token_id": 256, "suppress_tokens": [1, 2], "num_beams": 4},
)  # fmt: skip


def _prepare_generation(folder: Path, most: int) -> None:
    for number, fields in enumerate(_GENERATION[:most]):
        (write_tiny(folder / str(number)) / "generation_config.json").write_text(json.dumps(fields, indent=2))


def _prepare_index(folder: Path, most: int) -> None:
    from safetensors.numpy import load_file, save_file

    path = write_tiny(folder / "0")
    tensors, weight_map = load_file(path / "model.safetensors"), {}
    for number in range(3):
        shard = f"model-{number + 1:05}-of-00003.safetensors"
        some = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % 3 == number}
        save_file(some, path / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(some, shard)
    (path / "model.safetensors").unlink()
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _prepare_configs(folder: Path, most: int) -> None:
    """Every family and every quantized format."""
    from tests.checkpoints_convert import family_files
    from tests.checkpoints_convert.formats.tiny import FORMATS, tiny

    for path in family_files.GOLDEN[: (most + 1) // 2]:
        files = family_files.read(path.stem)
        files.config |= {"eos_token_id": 2}  # some have the published model's, beyond the tiny vocabulary
        files.write(folder / f"family-{path.stem}")
    for name in list(FORMATS)[: most // 2]:
        tiny(name).write(folder / f"format-{name}")


def _check_config(folder: Path) -> None:
    """Configurations that open are traced too: shapes and numbers that only a program shows."""
    import jax
    import jax.numpy as jnp

    from checkpoints_convert import load
    from jaxinfer.cache import attend_without_cache
    from jaxinfer.models import bind

    open_model(folder)
    config, params = load(folder)

    def forward(params: Any) -> Any:
        decoder = bind(config, params)
        return decoder.logits(decoder(jnp.zeros((1, 5), jnp.int32), jnp.arange(5)[None], attend_without_cache))

    jax.eval_shape(forward, params)


# Tokenizers.


def _prepare_tokenizers(folder: Path, most: int) -> None:
    from tests.text.conftest import byte_level, gemma, llama2, unigram

    for number, make in enumerate((byte_level, llama2, gemma, unigram)[: most - 1]):
        path = write_tiny(folder / str(number))
        backend = make()
        backend.add_special_tokens(["<|endoftext|>", "<|user|>", "<|assistant|>"])
        backend.save(str(path / "tokenizer.json"))
    write_tiny(folder / "4")


def _prepare_templates(folder: Path, most: int) -> None:
    templates = sorted((Path(__file__).parents[1] / "text" / "templates").glob("*.jinja"))
    for number, source in enumerate(templates[:most]):
        path = write_tiny(folder / str(number))
        config = json.loads((path / "tokenizer_config.json").read_text())
        del config["chat_template"]
        config |= {"bos_token": "<|endoftext|>"}
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        (path / "chat_template.jinja").write_bytes(source.read_bytes())


def _check_template(folder: Path) -> None:
    """A template that refuses one chat, with a sentence, may take another."""
    from jaxinfer.text import ChatTemplateError, Tokenizer

    tokenizer = Tokenizer.from_dir(folder)
    problem = None
    for messages, tools in ((MESSAGES, None), (MESSAGES[1:2], None), (MESSAGES[1:], TOOLS)):
        try:
            tokenizer.apply_chat_template(messages, tools=tools)
        except ChatTemplateError as error:
            problem = error
    if problem is not None:
        raise problem


# GGUF.


def _gguf_parts() -> tuple[dict[str, Any], dict[str, Any]]:
    from tests.checkpoints_convert.conftest import make_checkpoint
    from tests.checkpoints_convert.gguf.gguf_models import metadata_of, tensors_of
    from tests.checkpoints_convert.gguf.gguf_writer import q8_0

    source = make_checkpoint.__wrapped__()(Path("unused"), "LlamaForCausalLM")  # type: ignore[attr-defined]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(64)), *"abcdefghijklm"]
    metadata = {
        **metadata_of(source.config),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": -np.arange(len(tokens), dtype=np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3, *[6] * 64, *[1] * 13], np.int32),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    tensors = tensors_of(source.config, source.tensors)
    for name in ("blk.0.attn_q.weight", "blk.1.ffn_gate.weight", "token_embd.weight"):
        tensors[name] = q8_0(tensors[name])  # type: ignore[arg-type]
    return metadata, tensors


def _prepare_gguf(folder: Path, most: int) -> None:
    from tests.checkpoints_convert.gguf.gguf_writer import write

    (folder / "0").mkdir(parents=True)
    write(folder / "0" / "model.gguf", *_gguf_parts())


def _damage_gguf(folder: Path, random: Random) -> Damage:
    """Bytes anywhere, bytes of the header, or another value of the metadata in a file that is whole otherwise."""
    path = folder / "model.gguf"
    raw = path.read_bytes()
    kind = random.random()
    if kind < 0.4:
        what, raw = mutate_bytes(raw, random)
    elif kind < 0.7:
        what, front = mutate_bytes(raw[:4000], random)
        what, raw = f"header: {what}", front + raw[4000:]
    else:
        what, raw = _other_metadata(folder, random)
    return f"model.gguf: {what}", {"model.gguf": raw}


def _other_metadata(folder: Path, random: Random) -> tuple[str, bytes]:
    from tests.checkpoints_convert.gguf.gguf_writer import write

    metadata, tensors = _gguf_parts()
    plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in metadata.items()}
    target = folder / ".made.gguf"
    while True:
        what, changed = change_value(plain, random)
        if not isinstance(changed, dict):
            continue
        same = {key: metadata[key] for key in changed if key in metadata and changed[key] == plain[key]}
        try:
            write(target, {**changed, **same}, tensors)
        except (struct.error, AttributeError, TypeError, ValueError, KeyError, OverflowError):
            continue  # a value that GGUF has no type for
        raw = target.read_bytes()
        target.unlink()
        return f"metadata: {what}", raw


def _check_gguf(folder: Path) -> None:
    open_model(folder / "model.gguf")


# The converted form.


def _prepare_store(folder: Path, most: int) -> None:
    import checkpoints_convert

    logging.getLogger("absl").setLevel(logging.CRITICAL)
    source = write_tiny(folder / "source")
    checkpoints_convert.convert(source, folder / "0", progress=None)
    checkpoints_convert.convert(source, folder / "1", progress=None, dtype="bfloat16")
    for path in sorted(source.iterdir(), reverse=True):
        path.unlink()
    source.rmdir()
    for number in ("0", "1"):
        (folder / f"{number}.digest").write_text(_digest_of(folder / number))


def _digest_of(folder: Path) -> str:
    """SHA-256 over everything that `LLM` reads."""
    import jax

    from checkpoints_convert import load, open_checkpoint
    from jaxinfer.text import Tokenizer

    config, params = load(folder)
    found = hashlib.sha256(repr(config).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        found.update(f"{path} {leaf.dtype} {leaf.shape}".encode() + np.asarray(leaf).tobytes())
    with open_checkpoint(folder) as opened:
        tokenizer = Tokenizer.from_dir(folder)
        texts = [tokenizer.encode(text) for text in TEXTS]
        found.update(repr((opened.generation_config, opened.eos_token_ids, texts, tokenizer.chat_template)).encode())
    return found.hexdigest()


def _damage_store(folder: Path, random: Random) -> Damage:
    """One file in any way; half of them by their sizes, so that the arrays are hit too."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = np.array([path.stat().st_size for path in files], float)
    chosen = files[random.choice(len(files), p=sizes / sizes.sum()) if random.random() < 0.5 else
                   random.integers(len(files))]  # fmt: skip
    name, raw, kind = chosen.relative_to(folder).as_posix(), chosen.read_bytes(), random.random()
    if kind < 0.05:
        return f"{name}: removed", {name: None}
    if kind < 0.1:
        other = files[random.integers(len(files))]
        return f"{name}: the content of {other.relative_to(folder)}", {name: other.read_bytes()}
    if name.endswith(".json") or chosen.name.startswith((".z", "_METADATA", "_sharding")):
        try:
            what, raw = mutate_json(raw, random)
        except ValueError:
            what, raw = mutate_bytes(raw, random)
    else:
        what, raw = mutate_bytes(raw, random)
    if name != "manifest.json" and kind > 0.9:
        # An attacker, unlike a disk, writes the manifest too.
        manifest = json.loads((folder / "manifest.json").read_bytes())
        manifest["files"][name] = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        del manifest["sha256"]
        written = json.dumps(manifest).encode()
        return f"{name}: {what}; the manifest says so", {name: raw, "manifest.json": written}
    return f"{name}: {what}", {name: raw}


def _check_store(folder: Path) -> None:
    wanted = folder.with_name(f"{folder.name}.digest").read_text()
    is_forged = b'"sha256": "' not in (folder / "manifest.json").read_bytes()[-80:]
    open_model(folder)
    if not is_forged and _digest_of(folder) != wanted:
        raise AssertionError("damage was loaded without an error")


# Lines of a batch.

_ROWS: tuple[dict[str, Any], ...] = (
    {"prompt": "hello", "temperature": 0.7, "max_tokens": 5, "stop": ["x"], "seed": 1},
    {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions",
     "body": {"messages": MESSAGES, "max_tokens": 4, "logprobs": True, "top_logprobs": 2, "tools": TOOLS}},
    {"custom_id": "text", "method": "POST", "url": "/v1/completions",
     "body": {"prompt": ["one", "two"], "n": 2, "max_tokens": 3, "echo": True, "logit_bias": {"5": 1.5}}},
    {"messages": MESSAGES[1:2], "top_k": 5, "top_p": 0.9, "chat_template_kwargs": {"x": 1}},
    {"custom_id": "ids", "prompt": [1, 2, 3], "max_tokens": 2, "repetition_penalty": 1.1, "bad_words": ["no"]},
    {"custom_id": "last", "url": "/v1/completions", "body": {"prompt": [[1, 2], [3]], "max_tokens": 1}},
)  # fmt: skip


def _prepare_batch(folder: Path, most: int) -> None:
    write_tiny(folder / "0")
    lines = [json.dumps(row) for row in _ROWS]
    (folder / "0" / "in.jsonl").write_text("".join(f"{line}\n" for line in lines))


def _damage_batch(folder: Path, random: Random) -> Damage:
    """One line, or all of the file."""
    raw = (folder / "in.jsonl").read_bytes()
    if random.random() < 0.15:
        what, raw = mutate_bytes(raw, random)
        return f"in.jsonl: {what}", {"in.jsonl": raw, "line": None}
    lines = raw.splitlines()
    number = int(random.integers(len(lines)))
    what, lines[number] = mutate_json(lines[number], random)
    written = {"in.jsonl": b"\n".join(lines) + b"\n", "line": str(number + 1).encode()}
    return f"line {number + 1}: {what}", written


class _Answers:
    """A model that refuses what the real one refuses, and answers with nothing."""

    def __init__(self, folder: Path):
        from jaxinfer import LLM

        self.llm = LLM(folder, max_seqs=2, tool_parser="hermes")  # whose template shows none
        self.name, self.seed, self.default_params = "tiny", 0, self.llm.default_params
        self.tokenizer, self.chat_prompt = self.llm.tokenizer, self.llm.chat_prompt
        self.fingerprint, self.answer_format = self.llm.fingerprint, self.llm.answer_format
        self.client, self.max_model_len = self.llm.client, self.llm.max_model_len

    def generate_each(self, requests: Any, *, max_queued: int | None = None) -> Iterator[tuple[Any, Any]]:
        from jaxinfer.engine.request import CompletionOutput, Logprob, RequestOutput

        for key, prompt, params, _ in requests:
            try:
                request = self.llm.prepare(prompt, params)
            except ValueError as error:
                yield key, error
                continue
            logprobs = None if params.logprobs is None else [{5: Logprob(-0.5, 1, "x")}]
            answers = [
                CompletionOutput(i, "x", [5], seed=0, finish_reason="length", logprobs=logprobs)
                for i in range(params.n)
            ]
            ids = list(request.token_ids)
            prompt_logprobs = None
            if params.prompt_logprobs is not None:
                prompt_logprobs = [None, *({token: Logprob(-1.0, 3, "y")} for token in ids[1:])]
            text = prompt if isinstance(prompt, str) else None
            yield key, RequestOutput("0", text, ids, answers, True, prompt_logprobs=prompt_logprobs)


_answers: dict[str, _Answers] = {}  # of this process: the model stays the same


def _check_batch(folder: Path) -> None:
    from jaxinfer.batch import open_job

    if str(folder) not in _answers:
        _answers[str(folder)] = _Answers(folder)
    model = _answers[str(folder)]
    out, errors = folder / "out.jsonl", folder / "out.errors.jsonl"
    try:
        with open_job(folder / "in.jsonl", out) as job:
            summary = job.run(model, use_tqdm=False)  # type: ignore[arg-type]
        done, failed = (_records(path) for path in (out, errors))
        lines = [line for line in (folder / "in.jsonl").read_bytes().split(b"\n") if line.strip(b" \t\r\n\xef\xbb\xbf")]
        if len(done) + len(failed) != summary.rows or summary.rows not in (len(lines), len(lines) + 1):
            raise AssertionError(f"{len(lines)} lines, {len(done)} answers and {len(failed)} errors")
        _check_neighbours(folder, done, failed)
    finally:
        for path in (out, errors, folder / "out.jsonl.job.json"):
            path.unlink(missing_ok=True)
    if failed:
        messages = [_message(record) for record in failed]
        for message in messages:
            if not message or len(message) > MAX_MESSAGE or "Traceback" in message or "internal" in message:
                raise AssertionError(f"a row's error is {message!r:.300}")
        raise Refusal(f"{folder}: {messages[0]}")


def _message(record: dict[str, Any]) -> str:
    body = ((record.get("response") or {}).get("body") or {}).get("error") or record.get("error") or {}
    return body.get("message", "") if isinstance(body, dict) else str(body)


def _check_neighbours(folder: Path, done: list[dict[str, Any]], failed: list[dict[str, Any]]) -> None:
    """Rows beside a damaged line are answered. Damage may add blank lines, and so change the numbers of later ones."""
    if not (folder / "line").exists() or len(done) + len(failed) != len(_ROWS):
        return
    damaged = int((folder / "line").read_bytes())
    answered = {record["custom_id"] for record in done}
    lines = (folder / "in.jsonl").read_bytes().split(b"\n")
    for number, row in enumerate(_ROWS, 1):
        if number == damaged:
            continue
        line = lines.index(json.dumps(row).encode()) + 1
        if row.get("custom_id", f"row-{line}") not in answered:
            raise AssertionError(f"line {line} was not answered, though row {damaged} is the damaged one")


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


# Tables of a batch.

_CELLS = ({"prompt": 'a "b", c', "n": 1}, {"prompt": "two\nlines", "n": 2}, {"prompt": "naïve 你好", "n": 3})
_SEPARATORS = {"csv": ",", "tsv": "\t"}


def _prepare_tables(folder: Path, most: int) -> None:
    import pyarrow
    from pyarrow import parquet

    for number, kind in enumerate(("csv", "parquet", "txt", "tsv")[:most]):
        path = folder / str(number) / f"in.{kind}"
        path.parent.mkdir(parents=True)
        if kind == "parquet":
            parquet.write_table(pyarrow.Table.from_pylist(list(_CELLS)), path)
        elif kind == "txt":
            path.write_text("".join(f"prompt {row['n']}: naïve\n" for row in _CELLS), encoding="utf-8")
        else:
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, list(_CELLS[0]), delimiter=_SEPARATORS[kind])
                writer.writeheader()
                writer.writerows(_CELLS)


def _damage_table(folder: Path, random: Random) -> Damage:
    [path] = folder.glob("in.*")
    what, raw = mutate_bytes(path.read_bytes(), random)
    return f"{path.name}: {what}", {path.name: raw}


def _check_table(folder: Path) -> None:
    from jaxinfer.batch.input import scan
    from jaxinfer.batch.rows import BadRow
    from jaxinfer.batch.table import TableOptions

    [path] = folder.glob("in.*")
    found = scan(path, TableOptions(prompt="say {prompt}", keep=["prompt"]))
    rows = list(found.rows())
    if len(rows) != found.num_rows:
        raise AssertionError(f"{len(rows)} rows, and {found.num_rows} were counted")
    for row in rows:
        json.dumps(row.columns, allow_nan=False)
    if bad := [row for row in rows if isinstance(row, BadRow)]:
        raise Refusal(f"{path}: {bad[0].error}")


# Errors of one text or chat name the tokenizer or the template, not a file.
_REQUESTS = "the tokenizer|the chat template|the rendered chat"
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("safetensors", _prepare_safetensors, _of_file("model.safetensors", _damage_safetensors),
             _check_safetensors),
        Kind("index", _prepare_index, _of_file("model.safetensors.index.json", mutate_json), open_model),
        Kind("config", _prepare_configs, _of_file("config.json", mutate_json), _check_config),
        Kind("tokenizer", _prepare_tokenizers, _of_file("tokenizer.json", mutate_json), open_model, _REQUESTS),
        Kind("template", _prepare_templates, _of_file("chat_template.jinja", mutate_template), _check_template,
             _REQUESTS),
        Kind("generation", _prepare_generation, _of_file("generation_config.json", mutate_json), open_model),
        Kind("gguf", _prepare_gguf, _damage_gguf, _check_gguf, _REQUESTS),
        Kind("store", _prepare_store, _damage_store, _check_store),
        Kind("batch", _prepare_batch, _damage_batch, _check_batch),
        Kind("table", _prepare_tables, _damage_table, _check_table),
    )
}  # fmt: skip


def variants(folder: Path) -> list[Path]:
    """The folders that `prepare` wrote."""
    return sorted(path for path in folder.iterdir() if path.is_dir())


def apply(folder: Path, files: Mapping[str, bytes | None]) -> Callable[[], None]:
    """Writes damaged files; returns what puts the whole ones back."""
    before = {name: (folder / name).read_bytes() if (folder / name).exists() else None for name in files}
    _put(folder, files)
    return lambda: _put(folder, before)


def _put(folder: Path, files: Mapping[str, bytes | None]) -> None:
    for name, raw in files.items():
        if raw is None:
            (folder / name).unlink(missing_ok=True)
        else:
            (folder / name).write_bytes(raw)


def random_of(kind: str, seed: int, number: int) -> Random:
    """The generator of a case, a function of the kind, the seed and the number."""
    return np.random.default_rng([seed, number, *kind.encode()])


def damaged(kind: Kind, folder: Path, seed: int, number: int) -> tuple[Path, str, Mapping[str, bytes | None]]:
    """The folder of a case, what is damaged, and the files. Damage always changes something."""
    random, folders = random_of(kind.name, seed, number), variants(folder)
    chosen = folders[number % len(folders)]
    while True:
        what, files = kind.damage(chosen, random)
        if any(_is_other(chosen / name, raw) for name, raw in files.items()):
            return chosen, what, files


def _is_other(path: Path, raw: bytes | None) -> bool:
    return (path.read_bytes() if path.exists() else None) != raw and path.name != "line"


def quiet() -> None:
    """What a run prints would be too much."""
    logging.disable(logging.WARNING)
    os.environ["JAXINFER_PROGRESS"] = "0"
