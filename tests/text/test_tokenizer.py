"""Tokenizer: files, ids, content that cannot become a control token."""

import copy
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, processors

from jaxinfer.text import Tokenizer, TokenizerNotFoundError

FUZZ = settings(max_examples=60, derandomize=True, deadline=None)
FAMILIES = (
    *("byte_level", "normalized_markers", "markers_in_vocab", "ignore_merges", "llama2", "metaspace_first", "gemma"),
    *("unigram", "unigram_no_bytes", "word_level"),
)


@pytest.fixture(scope="session")
def content_tokenizers(toy):
    plain, normalized = toy.byte_level(), toy.byte_level()
    toy.add_markers(plain)
    normalized.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.NFKC(), tokenizers.normalizers.Lowercase()]
    )
    toy.add_markers(normalized, normalized=True)
    backends = {
        "byte_level": plain,
        "normalized_markers": normalized,
        "markers_in_vocab": toy.byte_level_with_markers_in_vocab(ignore_merges=False),
        "ignore_merges": toy.byte_level_with_markers_in_vocab(ignore_merges=True),
        "llama2": toy.llama2(),
        "metaspace_first": toy.llama2("first"),
        "gemma": toy.gemma(),
        "unigram": toy.unigram(),
        "unigram_no_bytes": toy.unigram(byte_fallback=False),
        "word_level": toy.with_decoder(None, ["<unk>", "a", "<think>", "<|im_end|>"]),
    }
    for name in ("markers_in_vocab", "ignore_merges", "llama2", "gemma", "unigram", "word_level"):
        toy.add_markers(backends[name])
    return {name: toy.wrap(backend) for name, backend in backends.items()}


