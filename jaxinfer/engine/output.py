"""From tokens to text: one answer's detokenizer and stop strings, and the records that callers get."""

from dataclasses import dataclass, replace

from jaxinfer.engine.request import CompletionOutput, Generation, RequestOutput, RequestTimings
from jaxinfer.text import StopStringMatcher, StreamingDetokenizer, Tokenizer


@dataclass(frozen=True)
class StreamDelta:
    """What was added to one answer.

    Attributes:
      index: the answer's number among the request's n. text, token_ids: what is new.
      output: the whole request, in the last delta only.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    output: RequestOutput | None = None

    def merged(self, later: "StreamDelta") -> "StreamDelta":
        """This delta and the answer's next one in one."""
        return replace(later, text=self.text + later.text, token_ids=[*self.token_ids, *later.token_ids])


class AnswerText:
    """Follows a `Generation` and turns its new tokens into text.

    The deltas that `read` returns add up to `text`. Nothing after a stop string is ever part of it; the text of a
    stop token is left out unless the request includes it.
    """

    def __init__(self, generation: Generation, index: int, tokenizer: Tokenizer | None):
        params = generation.params
        self.generation, self.index = generation, index
        self.text = ""
        self.num_read = 0
        self.is_closed = False
        self._tokenizer = tokenizer
        self._detokenizer = None if tokenizer is None else StreamingDetokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopStringMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None

    def read(self) -> tuple[str, list[int], str | None]:
        """Takes in the tokens since the last call: the new text, those tokens, and the stop string that was found.

        After a stop string the caller ends the generation; tokens beyond it do not count.
        """
        generation, params = self.generation, self.generation.params
        delta, matched = "", None
        first = self.num_read
        while self.num_read < len(generation.output) and matched is None:
            token = generation.output[self.num_read]
            self.num_read += 1
            is_stop_token = (
                generation.finish_reason == "stop"
                and self.num_read == len(generation.output)
                and isinstance(generation.stop_reason, int)
            )
            if self._detokenizer is None or (is_stop_token and not params.include_stop_str_in_output):
                continue
            if self._tokenizer is None or not self._tokenizer.has_id(token):
                continue  # a row of the model that is none of the tokenizer's tokens has no text
            text = self._detokenizer.add([token])
            if self._stops is not None and self.num_read > params.min_tokens:
                result = self._stops.feed(text)
                text, matched = result.text, result.matched
            delta += text
        if matched is not None:
            self._drop_after(self.num_read)
        tokens = generation.output[first : self.num_read]
        if matched is None and generation.finish_reason is not None and not self.is_closed:
            delta, matched = self._close(delta)
        self.text += delta
        return delta, tokens, matched

    def completion(self) -> CompletionOutput:
        """The answer as it stands."""
        generation = self.generation
        logprobs = generation.logprobs if generation.params.logprobs is not None else None
        total = None
        if logprobs is not None:
            total = float(sum(next(iter(entry.values())).logprob for entry in logprobs))
        seed = generation.row.seed if generation.row.seed is not None else generation.params.seed
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(generation.output),
            seed=seed or 0,
            finish_reason=generation.finish_reason,
            stop_reason=generation.stop_reason,
            error=generation.error,
            cumulative_logprob=total,
            logprobs=logprobs,
            speculation=generation.speculation,
        )

    def _close(self, delta: str) -> tuple[str, str | None]:
        """The text still held back when the generation has ended, which may itself complete a stop string."""
        self.is_closed = True
        matched = None
        if self._detokenizer is not None:
            rest = self._detokenizer.finalize()
            if self._stops is not None and self.num_read > self.generation.params.min_tokens:
                result = self._stops.feed(rest)
                rest, matched = result.text, result.matched
                if matched is None:
                    rest += self._stops.flush()
            delta += rest
        return delta, matched

    def _drop_after(self, num_tokens: int) -> None:
        del self.generation.output[num_tokens:]
        del self.generation.logprobs[num_tokens:]
        self.is_closed = True


def timings(generations: list[Generation]) -> RequestTimings:
    """Of a request with these answers: the first token of any, the end of the last."""
    arrival = min(generation.arrival for generation in generations)
    admitted = min(generation.admitted or generation.finished for generation in generations)
    first = min(generation.first_token or generation.finished for generation in generations)
    finished = max(generation.finished for generation in generations)
    num_tokens = max(len(generation.output) for generation in generations)
    return RequestTimings(
        queue_time=admitted - arrival,
        time_to_first_token=first - arrival,
        total_time=finished - arrival,
        time_per_output_token=(finished - first) / max(num_tokens - 1, 1),
    )
