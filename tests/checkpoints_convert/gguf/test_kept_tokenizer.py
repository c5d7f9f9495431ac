"""A kept tokenizer is the one converted afresh: the same files, ids, streams and ends, until something changes."""

import logging
import threading

import pytest

from checkpoints_convert import CheckpointError, tokenizer_files
from checkpoints_convert.gguf import tokenizer as gguf_tokenizer
from checkpoints_convert.gguf.index import GGUFIndex
from checkpoints_convert.gguf.tokenizer import convert_tokenizer, end_token_ids
from jaxinfer import loaded_tokenizers
from jaxinfer.kept_files import KeptFiles
from jaxinfer.loaded_tokenizers import begin_tokenizer, tokenizer_of
from jaxinfer.text import facts as text_facts
from jaxinfer.text.stream import StreamingDetokenizer
from tests.checkpoints_convert.gguf.gguf_writer import write
from tests.checkpoints_convert.gguf.test_tokenizer import TEXTS, metadata, sentencepiece_like, trained

TEMPLATE = "{% for message in messages %}<|bos|>{{ message.content }}<|eot|>{% endfor %}"


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXINFER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_tokenizer, "LEAST_BYTES", 0)
    monkeypatch.setattr(text_facts, "LEAST_CHARS", 0)
    return KeptFiles.of("tokenizers")


@pytest.fixture
def conversions(monkeypatch):
    """The paths of what is converted."""
    paths = []
    monkeypatch.setattr(
        gguf_tokenizer, "convert_tokenizer", lambda index: (paths.append(index.path), convert_tokenizer(index))[1]
    )
    return paths


def byte_level(name):
    return metadata(trained(name), name, **{"tokenizer.chat_template": TEMPLATE})


KINDS = {
    **{name: lambda name=name: byte_level(name) for name in ("llama-bpe", "qwen2", "tekken", "gpt-2", "smollm")},
    "llama": lambda: sentencepiece_like(),
    "gemma": lambda: sentencepiece_like() | {"general.architecture": "gemma3"},
}


def observed(tokenizer):
    """All that generation takes from a tokenizer."""
    ids = [tokenizer.encode(text, add_special_tokens=special) for text in TEXTS for special in (True, False)]
    streams = []
    for some in ids:
        stream = StreamingDetokenizer(tokenizer)
        streams.append([*(stream.add(id) for id in some), stream.finalize()])
    content = [tokenizer.encode_content(text) for text in TEXTS]
    chat = None
    if tokenizer.chat_template is not None:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "a <|eot|> b"}])
    named = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.vocab_size)
    sets = (tokenizer.control_ids, tokenizer.special_ids, tokenizer.skipped_tokens)
    length = tokenizer._length_check.bounds
    return ids, streams, content, chat, named, sets, length, tokenizer.digest, tokenizer.decoder_spec


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_ids_streams_and_ends_are_those_of_a_fresh_one(tmp_path, monkeypatch, conversions, kind):
    path = write(tmp_path / "model.gguf", KINDS[kind](), {})
    monkeypatch.setenv("JAXINFER_CACHE_DIR", "")
    wanted, files = observed(tokenizer_of(path)), tokenizer_files(path)
    monkeypatch.setenv("JAXINFER_CACHE_DIR", str(tmp_path / "cache"))
    conversions.clear()
    for _ in range(3):
        assert tokenizer_files(path) == files
        assert observed(tokenizer_of(path)) == wanted
    assert len(conversions) == 1


def test_facts_are_found_once(tmp_path, monkeypatch):
    path = write(tmp_path / "model.gguf", byte_level("qwen2"), {})
    tokenizer_of(path)
    monkeypatch.setattr("jaxinfer.text.tokenizer.parse_json", None)
    assert tokenizer_of(path).decode([2, 3, 4])


def test_other_metadata_and_other_sources_are_converted_again(tmp_path, monkeypatch, conversions):
    data = byte_level("qwen2")
    path = write(tmp_path / "model.gguf", data, {})
    tokenizer_files(path)
    other = dict(data, **{"tokenizer.ggml.eos_token_id": 0})
    write(path, other, {})  # in place, of the same size
    assert '"eos_token":"<|bos|>"' in tokenizer_files(path)["tokenizer_config.json"]
    with GGUFIndex(path) as index:
        assert end_token_ids(index)[0] == 0
    monkeypatch.setattr(gguf_tokenizer, "sources_key", lambda folder: "changed")
    tokenizer_files(path)
    assert len(conversions) == 3
    tokenizer_files(write(tmp_path / "copy.gguf", other, {}))
    assert len(conversions) == 3


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: raw[:-9] + b"x" + raw[-8:], lambda raw: b"x"])
def test_damaged_ones_are_made_again_with_a_line_in_the_log(tmp_path, caplog, kept, conversions, damage):
    path = write(tmp_path / "model.gguf", byte_level("smollm"), {})
    wanted, files = observed(tokenizer_of(path)), tokenizer_files(path)
    entries = list(kept.folder.iterdir())
    assert len(entries) == 2  # the files and their facts
    for entry in entries:
        entry.write_bytes(damage(entry.read_bytes()))
    assert observed(tokenizer_of(path)) == wanted
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert tokenizer_files(path) == files
    assert len(conversions) == 2


def test_an_error_is_not_kept(tmp_path, kept):
    path = write(tmp_path / "model.gguf", dict(byte_level("smollm"), **{"tokenizer.ggml.pre": "unknown"}), {})
    for _ in range(2):
        with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre"):
            tokenizer_files(path)
    assert kept.usage() == (0, 0)


def test_small_ones_are_not_kept(tmp_path, monkeypatch, kept):
    monkeypatch.setattr(gguf_tokenizer, "LEAST_BYTES", 2**18)
    monkeypatch.setattr(text_facts, "LEAST_CHARS", 2**18)
    tokenizer_of(write(tmp_path / "model.gguf", byte_level("smollm"), {}))
    assert kept.usage() == (0, 0)


def test_the_comparison_sees_another_tokenizer(tmp_path):
    """The inverse: what is compared above differs where the tokenizers do."""
    data = byte_level("smollm")
    one = observed(tokenizer_of(write(tmp_path / "one.gguf", data, {})))
    data["tokenizer.ggml.token_type"][data["tokenizer.ggml.tokens"].index("<think>")] = 1
    other = observed(tokenizer_of(write(tmp_path / "other.gguf", data, {})))
    assert one[0] != other[0]
    assert one[5] != other[5]


def test_only_files_that_passed_all_checks_are_read_in_a_thread(tmp_path, monkeypatch):
    path = write(tmp_path / "model.gguf", byte_level("smollm"), {})
    made_in = []

    class Observed(loaded_tokenizers.Tokenizer):
        def __init__(self, files):
            made_in.append(threading.current_thread().name)
            super().__init__(files)

    monkeypatch.setattr(loaded_tokenizers, "Tokenizer", Observed)
    found = [observed(begin_tokenizer(path, tokenizer_files(path))()) for _ in range(2)]
    assert found[0] == found[1]
    assert made_in[0] == threading.main_thread().name
    assert made_in[1].startswith("jaxinfer-tokenizer")
    assert begin_tokenizer(path, {})() is None
    damaged = {**tokenizer_files(path), "tokenizer.json": "{}"}
    with pytest.raises(CheckpointError, match="its tokenizer"):
        begin_tokenizer(path, damaged)
