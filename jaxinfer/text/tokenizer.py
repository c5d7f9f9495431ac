"""The tokenizer: text to token ids and back, chats to prompts."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from jaxinfer.text.chat_template import ChatTemplate, ChatTemplateError, RenderedChat
from jaxinfer.text.encoding import ChatEncoder, ContentEncoder
from jaxinfer.text.facts import find_facts, keep_facts, kept_facts
from jaxinfer.text.files import TokenizerFiles, read_tokenizer_files
from jaxinfer.text.length import LengthCheck
from jaxinfer.text.library import library_errors, run
from jaxinfer.text.messages import check_text, num_chars
from jaxinfer.text.spec_checks import FieldError, check_added, check_spec, parse_json
from jaxinfer.text.token_bytes import byte_decoder

# Named tokens that a class of Transformers 5 puts before a text, whatever post-processor tokenizer.json has.
_ADDED_BY_CLASS = {"CodeLlamaTokenizer": ("bos_token",), "GPTNeoXTokenizer": ()}

# Messages are refused before they are rendered if they are as many times longer than any prompt that fits.
_DROPPED_BY_TEMPLATES = 16


class Tokenizer:
    """A Hugging Face tokenizer (tokenizer.json) with the chat template of its model.

    Ids are those of Transformers 5. Truncation, padding and BPE dropout that a tokenizer.json may ask for are off:
    nothing is cut silently.

    Control tokens are the added tokens with a function: all special ones, and the non-special ones longer than one
    character that are not white space (`<tool_call>`, `<think>`). Added tokens that are only text (Gemma's
    `\\n\\n`, GPT-NeoX's runs of spaces, DeepSeek's single letters) stay text.
    """

    def __init__(self, files: TokenizerFiles):
        """Build from files read before (`read_tokenizer_files`); usually `Tokenizer.from_dir` is called instead."""
        name = files.paths.get("tokenizer.json", "tokenizer.json")
        facts = kept_facts(files)
        spec, growth = ({}, 0.0) if facts is not None else _checked_spec(files, name)
        with library_errors(f"{name} is not a tokenizer that tokenizers can load"):
            self._backend = tokenizers.Tokenizer.from_str(files.tokenizer_json)
        self._files = files
        self._backend.no_truncation()
        self._backend.no_padding()
        if getattr(self._backend.model, "dropout", None):
            self._backend.model.dropout = None
        with library_errors(f"{name}: its added tokens"):
            _add_declared_tokens(self._backend, files)
        if facts is None:
            facts = find_facts(spec, growth, self._backend, name)
            keep_facts(files, facts)
        added = self._backend.get_added_tokens_decoder()
        self.skipped_tokens = facts.skipped_of(added)
        self.decoder_spec: Mapping[str, Any] | None = facts.components["decoder"]
        self._fragments = facts.components
        self._length_check = LengthCheck(self._backend, facts.bounds)
        control, unknown_id = facts.control_of(added), facts.unknown_id
        self._control_texts = {text: token_id for token_id, text in control.items()}
        self._unknown = None
        if unknown_id is not None and unknown_id in control:
            self._unknown = (unknown_id, control.pop(unknown_id))
        self.control_ids = frozenset(control)
        self.special_ids = frozenset(
            token_id for token_id, token in added.items() if token.content in self.skipped_tokens
        )
        self._is_control_reachable = facts.is_control_reachable
        self._num_ids = 1 + max(facts.largest_id, *added, -1)
        self._add_tokens_of_class()

    @classmethod
    def from_dir(cls, path: str | Path) -> "Tokenizer":
        """Read the tokenizer of a local model directory.

        Raises:
            TokenizerNotFoundError: There is no tokenizer.json.
            ValueError: A file is malformed; the error names it.
        """
        return cls(read_tokenizer_files(path))

    def __reduce__(self) -> "tuple[type[Tokenizer], tuple[TokenizerFiles]]":
        return Tokenizer, (self._files,)  # compiled chat templates do not pickle; worker processes build their own

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def tokens_by_id(self) -> dict[int, str]:
        """Every token as the vocabulary spells it, added ones included."""
        return {token_id: token for token, token_id in self._backend.get_vocab(with_added_tokens=True).items()}

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._named_id("pad_token")

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The Jinja sources by their names, of which "default" is used unless tools ask for "tool_use"."""
        return self._files.chat_templates

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template, or None."""
        return self._files.chat_templates.get("default")

    @property
    def shows_tools(self) -> bool:
        """Tells whether the chat template for tools prints them."""
        template = self._templates.get("tool_use") or self._templates.get("default")
        return template is not None and template.form.shows_tools

    @property
    def files(self) -> dict[str, Path]:
        """The source files, by name relative to the model directory."""
        return dict(self._files.paths)

    def encode(self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None) -> list[int]:
        """Token ids of trusted text: control tokens written in it are recognised.

        With `add_special_tokens`, what tokenizer.json's post-processor adds (usually BOS): as in Transformers 5, it
        decides alone, and `add_bos_token` and `add_eos_token` of the configuration add nothing.

        Raises:
            TextTooLongError: `text` surely has more than `max_tokens` tokens; it was not tokenized whole to find out.
                The ids of a text that is only a little too long are returned.
            ValueError: `text` has a lone surrogate, or the tokenizer fails on it.
        """
        self._length_check.check(check_text(text, "text"), max_tokens)
        return run(self._backend.encode, text, add_special_tokens=add_special_tokens).ids

    def encode_content(self, text: str) -> list[int]:
        """Token ids of text from an untrusted user: no control token is recognised, so no id is in `control_ids`.

        The text is encoded as the start of a string (a sentencepiece tokenizer puts its dummy `▁` there). The one
        special id that can occur is the unknown token's, for a character that the vocabulary lacks.

        Raises ValueError: `text` has a lone surrogate.
        """
        self._length_check.check(check_text(text, "text"), None)
        ids = run(self._content_encoder.encode, text)
        if not self.control_ids.isdisjoint(ids):
            raise RuntimeError("internal error: a control token came out of content; please report this")
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; spaces are left as they are (no clean-up).

        Raises ValueError: an id outside of the vocabulary.
        """
        ids = [int(token_id) for token_id in ids]
        self.check_ids(ids)
        return run(self._backend.decode, ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes | None:
        """The bytes that a token adds to a text, such as a part of an emoji; None for one that `decode` leaves out, and
        where they depend on its neighbours."""
        token = self.id_to_token(token_id)
        if token is None or (skip_special_tokens and token_id in self.special_ids):
            return None
        if self._to_bytes is not None and token_id not in self.special_ids:
            return self._to_bytes(token)
        text = self.decode([token_id], skip_special_tokens=False)
        return None if "\ufffd" in text else text.encode()

    @cached_property
    def _to_bytes(self) -> Callable[[str], bytes] | None:
        try:
            return byte_decoder(self.decoder_spec)
        except ValueError:
            return None

    def has_id(self, token_id: int) -> bool:
        """True if the id is a token: a model may have more rows than its tokenizer has tokens."""
        return 0 <= token_id < self._num_ids and self._backend.id_to_token(token_id) is not None

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise ValueError, with the id and the vocabulary size, unless every id is a token."""
        for token_id in ids:
            if not self.has_id(token_id):
                raise ValueError(
                    f"token id {token_id} is not in the vocabulary of {self.vocab_size} tokens "
                    f"(ids 0 to {self._num_ids - 1})"
                )

    def token_to_id(self, token: str) -> int | None:
        """Id of a token given as in the vocabulary, or None."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Token of an id as in the vocabulary, or None."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self._num_ids else None

    def token_map_digest(self) -> str:
        """SHA-256 (hex) of the id-to-token map: equal if and only if two tokenizers number the same tokens alike."""
        digest = hashlib.sha256()
        vocab = self._backend.get_vocab(with_added_tokens=True)
        for token_id, token in sorted((token_id, token) for token, token_id in vocab.items()):
            digest.update(json.dumps([token_id, token]).encode() + b"\n")
        return digest.hexdigest()

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of what texts and ids are made one from the other by, for caches."""
        return self._files.digest

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt text of a chat, as Transformers renders it. For display: encode with `apply_chat_template`."""
        return self._render(messages, add_generation_prompt, continue_final_message, tools, template_kwargs).text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_prompt_tokens: int | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a chat.

        A control token comes out only where the chat template itself wrote it, never out of messages, tools or
        template variables. Where content has no control text, the ids are those of Transformers.

        Raises:
            TextTooLongError: The chat surely has more than `max_prompt_tokens` tokens; see `encode`.
            ValueError: Messages, tools or template variables are malformed; the error says where.
            ChatTemplateError: No template, the template refused this chat, or it cannot be rendered safely.
        """
        if max_prompt_tokens is not None:
            # A template prints what it is given, or leaves some of it out; rendering 50 MB takes a second.
            self._length_check.check_bytes(
                num_chars([messages, tools]), max_prompt_tokens, factor=_DROPPED_BY_TEMPLATES
            )
        chat = self._render(messages, add_generation_prompt, continue_final_message, tools, template_kwargs)
        self._length_check.check(chat.text, max_prompt_tokens)
        return run(self._chat_encoder.encode, chat)

    def save(self, directory: str | Path) -> None:
        """Copy the source files, unchanged, to `directory` (made if missing); or write those of a GGUF file's metadata.

        Raises ValueError: this tokenizer was not read from files.
        """
        if not self._files.paths and not self._files.contents:
            raise ValueError("this tokenizer was not read from a directory, so there are no files to copy")
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        for name, text in self._files.contents.items():
            (target / name).write_text(text, encoding="utf-8")
        for name, path in self._files.paths.items():
            copy = target / name
            copy.parent.mkdir(exist_ok=True)
            if not (copy.exists() and copy.samefile(path)):
                shutil.copyfile(path, copy)

    def _named_id(self, name: str) -> int | None:
        text = self._files.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _add_tokens_of_class(self) -> None:
        names = _ADDED_BY_CLASS.get(str(self._files.config.get("tokenizer_class")).removesuffix("Fast"))
        if names is None:
            return
        ids = {self._files.special_tokens[name]: id for name in names if (id := self._named_id(name)) is not None}
        single = " ".join((*ids, "$A"))
        self._backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=single, pair=f"{single} $B:1", special_tokens=list(ids.items())
        )

    @cached_property
    def _content_encoder(self) -> ContentEncoder:
        return ContentEncoder(
            self._backend,
            control=self._control_texts,
            is_reachable=self._is_control_reachable,
            normalizer=self._fragments["normalizer"],
            pre_tokenizer=self._fragments["pre_tokenizer"],
        )

    @cached_property
    def _chat_encoder(self) -> ChatEncoder:
        return ChatEncoder(self._backend, self._content_encoder, self.control_ids, self._unknown)

    @cached_property
    def _templates(self) -> dict[str, ChatTemplate]:
        return {
            name: ChatTemplate(
                source,
                special_tokens=self._files.special_tokens,
                control_tokens=self._control_texts,
            )
            for name, source in self._files.chat_templates.items()
            if name in ("default", "tool_use")
        }

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
    ) -> RenderedChat:
        templates = self._templates
        template = templates.get("tool_use") if tools is not None else None
        template = template or templates.get("default")
        if template is None:
            names = sorted(self._files.chat_templates)
            raise ChatTemplateError(
                f"this model has no default chat template, only {names}"
                if names
                else "this model has no chat template; give a prompt instead of messages, or add a "
                "chat_template.jinja to the model directory"
            )
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )


def _checked_spec(files: TokenizerFiles, name: Any) -> tuple[Mapping[str, Any], float]:
    """tokenizer.json, and its growth (`check_spec`). Raises ValueError for files that the library should not read."""
    spec = parse_json(files.tokenizer_json, name)
    try:
        growth = check_spec(spec)
        check_added([token.content for token in files.added_tokens], "added tokens of the configuration")
        check_added([*files.special_tokens.values(), *files.extra_special_tokens], "special tokens")
    except FieldError as error:
        raise ValueError(f"{name}: {error}") from None
    return spec, growth


def _add_declared_tokens(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    """Add the tokens of the configuration that tokenizer.json lacks, as Transformers does, and check their ids.

    They are added all at once: the library prepares its search for added tokens again at each call.
    """
    existing = {token.content: repr(token) for token in backend.get_added_tokens_decoder().values()}
    tokens = [
        (spec, tokenizers.AddedToken(spec.content, special=spec.special, **spec.flags)) for spec in files.added_tokens
    ]
    backend.add_tokens([token for spec, token in tokens if existing.get(spec.content) != repr(token)])
    for spec, token in tokens:
        token_id = backend.token_to_id(spec.content)
        if existing.get(spec.content) != repr(token) and spec.token_id not in (None, token_id):
            raise ValueError(
                f"added token {spec.content!r} has id {spec.token_id} in the configuration but {token_id} in "
                "tokenizer.json: the files do not belong together"
            )
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    texts = dict.fromkeys((*files.special_tokens.values(), *files.extra_special_tokens))
    missing = [tokenizers.AddedToken(text, special=True, normalized=False) for text in texts if text not in known]
    if missing:
        backend.add_special_tokens(missing)


def has_same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """True if both map the ids that both have to the same tokens, and there are some."""
    tokens, others = one.tokens_by_id(), other.tokens_by_id()
    common = tokens.keys() & others.keys()
    return bool(common) and all(tokens[token_id] == others[token_id] for token_id in common)


def check_same_tokens(one: Tokenizer, other: Tokenizer, names: tuple[str, str]) -> None:
    """Raises ValueError, with the first id that differs, unless both map the same ids to the same tokens.

    Ids that only one of them has are ignored, since models pad their vocabularies differently.
    """
    if has_same_tokens(one, other):
        return
    tokens, others = one.tokens_by_id(), other.tokens_by_id()
    for token_id in sorted(tokens.keys() & others.keys()):
        if tokens[token_id] != others[token_id]:
            raise ValueError(
                f"{names[0]} and {names[1]} have different tokenizers: token id {token_id} is "
                f"{tokens[token_id]!r} in one and {others[token_id]!r} in the other"
            )
    raise ValueError(f"{names[0]} and {names[1]} have no token in common")
