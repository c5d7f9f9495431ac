"""Runs a job: tokenized in a thread, admitted in turn, submitted; its events as they come, its outputs at the end."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from jaxinfer.async_engine import AnswerStream
from jaxinfer.engine.request import (
    CompletionOutput,
    Request,
    RequestOptions,
    RequestOutput,
    StreamDelta,
    TokenLogprob,
)
from jaxinfer.server.admission import Ticket
from jaxinfer.server.errors import APIError, client_errors, refused, unavailable
from jaxinfer.server.params import Job
from jaxinfer.server.reasoning import ReasoningSplitter, Tags, split, starts_inside
from jaxinfer.server.record import Record
from jaxinfer.server.resume import Skipper, StreamPosition
from jaxinfer.server.service import Service
from jaxinfer.text import Tokenizer

_NUM_PROMPT_END = 16  # tokens of a prompt's end that are looked at for an opening tag


@dataclass(slots=True)
class Piece:
    """What is new of one choice; with `end`, the last of it."""

    index: int
    text: str = ""
    reasoning: str = ""
    token_ids: Sequence[int] = ()
    logprobs: list[TokenLogprob] | None = None
    end: CompletionOutput | None = None


class StreamFormat(Protocol):
    """Writes the events of one stream. No method is a coroutine: that would cost more than the events themselves."""

    def begin(self) -> bytes:
        """Events before the first token."""
        ...

    def add(self, piece: Piece) -> bytes:
        """Events of what is new of one choice."""
        ...

    def finish(self) -> bytes:
        """Events after the last choice has ended."""
        ...


class Generation:
    """One job of one client. `prepare`, then `events` to the end, or `run`; `close` in any case.

    Args:
      key: the name of the client's API key. tags: of the model's reasoning, where it is to be told apart.
      resumed: what the client has already. echo: whether texts begin with the prompt's.
    """

    def __init__(
        self,
        service: Service,
        job: Job,
        record: Record,
        *,
        tags: Tags | None = None,
        resumed: StreamPosition | None = None,
        echo: bool = False,
    ):
        self._service, self.job, self._record, self._tags, self._echo = service, job, record, tags, echo
        self.requests: list[Request] = []
        self.outputs: list[RequestOutput] = []
        self._source = _Source()
        self._outputs: list[RequestOutput | None] = []
        self._skippers = None if resumed is None else [Skipper(one) for one in resumed.choices]
        self._start = time.perf_counter()
        self._ticket: Ticket = service.admission.enter(record.key, job.num_answers, job.num_estimated, job.priority)
        service.generations.add(self)

    async def prepare(self) -> None:
        """Tokenizes the prompts. Raises APIError for what cannot be served."""
        self.requests = await asyncio.to_thread(self._prepare)
        self._record.num_prompt = sum(request.num_prompt for request in self.requests)

    def _prepare(self) -> list[Request]:
        llm, job, requests = self._service.llm, self.job, []
        options = RequestOptions(job.priority, None, self._service.salt(self._record.key, job.cache_salt))
        for number, prompt in enumerate(job.prompts):
            what = "the prompt" if len(job.prompts) == 1 else f"prompt {number}"
            with client_errors("prompt"):
                prepared = job.token_ids(llm, prompt)
                if isinstance(prepared, str) and not job.has_limit:
                    prepared = llm.client.tokenize(prepared, what=what)[1]
                num_prompt = 0 if isinstance(prepared, str) else len(prepared)
                params = job.params_for(num_prompt, llm.max_model_len)
                requests.append(llm.prepare(prepared, params, options, what=what))
        return requests

    @property
    def is_resumed(self) -> bool:
        """Whether the client has the beginning."""
        return self._skippers is not None

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._service.llm.tokenizer

    def is_inside(self, number: int) -> bool:
        """Whether the prompt ends within the reasoning."""
        tokenizer = self._service.llm.tokenizer
        if self._tags is None or tokenizer is None:
            return False
        end = [one for one in self.requests[number].token_ids[-_NUM_PROMPT_END:] if tokenizer.has_id(one)]
        return starts_inside(self._tags, tokenizer.decode(end, skip_special_tokens=False))

    def prompt_text(self, number: int) -> str:
        """A prompt as text. Raises APIError where there is no tokenizer to make one of token ids."""
        request = self.requests[number]
        if request.text is not None:
            return request.text
        if self._service.llm.tokenizer is None:
            raise refused("echo", "echo of token ids needs a tokenizer, and this model has none")
        return self._service.llm.tokenizer.decode(request.token_ids, self.job.params.skip_special_tokens)

    async def run(self) -> list[RequestOutput]:
        """The outputs of the whole job. Raises APIError if an answer failed."""
        source = await self._submit()
        while not source.is_done:
            for number, delta in await source.read():
                self._receive(number, delta)
        return self._end()

    async def events(self, form: StreamFormat) -> AsyncIterator[bytes]:
        """Events of what is new, as it comes. Raises APIError if an answer failed."""
        if begun := form.begin() + b"".join(map(form.add, self._echoed())):
            yield begun
        source = await self._submit()
        splitters = self._splitters()
        while not source.is_done:
            found = b""
            for number, delta in await source.read():
                self._receive(number, delta)
                for piece in self._pieces(number, delta, splitters):
                    found += form.add(piece)
            if found:
                yield found
        self._end()
        yield form.finish()

    def _echoed(self) -> Iterator[Piece]:
        num = self.job.params.n
        for index in range(self.job.num_answers if self._echo else 0):
            piece = Piece(index, self.prompt_text(index // num))
            if self._skippers is not None:
                self._skip(piece, self._skippers[index], is_end=False)
            if piece.text:
                yield piece

    def _splitters(self) -> dict[int, ReasoningSplitter]:
        if self._tags is None:
            return {}
        num = self.job.params.n
        return {
            number * num + index: ReasoningSplitter(self._tags, self.is_inside(number))
            for number in range(len(self.requests))
            for index in range(num)
        }

    def _pieces(self, number: int, delta: StreamDelta, splitters: Mapping[int, ReasoningSplitter]) -> list[Piece]:
        index = number * self.job.params.n + delta.index
        if self.job.num_kept is not None:
            piece = Piece(index)
        else:
            piece = Piece(index, delta.text, "", delta.token_ids, delta.logprobs)
        is_end, is_known = delta.finish_reason is not None, False
        if splitters:
            self._split(piece, splitters[index], delta)
        if self._skippers is not None:
            self._skip(piece, self._skippers[index], is_end)
            is_known = self._skippers[index].has_ended
        pieces = [piece] if piece.text or piece.reasoning or piece.token_ids else []
        if is_end and not is_known:
            pieces.append(Piece(index, end=self._ending(delta)))
        return pieces

    def _split(self, piece: Piece, splitter: ReasoningSplitter, delta: StreamDelta) -> None:
        found = {"reasoning": "", "content": ""}
        ending = splitter.finish() if delta.finish_reason is not None else ()
        for kind, text in (*splitter.feed(delta.text), *ending):
            found[kind] += text
        piece.text, piece.reasoning = found["content"], found["reasoning"]

    def _skip(self, piece: Piece, skipper: Skipper, is_end: bool) -> None:
        """Removes from the piece what was sent before."""
        num_chars, num_tokens = skipper.skip(piece.reasoning + piece.text, len(piece.token_ids))
        num_reasoning = min(num_chars, len(piece.reasoning))
        piece.reasoning = piece.reasoning[num_reasoning:]
        piece.text = piece.text[num_chars - num_reasoning :]
        piece.token_ids = piece.token_ids[num_tokens:]
        piece.logprobs = None if piece.logprobs is None else piece.logprobs[num_tokens:]
        if is_end:
            skipper.check_end()

    def _ending(self, delta: StreamDelta) -> CompletionOutput:
        return CompletionOutput(delta.index, "", [], 0, delta.finish_reason, delta.stop_reason)

    async def _submit(self) -> "_Source":
        """Waits for the job's turn; returns the deltas of its prompts."""
        await self._ticket.turn()
        self._record.queued_seconds = time.perf_counter() - self._start
        engine = self._service.engine
        for request in self.requests:
            self._source.streams.append(await engine.submit(request))
        self._outputs = [None] * len(self.requests)
        return self._source

    def _receive(self, number: int, delta: StreamDelta) -> None:
        """Counts what has come. Raises APIError if the answer failed."""
        self._service.metrics.deliver(self._record, time.perf_counter() - self._start, len(delta.token_ids))
        if delta.output is not None:
            self._outputs[number] = delta.output
        if delta.finish_reason is not None:
            _check(delta)

    def _end(self) -> list[RequestOutput]:
        self.outputs = [self._kept(output) for output in self._outputs if output is not None]
        self._record.end(self.outputs)
        return self.outputs

    def _kept(self, output: RequestOutput) -> RequestOutput:
        if self.job.num_kept is None:
            return output
        answers = [
            replace(one, text="", token_ids=[], logprobs=None if one.logprobs is None else [], finish_reason="length")
            for one in output.outputs
        ]
        return replace(output, outputs=answers)

    def split(self, number: int, text: str) -> tuple[str, str]:
        """A whole answer's reasoning and content."""
        return split(text, self._tags, self.is_inside(number))

    def close(self) -> None:
        """Gives back what it holds: the place in the queue, slots and pages."""
        self._service.generations.discard(self)
        self._source.close()
        self._ticket.leave(self._record.num_output)


