"""The files of a job: results, errors, and a small file that identifies the job, compared before it is resumed."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxinfer.batch.errors import BatchError, BatchWriteError
from jaxinfer.batch.input import Scan
from jaxinfer.batch.responses import usage_of_line
from jaxinfer.batch.results import ResultsFile, write_atomically
from jaxinfer.batch.table import check_output
from jaxinfer.files import sync

FORMAT = 1
_NUM_SHOWN = 16  # digits of a fingerprint in a message


@dataclass(frozen=True)
class Identity:
    """Everything that the answers depend on, and the path of the errors relative to the results.

    `table`: how a table's rows become requests; None for JSON lines. `adapters`: fingerprints by name, of those that
    rows name and that are loaded; None for none.
    """

    input_sha256: str
    rows: int
    errors: str
    model_sha256: str
    seed: int
    params: dict[str, Any]
    format: int = FORMAT
    table: dict[str, Any] | None = None
    adapters: dict[str, str] | None = None

    @property
    def job_id(self) -> str:
        """The part of the answers' ids that identifies the job."""
        values = {**self._values(), "errors": ""}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The values as they are read from a file."""
        return {"table": None, "adapters": None, **json.loads(json.dumps(self._values()))}

    def _values(self) -> dict[str, Any]:
        values = asdict(self)
        return {name: value for name, value in values.items() if name not in ("table", "adapters") or value is not None}

    def write(self, path: Path, model: str) -> None:
        """Writes the identity, with the model's name for people. Raises BatchWriteError."""
        write_atomically(path, json.dumps({**self._values(), "model": model, "job_id": self.job_id}, indent=2) + "\n")


