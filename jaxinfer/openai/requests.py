"""From typed bodies to what the engine takes: the one reader of chat, completions and plain rows.

A `TextRequest` is a body that was checked as far as that is possible without a model; bound to one it is a
`BoundRequest`, with complete sampling parameters. Routes of other forms (responses, Anthropic's, Ollama's) translate to
the first.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from jaxinfer.openai.bodies import MAX_SALT_CHARS, MAX_TIMEOUT, TOOL, TOOL_CHOICE
from jaxinfer.openai.errors import RequestError
from jaxinfer.openai.fields import check_message_names, check_names
from jaxinfer.sampling.params import SamplingParams, SamplingParamsError
from jaxinfer.text.messages import check_messages, num_chars
from jaxinfer.tool_calls import AnswerFormat, ToolOffer, check_tools

if TYPE_CHECKING:
    from jaxinfer.engine.request import RequestOutput
    from jaxinfer.text import Tokenizer
    from jaxinfer.text.prompts import TakesPrompts

Prompt = str | Sequence[int]

COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default; chat has no limit
CHARS_PER_TOKEN = 4  # of English text, about; for limits that are checked before a text is tokenized


class TextModel(Protocol):
    """The part of `LLM` that requests are bound to."""

    @property
    def default_params(self) -> SamplingParams: ...

    @property
    def client(self) -> "TakesPrompts": ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def tokenizer(self) -> "Tokenizer | None": ...


@dataclass(frozen=True)
class AdapterTexts:
    """A model as texts for one of its adapters are read, with the tokenizer and chat template of that adapter."""

    client: "TakesPrompts"
    default_params: SamplingParams

    @property
    def max_model_len(self) -> int:
        return self.client.max_model_len

    @property
    def tokenizer(self) -> "Tokenizer | None":
        return self.client.tokenizer


@dataclass(frozen=True)
class TextRequest:
    """A request as its body states it, checked without a model.

    Attributes:
      sampling: fields of `SamplingParams` that the body gives. names: what it calls them, where that differs.
      prompts: texts or token ids; none where there are `messages`, with their places in the body. source: the field
        that has either. ignore_unknown: whether messages may have names that nothing reads.
      tools, tool_choice, parallel_tool_calls: of OpenAI's chat completions. tool_path, schema_name: what stands for
        `.function` and `parameters` in the places of tools. template_kwargs: variables of the chat template.
      effort: of reasoning. effort_name: its field.
      num_kept: answer tokens that are returned at most; 0 where only the prompt is scored.
      truncate_to: tokens that are kept of a prompt, the last ones; -1 for as many as fit, None for all.
      adds_special_tokens: as of a tokenizer. priority, timeout, cache_salt: as of `RequestOptions`.
      max_length: tokens of a prompt with its answer, where that is less than the model's length. length_name: its
        field.
      model, echo, return_token_ids, return_coordinate: of the body. has_openai_limits: whether the default of
        max_tokens is OpenAI's.
      ignored: what the body has that is not supported and changes nothing, for a log.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    prompts: tuple[Prompt, ...] = ()
    messages: Sequence[Mapping[str, Any]] | None = None
    places: Sequence[str] | None = None
    source: str = "messages"
    ignore_unknown: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    tool_path: str = ".function"
    schema_name: str = "parameters"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None
    effort_name: str = "reasoning_effort"
    num_kept: int | None = None
    truncate_to: int | None = None
    adds_special_tokens: bool = True
    priority: int = 0
    timeout: float | None = None
    cache_salt: str = ""
    max_length: int | None = None
    length_name: str = "max_length"
    model: str | None = None
    echo: bool = False
    return_token_ids: bool = False
    return_coordinate: bool = False
    has_openai_limits: bool = True
    ignored: tuple[str, ...] = ()
    _offers: dict[AnswerFormat, ToolOffer | None] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        with _explaining(lambda error: error):
            if not self.ignore_unknown:
                check_names(self.tools, TOOL, "tools")
                check_names(self.tool_choice, TOOL_CHOICE, "tool_choice")
            with self.errors_of_tools():
                check_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
            if self.messages is not None:
                check_messages(self.messages, self.places)
        check_timeout(self.timeout)
        if len(self.cache_salt) > MAX_SALT_CHARS:
            told = f"cache_salt has {len(self.cache_salt)} characters, at most {MAX_SALT_CHARS} are allowed"
            raise RequestError(told, "cache_salt")

    def with_messages(self, messages: Sequence[Mapping[str, Any]]) -> "TextRequest":
        """The request for a conversation; the tools, which are checked, are not read again."""
        check_messages(messages)
        request = copy(self)
        vars(request)["messages"] = messages
        return request

    @property
    def is_chat(self) -> bool:
        return self.messages is not None

    def bind(
        self,
        model: TextModel,
        answers: AnswerFormat,
        choose_seed: Callable[[SamplingParams], int | None] = lambda params: None,
        given: Mapping[str, Any] | None = None,
    ) -> "BoundRequest":
        """The request for a model, over the checkpoint's sampling parameters and those `given` for all requests.

        `choose_seed` gives the seed of a request that has none; by default the engine does.

        Raises RequestError or SamplingParamsError.
        """
        values = {param.name: getattr(model.default_params, param.name) for param in fields(SamplingParams)}
        if self.is_chat and self.has_openai_limits and values["max_tokens"] == SamplingParams().max_tokens:
            values["max_tokens"] = None  # a conversation has no other limit than the model's length
        limits = {**(given or {}), **self.sampling}
        values |= limits
        if self.echo and values["logprobs"] is not None and values["prompt_logprobs"] is None:
            values["prompt_logprobs"] = values["logprobs"]  # the text starts with the prompt
        is_short = self.has_openai_limits and not self.is_chat
        if is_short and values["max_tokens"] is None and "max_tokens" not in limits:
            values["max_tokens"] = COMPLETIONS_MAX_TOKENS
        if self.num_kept == 0 and _number(values["min_tokens"]) > 0:
            values["min_tokens"] = 0
        if "max_tokens" not in limits and values["max_tokens"] is not None:
            values["max_tokens"] = max(values["max_tokens"], _number(values["min_tokens"]))
        offer, ignored = None, self.ignored
        template = (None if model.tokenizer is None else model.tokenizer.chat_template) or ""
        if self.is_chat:
            names = check_message_names(self.messages, model.tokenizer, ignore_unknown=self.ignore_unknown)
            offer, ignored = self._offer(answers), (*ignored, *names)
        with _explaining(self.explained):
            params = SamplingParams.from_dict(values)
        if offer is not None and offer.is_read and params.structured is not None:
            name = self.names.get("structured", "structured")
            told = f"tools and {name} exclude each other: leave one out, or use tool_choice none"
            raise RequestError(told, "tools")
        if params.seed is None:
            params = replace(params, seed=choose_seed(params))
        return BoundRequest(
            self,
            params,
            offer,
            has_limit=limits.get("max_tokens") is not None,
            template_kwargs={**self.template_kwargs, **self._effort(template)},
            truncate_to=self._truncation(model.max_model_len),
            ignored=ignored,
        )

    def _offer(self, answers: AnswerFormat) -> ToolOffer | None:
        if answers not in self._offers:
            with self.errors_of_tools():
                self._offers[answers] = answers.offer(self.tools, self.tool_choice, self.parallel_tool_calls)
        return self._offers[answers]

    def _truncation(self, max_model_len: int) -> int | None:
        wanted = max_model_len - 1 if self.truncate_to == -1 else self.truncate_to
        if wanted is not None and not 1 <= wanted <= max_model_len:
            name = "truncate_prompt_tokens"
            raise RequestError(f"{name}={wanted} must be 1 to {max_model_len}, or -1 for all", name)
        return wanted

    def _effort(self, template: str) -> dict[str, Any]:
        """Variables of the chat template that set the effort of reasoning; "none" switches it off where a template has
        only a switch."""
        if not self.effort:
            return {}
        if "reasoning_effort" in template:
            return {"reasoning_effort": self.effort}
        if self.effort == "none" and "enable_thinking" in template:
            return {"enable_thinking": False}
        name = self.effort_name
        told = f"{name}={self.effort!r:.60}: the model's chat template does not know reasoning_effort"
        raise RequestError(told, name)

    def explained(self, error: ValueError) -> ValueError:
        """An error of the engine with the body's name of what it is about."""
        parameter = getattr(error, "parameter", None)
        if not isinstance(error, SamplingParamsError) or parameter is None:
            return error
        name = self.names.get(parameter, parameter)
        return RequestError(self.in_their_names(str(error).replace(parameter, name, 1)), name)

    def in_their_names(self, sentence: str) -> str:
        """An error's sentence with the body's names of parameters that have a value in it."""
        for ours, theirs in self.names.items():
            sentence = re.sub(rf"(?<![\w.]){ours}(?==)", theirs, sentence)
        return sentence

    def errors_of_tools(self) -> AbstractContextManager[None]:
        """A block whose errors are about tools."""

        def explained(error: ValueError) -> ValueError:
            sentence = str(error).replace(".parameters", f".{self.schema_name}")
            if not self.tool_path:  # names are not in an object of their own
                sentence = sentence.replace("'function': {'name': ...}", "'name': ...").replace(".allowed_tools", "")
            sentence = sentence.replace(".function", self.tool_path)
            name = sentence.partition("[")[0].partition(".")[0].partition("=")[0].partition(" ")[0]
            return RequestError(sentence, name if name in ("tool_choice", "parallel_tool_calls") else "tools")

        return _explaining(explained)


