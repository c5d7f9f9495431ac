"""From the engine's outputs to OpenAI's answers, for server and batch."""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, structs

from jaxinfer.openai import answers as types
from jaxinfer.openai.bodies import EmbeddingsRequest
from jaxinfer.openai.errors import RequestError
from jaxinfer.openai.requests import BoundRequest

if TYPE_CHECKING:
    import numpy as np

    from jaxinfer.engine.request import CompletionOutput, RequestOutput, TokenLogprob
    from jaxinfer.sampling import SamplingParams
    from jaxinfer.text import Tokenizer
    from jaxinfer.tool_calls import ToolCall

_BYTE = re.compile("<0x[0-9A-F]{2}>")
LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON lacks


def chat_completion(
    request: BoundRequest,
    output: "RequestOutput",
    about: Mapping[str, Any],
    *,
    has_cached: bool = False,
    coordinates: list[dict[str, Any]] | None = None,
) -> types.ChatCompletion:
    """The answer of a chat, whose output has reasoning and calls apart. `about`: id, time, model and fingerprint."""
    params, has_ids = request.params, request.asked.return_token_ids
    return types.ChatCompletion(
        object="chat.completion",
        choices=[_chat_choice(answer, params, has_ids) for answer in output.outputs],
        usage=usage([output], has_cached=has_cached),
        seed=params.seed or 0,
        prompt_token_ids=list(output.prompt_token_ids) if has_ids else UNSET,
        prompt_logprobs=UNSET if output.prompt_logprobs is None else prompt_entries(output, params),
        coordinates=UNSET if coordinates is None else coordinates,
        **about,
    )


def completion(
    request: BoundRequest,
    outputs: Sequence["RequestOutput"],
    about: Mapping[str, Any],
    tokenizer: "Tokenizer | None",
    *,
    has_cached: bool = False,
    coordinates: list[dict[str, Any]] | None = None,
) -> types.Completion:
    """Continuations of prompts, an output for each. Raises RequestError for an echo that cannot be made."""
    choices = [
        _completion_choice(number * request.params.n + answer.index, request, output, answer, tokenizer)
        for number, output in enumerate(outputs)
        for answer in output.outputs
    ]
    return types.Completion(
        object="text_completion",
        choices=choices,
        usage=usage(outputs, has_cached=has_cached),
        seed=request.params.seed or 0,
        coordinates=UNSET if coordinates is None else coordinates,
        **about,
    )


def usage(outputs: Sequence["RequestOutput"], *, has_cached: bool = False) -> types.Usage:
    """Numbers of tokens, counted as by OpenAI: a prompt once, for any number of answers."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    cached = types.CachedTokens(cached_tokens=sum(output.num_cached_tokens for output in outputs))
    return types.Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_output,
        total_tokens=num_prompt + num_output,
        prompt_tokens_details=cached if has_cached else UNSET,
    )


def ending(answer: "CompletionOutput") -> Any:
    """OpenAI's finish_reason of an answer whose calls are apart."""
    return "tool_calls" if answer.tool_calls and answer.finish_reason == "stop" else answer.finish_reason


def scored(output: "RequestOutput") -> "RequestOutput":
    """The output of a request of which only the prompt is scored, without the token that was made."""
    empty = {"text": "", "token_ids": [], "finish_reason": "length"}
    return replace(
        output,
        outputs=[
            replace(answer, logprobs=None if answer.logprobs is None else [], **empty) for answer in output.outputs
        ],
    )


def embeddings(vectors: "np.ndarray", num_tokens: int, body: EmbeddingsRequest, model: str) -> types.Embeddings:
    """The answer with these vectors, float32 [texts, dimensions]."""
    as_base64 = body.encoding_format == "base64"
    rows = [base64.b64encode(row).decode() for row in vectors.astype("<f4")] if as_base64 else vectors.tolist()
    return types.Embeddings(
        object="list",
        data=[types.TextEmbedding(object="embedding", index=index, embedding=row) for index, row in enumerate(rows)],
        model=model,
        usage=types.TokenCounts(prompt_tokens=num_tokens, total_tokens=num_tokens),
    )


# Choices.


