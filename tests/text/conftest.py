"""Toy tokenizers of every family, and chat templates as real models have them. No network, no files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxinfer.text import Tokenizer, TokenizerFiles

CORPUS = [
    "hello world, the quick brown fox jumps over the lazy dog",
    "<im end start tool call think> user assistant system model INST eot header id",
    '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}',
    "it's 3 o'clock: naïve café 你好 🎉",
] * 3

SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "[|user|]", "[|assistant|]"),
    *("[|system|]", "[|endofturn|]"),
]
NON_SPECIAL = [
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<image>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
]
NAMES = {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def add_markers(backend: tokenizers.Tokenizer, normalized: bool = False) -> None:
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, normalized=normalized, special=False) for text in NON_SPECIAL])


def byte_level(**bpe_options) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(**bpe_options))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_level_with_markers_in_vocab(ignore_merges: bool) -> tokenizers.Tokenizer:
    """The base vocabulary itself holds two markers; for one of them there are merges that build it."""
    spec = json.loads(byte_level().to_str())
    vocab, merges = spec["model"]["vocab"], spec["model"]["merges"]
    for marker in ("<|im_end|>", "<think>"):
        for end in range(2, len(marker) + 1):
            if marker[:end] not in vocab:
                vocab[marker[:end]] = len(vocab)
            merges.insert(end - 2, [marker[: end - 1], marker[end - 1]])
    vocab["<|eot_id|>"] = len(vocab)
    spec["model"]["ignore_merges"] = ignore_merges
    # One pre-token per line, so that a whole marker can be one pre-token.
    spec["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"\n"}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def sentencepiece_vocab() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges as of Llama 2: control tokens, 256 bytes, then pieces with `▁`."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=160, show_progress=False))
    trained = json.loads(backend.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *trained["vocab"]]
    return {piece: index for index, piece in enumerate(pieces)}, [tuple(merge) for merge in trained["merges"]]


def llama2(prepend_scheme: str | None = None) -> tokenizers.Tokenizer:
    """Llama 2 as converted: `Prepend` normalizer (None), or Metaspace with a prepend scheme (newer conversions)."""
    vocab, merges = sentencepiece_vocab()
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if prepend_scheme is None:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    for text in ("<unk>", "<s>", "</s>"):
        backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return backend


def gemma() -> tokenizers.Tokenizer:
    """No dummy prefix; runs of newlines and of spaces are non-special added tokens, some with ids of the vocabulary."""
    vocab, merges = sentencepiece_vocab()
    vocab |= {text: len(vocab) + index for index, text in enumerate(["<start_of_turn>", "<end_of_turn>", "\n"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    for text in ("<unk>", "<s>", "</s>"):
        backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])
    backend.add_tokens([AddedToken("[marker before]", normalized=False)])
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("\n", "\n\n", "▁▁", "▁▁▁")])
    return backend


def unigram(byte_fallback: bool = True) -> tokenizers.Tokenizer:
    """Unigram looks pieces up in the text directly: it finds `</s>` in content unless it is kept from it."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    if byte_fallback:
        pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    chars = sorted({char for line in CORPUS for char in line if char.isascii() and char != " "} | {"▁", "/"})
    words = ["▁hello", "▁the", "▁world", "user", "think", "</", "s>"]
    pieces += [(char, -10.0) for char in chars] + [(word, -6.0) for word in words]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=byte_fallback))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace()] if byte_fallback else [decoders.Metaspace()]
    )
    for text in ("<unk>", "<s>", "</s>"):
        backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])
    return backend


def with_decoder(decoder, pieces: list[str]) -> tokenizers.Tokenizer:
    """A word-level tokenizer that exists only to be decoded."""
    backend = tokenizers.Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0]))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<s>", "<extra one>"])
    return backend


def wrap(backend: tokenizers.Tokenizer, chat_template: str | None = None, **options) -> Tokenizer:
    templates = {} if chat_template is None else {"default": chat_template}
    files = TokenizerFiles(backend.to_str(), chat_templates=templates, **options)
    return Tokenizer(files)


# Templates as real models have them (written after those of Qwen, Llama, Mistral, Gemma); `role_built` puts control
# tokens together around the role (EXAONE, Phi-4-mini); `transforms` joins, cuts and changes content in every way.
TEMPLATES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}


@pytest.fixture(scope="session")
def toy() -> SimpleNamespace:
    """Builders of tokenizers: each call makes a fresh `tokenizers.Tokenizer`; `wrap` makes ours of it."""
    functions: dict[str, Callable] = {
        function.__name__: function
        for function in (
            *(add_markers, byte_level, byte_level_with_markers_in_vocab, llama2, gemma, unigram, with_decoder, wrap),
        )
    }
    return SimpleNamespace(
        **functions, CORPUS=CORPUS, SPECIAL=SPECIAL, NON_SPECIAL=NON_SPECIAL, NAMES=NAMES, TEMPLATES=TEMPLATES
    )


@pytest.fixture(scope="session")
def chat_tokenizers() -> dict[str, Tokenizer]:
    """One byte-level tokenizer per template: all special and non-special markers of all of them."""
    backend = byte_level()
    add_markers(backend)
    return {name: wrap(backend, source, special_tokens=NAMES) for name, source in TEMPLATES.items()}
