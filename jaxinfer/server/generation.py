"""Runs a job: tokenized in a thread, admitted in turn, submitted; its events as they come, its outputs at the end."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from jaxinfer.api.async_engine import AnswerStream
from jaxinfer.engine.request import BegunAnswer, Request, RequestOptions, RequestOutput, StreamDelta
from jaxinfer.openai.requests import BoundRequest
from jaxinfer.openai.writer import prompt_text, scored
from jaxinfer.sampling.seeds import sample_seed
from jaxinfer.server.admission import Ticket
from jaxinfer.server.api_error import APIError, refused, unavailable
from jaxinfer.server.http import in_thread
from jaxinfer.server.models import Lease
from jaxinfer.server.record import Record
from jaxinfer.server.resume import Skipper, StreamPosition
from jaxinfer.server.sent_tokens import SENT_TOKENS
from jaxinfer.server.service import Service
from jaxinfer.text import Tokenizer
from jaxinfer.text.reasoning import AnswerSplitter, prompt_end, starts_inside
from jaxinfer.tool_calls import AnswerReader, Content, Reasoning, ToolCallDelta, text_of


class AnswerForm(Protocol):
    """Writes one answer in a route's form, as a whole or as a stream of events. No method is a coroutine: that would
    cost more than the events themselves."""

    def whole(self, outputs: list[RequestOutput]) -> Any:
        """The whole answer, as JSON data or a Struct."""
        ...

    def begin(self) -> bytes:
        """Events before the first token."""
        ...

    def add(self, delta: StreamDelta, reasoning: str = "", call: ToolCallDelta | None = None) -> bytes:
        """Events of what is new of a choice, whose number is the delta's index: reasoning, then text, or a piece of a
        call; then its end."""
        ...

    def pass_over(self, delta: StreamDelta, reasoning: str = "", call: ToolCallDelta | None = None) -> None:
        """The part of what is new that the client has already: no event is made of it."""
        ...

    def finish(self) -> bytes:
        """Events after the last choice has ended."""
        ...

    def error_event(self, error: APIError) -> bytes:
        """The last event of a stream that fails."""
        ...


Shown = tuple[StreamDelta, str, ToolCallDelta | None]
"""Arguments of `AnswerForm.add`."""


class Generation:
    """One job of one client. `prepare`, then `events` to the end, or `run`; `close` in any case.

    Args:
      lease: of the model, released with `close`. resumed: what the client has already. begun: of each choice, its first
        tokens, which are not made again. tells_tokens: whether comments between the events tell the token ids.
      has_front: whether a front reads the stream, which takes all comments out where there may be none.
    """

    def __init__(
        self,
        service: Service,
        lease: Lease,
        job: BoundRequest,
        record: Record,
        resumed: StreamPosition | None = None,
        *,
        begun: Sequence[BegunAnswer] | None = None,
        tells_tokens: bool = False,
        has_front: bool = False,
    ):
        self._service, self._lease, self.model = service, lease, lease.model
        self.job, self.record, self.has_front = job, record, has_front
        answers = self.model.answers
        is_read = job.asked.is_chat and answers.is_read(job.params, job.offer)
        self._offer, self._tags = job.read_offer, answers.reasoning if is_read else None
        # Special tokens to be removed from the text, where the tags can only be seen beside them.
        self._hidden = answers.hidden_with(job.offer) if is_read and job.params.skip_special_tokens else None
        self.requests: list[Request] = []
        self.outputs: list[RequestOutput] = []
        self.coordinates: list[dict[str, Any]] | None = None  # of the choices, where the body asks for them
        self._streams: list[AnswerStream] = []
        self._merged: MergedStreams | None = None
        self._outputs: list[RequestOutput | None] = []
        self._metrics, self._last = self.model.metrics, 0.0
        self._skippers = None if resumed is None else [Skipper(sent) for sent in resumed.choices]
        self._begun, self._num_told = begun, [0] * job.num_answers if tells_tokens else None
        self._start = time.perf_counter()
        self._deadline = lease.deadline
        self._ticket: Ticket = self.model.admission.enter(
            *(record.key, job.num_answers, job.num_estimated, job.asked.priority),
            adapter=self.model.adapter,
            is_continued=begun is not None,
        )
        service.generations.add(self)

    async def prepare(self) -> None:
        """Tokenizes the prompts. Raises APIError for what cannot be served."""
        self.requests = await in_thread(self.record, self._prepare)
        self.record.num_prompt = sum(request.num_prompt for request in self.requests)

    def _prepare(self) -> list[Request]:
        llm, job = self.model.llm, self.job
        salt = self._service.salt(self.record.key, job.asked.cache_salt)
        options = RequestOptions(job.asked.priority, self._seconds_left(), salt, self.model.adapter)
        try:
            requests = [
                llm.prepare(prompt, params, options, what=job.name_of(number), keeps_answer=job.asked.num_kept != 0)
                for number, (prompt, params) in enumerate(job.inputs(self.model.texts, self.model.answers))
            ]
        except (ValueError, TypeError) as error:
            raise job.refused(error) from error
        self._service.name_prefixes(requests, self.record.key, job.asked.cache_salt, self.model)
        if (begun := self._begun) is None:
            return requests
        try:
            parts = (begun[start : start + job.params.n] for start in range(0, len(begun), job.params.n))
            return [llm.client.begun(request, part) for request, part in zip(requests, parts, strict=True)]
        except ValueError as error:
            raise refused(SENT_TOKENS, str(error)) from error

    @property
    def begun(self) -> Sequence[BegunAnswer]:
        """The first tokens of each choice, where the client has them."""
        return self._begun or ()

    @property
    def is_resumed(self) -> bool:
        """True if the client has the beginning."""
        return self._skippers is not None

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.model.texts.tokenizer

    async def run(self) -> list[RequestOutput]:
        """The outputs of the whole job. Raises APIError if an answer failed."""
        source = await self._submit()
        while not source.is_done:
            for delta in await source.read():
                self._receive(delta)
        self._end()
        await self._make_coordinates()
        return self.outputs

    async def events(self, form: AnswerForm) -> AsyncIterator[bytes]:
        """Events of what is new, as it comes. Raises APIError if an answer failed."""
        if begun := form.begin() + self._echoed(form):
            yield begun
        source = await self._submit()
        readers = self._readers()
        is_plain = not readers and self._skippers is None and self.job.asked.num_kept is None
        while not source.is_done:
            chunk = b""
            for delta in await source.read():
                self._receive(delta)
                if self._num_told is not None and delta.token_ids:
                    chunk += self._told(delta)
                if is_plain:
                    chunk += form.add(delta)
                else:
                    chunk += b"".join(form.add(*arguments) for arguments in self._shown(form, delta, readers))
            if chunk:
                yield chunk
        self._end()
        await self._make_coordinates()
        yield form.finish()

    def _told(self, delta: StreamDelta) -> bytes:
        """A comment with the number of a choice, how many of its tokens came before, and its new ones."""
        assert self._num_told is not None
        first, ids = self._num_told[delta.index], delta.token_ids
        self._num_told[delta.index] = first + len(ids)
        return b":tokens %d %d %b\n\n" % (delta.index, first, ",".join(map(str, ids)).encode())

    def _echoed(self, form: AnswerForm) -> bytes:
        """Events of the prompts' texts, if they are part of the answers."""
        chunks = b""
        for index in range(self.job.num_answers if self.job.asked.echo else 0):
            request, skips = self.requests[index // self.job.params.n], self.job.params.skip_special_tokens
            text = prompt_text(request.text, request.token_ids, self.tokenizer, skips)
            delta = StreamDelta(index, text, [])
            if self._skippers is not None:
                delta, *_ = self._skip(form, delta, "", None)
            if delta.text:
                chunks += form.add(delta)
        return chunks

    def _readers(self) -> dict[int, AnswerSplitter | AnswerReader]:
        """A reader for each choice whose text is more than content."""
        if self._tags is None and self._offer is None:
            return {}
        num = self.job.params.n
        return {
            number * num + index: self._reader(number, index)
            for number in range(len(self.requests))
            for index in range(num)
        }

    def _reader(self, number: int, index: int) -> AnswerSplitter | AnswerReader:
        prompt_ids, tags, is_inside = self.requests[number].token_ids, self._tags, False
        if tags is not None and self.tokenizer is not None:
            is_inside = starts_inside(tags, prompt_end(self.tokenizer, prompt_ids))
        if self._offer is not None:
            seed = sample_seed(self.job.params.seed or 0, index)
            return self._offer.reader(prompt_ids, seed, tags, is_inside, self._hidden)
        assert tags is not None
        return AnswerSplitter(tags, is_inside, self._hidden)

    def _shown(
        self, form: AnswerForm, delta: StreamDelta, readers: Mapping[int, AnswerSplitter | AnswerReader]
    ) -> list[Shown]:
        """A delta with its reasoning and calls apart, and without what the client has."""
        if self.job.asked.num_kept is not None:
            delta = replace(delta, text="", token_ids=[], logprobs=None)
        reader = readers.get(delta.index)
        shown: list[Shown]
        if isinstance(reader, AnswerReader):
            shown = _parts(delta, reader)
        elif reader is not None:
            reasoning, text = reader.feed(delta.text, delta.finish_reason is not None)
            shown = [(replace(delta, text=text), reasoning, None)]
        else:
            shown = [(delta, "", None)]
        return shown if self._skippers is None else [self._skip(form, *arguments) for arguments in shown]

    def _skip(self, form: AnswerForm, delta: StreamDelta, reasoning: str, call: ToolCallDelta | None) -> Shown:
        assert self._skippers is not None
        skipper, end = self._skippers[delta.index], delta.finish_reason
        called = "" if call is None else text_of(call)
        num_chars, num_tokens = skipper.skip(reasoning + delta.text + called, len(delta.token_ids))
        if end is not None:
            skipper.check_end()
        num_reasoning = min(num_chars, len(reasoning))
        num_text = min(num_chars - num_reasoning, len(delta.text))
        known = replace(delta, text=delta.text[:num_text], token_ids=delta.token_ids[:num_tokens], finish_reason=None)
        known_call: ToolCallDelta | None = None
        if call is not None and num_chars:  # the event of a call's name was sent whole
            known_call = call if call.name is not None else replace(call, arguments=call.arguments[:num_chars])
            call = None if call.name is not None else replace(call, arguments=call.arguments[num_chars:])
            call = call if call is not None and call.arguments else None
        if num_chars:
            form.pass_over(known, reasoning[:num_reasoning], known_call)
        delta = replace(
            delta,
            text=delta.text[num_text:],
            token_ids=delta.token_ids[num_tokens:],
            logprobs=None if delta.logprobs is None else delta.logprobs[num_tokens:],
            finish_reason=None if skipper.has_ended else end,
        )
        return delta, reasoning[num_reasoning:], call

    async def _submit(self) -> "AnswerStream | MergedStreams":
        """Waits for the job's turn; returns the deltas of its answers."""
        try:
            async with asyncio.timeout(self._seconds_left()):
                await self._ticket.turn()
        except TimeoutError:
            raise self._expired() from None
        self.record.queued_seconds = time.perf_counter() - self._start
        engine = self.model.engine
        for request in self.requests:
            options = replace(request.options, priority=self._ticket.rank)  # the client's has counted in the queue
            self._streams.append(await engine.submit(replace(request, options=options)))
        self._outputs = [None] * len(self.requests)
        if len(self._streams) == 1:
            return self._streams[0]
        self._merged = MergedStreams(self._streams, self.job.params.n)
        return self._merged

    def _receive(self, delta: StreamDelta) -> None:
        """Counts what has come. Raises APIError if the answer failed."""
        if num := len(delta.token_ids):
            seconds = time.perf_counter() - self._start
            self.record.num_output += num
            if self.record.first_token_seconds is None:
                self.record.first_token_seconds = seconds
                self._metrics.first_token.observe(seconds)
            else:
                self._metrics.inter_token.observe((seconds - self._last) / num)
            self._last = seconds
        if delta.finish_reason is not None:
            if delta.finish_reason == "abort" and self._deadline is not None and time.monotonic() >= self._deadline:
                raise self._expired()
            _check(delta)
            if delta.output is not None:
                self._outputs[delta.index // self.job.params.n] = delta.output

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 1e-3)

    def _expired(self) -> APIError:
        # Clients would try again, and be as late.
        headers = {"x-should-retry": "false"}
        message = f"the answer was not complete within {self.job.asked.timeout} s, the limit that the request set"
        return APIError(408, message, param="timeout", code="deadline_exceeded", headers=headers)

    async def _make_coordinates(self) -> None:
        if not self.job.asked.return_coordinate:
            return
        llm, outputs = self.model.llm, self.outputs

        def make() -> list[dict[str, Any]]:
            made = [llm.coordinate(output, answer.index) for output in outputs for answer in output.outputs]
            return [replace(coordinate, model=self.model.name).to_dict() for coordinate in made]

        self.coordinates = await in_thread(self.record, make)  # the first one of a model's weights takes a while

    def _end(self) -> None:
        self.outputs = [output for output in self._outputs if output is not None]
        if self.job.asked.num_kept == 0:
            self.outputs = [scored(output) for output in self.outputs]
        self.record.end(self.outputs)

    def read(self, output: RequestOutput) -> RequestOutput:
        """A whole output with its answers told apart."""
        return self.job.read(output, self.model.answers)

    def close(self) -> None:
        """Gives back what it holds: the place in the queue, slots and pages."""
        self._service.generations.discard(self)
        for stream in self._streams:
            stream.abort()
        if self._merged is not None:
            self._merged.close()
        self._ticket.leave(self.record.num_output)
        self._lease.release()


def _parts(delta: StreamDelta, reader: AnswerReader) -> list[Shown]:
    """A delta for each part of its text; the first has its tokens, the last its end."""
    end = delta.finish_reason
    parts = reader.feed(delta.text, end is not None) or [Content("")]
    if end == "stop" and reader.num_calls:
        end = "tool_calls"
    shown: list[Shown] = []
    for number, part in enumerate(parts):
        piece = replace(
            delta,
            text=part.text if isinstance(part, Content) else "",
            token_ids=[] if number else delta.token_ids,
            logprobs=None if number else delta.logprobs,
            finish_reason=end if number == len(parts) - 1 else None,
        )
        shown.append(
            (piece, part.text if isinstance(part, Reasoning) else "", part if isinstance(part, ToolCallDelta) else None)
        )
    return shown


def _check(delta: StreamDelta) -> None:
    """Raises APIError for an answer that did not end as it should."""
    if delta.excludes_itself:
        raise APIError(400, f"the request excludes its own answer: {delta.error}")
    if delta.finish_reason == "error":
        raise APIError(500, f"the answer failed: {delta.error or 'the model computed invalid numbers'}")
    if delta.finish_reason == "abort":
        raise unavailable(f"the answer was aborted: {delta.error or 'the server is going away'}", 5)


class MergedStreams:
    """Deltas of several requests as they come. Their indices are those of the choices: number of the request times n,
    plus that of the answer."""

    def __init__(self, streams: Sequence[AnswerStream], n: int):
        self._streams, self._n = streams, n
        self._reads: dict[int, asyncio.Future[list[StreamDelta]]] = {}

    @property
    def is_done(self) -> bool:
        return not self._reads and all(stream.is_done for stream in self._streams)

    async def read(self) -> list[StreamDelta]:
        """Waits for something new. Raises what a request failed with."""
        for number, stream in enumerate(self._streams):
            if number not in self._reads and not stream.is_done:
                self._reads[number] = asyncio.ensure_future(stream.read())
        await asyncio.wait(self._reads.values(), return_when=asyncio.FIRST_COMPLETED)
        return [
            replace(delta, index=number * self._n + delta.index)
            for number in [number for number, read in self._reads.items() if read.done()]
            for delta in self._reads.pop(number).result()
        ]

    def close(self) -> None:
        for read in self._reads.values():
            read.cancel()