def hostile_text(tokenizer: Tokenizer) -> st.SearchStrategy[str]:
    """Text made of control tokens, halves of them, their look-alikes, and ordinary text."""
    markers = [tokenizer.id_to_token(i) for i in sorted(tokenizer.control_ids)] + ["<unk>"]
    halves = [half for marker in markers for half in (marker[: len(marker) // 2], marker[len(marker) // 2 :])]
    wide = [marker.replace("<", "＜").replace(">", "＞").upper() for marker in markers]
    plain = [" ", "\n", "\n\n", "▁", "<", ">", "|", "a", "hello", "é", "你", "🎉", "<0x0A>", "\x00", "\u200b"]
    return st.lists(st.sampled_from(markers * 2 + halves + wide + plain), max_size=6).map("".join)


@pytest.mark.parametrize("name", FAMILIES)
def test_content_never_gives_a_control_token(content_tokenizers, name):
    tokenizer = content_tokenizers[name]
    assert tokenizer.control_ids

    @FUZZ
    @given(hostile_text(tokenizer))
    def check(text):
        ids = tokenizer._content_encoder.encode(text)  # without the final check of encode_content
        assert tokenizer.control_ids.isdisjoint(ids)
        for position in ("after_token", "after_normalized_token"):
            assert tokenizer.control_ids.isdisjoint(tokenizer._content_encoder.encode(text, position))

    check()


@pytest.mark.parametrize("name", FAMILIES)
def test_naive_encoding_is_caught(content_tokenizers, name):
    """Inverse test: the same check fails for plain `encode`, and with only *special* tokens disabled as well."""
    tokenizer = content_tokenizers[name]
    text = "".join(tokenizer.id_to_token(i) for i in sorted(tokenizer.control_ids))
    assert not tokenizer.control_ids.isdisjoint(tokenizer.encode(text, add_special_tokens=False))
    if name in ("byte_level", "normalized_markers", "markers_in_vocab", "unigram"):
        backend = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str())
        backend.encode_special_tokens = True
        assert not tokenizer.control_ids.isdisjoint(backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.matrix
@pytest.mark.parametrize("name", FAMILIES)
def test_ordinary_content_encodes_as_ever(content_tokenizers, name):
    tokenizer = content_tokenizers[name]
    markers = [tokenizer.id_to_token(i) for i in tokenizer.control_ids] + ["<unk>"]
    words = st.sampled_from(
        [" ", "\n", "\n\n", "   ", "hello", "the", "é", "你", "🎉", "{", "don't", "1", "x < y", "▁"]
    )

    @FUZZ
    @given(st.lists(words, max_size=8).map("".join))
    def check(text):
        assert not any(marker in text for marker in markers)
        assert tokenizer.encode_content(text) == tokenizer.encode(text, add_special_tokens=False)

    check()


def test_content_text_survives(content_tokenizers):
    for name in ("byte_level", "markers_in_vocab", "ignore_merges", "llama2", "gemma"):
        tokenizer = content_tokenizers[name]
        text = "a <|im_end|>\n<think> b</s> <unk>é"
        assert tokenizer.decode(tokenizer.encode_content(text), skip_special_tokens=False) == text


def test_text_tokens_are_not_control_tokens(content_tokenizers):
    """Gemma's newline and space runs are added tokens, but content needs them; ids past the vocabulary stay right."""
    gemma = content_tokenizers["gemma"]
    for text in ("\n\n", "▁▁▁"):
        assert gemma.token_to_id(text) not in gemma.control_ids
        assert gemma.encode_content("a" + text + "b")[1:-1] == [gemma.token_to_id(text)]
    assert gemma.token_to_id("[marker before]") in gemma.control_ids


def test_unknown_characters_may_give_the_unknown_token(content_tokenizers):
    tokenizer = content_tokenizers["unigram_no_bytes"]
    unknown = tokenizer.token_to_id("<unk>")
    assert unknown not in tokenizer.control_ids
    assert unknown in tokenizer.encode_content("你")
    assert unknown not in tokenizer.encode_content("<unk>".replace("<", "</"))


def test_ids_names_and_decode(toy):
    backend = toy.byte_level()
    toy.add_markers(backend)
    tokenizer = toy.wrap(backend, special_tokens=toy.NAMES)
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert tokenizer.eos_token_id == tokenizer.token_to_id("<|im_end|>")
    assert tokenizer.bos_token_id == tokenizer.token_to_id("<|begin_of_text|>")
    assert tokenizer.pad_token_id == tokenizer.token_to_id("<|endoftext|>")
    assert {tokenizer.id_to_token(i) for i in tokenizer.special_ids} == set(toy.SPECIAL)
    assert {tokenizer.id_to_token(i) for i in tokenizer.control_ids} == {*toy.SPECIAL, *toy.NON_SPECIAL}
    assert tokenizer.id_to_token(-1) is None
    assert tokenizer.id_to_token(10**9) is None
    ids = [*tokenizer.encode("hello , world ."), tokenizer.eos_token_id, tokenizer.token_to_id("<think>")]
    assert tokenizer.decode(ids) == "hello , world .<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello , world .<|im_end|><think>"
    with pytest.raises(ValueError, match=f"token id {tokenizer.vocab_size} is not in the vocabulary of"):
        tokenizer.decode([1, tokenizer.vocab_size])
    with pytest.raises(ValueError, match="token id -1"):
        tokenizer.decode([-1])
    for encode in (tokenizer.encode, tokenizer.encode_content):
        with pytest.raises(ValueError, match="lone surrogate at character 1"):
            encode("a\ud800")


def test_digest_tells_token_maps_apart(toy):
    backend = toy.byte_level()
    digest = toy.wrap(backend).token_map_digest()
    assert digest == toy.wrap(toy.byte_level()).token_map_digest()
    assert len(digest) == 64
    backend.add_tokens(["one more"])
    assert toy.wrap(backend).token_map_digest() != digest


def test_nothing_is_cut_padded_or_random(toy):
    spec = json.loads(toy.byte_level().to_str())
    spec["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    spec["padding"] = {**padding, "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
    spec["model"]["dropout"] = 0.5
    tokenizer = toy.wrap(tokenizers.Tokenizer.from_str(json.dumps(spec)))
    for _ in range(5):
        assert tokenizer.encode("hello world") == toy.wrap(toy.byte_level()).encode("hello world")
        assert tokenizer.encode_content("hello world") == tokenizer.encode("hello world")


BOS_CASES = [
    # tokenizer_class, add_bos_token, add_eos_token, post-processor adds BOS, expected: those of Transformers 5.24
    ("LlamaTokenizerFast", True, None, True, "b"),
    ("LlamaTokenizerFast", True, None, False, ""),  # DeepSeek-V3 declares this, and a byte-level post-processor
    ("LlamaTokenizer", True, True, True, "b"),
    ("LlamaTokenizer", True, True, False, ""),
    ("LlamaTokenizer", None, None, True, "b"),
    ("LlamaTokenizer", None, None, False, ""),
    ("LlamaTokenizer", False, None, True, "b"),
    ("GemmaTokenizer", True, True, False, ""),
    ("CohereTokenizerFast", True, True, True, "b"),
    ("PreTrainedTokenizerFast", True, True, False, ""),
    ("PreTrainedTokenizerFast", None, None, True, "b"),
    ("CodeLlamaTokenizerFast", None, None, False, "b"),
    ("CodeLlamaTokenizer", False, True, True, "b"),
    ("GPTNeoXTokenizerFast", True, True, True, ""),
]


@pytest.mark.parametrize(("tokenizer_class", "add_bos", "add_eos", "processed", "expected"), BOS_CASES)
def test_bos_and_eos_are_added_once(toy, tokenizer_class, add_bos, add_eos, processed, expected):
    backend = toy.llama2()
    if not processed:
        backend.post_processor = processors.ByteLevel()
    flags = {"add_bos_token": add_bos, "add_eos_token": add_eos}
    config = {"tokenizer_class": tokenizer_class, **{name: on for name, on in flags.items() if on is not None}}
    tokenizer = toy.wrap(backend, config=config, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    bare = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [1] * ("b" in expected) + bare + [2] * ("e" in expected)


def write(directory, backend, **files):
    (directory / "tokenizer.json").write_text(backend if isinstance(backend, str) else backend.to_str())
    for name, content in files.items():
        path = directory / name.replace("__", "/").replace("_jinja", ".jinja").replace("_json", ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def test_missing_and_broken_files_say_what_to_do(toy, tmp_path):
    with pytest.raises(TokenizerNotFoundError, match="is not a directory"):
        Tokenizer.from_dir(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerNotFoundError, match=r"has a tokenizer.model but no tokenizer.json.*convert"):
        Tokenizer.from_dir(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not valid JSON"):
        Tokenizer.from_dir(write(tmp_path, "{"))
    with pytest.raises(ValueError, match=r"tokenizer\.json: model must be an object, got None"):
        Tokenizer.from_dir(write(tmp_path, "{}"))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_dir(write(tmp_path, toy.byte_level(), tokenizer_config_json="{'a': 1}"))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json must hold a JSON object"):
        Tokenizer.from_dir(write(tmp_path, toy.byte_level(), tokenizer_config_json="[]"))


def test_special_tokens_come_from_the_configuration(toy, tmp_path):
    backend = toy.byte_level()
    base = backend.get_vocab_size()
    backend.add_tokens([AddedToken("<end>", special=False)])
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<begin>", "normalized": False},
        "eos_token": "<end>",
        "image_token": "<img>",
        "additional_special_tokens": ["<extra>"],
        "added_tokens_decoder": {
            str(base): {"content": "<end>", "special": True, "normalized": False},
            str(base + 1): {"content": "<begin>", "special": True, "normalized": False},
        },
    }
    ignored = {"eos_token": "<not this>"}
    tokenizer = Tokenizer.from_dir(
        write(tmp_path, backend, tokenizer_config_json=config, special_tokens_map_json=ignored)
    )
    names = ["<end>", "<begin>", "<img>", "<extra>"]
    assert [tokenizer.token_to_id(name) for name in names] == [base, base + 1, base + 2, base + 3]
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (base, base + 1, None)
    assert tokenizer.special_ids == {base, base + 1, base + 2, base + 3}
    config["added_tokens_decoder"][str(base + 7)] = config["added_tokens_decoder"].pop(str(base + 1))
    with pytest.raises(ValueError, match=rf"'<begin>' has id {base + 7} in the configuration but {base + 1}"):
        Tokenizer.from_dir(write(tmp_path, backend, tokenizer_config_json=config))


def test_legacy_files_fill_in(toy, tmp_path):
    backend = toy.byte_level()
    base = backend.get_vocab_size()
    files = {
        "special_tokens_map_json": {"eos_token": {"content": "<end>"}},
        "added_tokens_json": {"<tool>": base + 1, "<end>": base},
    }
    tokenizer = Tokenizer.from_dir(write(tmp_path, backend, **files))
    assert tokenizer.eos_token_id == base
    assert tokenizer.special_ids == {base}
    assert tokenizer.control_ids == {base, base + 1}


def test_chat_template_files_and_their_order(toy, tmp_path):
    files = {"chat_template_json": {"chat_template": "processor"}}
    assert Tokenizer.from_dir(write(tmp_path, toy.byte_level(), **files)).chat_template == "processor"
    files["tokenizer_config_json"] = {"chat_template": "config"}
    assert Tokenizer.from_dir(write(tmp_path, toy.byte_level(), **files)).chat_template == "config"
    named = [{"name": "default", "template": "first"}, {"name": "tool_use", "template": "tools"}]
    files["tokenizer_config_json"] = {"chat_template": named}
    tokenizer = Tokenizer.from_dir(write(tmp_path, toy.byte_level(), **files))
    user = [{"role": "user", "content": "hi"}]
    assert (tokenizer.chat_template, tokenizer.render_chat(user)) == ("first", "first")
    assert tokenizer.render_chat(user, tools=[{"name": "f"}]) == "tools"
    files["chat_template_jinja"] = "file"
    files["additional_chat_templates__tool_use_jinja"] = "more"
    tokenizer = Tokenizer.from_dir(write(tmp_path, toy.byte_level(), **files))
    assert tokenizer.render_chat(user) == "file"
    assert tokenizer.render_chat(user, tools=[{"name": "f"}]) == "more"
    with pytest.raises(ValueError, match="chat_template must be a string or a list"):
        Tokenizer.from_dir(write(_new(tmp_path), toy.byte_level(), tokenizer_config_json={"chat_template": [1]}))


def _new(tmp_path):
    (tmp_path / "other").mkdir()
    return tmp_path / "other"


def test_save_copies_the_files_unchanged(toy, tmp_path):
    source, target = tmp_path / "source", tmp_path / "deep" / "target"
    source.mkdir()
    write(source, toy.byte_level(), tokenizer_config_json='{ "a" :1}', additional_chat_templates__x_jinja="x")
    tokenizer = Tokenizer.from_dir(source)
    (source / "model.safetensors").write_text("not a tokenizer file")
    tokenizer.save(target)
    tokenizer.save(source)
    names = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert (
        names
        == set(tokenizer.files)
        == {"tokenizer.json", "tokenizer_config.json", "additional_chat_templates/x.jinja"}
    )
    for name, path in tokenizer.files.items():
        assert (target / name).read_bytes() == path.read_bytes()

    with pytest.raises(ValueError, match="not read from a directory"):
        toy.wrap(toy.byte_level()).save(target)


def test_copies_for_worker_processes(chat_tokenizers):
    tokenizer = chat_tokenizers["chatml"]
    messages = [{"role": "user", "content": "hi <|im_end|>"}]
    expected = tokenizer.apply_chat_template(messages)
    assert copy.deepcopy(tokenizer).apply_chat_template(messages) == expected


def test_a_model_without_added_tokens_has_nothing_to_guard(toy):
    tokenizer = toy.wrap(tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    assert tokenizer.encode_content("a") == [0]
    assert tokenizer.control_ids == tokenizer.special_ids == frozenset()


def test_a_control_token_with_the_id_of_text_is_refused(toy, tmp_path):
    """The library numbers added tokens from the size of the vocabulary: where that has gaps, they get ids of text."""
    spec = json.loads(toy.byte_level().to_str())
    spec["model"]["merges"] = []
    for token in "{0":
        del spec["model"]["vocab"][token]
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    backend.add_special_tokens(["<|user|>"])
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    with pytest.raises(
        ValueError, match=r"tokenizer\.json: the added token '<\|user\|>' has the id \d+ of the token '"
    ):
        Tokenizer.from_dir(tmp_path)


def test_control_tokens_named_as_bytes_do_not_come_out_of_content(toy):
    backend = toy.llama2()
    backend.add_special_tokens(["<0xF0>"])
    tokenizer = toy.wrap(backend)
    assert tokenizer.control_ids & set(backend.encode("🎉").ids)
    assert not tokenizer.control_ids & set(tokenizer.encode_content("🎉"))


def test_messages_of_the_library_are_short(toy, tmp_path):
    spec = json.loads(toy.byte_level().to_str()) | {"padding": "x" * 1_000_000}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ValueError, match=r"tokenizer\.json .*\(\d+ characters\)") as caught:
        Tokenizer.from_dir(tmp_path)
    assert len(str(caught.value)) < 1000


def test_bytes_of_tokens_join_to_those_of_the_text(chat_tokenizers):
    for name, tokenizer in chat_tokenizers.items():
        text = "a 😀 größe\n你好"
        found = [tokenizer.token_bytes(token) for token in tokenizer.encode(text, False)]
        joined = b"".join(one or b"" for one in found).decode(errors="replace")
        assert joined.removeprefix(" ") == tokenizer.decode(tokenizer.encode(text, False)).removeprefix(" "), name
        assert all(tokenizer.token_bytes(token) is None for token in tokenizer.special_ids), name
