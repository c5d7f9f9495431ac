"""A batch job: rows go to the model as it has room, and answers to the files as they finish."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from jaxinfer.batch.errors import BatchError, BatchWriteError
from jaxinfer.batch.input import Scan, scan
from jaxinfer.batch.ledger import Identity, Ledger
from jaxinfer.batch.responses import embeddings_line, error_line, result_line
from jaxinfer.batch.rows import ADAPTER, COORDINATE, BadRow, BatchRow
from jaxinfer.batch.table import TableOptions
from jaxinfer.engine.adapter_slots import LoadedAdapter, not_loaded
from jaxinfer.openai.errors import RequestError
from jaxinfer.openai.reader import options_of, read_inputs
from jaxinfer.openai.requests import BoundRequest, Prompt, TextModel
from jaxinfer.openai.writer import scored, usage
from jaxinfer.progress import Stage, compile_seconds, follow_compiler
from jaxinfer.sampling.params import SamplingParams, our_names
from jaxinfer.sampling.seeds import derive_seed
from jaxinfer.tool_calls import AnswerFormat

if TYPE_CHECKING:
    from jaxinfer.engine.request import RequestOptions, RequestOutput
    from jaxinfer.engine.results import VectorJob


_LOG = logging.getLogger("jaxinfer.batch")
_NO_COORDINATE = "coordinates of answers need a model in this process: leave out --ray"
Key = tuple[int, int]  # line, number of the prompt among the row's


class BatchModel(TextModel, Protocol):
    """The part of `LLM` that a job uses."""

    name: str
    seed: int

    @property
    def answer_format(self) -> AnswerFormat: ...

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]: ...

    def text_model(self, adapter: LoadedAdapter | None) -> TextModel: ...

    def fingerprint(self) -> str: ...

    def generate_each(
        self, requests: Iterable[tuple[Any, Prompt, SamplingParams, "RequestOptions"]], *, max_queued: int | None = None
    ) -> Iterator[tuple[Any, "RequestOutput | ValueError"]]: ...


@dataclass(frozen=True)
class BatchSummary:
    """The state of a job.

    Attributes:
      rows, ok, failed: numbers of rows of the whole job. resumed: rows that were written before this run.
      prompt_tokens, output_tokens: of all successful rows.
      seconds, tokens_per_second: of this run; tokens are output tokens.
      compile_seconds: spent compiling programs in this run, in this process; a part of `seconds`.
      out, errors: paths of the two files; the second exists only if rows failed.
      other_models: names of other models that rows give, with the numbers of these rows; the job's model served them.
    """

    rows: int
    ok: int
    failed: int
    resumed: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    tokens_per_second: float
    out: str
    errors: str
    other_models: Mapping[str, int] = field(default_factory=dict)
    compile_seconds: float = 0.0


@contextlib.contextmanager
def open_job(
    path_in: str | Path,
    path_out: str | Path,
    *,
    errors: str | Path | None = None,
    resume: bool = True,
    overwrite: bool = False,
    retry_errors: bool = False,
    sort: bool = False,
    prompt_column: str | None = None,
    prompt: str | None = None,
    chat: bool = False,
    keep: Sequence[str] = (),
    adapter_column: str | None = None,
    coordinates: bool = False,
    on_line: Callable[[dict[str, Any]], None] | None = None,
) -> Iterator["Job"]:
    """Reads the input and the results of earlier runs. No model is needed, and no results change before `Job.run`.

    The input is JSON lines, or a table or text whose name ends in .csv, .tsv, .parquet or .txt.

    Args:
      errors: the file for failed rows; by default OUT.errors.jsonl beside the results.
      resume: continue after earlier results; False raises if there are any.
      overwrite: discard earlier results. retry_errors: retry rows that failed.
      sort: when all rows are written, put the lines in the order of the input.
      prompt_column: the column of a table that has the prompts; by default "prompt".
      prompt: instead, a template filled from columns, such as "Translate: {text}"; {{ and }} are braces.
      chat: prompts of a table are users' messages for the chat template. keep: columns copied to the answers' lines.
      adapter_column: the column of a table that names each row's adapter.
      coordinates: whether lines have the coordinates of their answers (docs/replay.md), not only where rows ask for
        them with "return_coordinate".
      on_line: called with each line, of a result or an error, once it is written.

    Raises BatchError: two rows with the same custom_id; results of another job; files that another process has locked;
    a column that the table lacks; a missing extra.
    """
    path_errors = None if errors is None else Path(errors)
    rows = scan(Path(path_in), TableOptions(prompt_column, prompt, chat, keep, adapter_column))
    ledger = Ledger(rows, Path(path_out), path_errors, resume=resume, overwrite=overwrite, retry_errors=retry_errors)
    with contextlib.closing(ledger):
        yield Job(rows, ledger, on_line, sort=sort, coordinates=coordinates)


@dataclass
class _Pending:
    """A row whose prompts are running, with its adapter if it has one."""

    row: BatchRow
    request: "BoundRequest | VectorJob"
    adapter: LoadedAdapter | None
    outputs: list["RequestOutput | None"]
    num_left: int
    error: ValueError | None = None


class Job:
    """One input and its files. Use `open_job`."""

    def __init__(
        self,
        rows: Scan,
        ledger: Ledger,
        on_line: Callable[[dict[str, Any]], None] | None = None,
        *,
        sort: bool = False,
        coordinates: bool = False,
    ):
        self.scan = rows
        self._sort, self._has_coordinates = sort, coordinates
        self._ledger = ledger
        self._on_line = on_line or (lambda record: None)
        self._pending: dict[int, _Pending] = {}

    @property
    def num_rows(self) -> int:
        return self.scan.num_rows

    @property
    def num_done(self) -> int:
        """Number of rows written, successful and failed."""
        return self._ledger.num_done

    def run(
        self,
        model: BatchModel,
        params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> BatchSummary:
        """Serves the remaining rows.

        Args:
          params: sampling parameters for fields that a row does not give: all of them, or some by name. The seed is
            that of the job: the seed of a row without one is derived from it and from the line number.
          use_tqdm: whether to show progress, in a log too; None shows it on a terminal, unless JAXINFER_PROGRESS=0.

        Raises:
          BatchError: the files have results of another job; an adapter is replaced while the job runs.
          BatchWriteError: for example, the disk is full.
          ValueError: a model with acceptance="maximal", whose answers depend on what else runs.
        """
        if getattr(model, "acceptance", "exact") != "exact":
            raise ValueError("acceptance='maximal' gives other tokens after a resume: a batch needs acceptance='exact'")
        if self._has_coordinates and not hasattr(model, "coordinate"):
            raise ValueError(_NO_COORDINATE)
        self._model, self._adapters = model, dict(model.adapters)
        self._defaults = Defaults.of(model.default_params, params, model.seed)
        self._identity = self._identify()
        counts = self._ledger.counts
        follow_compiler()
        compiled_before = compile_seconds()
        started, num_resumed, tokens_before = time.monotonic(), self.num_done, counts.output_tokens
        try:
            self._ledger.begin(self._identity, model.name)
            with Stage("serving", self.num_rows, "row", initial=self.num_done, show=use_tqdm) as stage:
                if self.num_done < self.num_rows:
                    self._serve(stage)
            self._ledger.sync()
            if self._sort:
                self._ledger.sort()
        except BatchWriteError as error:
            raise BatchWriteError(
                f"{error}; {self.num_done} of {self.num_rows} rows are written completely. "
                "Free some space and run the same again: it continues from there"
            ) from error
        seconds, own_names = time.monotonic() - started, (model.name, Path(model.name).name, *self._adapters)
        return BatchSummary(
            rows=self.num_rows,
            resumed=num_resumed,
            seconds=seconds,
            tokens_per_second=(counts.output_tokens - tokens_before) / max(seconds, 1e-9),
            out=str(self._ledger.path_out),
            errors=str(self._ledger.path_errors),
            other_models={name: count for name, count in self.scan.models.items() if name not in own_names},
            compile_seconds=compile_seconds() - compiled_before,
            **vars(counts),
        )

    def _identify(self) -> Identity:
        asked = self._defaults.to_dict()
        if (parser := self._model.answer_format.parser) != "auto":
            asked["given"] = {**asked["given"], "tool_parser": parser}
        named = self.scan.adapters | self.scan.models.keys()
        return Identity(
            self.scan.sha256,
            self.num_rows,
            self._ledger.relative_errors(),
            self._model.fingerprint(),
            self._defaults.seed,
            asked,
            table=self.scan.table,
            adapters={name: self._adapters[name].identity for name in sorted(named & self._adapters.keys())} or None,
        )

    def _serve(self, stage: Stage) -> None:
        counts = self._ledger.counts
        tokens_before = counts.output_tokens
        stage.describe(lambda: f"{(counts.output_tokens - tokens_before) / stage.seconds:.0f} tokens/s")
        results = self._model.generate_each(self._requests(stage))
        try:
            for (line, index), result in results:
                self._take(line, index, result, stage)
        finally:
            results.close()  # type: ignore[attr-defined]

    def _requests(self, stage: Stage) -> Iterator[tuple[Key, Prompt, SamplingParams, "RequestOptions"]]:
        """The requests of the remaining rows, read from the input as needed. Invalid rows are written as errors."""
        from jaxinfer.engine.request import RequestOptions

        answers, ignored = self._model.answer_format, set[str]()
        for row in self.scan.rows(self._ledger.done):
            if isinstance(row, BadRow):
                self._fail(row, row.error, stage)
                continue
            try:
                adapter = self._adapter_of(row)
            except RequestError as error:
                self._fail(row, error, stage)
                continue
            if row.request.form == "embeddings":
                self._check_same(adapter, row)
                yield from self._vectors(row, adapter, stage)
                continue
            request = None
            try:
                model = self._model.text_model(adapter)
                request = self._defaults.bind(row, model, answers)
                inputs = request.inputs(model, answers)
            except ValueError as error:
                self._fail(row, error if request is None else request.refused(error), stage)
                continue
            for name in set(request.ignored) - ignored:
                place = f"{self.scan.source.unit} {row.line}"
                _LOG.warning("%s: %s are not supported: they are ignored here, and in later rows", place, name)
            ignored.update(request.ignored)
            self._pending[row.line] = _Pending(row, request, adapter, [None] * len(inputs), len(inputs))
            asked, name = request.asked, None if adapter is None else adapter.name
            options = RequestOptions(asked.priority, asked.timeout, asked.cache_salt, name)
            for index, (prompt, params) in enumerate(inputs):
                self._check_same(adapter, row)
                yield (row.line, index), prompt, _with_own_seed(row, params, index), options

    def _adapter_of(self, row: BatchRow) -> LoadedAdapter | None:
        """The adapter that a row names, in OpenAI's form as its model. Raises RequestError if it is not loaded."""
        name = row.request.adapter
        if name is None:
            adapter = None if row.request.text.model is None else self._adapters.get(row.request.text.model)
        elif (adapter := self._adapters.get(name)) is None:
            raise RequestError(not_loaded(name, self._adapters), ADAPTER)
        return adapter

    def _check_same(self, adapter: LoadedAdapter | None, row: BatchRow) -> None:
        """Raises BatchError where an adapter is another one than when the job began: its rows would be of two."""
        if adapter is None or self._model.adapters.get(adapter.name) is adapter:
            return
        place = f"{self.scan.source.unit} {row.line}"
        raise BatchError(
            f"adapter {adapter.name!r:.80} was replaced or unloaded while the job ran, at {place} of {self.scan.path}; "
            "the rows that are written have the answers of the one before"
        )

    def _vectors(
        self, row: BatchRow, adapter: LoadedAdapter | None, stage: Stage
    ) -> Iterator[tuple[Key, Any, Any, "RequestOptions"]]:
        """The requests of a row of embeddings, one for each text."""
        from jaxinfer.engine.request import RequestOptions

        name = None if adapter is None else adapter.name
        body, options = row.request.body, RequestOptions(row.request.text.priority, adapter=name)
        embedder = getattr(self._model, "embedder", None)
        if embedder is None:  # of workers in other processes
            told = "rows of /v1/embeddings need a model in this process: leave out --ray"
            self._fail(row, RequestError(told, "url"), stage)
            return
        try:
            vectors = embedder.embed(read_inputs(body), **options_of(body), options=options, what="input")
        except (ValueError, TypeError) as error:
            self._fail(row, RequestError(str(error), getattr(error, "parameter", None) or "input"), stage)
            return
        num = len(vectors.requests)
        self._pending[row.line] = _Pending(row, vectors, adapter, [None] * num, num)
        for index, request in enumerate(vectors.requests):
            yield (row.line, index), request, request.params, options

    def _take(self, line: int, index: int, result: "RequestOutput | ValueError", stage: Stage) -> None:
        """Takes the result of one prompt; the row is written with its last one."""
        pending = self._pending[line]
        pending.num_left -= 1
        if isinstance(result, ValueError):
            error = pending.request.refused(result, index) if isinstance(pending.request, BoundRequest) else result
            pending.error = pending.error or error
        else:
            pending.outputs[index] = result
        if pending.num_left:
            return
        del self._pending[line]
        if pending.error is not None:
            self._fail(pending.row, pending.error, stage)
        else:
            self._finish(pending, [output for output in pending.outputs if output is not None], stage)

    def _finish(self, pending: _Pending, outputs: list["RequestOutput"], stage: Stage) -> None:
        request = pending.request
        if not isinstance(request, BoundRequest):
            self._finish_vectors(pending, request, outputs, stage)
            return
        for answer in (answer for output in outputs for answer in output.outputs):
            if answer.finish_reason not in ("stop", "length"):
                if answer.finish_reason == "abort" and (timeout := request.asked.timeout) is not None:
                    told = f"the answer was not complete within {timeout} s, the limit that the row set"
                    self._fail(pending.row, RequestError(told, "timeout"), stage, status_code=408)
                    return
                error = RuntimeError(answer.error or f"the answer ended with {answer.finish_reason!r}")
                self._fail(pending.row, error, stage, status_code=400 if answer.excludes_itself else 500)
                return
        if request.asked.num_kept == 0:
            outputs = [scored(output) for output in outputs]
        outputs = [request.read(output, self._model.answer_format) for output in outputs]
        try:
            coordinates = self._coordinates(request, outputs)
            record = result_line(
                pending.row,
                request,
                outputs,
                job_id=self._identity.job_id,
                model=self._model.name,
                fingerprint=self._identity.model_sha256,
                tokenizer=self._model.text_model(pending.adapter).tokenizer,
                coordinates=coordinates,
            )
            record |= self._weights_of(outputs)
        except RequestError as error:
            self._fail(pending.row, error, stage)
            return
        self._write(pending, record, msgspec.to_builtins(usage(outputs)), stage)

    def _coordinates(self, request: BoundRequest, outputs: list["RequestOutput"]) -> list[dict[str, Any]] | None:
        """The coordinates of a row's answers, if they are wanted. Raises RequestError for workers elsewhere."""
        if not (self._has_coordinates or request.asked.return_coordinate):
            return None
        if (make := getattr(self._model, "coordinate", None)) is None:
            raise RequestError(_NO_COORDINATE, COORDINATE)
        return [make(output, answer.index).to_dict() for output in outputs for answer in output.outputs]

    def _weights_of(self, outputs: list["RequestOutput"]) -> dict[str, Any]:
        """The weights that made a row's last tokens, by what they are called and by the fingerprint of the model;
        all that made tokens of it, where there are several."""
        spans = [span for output in outputs for answer in output.outputs for span in answer.weights]
        if not spans:
            return {}
        version, known = spans[-1].version, getattr(self._model, "fingerprint_of", None)
        fingerprint = self._identity.model_sha256 if known is None else known(version)
        versions = list(dict.fromkeys(span.version for span in spans))
        more = {"versions": versions} if len(versions) > 1 else {}
        return {"weights": {"version": version, "fingerprint": fingerprint, **more}}

    def _finish_vectors(
        self, pending: _Pending, vectors: "VectorJob", outputs: list["RequestOutput"], stage: Stage
    ) -> None:
        row = pending.row
        try:
            result = vectors.result(outputs)
        except FloatingPointError as error:
            self._fail(row, error, stage, status_code=500)
            return
        job_id = self._identity.job_id
        record = embeddings_line(row, result, vectors.num_tokens, job_id=job_id, model=self._model.name)
        record |= self._weights_of(outputs)
        self._write(pending, record, record["response"]["body"]["usage"], stage)

    def _write(self, pending: _Pending, record: dict[str, Any], used: Mapping[str, int], stage: Stage) -> None:
        if (adapter := pending.adapter) is not None:
            record["adapter"] = {"name": adapter.name, "fingerprint": adapter.fingerprint}
        record |= _columns(pending.row)
        self._ledger.add_result(record, used)
        self._on_line(record)
        stage.update()

    def _fail(self, row: BatchRow | BadRow, error: Exception, stage: Stage, *, status_code: int = 400) -> None:
        is_plain = self.scan.is_plain if row.is_plain is None else row.is_plain
        job_id = self._identity.job_id
        record = error_line(row.line, row.custom_id, error, job_id=job_id, status_code=status_code, is_plain=is_plain)
        record |= _columns(row)
        self._ledger.add_error(record)
        self._on_line(record)
        stage.update()


