"""From what a user gives as a prompt to token ids of at most the model's length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.text.length import TextTooLongError
from jaxinfer.text.messages import check_messages, with_system
from jaxinfer.text.token_ids import read_token_ids
from jaxinfer.text.tokenizer import Tokenizer


class TakesPrompts:
    """Tokenizes prompts for one model.

    Attributes:
      name: of the model, for messages. tokenizer: None for token ids only. vocab_size: of its ids. max_model_len:
        tokens of a prompt with its answer. system: for conversations without a system message.
    """

    name: str
    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    system: str | None

    def tokenize(
        self, prompt: str | Sequence[int], add_special_tokens: bool = True, *, what: str = "the prompt"
    ) -> tuple[str | None, list[int]]:
        """The text, if it is one, and its token ids.

        Raises ValueError, with `what`, for what is no token id, and TextTooLongError for a text that is too long for
        any request, before all of it is tokenized.
        """
        try:
            if not isinstance(prompt, str):
                return None, read_token_ids(prompt, self.vocab_size)
            tokenizer = self.need_tokenizer("a text prompt")
            return prompt, tokenizer.encode(prompt, add_special_tokens, max_tokens=self.max_model_len)
        except TextTooLongError as error:
            raise TextTooLongError(f"{what}: {error}, and max_model_len={self.max_model_len}") from None
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None

    def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
    ) -> list[int]:
        """Token ids of a conversation; raises as `Tokenizer.apply_chat_template`.

        One without a system message begins with the system prompt of the model's alias, if it has one.
        """
        if self.system is not None:
            check_messages(messages)  # before another one moves their numbers
        messages = with_system(messages, self.system)
        limit = self.max_model_len
        try:
            return self.need_tokenizer("chat").apply_chat_template(
                messages, tools=tools, max_prompt_tokens=limit, **template_kwargs
            )
        except TextTooLongError as error:
            raise TextTooLongError(f"the messages: {error}, and max_model_len={limit}") from None

    def need_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer; raises ValueError where there is none."""
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and {self.name} has none: pass token ids or tokenizer=...")
        return self.tokenizer

    def with_tokens(self, tokenizer: Tokenizer | None, num_added: int) -> "Prompts":
        """Takes prompts with so many more token ids, and with a tokenizer of their own if there is one."""
        own = self.tokenizer if tokenizer is None else tokenizer
        return Prompts(self.name, own, self.vocab_size + num_added, self.max_model_len, self.system)


@dataclass(frozen=True)
class Prompts(TakesPrompts):
    """Takes prompts, and nothing else."""

    name: str
    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    system: str | None