def num_estimated(prompts: Sequence[Prompt]) -> int:
    """Tokens of prompts, estimated without tokenizing."""
    return sum(-(-len(prompt) // (CHARS_PER_TOKEN if isinstance(prompt, str) else 1)) for prompt in prompts)


def check_timeout(timeout: float | None) -> None:
    """Raises RequestError for seconds that no request may wait."""
    if timeout is not None and not 0 < timeout <= MAX_TIMEOUT:
        told = f"must be seconds above 0, at most {MAX_TIMEOUT:.0f}; leave it out for none"
        raise RequestError(f"timeout={timeout} {told}", "timeout")


@contextmanager
def _explaining(explained: Callable[[ValueError], ValueError]) -> Iterator[None]:
    """A block of which a ValueError is explained."""
    try:
        yield
    except ValueError as error:
        if (told := explained(error)) is error:
            raise
        raise told from None
    except RecursionError:
        raise RequestError("the tools or the messages are nested too deeply") from None


@dataclass(frozen=True)
class BoundRequest:
    """A request for one model.

    Attributes:
      asked: the body's. params: complete, with a seed, as the body has them; answers are generated under `inputs`.
      offer: tools, where there are any. has_limit: False if max_tokens is a default, which is lowered to what fits.
        template_kwargs, truncate_to: of the model. ignored: as of `TextRequest`, with names of messages.
    """

    asked: TextRequest
    params: SamplingParams
    offer: ToolOffer | None = None
    has_limit: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    truncate_to: int | None = None
    ignored: tuple[str, ...] = ()

    @property
    def num_prompts(self) -> int:
        return 1 if self.asked.is_chat else len(self.asked.prompts)

    @property
    def num_answers(self) -> int:
        return self.num_prompts * self.params.n

    @property
    def read_offer(self) -> ToolOffer | None:
        """The tools, where calls are told from the text of answers."""
        return self.offer if self.offer is not None and self.offer.is_read else None

    @cached_property
    def num_estimated(self) -> int:
        """Prompt tokens, estimated without tokenizing."""
        asked = self.asked
        if asked.messages is not None:
            return -(-num_chars([asked.messages, asked.tools]) // CHARS_PER_TOKEN) + 1
        return num_estimated(asked.prompts)

    def inputs(self, model: TextModel, answers: AnswerFormat) -> list[tuple[Prompt, SamplingParams]]:
        """Each prompt with the sampling parameters that its answers are generated under.

        A text stays one where nothing is to be known of its tokens. Raises RequestError or ValueError.
        """
        params = self.params
        if self.asked.is_chat:
            with self.asked.errors_of_tools():  # whose grammar is made here
                params = answers.params(params, self.offer)
        return [(prompt, self._params_for(params, prompt, model)) for prompt in self.prompts(model)]

    def prompts(self, model: TextModel) -> list[Prompt]:
        """The prompts, of a chat its token ids. Raises as `inputs`."""
        asked = self.asked
        if asked.messages is not None:
            shown = None if self.offer is None else self.offer.shown
            return [self._cut(model.client.tokenize_chat(asked.messages, shown, self.template_kwargs))]
        # The number of tokens is known where a limit may be lowered, or tokens are left out.
        is_told = self.has_limit and asked.max_length is None and self.truncate_to is None and asked.adds_special_tokens
        prompts: list[Prompt] = []
        for number, prompt in enumerate(asked.prompts):
            if isinstance(prompt, str) and not is_told:
                what = self.name_of(number)
                prompt = self._cut(model.client.tokenize(prompt, asked.adds_special_tokens, what=what)[1])
            prompts.append(prompt if isinstance(prompt, str) else self._cut(prompt))
        return prompts

    def read(self, output: "RequestOutput", answers: AnswerFormat) -> "RequestOutput":
        """The output, of a chat with reasoning and calls apart from the text of its answers."""
        if not self.asked.is_chat or not answers.is_read(self.params, self.offer):
            return output
        read, skips = [], self.params.skip_special_tokens
        for answer in output.outputs:
            told = answers.read(answer.text, output.prompt_token_ids, answer.seed, self.offer, skips)
            called = answer.tool_calls if self.read_offer is None else told[2]
            read.append(replace(answer, text=told[1], reasoning=told[0] or None, tool_calls=called))
        return replace(output, outputs=read)

    def refused(self, error: Exception, number: int = 0) -> RequestError:
        """The error of a request that the engine does not take, or of the prompt with this number: with the body's
        field, and OpenAI's code."""
        if self.read_offer is not None and getattr(error, "parameter", None) == "structured":  # the grammar of calls
            return RequestError(str(error).replace("structured: ", "tools: "), "tools")
        told = self.asked.explained(error) if isinstance(error, ValueError) else error
        name, code = getattr(told, "parameter", None), getattr(told, "code", None)
        if name is None and code is None:
            name = self.asked.source if self.asked.is_chat else "prompt"
        sentence = self.asked.in_their_names(str(told))
        if sentence.startswith("the prompt:"):
            sentence = sentence.replace("the prompt", self.name_of(number), 1)
        return RequestError(sentence, name, code)

    def name_of(self, number: int) -> str:
        """A prompt's name in errors."""
        return "the prompt" if self.num_prompts == 1 else f"prompt {number}"

    def _cut(self, ids: Sequence[int]) -> Sequence[int]:
        return ids if self.truncate_to is None else ids[-self.truncate_to :]

    def _params_for(self, params: SamplingParams, prompt: Prompt, model: TextModel) -> SamplingParams:
        if isinstance(prompt, str):
            return params
        asked, limit, room = self.asked, params.max_tokens, model.max_model_len - len(prompt)
        if asked.max_length is not None:
            room = asked.max_length - len(prompt)
            if room < 1:
                told = f"the prompt has {len(prompt)} tokens, and {asked.length_name}={asked.max_length}"
                raise RequestError(told, asked.length_name, "context_length_exceeded")
            return replace(params, max_tokens=min(limit or room, room))
        if self.has_limit or limit is None or limit <= room:
            return params
        if room < 1:  # too long: the error names no max_tokens, which was not given
            return replace(params, max_tokens=None)
        return replace(params, max_tokens=max(room, params.min_tokens))


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0  # what is no number is refused with the other parameters