def read_identity(path: Path) -> dict[str, Any] | None:
    """The content that `write` wrote, None if there is no such file. Raises BatchError if it cannot be read."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise BatchError(f"{path} cannot be read: {error}") from None
    if not isinstance(stored, dict) or "format" not in stored:
        raise BatchError(f"{path} is not the job file of a batch")
    return stored


@dataclass
class RowCounts:
    """Numbers of rows, and of tokens of the successful ones."""

    ok: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def add(self, used: Mapping[str, int]) -> None:
        self.ok += 1
        self.prompt_tokens += used.get("prompt_tokens", 0)
        self.output_tokens += used.get("completion_tokens", 0)


class Ledger:
    """The files of results and errors, locked until `close`. Each row is one line in one of them.

    Opening reads the files; they are not changed before `begin`, when the model is known.

    Raises BatchError: results of another job or without a job file; files that are locked or damaged.
    """

    def __init__(
        self,
        scan: Scan,
        path_out: Path,
        path_errors: Path | None,
        *,
        resume: bool,
        overwrite: bool,
        retry_errors: bool,
    ):
        self.counts = RowCounts()
        self.done: set[int] = set()
        self.path_out = path_out
        self.path_errors = path_errors or path_out.with_name(f"{path_out.name.removesuffix('.jsonl')}.errors.jsonl")
        self._path_job = path_out.with_name(f"{path_out.name}.job.json")
        self._scan = scan
        self._retry_errors = retry_errors
        self._has_begun = False
        self._files: list[ResultsFile] = []
        self._check_paths()
        try:
            for path in (self.path_out, self.path_errors):
                self._files.append(ResultsFile(path))
            self._out, self._errors = self._files
            self._stored = None if overwrite or all(file.is_empty for file in self._files) else self._read_stored()
            if self._stored is not None:
                if not resume:
                    raise BatchError(
                        f"{path_out} has results of an earlier run: --resume continues them, --overwrite "
                        "(overwrite=True in Python) drops them"
                    )
                self._check_same(self._known())
                self._recover()
        except BaseException:
            self.close()
            raise

    @property
    def num_done(self) -> int:
        return self.counts.ok + self.counts.failed

    def begin(self, identity: Identity, model: str) -> None:
        """Prepares the files for resuming or for a new start. Raises BatchError if they belong to another job."""
        if self._stored is not None:
            # A row whose adapter was not loaded has failed: none has an answer of another one.
            values, had = identity.to_dict(), self._stored.get("adapters") or {}
            added = (values["adapters"] or {}).keys() & self._scan.adapters - had.keys() - self._scan.models.keys()
            known = {**had, **{name: values["adapters"][name] for name in added}}
            self._check_same(values, {**self._stored, "adapters": known or None})
            for file in self._files:
                file.trim()
            if added:
                identity.write(self._path_job, model)
            if self._retry_errors:
                self._errors.clear()
        else:
            for file in reversed(self._files):
                file.clear()
            identity.write(self._path_job, model)
            sync(self.path_errors.parent)
        self._has_begun = True

    def add_result(self, record: dict[str, Any], used: Mapping[str, int]) -> None:
        """Writes a successful row; `used` are its numbers of tokens. Raises BatchWriteError."""
        self._out.append(record)
        self.counts.add(used)

    def add_error(self, record: dict[str, Any]) -> None:
        """Writes a failed row. Raises BatchWriteError."""
        self._errors.append(record)
        self.counts.failed += 1

    def sync(self) -> None:
        """Waits until everything is on the disk. Raises BatchWriteError."""
        for file in self._files:
            file.sync()

    def sort(self) -> None:
        """Puts the lines of both files in the order of the input's rows. Raises BatchWriteError."""
        for file in self._files:
            file.sort(lambda record: self._scan.line_of(record["custom_id"]) or 0)

    def close(self) -> None:
        """Syncs as far as possible, and unlocks. Removes empty files that were created only for locking."""
        with contextlib.ExitStack() as closing:
            for file in self._files:
                closing.callback(file.close, keep_if_empty=self._has_begun and file is self._files[0])
            with contextlib.suppress(BatchWriteError):
                self.sync()

    def relative_errors(self) -> str:
        """The path of the errors relative to the folder of the results."""
        return os.path.relpath(self.path_errors.resolve(), self.path_out.resolve().parent)

    def _check_paths(self) -> None:
        paths = {path.resolve() for path in (self._scan.path, self.path_out, self.path_errors, self._path_job)}
        if len(paths) < 4:
            raise BatchError("the input, the results and the errors must be different files")
        for path in (self.path_out, self.path_errors):
            if not path.parent.is_dir():
                raise BatchError(f"{path}: there is no folder {path.parent}")
            check_output(path)

    def _read_stored(self) -> dict[str, Any]:
        stored = read_identity(self._path_job)
        if stored is None:
            held = self.path_errors if self._out.is_empty else self.path_out
            raise BatchError(
                f"{held} exists without a {self._path_job.name}, so it is not the result of a batch: "
                "choose another file, or drop what it holds with --overwrite (overwrite=True in Python)"
            )
        return stored

    def _known(self) -> dict[str, Any]:
        """The part of the identity that is known before the model is loaded."""
        return {
            "input_sha256": self._scan.sha256,
            "rows": self._scan.num_rows,
            "errors": self.relative_errors(),
            "table": self._scan.table,
        }

    def _check_same(self, values: Mapping[str, Any], stored: Mapping[str, Any] | None = None) -> None:
        changed = differences(stored or self._stored or {}, values)
        if changed:
            raise BatchError(
                f"{self.path_out} has results of another job; differences: {'; '.join(changed)}. "
                "Choose another file, or drop what it holds with --overwrite (overwrite=True in Python)"
            )

    def _recover(self) -> None:
        """Reads which rows are done."""
        for file in self._files:
            for number, record in file.read():
                line = self._scan.line_of(record["custom_id"])
                where = f"{file.path} line {number}: custom_id {record['custom_id']!r:.80}"
                if line is None:
                    raise BatchError(f"{where} is not in {self._scan.path}")
                if file is self._errors and self._retry_errors:
                    continue
                if line in self.done:
                    raise BatchError(f"{where} occurs twice: remove one of the two lines")
                self.done.add(line)
                if file is self._errors:
                    self.counts.failed += 1
                else:
                    self.counts.add(usage_of_line(record))


def differences(stored: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Sentences about those `values` that differ from the stored ones."""
    return [_difference(name, stored.get(name), value) for name, value in values.items() if stored.get(name) != value]


def _difference(name: str, was: Any, now: Any) -> str:
    if name == "input_sha256":
        return "the input's content"
    if name == "model_sha256":
        return "the model (its configuration, weights, tokenizer or max_model_len)"
    if name == "params" and isinstance(was, dict):
        return "; ".join(_changed_params(was, now))
    if name == "adapters":
        return "; ".join(_changed_adapters(was or {}, now or {}))
    if name == "table":
        return "; ".join(_changed_params({"table": was or {}}, {"table": now or {}}))
    return f"{name} (was {was}, is {now})"


def _changed_adapters(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    def shown(fingerprint: str | None) -> str:
        return "not loaded" if fingerprint is None else fingerprint[:_NUM_SHOWN]

    names = [name for name in sorted({*was, *now}) if was.get(name) != now.get(name)]
    return [f"adapter {name!r:.80} (was {shown(was.get(name))}, is {shown(now.get(name))})" for name in names]


def _changed_params(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    changed = []
    for part in now:
        before, after = was.get(part, {}), now[part]
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name):
                where = "" if part == "given" else f" of the {part}"
                changed.append(
                    f"{name}{where} (was {before.get(name, 'not given')}, is {after.get(name, 'not given')})"
                )
    return changed
