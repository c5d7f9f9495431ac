"""Runs a job: tokenized in a thread, admitted in turn, submitted; its pieces as they come, its outputs at the end."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

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


class Generation:
    """One job of one client. `prepare`, then `pieces` to the end, or `outputs`; `close` in any case.

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
        self._streams: list[AnswerStream] = []
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
        async for _ in self._deltas():
            pass
        return self.outputs

    async def pieces(self) -> AsyncIterator[Piece]:
        """What is new, as it comes. Raises APIError if an answer failed."""
        num = self.job.params.n
        splitters: dict[int, ReasoningSplitter] = {}
        if self._tags is not None:
            splitters = {
                number * num + index: ReasoningSplitter(self._tags, self.is_inside(number))
                for number in range(len(self.requests))
                for index in range(num)
            }
        for index in range(self.job.num_answers if self._echo else 0):
            piece = Piece(index, self.prompt_text(index // num))
            if self._skippers is not None:
                self._skip(piece, self._skippers[index], is_end=False)
            if piece.text:
                yield piece
        async for number, delta in self._deltas():
            index = number * num + delta.index
            piece = Piece(index, delta.text, "", delta.token_ids, delta.logprobs)
            if self.job.num_kept is not None:
                piece = Piece(index)
            if self._tags is not None:
                self._split(piece, splitters[index], delta)
            if self._skippers is not None:
                self._skip(piece, self._skippers[index], delta.finish_reason is not None)
            if piece.text or piece.reasoning or piece.token_ids:
                yield piece
            is_known = self._skippers is not None and self._skippers[index].has_ended
            if delta.finish_reason is not None and not is_known:
                yield Piece(index, end=self._ending(delta))

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

    async def _deltas(self) -> AsyncIterator[tuple[int, StreamDelta]]:
        """Deltas of all prompts, with the prompt's number."""
        await self._ticket.turn()
        self._record.queued_seconds = time.perf_counter() - self._start
        engine = self._service.engine
        for request in self.requests:
            self._streams.append(await engine.submit(request))
        outputs: list[RequestOutput | None] = [None] * len(self._streams)
        async for number, delta in _merged(self._streams):
            seconds = time.perf_counter() - self._start
            self._service.metrics.deliver(self._record, seconds, len(delta.token_ids))
            if delta.output is not None:
                outputs[number] = delta.output
            _check(delta)
            yield number, delta
        self.outputs = [self._kept(output) for output in outputs if output is not None]
        self._record.end(self.outputs)

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
        for stream in self._streams:
            stream.abort()
        self._ticket.leave(self._record.num_output)


def _check(delta: StreamDelta) -> None:
    """Raises APIError for an answer that did not end as it should."""
    if delta.finish_reason == "error":
        raise APIError(500, f"the answer failed: {delta.error or 'the model computed invalid numbers'}")
    if delta.finish_reason == "abort":
        raise unavailable(f"the answer was aborted: {delta.error or 'the server is going away'}", 5)


async def _merged(streams: Sequence[AnswerStream]) -> AsyncIterator[tuple[int, StreamDelta]]:
    """Deltas of several streams as they come, with the stream's number."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    arrived: asyncio.Queue[Any] = asyncio.Queue(maxsize=1)  # a slow reader's deltas are merged by the engine

    async def forward(number: int) -> None:
        try:
            async for delta in streams[number]:
                await arrived.put((number, delta))
            await arrived.put(None)
        except Exception as error:
            await arrived.put(error)

    tasks = [asyncio.create_task(forward(number)) for number in range(len(streams))]
    try:
        num_left = len(tasks)
        while num_left:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