def _check(delta: StreamDelta) -> None:
    """Raises APIError for an answer that did not end as it should."""
    if delta.finish_reason == "error":
        raise APIError(500, f"the answer failed: {delta.error or 'the model computed invalid numbers'}")
    if delta.finish_reason == "abort":
        raise unavailable(f"the answer was aborted: {delta.error or 'the server is going away'}", 5)


class _Source:
    """Deltas of several streams as they come, with the stream's number."""

    def __init__(self) -> None:
        self.streams: list[AnswerStream] = []
        self._reads: dict[int, asyncio.Future[list[StreamDelta]]] = {}

    @property
    def is_done(self) -> bool:
        return not self._reads and all(stream.is_done for stream in self.streams)

    async def read(self) -> list[tuple[int, StreamDelta]]:
        """Waits for something new. Raises what a request failed with."""
        if len(self.streams) == 1:
            return [(0, delta) for delta in await self.streams[0].read()]
        for number, stream in enumerate(self.streams):
            if number not in self._reads and not stream.is_done:
                self._reads[number] = asyncio.ensure_future(stream.read())
        await asyncio.wait(self._reads.values(), return_when=asyncio.FIRST_COMPLETED)
        found = []
        for number in [number for number, task in self._reads.items() if task.done()]:
            found += [(number, delta) for delta in self._reads.pop(number).result()]
        return found

    def close(self) -> None:
        for stream in self.streams:
            stream.abort()
        for task in self._reads.values():
            task.cancel()