def _columns(row: BatchRow | BadRow) -> dict[str, Any]:
    return {"columns": row.columns} if row.columns else {}


def _with_own_seed(row: BatchRow, params: SamplingParams, index: int) -> SamplingParams:
    """Prompts of one row share a seed only if the row gives one."""
    if index == 0 or row.request.text.sampling.get("seed") is not None:
        return params
    return replace(params, seed=derive_seed(params.seed or 0, index))


@dataclass(frozen=True)
class Defaults:
    """The sampling parameters of rows: from the row, the job, the form, the checkpoint.

    Attributes:
      checkpoint: from generation_config, which the model has. given: fields of `SamplingParams`, for the whole job.
      seed: of the job; a row without a seed has `derive_seed(seed, row.number)`.
    """

    checkpoint: SamplingParams
    given: Mapping[str, Any]
    seed: int

    @classmethod
    def of(cls, checkpoint: SamplingParams, params: SamplingParams | Mapping[str, Any] | None, seed: int) -> "Defaults":
        """`params` are complete, or some fields by name; their seed is the job's. Raises SamplingParamsError."""
        if isinstance(params, SamplingParams):
            given = {field.name: getattr(params, field.name) for field in fields(params)}
        else:
            given = our_names(params or {})
        SamplingParams.from_dict({"max_tokens": None, **given})
        own_seed = given.pop("seed", None)
        return cls(checkpoint, given, seed if own_seed is None else own_seed)

    def bind(self, row: BatchRow, model: TextModel, answers: AnswerFormat) -> BoundRequest:
        """The request of one row, with its seed. Raises RequestError or SamplingParamsError."""
        asked = row.request.text
        if row.is_table and asked.is_chat:
            asked = replace(asked, has_openai_limits=True)
        return asked.bind(model, answers, lambda params: derive_seed(self.seed, row.number), self.given)

    def to_dict(self) -> dict[str, Any]:
        """Everything that answers depend on, as JSON values."""
        return msgspec.to_builtins({"checkpoint": self.checkpoint, "given": self.given}, str_keys=True)
