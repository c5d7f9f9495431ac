"""Text in and out: tokenizer, chat templates, streaming detokenizer, stop strings. Pure Python, no JAX."""

from jaxinfer.text.chat_template import ChatTemplate, ChatTemplateError, ChatTemplateLimitError, RenderedChat
from jaxinfer.text.facts import has_passed_checks
from jaxinfer.text.files import TokenizerFiles, TokenizerNotFoundError, read_tokenizer_files, tokenizer_files_of
from jaxinfer.text.length import TextTooLongError
from jaxinfer.text.stream import StopResult, StopStringMatcher, StreamingDetokenizer
from jaxinfer.text.token_ids import read_token_ids
from jaxinfer.text.tokenizer import Tokenizer, check_same_tokens, has_same_tokens

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "ChatTemplateLimitError",
    "RenderedChat",
    "StopResult",
    "StopStringMatcher",
    "StreamingDetokenizer",
    "TextTooLongError",
    "Tokenizer",
    "TokenizerFiles",
    "TokenizerNotFoundError",
    "check_same_tokens",
    "has_passed_checks",
    "has_same_tokens",
    "read_token_ids",
    "read_tokenizer_files",
    "tokenizer_files_of",
]