def _chat_choice(answer: "CompletionOutput", params: "SamplingParams", has_ids: bool) -> types.ChatChoice:
    calls = answer.tool_calls
    return types.ChatChoice(
        index=answer.index,
        message=types.ChatMessage(
            role="assistant",
            content=(answer.text or None) if calls else answer.text,
            refusal=None,
            reasoning_content=answer.reasoning or UNSET,
            tool_calls=call_entries(calls) if calls else UNSET,
        ),
        logprobs=chat_logprobs(answer.logprobs, params),
        finish_reason=ending(answer),
        stop_reason=answer.stop_reason,
        token_ids=list(answer.token_ids) if has_ids else UNSET,
    )


def chat_logprobs(entries: "Sequence[TokenLogprob] | None", params: "SamplingParams") -> types.ChatLogprobs | None:
    """The log-probabilities of a chat's tokens."""
    if entries is None:
        return None
    return types.ChatLogprobs(content=[token_entry(entry, params.logprobs or 0) for entry in entries], refusal=None)


def call_entries(calls: Sequence["ToolCall"]) -> list[types.ChatToolCall]:
    """Calls of tools as in OpenAI's chat API."""
    return [
        types.ChatToolCall(
            id=call.id, type="function", function=types.Function(name=call.name, arguments=call.arguments)
        )
        for call in calls
    ]


def _completion_choice(
    index: int,
    request: BoundRequest,
    output: "RequestOutput",
    answer: "CompletionOutput",
    tokenizer: "Tokenizer | None",
) -> types.CompletionChoice:
    asked, params = request.asked, request.params
    before = ""
    if asked.echo:
        before = prompt_text(output.prompt, output.prompt_token_ids, tokenizer, params.skip_special_tokens)
    logprobs = None
    if answer.logprobs is not None:
        lists = LogprobLists(tokenizer, params.skip_special_tokens)
        if asked.echo:
            lists.add_prompt(before, output, params)
        for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
            lists.add(token, entry, params.logprobs or 0)
        logprobs = lists.take()
    # Those of an echo are among the answer's, unless the body asks for them too.
    is_asked = "prompt_logprobs" in asked.sampling or not (asked.echo and params.logprobs is not None)
    return types.CompletionChoice(
        index=index,
        text=before + answer.text,
        logprobs=logprobs,
        finish_reason=answer.finish_reason,  # type: ignore[arg-type]
        stop_reason=answer.stop_reason,
        token_ids=list(answer.token_ids) if asked.return_token_ids else UNSET,
        prompt_token_ids=list(output.prompt_token_ids) if asked.return_token_ids else UNSET,
        prompt_logprobs=prompt_entries(output, params) if is_asked and params.prompt_logprobs is not None else UNSET,
    )


def prompt_text(
    text: str | None, token_ids: Sequence[int], tokenizer: "Tokenizer | None", skip_special_tokens: bool
) -> str:
    """A prompt as text. Raises RequestError where there is no tokenizer to make one of token ids."""
    if text is not None:
        return text
    if tokenizer is None:
        raise RequestError("echo of token ids needs a tokenizer, and this model has none", "echo")
    return tokenizer.decode(token_ids, skip_special_tokens)


# Log-probabilities.


def token_entry(entry: "TokenLogprob", num_top: int) -> types.ChatTokenLogprobs:
    """A token as in OpenAI's chat API, with its id and rank; `top_logprobs` are the `num_top` most probable ones."""
    every = [
        types.TokenEntry(
            token=_text(token, logprob.decoded_token),
            token_id=token,
            logprob=finite(logprob.logprob),
            rank=logprob.rank,
            bytes=None if logprob.token_bytes is None else list(logprob.token_bytes),
        )
        for token, logprob in entry.items()
    ]
    best = sorted((candidate for candidate in every if candidate.rank <= num_top), key=lambda candidate: candidate.rank)
    return types.ChatTokenLogprobs(**structs.asdict(every[0]), top_logprobs=best)


def prompt_entries(output: "RequestOutput", params: "SamplingParams") -> list[types.ChatTokenLogprobs | None]:
    """Those of a prompt, of which the first token has none."""
    entries = output.prompt_logprobs or []
    return [None if entry is None else token_entry(entry, params.prompt_logprobs or 0) for entry in entries]


