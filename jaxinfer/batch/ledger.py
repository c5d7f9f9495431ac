"""What is written: the results and the errors of one job, which rows they hold, and whose they are."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer.batch.errors import BatchError, BatchWriteError
from jaxinfer.batch.identity import Identity, read_identity
from jaxinfer.batch.responses import usage_of_line
from jaxinfer.batch.results import ResultsFile, sync_folder
from jaxinfer.batch.scan import Scan


@dataclass
class Counts:
    """Rows, and tokens of those that went well."""

    ok: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def add(self, used: Mapping[str, int]) -> None:
        self.ok += 1
        self.prompt_tokens += used.get("prompt_tokens", 0)
        self.output_tokens += used.get("completion_tokens", 0)


class Ledger:
    """Both files, locked until `close`. A row is one line in one of them, so no crash can leave it in both.

    Opening reads; nothing that exists is changed before `begin`, when the model is known.

    Raises:
      BatchError: results of another job, or of none; files that another process writes, or that are damaged.
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
        self.counts = Counts()
        self.done: set[int] = set()
        self.path_out = path_out
        self.path_errors = path_errors or _beside(path_out)
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
                    raise BatchError(f"{path_out} has results of an earlier run: resume them, or overwrite them")
                self._check_same(self._known())
                self._recover()
        except BaseException:
            self.close()
            raise

    @property
    def num_done(self) -> int:
        return self.counts.ok + self.counts.failed

    def begin(self, identity: Identity, model: str) -> None:
        """Makes the files ready to go on, or to start anew. Raises BatchError where they are another job's."""
        if self._stored is not None:
            self._check_same(identity.to_dict())
            for file in self._files:
                file.trim()
            if self._retry_errors:
                self._errors.clear()
        else:
            for file in reversed(self._files):
                file.clear()
            identity.write(self._path_job, model)
            sync_folder(self.path_errors)
        self._has_begun = True

    def add_result(self, record: dict[str, Any], used: Mapping[str, int]) -> None:
        """Writes a row that went well, with the tokens it took. Raises BatchWriteError."""
        self._out.append(record)
        self.counts.add(used)

    def add_error(self, record: dict[str, Any]) -> None:
        """Writes a row that failed. Raises BatchWriteError."""
        self._errors.append(record)
        self.counts.failed += 1

    def sync(self) -> None:
        """Waits until all is on the disk. Raises BatchWriteError."""
        for file in self._files:
            file.sync()

    def close(self) -> None:
        """Syncs as far as can be, and unlocks. Files that were only made to be locked go again."""
        with contextlib.ExitStack() as closing:
            for file in self._files:
                closing.callback(file.close, keep_if_empty=self._has_begun and file is self._files[0])
            with contextlib.suppress(BatchWriteError):
                self.sync()

    def relative_errors(self) -> str:
        """Where the errors are, from where the results are."""
        return os.path.relpath(self.path_errors.resolve(), self.path_out.resolve().parent)

    def _check_paths(self) -> None:
        paths = {path.resolve() for path in (self._scan.path, self.path_out, self.path_errors, self._path_job)}
        if len(paths) < 4:
            raise BatchError("the input, the results and the errors must be different files")
        for path in (self.path_out, self.path_errors):
            if not path.parent.is_dir():
                raise BatchError(f"{path}: there is no folder {path.parent}")

    def _read_stored(self) -> dict[str, Any]:
        stored = read_identity(self._path_job)
        if stored is None:
            held = self.path_errors if self._out.is_empty else self.path_out
            raise BatchError(
                f"{held} exists without a {self._path_job.name}, so it is no batch's of ours: "
                "choose another file, or overwrite it"
            )
        return stored

    def _known(self) -> dict[str, Any]:
        """The part of the identity that needs no model: told before one is loaded."""
        return {"input_sha256": self._scan.sha256, "rows": self._scan.num_rows, "errors": self.relative_errors()}

    def _check_same(self, values: Mapping[str, Any]) -> None:
        changed = differences(self._stored or {}, values)
        if changed:
            raise BatchError(
                f"{self.path_out} has results of another job; what differs: {'; '.join(changed)}. "
                "Choose another file, or overwrite it"
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
                    raise BatchError(f"{where} is there a second time: remove one of the two lines")
                self.done.add(line)
                if file is self._errors:
                    self.counts.failed += 1
                else:
                    self.counts.add(usage_of_line(record))


def _beside(path_out: Path) -> Path:
    name = path_out.name
    return path_out.with_name(f"{name.removesuffix('.jsonl')}.errors.jsonl")


def differences(stored: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """In words, which of `values` are not as they are stored."""
    return [_difference(name, stored.get(name), value) for name, value in values.items() if stored.get(name) != value]


def _difference(name: str, was: Any, now: Any) -> str:
    if name == "input_sha256":
        return "the input's content"
    if name == "model_sha256":
        return "the model (its configuration, weights, tokenizer or max_model_len)"
    if name == "params" and isinstance(was, dict):
        return "; ".join(_changed_params(was, now))
    return f"{name} (was {was}, is {now})"


def _changed_params(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    changed = []
    for part in now:
        before, after = was.get(part, {}), now[part]
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name):
                told = "" if part == "given" else f" of the {part}"
                changed.append(f"{name}{told} (was {before.get(name, 'not given')}, is {after.get(name, 'not given')})")
    return changed