class LogprobLists:
    """OpenAI's four lists of completions; with echo they begin with the prompt's tokens, of which the first has no
    log-probability.

    Offsets are where tokens begin in the choice's text, in characters, from `offset` on. Parts of a character have the
    place of that character, and a token that the text leaves out that of what follows.
    """

    def __init__(self, tokenizer: "Tokenizer | None", skip_special_tokens: bool = True, offset: int = 0):
        self._tokenizer, self._skips, self._offset = tokenizer, skip_special_tokens, offset
        self._prompt: str | None = None  # of which tokens are added
        self._start_text()
        self._start()

    def add_prompt(self, text: str, output: "RequestOutput", params: "SamplingParams") -> None:
        """Adds the prompt's tokens, whose text the choice begins with."""
        self._prompt = text
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True):
            self.add(token, entry, params.prompt_logprobs or 0)
        self._prompt, self._offset = None, len(text)
        self._start_text()

    def pass_over(self, tokens: Sequence[int]) -> None:
        """Tokens before those that are added: the first one that is added may end a character of theirs."""
        offset, decode = self._offset, None if self._tokenizer is None else self._tokenizer.decode
        for token in tokens:
            self._place(token, "" if decode is None else decode([token], False))
        self._offset = offset

    def _start_text(self) -> None:
        from jaxinfer.text import StreamingDetokenizer

        self._detokenizer = None if self._tokenizer is None else StreamingDetokenizer(self._tokenizer)
        self._held = b""

    def _start(self) -> None:
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top_logprobs: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, token: int, entry: "TokenLogprob | None", num_top: int) -> None:
        """Adds a token with its `num_top` most probable ones."""
        if entry is None:
            decoded = None if self._tokenizer is None else self._tokenizer.decode([token], False)
            self._append(token, decoded, None, None)
            return
        shown = token_entry(entry, num_top)
        best: dict[str, float] = {}
        for candidate in [*shown.top_logprobs, shown]:  # OpenAI includes the chosen token
            if candidate is shown and any(other.token_id == shown.token_id for other in shown.top_logprobs):
                continue
            # Two ids can have the same text, if they are parts of characters.
            name = candidate.token if candidate.token not in best else _text(candidate.token_id, None)
            best[name] = candidate.logprob
        self._append(token, entry[token].decoded_token, shown.logprob, best)

    def _append(self, token: int, decoded: str | None, logprob: float | None, best: dict[str, float] | None) -> None:
        self._tokens.append(_text(token, decoded))
        self._token_logprobs.append(logprob)
        self._top_logprobs.append(best)
        self._offsets.append(self._place(token, decoded or ""))

    def _place(self, token: int, own: str) -> int:
        """The place where a token with this text of its own begins; moves on to its end."""
        before, tokenizer, is_whole = self._offset, self._tokenizer, "\ufffd" not in own
        if tokenizer is None or self._detokenizer is None or not tokenizer.has_id(token):
            text = own if is_whole and tokenizer is None else ""
        elif token in tokenizer.special_ids:
            is_shown = not self._skips if self._prompt is None else self._prompt.startswith(own, before)
            text = own if is_shown else ""
        else:
            text = self._detokenizer.add(token) if self._detokenizer.is_incremental else own
        self._offset += len(text)
        if not is_whole or not text.endswith(own):
            return before + self._num_held_chars(token, text)
        self._held = b""
        start = len(text) - len(own)  # before it, the end of other tokens' character, or a space that is trimmed alone
        if tokenizer is not None and text[:start].endswith(" "):
            start -= (tokenizer.id_to_token(token) or "").startswith("▁")
        return before + start

    def _num_held_chars(self, token: int, text: str) -> int:
        """Characters that are complete before this byte of a run whose text comes as a whole (`<0xE4>`: byte
        fallback)."""
        if text or self._tokenizer is None:
            self._held = b""
            return 0
        num_before, piece = len(self._held.decode(errors="ignore")), self._tokenizer.id_to_token(token) or ""
        if _BYTE.fullmatch(piece):
            self._held += bytes.fromhex(piece[3:5])
        return num_before

    def take(self) -> types.CompletionLogprobs:
        """The lists of what was added since the last call; offsets go on from it."""
        lists = types.CompletionLogprobs(
            tokens=self._tokens,
            token_logprobs=self._token_logprobs,
            top_logprobs=self._top_logprobs,
            text_offset=self._offsets,
        )
        self._start()
        return lists


def finite(logprob: float) -> float:
    """A log-probability as a number that JSON has."""
    return max(logprob, LOWEST_LOGPROB)


def _text(token: int, decoded: str | None) -> str:
    return f"token_id:{token}" if decoded is None else decoded
