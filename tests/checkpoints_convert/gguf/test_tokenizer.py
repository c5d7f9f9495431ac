"""Tokenizers rebuilt from metadata: the ids of the tokenizer that the file was made from."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from checkpoints_convert import CheckpointError, convert, tokenizer_files
from checkpoints_convert.gguf.index import GGUFIndex
from checkpoints_convert.gguf.pre_tokenizers import PRE_TOKENIZERS
from checkpoints_convert.gguf.tokenizer import end_token_ids, token_id
from jaxinfer.loaded_tokenizers import tokenizer_of
from jaxinfer.loading import load_model
from tests.checkpoints_convert.gguf.gguf_models import metadata_of, tensors_of
from tests.checkpoints_convert.gguf.gguf_writer import write
from tests.checkpoints_convert.gguf.vocabularies import byte_level as byte_level_metadata
from tests.checkpoints_convert.gguf.vocabularies import sentencepiece


def eos_token_ids(path):
    with GGUFIndex(path) as index:
        return end_token_ids(index)


def bos_token_id(path):
    with GGUFIndex(path) as index:
        return token_id(index, "bos_token_id")


TEXTS = [
    "Hello, world! The year 2024 cost $1,234.50; isn't that  odd?\n\n\tYes   it is.  ",
    "naïve café — “quotes”… 日本語のテキスト 한국어 ру́сский 123456789 x²",
    "def f(x):\n    return x**2  # comment\r\n    if x != 3: HTTPServerError()",
    "I'LL we're THEY'VE DON'T camelCaseWord 👩‍👩‍👧 zero\u200bwidth e\u0301 \u212b",
    " leading", "", "\n", "   ", "a", "<|eot|>", "before<|eot|>after <think> deep </think>",
]  # fmt: skip
CORPUS = [*TEXTS * 4, "the quick brown fox jumps over the lazy dog 0123456789 " * 5, "lorem ipsum dolor sit amet " * 5]
# The pre-tokenizer of a tokenizer.json that llama.cpp's converter calls by the name.
SPLITS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def split(regex):
    return pre_tokenizers.Split(tokenizers.Regex(regex), behavior="isolated")


def byte_level(*, splits):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits)


def pre_tokenizer_of(name):
    """As the models' own tokenizer.json has it, written apart from the code under test."""
    if name in SPLITS:
        return pre_tokenizers.Sequence([split(SPLITS[name]), byte_level(splits=False)])
    digits = pre_tokenizers.Digits(individual_digits=True)
    return {
        "gpt-2": byte_level(splits=True),
        "olmo": byte_level(splits=True),
        "smollm": pre_tokenizers.Sequence([digits, byte_level(splits=True)]),
        "command-r": pre_tokenizers.Sequence([digits, byte_level(splits=True)]),
    }[name]


def trained(name, *, bos=False):
    """A tokenizer of the kind, trained on a few sentences, with a special token and one of the user's own."""
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=name in ("llama-bpe", "tekken")))
    made.normalizer = normalizers.NFC() if name in ("qwen2", "olmo", "command-r") else None
    made.pre_tokenizer, made.decoder = pre_tokenizer_of(name), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|bos|>", "<|eot|>"],
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A <|bos|>:1 $B:1", special_tokens=[("<|bos|>", 0)]
        )
    return made


def metadata(made, name, **changes):
    """Metadata that the converter writes of a byte-level tokenizer."""
    tokens = [made.id_to_token(i) for i in range(made.get_vocab_size())]
    added = {token.content: token.special for token in made.get_added_tokens_decoder().values()}
    merges = json.loads(made.to_str())["model"]["merges"]
    found = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([(3 if added[t] else 4) if t in added else 1 for t in tokens], np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return {key: value for key, value in {**found, **changes}.items() if value is not None}


@pytest.mark.parametrize("name", [*SPLITS, "gpt-2", "olmo", "smollm", "command-r"])
def test_byte_level_tokenizers_encode_as_their_source(tmp_path, name):
    made = trained(name, bos=PRE_TOKENIZERS[name].adds_bos)
    path = write(tmp_path / "model.gguf", metadata(made, name), {})
    rebuilt = tokenizer_of(path)
    for text in TEXTS:
        for special in (True, False):
            ids = rebuilt.encode(text, add_special_tokens=special)
            assert ids == made.encode(text, add_special_tokens=special).ids, text
        assert rebuilt.decode(made.encode(text).ids) == made.decode(made.encode(text).ids)
    assert rebuilt.vocab_size == made.get_vocab_size()
    assert (rebuilt.bos_token_id, rebuilt.eos_token_id) == (bos_token_id(path), *eos_token_ids(path)) == (0, 1)


def test_another_cut_gives_other_ids(tmp_path):
    """So that the test above can fail: the pre-tokenizer matters."""
    made = trained("qwen2")
    others = {
        name: tokenizer_of(write(tmp_path / f"{name}.gguf", metadata(made, name), {})) for name in ("gpt-2", "gpt-4o")
    }
    for rebuilt in others.values():
        assert any(rebuilt.encode(text) != made.encode(text).ids for text in TEXTS)


@pytest.mark.parametrize(("add_bos", "add_eos"), [(True, True), (True, False), (False, True), (False, False)])
def test_what_is_added_to_a_text(tmp_path, add_bos, add_eos):
    made = trained("llama-bpe")
    flags = {"tokenizer.ggml.add_bos_token": add_bos, "tokenizer.ggml.add_eos_token": add_eos}
    rebuilt = tokenizer_of(write(tmp_path / "m.gguf", metadata(made, "llama-bpe", **flags), {}))
    assert rebuilt.encode("fox") == [*[0] * add_bos, *made.encode("fox").ids, *[1] * add_eos]


def test_chat_templates_and_ends_of_turns(tmp_path):
    made = trained("qwen2")
    more = {
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}<|eot|>{% endfor %}",
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.padding_token_id": 0,
    }
    path = write(tmp_path / "m.gguf", metadata(made, "qwen2", **more), {})
    rebuilt = tokenizer_of(path)
    assert rebuilt.chat_template == more["tokenizer.chat_template"]
    assert rebuilt.apply_chat_template([{"role": "user", "content": "fox"}]) == [*made.encode("fox").ids, 1]
    assert eos_token_ids(path) == (1, 5)
    assert rebuilt.pad_token_id == 0
    rebuilt.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "tokenizer.json").read_text())["model"]["type"] == "BPE"


def sentencepiece_like(scores=True):
    """Pieces with scores: the better a merge, the higher."""
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz", "he", "▁t", "▁the", "in", "er", "an", "▁qu", "ick", "ic", "ow", "own"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<turn>", "  ", "▁▁"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4, 4, 1]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(-i) for i in range(len(tokens))] if scores else None,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_merges_the_best_neighbours_first(tmp_path):
    data = sentencepiece_like()
    ids = {token: i for i, token in enumerate(data["tokenizer.ggml.tokens"])}
    rebuilt = tokenizer_of(write(tmp_path / "m.gguf", data, {}))

    def pieces(text):
        return [rebuilt.id_to_token(i) for i in rebuilt.encode(text, add_special_tokens=False)]

    assert rebuilt.encode("the")[0] == ids["<s>"]
    assert pieces("ther") == ["▁the", "r"]  # "he" is better than "er"
    assert pieces("the quick") == ["▁the", "▁", "q", "u", "ick"]
    assert pieces("brown") == ["▁", "b", "r", "own"]
    assert pieces("é") == ["▁", "<0xC3>", "<0xA9>"]
    assert pieces("a<turn>b") == ["▁", "a", "<turn>", "▁", "b"]
    assert rebuilt.decode(rebuilt.encode("the quick é fox")) == "the quick é fox"


def test_gemma_has_no_space_in_front_and_merges_in_the_order_of_its_tokens(tmp_path):
    data = sentencepiece_like() | {"general.architecture": "gemma2"}
    data["tokenizer.ggml.tokens"] = [token if token != "▁▁" else "▁▁▁" for token in data["tokenizer.ggml.tokens"]]
    data["tokenizer.ggml.scores"] = [-1000.0] * len(data["tokenizer.ggml.tokens"])
    rebuilt = tokenizer_of(write(tmp_path / "m.gguf", data, {}))
    pieces = [rebuilt.id_to_token(i) for i in rebuilt.encode("he  own", add_special_tokens=False)]
    assert pieces == ["he", "  ", "own"]
    assert rebuilt.decode(rebuilt.encode("he  own")) == "he  own"


def test_a_user_defined_piece_is_matched_after_normalization(tmp_path):
    """`▁▁` is spelled as after normalization, and its text is two spaces."""
    data = sentencepiece()
    tokenizer = tokenizer_of(write(tmp_path / "m.gguf", data, {}))
    tokens = data["tokenizer.ggml.tokens"]
    ids = [tokens.index(token) for token in ("<s>", "▁a", "▁▁", "b")]
    assert tokenizer.encode("a  b") == [1, 263, 269, 261] == ids
    assert tokenizer.encode_content("a  b") == ids[1:]
    assert tokenizer.decode(ids) == "a  b"


@pytest.mark.parametrize("add", [None, True])
def test_missing_ids_are_those_that_llama_cpp_assumes(tmp_path, add):
    without = {"bos_token_id": None, "eos_token_id": None, "unknown_token_id": None}
    path = write(tmp_path / "m.gguf", sentencepiece(**without, add_bos_token=add), {})
    tokenizer = tokenizer_of(path)
    assert tokenizer.encode("a") == [1, 263]
    assert (tokenizer.bos_token_id, bos_token_id(path), eos_token_ids(path)) == (1, 1, (2,))


def test_a_missing_id_of_a_byte_level_tokenizer_is_no_comma(tmp_path, caplog):
    """llama.cpp assumes token 11, Falcon's; here it ends no answer unless it is a control token."""
    data = byte_level_metadata("gpt-2", bos_token_id=None, eos_token_id=None, add_bos_token=True)
    path = write(tmp_path / "m.gguf", data, {})
    assert (tokenizer_of(path).encode("a")[0], bos_token_id(path), eos_token_ids(path)) == (11, None, ())
    assert "there is no tokenizer.ggml.bos_token_id: llama.cpp's default, 11, is added" in caplog.text
    data["tokenizer.ggml.token_type"][11] = 3
    path = write(tmp_path / "control.gguf", data, {})
    assert (tokenizer_of(path).encode("a")[0], bos_token_id(path), eos_token_ids(path)) == (11, 11, (11,))
    path = write(tmp_path / "glm.gguf", byte_level_metadata("glm4", bos_token_id=None, add_bos_token=True), {})
    assert tokenizer_of(path).encode("a") == [ord("a")]
    assert "there is no tokenizer.ggml.bos_token_id: nothing is added" in caplog.text


@pytest.mark.parametrize("id", [2**32 - 1, 272, 10**6])
@pytest.mark.parametrize("name", ["bos", "eos", "unknown", "padding"])
def test_an_id_of_no_token_is_as_a_missing_one(tmp_path, caplog, name, id):
    """As in llama.cpp, whose "none" is -1, here in 32 bits; published files have the number of tokens as padding."""
    path = write(tmp_path / "m.gguf", sentencepiece(**{f"{name}_token_id": id}), {})
    tokenizer = tokenizer_of(path)
    assert (tokenizer.encode("a"), bos_token_id(path), eos_token_ids(path)) == ([1, 263], 1, (2,))
    used = {"bos": 1, "eos": 2, "unknown": 0, "padding": None}[name]
    warning = f"tokenizer.ggml.{name}_token_id is {id}, not the id of one of 272 tokens: {used} is used"
    assert caplog.text.count(warning) == (id < 2**31)


def test_two_tokens_without_text_have_names_of_their_own(tmp_path):
    data = sentencepiece()
    data["tokenizer.ggml.tokens"] = [*data["tokenizer.ggml.tokens"], "", ""]
    data["tokenizer.ggml.scores"] = [*data["tokenizer.ggml.scores"], 0.0, 0.0]
    data["tokenizer.ggml.token_type"] = np.append(data["tokenizer.ggml.token_type"], [5, 5]).astype(np.int32)
    tokenizer = tokenizer_of(write(tmp_path / "m.gguf", data, {}))
    assert tokenizer.encode("a  b") == [1, 263, 269, 261]
    assert [tokenizer.id_to_token(id) for id in (272, 273)] == ["[EMPTY_272]", "[EMPTY_273]"]


@pytest.mark.parametrize("spelled", [" ", "▁"])
@pytest.mark.parametrize(("kind", "lengths"), [(4, [4, 4, 1]), (1, [4, 2, 3])])
def test_user_defined_runs_of_spaces_match_longest_first_and_others_are_merged(tmp_path, kind, lengths, spelled):
    data = sentencepiece_like() | {"general.architecture": "gemma3"}
    runs = [spelled * 2, spelled * 3, spelled * 4]
    data["tokenizer.ggml.tokens"] = [*data["tokenizer.ggml.tokens"][:-2], *runs]
    data["tokenizer.ggml.token_type"] = np.array([*data["tokenizer.ggml.token_type"][:-2], *[kind] * 3], np.int32)
    del data["tokenizer.ggml.scores"]
    rebuilt = tokenizer_of(write(tmp_path / "m.gguf", data, {}))
    ids = rebuilt.encode("a" + " " * 9 + "b", add_special_tokens=False)
    assert [len(rebuilt.decode([id])) for id in ids[1:-1]] == lengths
    assert rebuilt.decode(ids) == "a" + " " * 9 + "b"
    assert rebuilt.encode_content("a" + " " * 9 + "b") == ids


def test_a_whole_tokenizer_in_the_file_is_taken_as_it_is(tmp_path):
    made = trained("gpt-2")
    data = {"tokenizer.huggingface.json": made.to_str(), "tokenizer.ggml.eos_token_id": 1}
    data["tokenizer.ggml.tokens"] = [made.id_to_token(i) for i in range(made.get_vocab_size())]
    path = write(tmp_path / "m.gguf", {"general.architecture": "llama", **data}, {})
    assert tokenizer_of(path).encode(TEXTS[0]) == made.encode(TEXTS[0]).ids


def test_a_file_without_a_tokenizer(tmp_path):
    path = write(tmp_path / "m.gguf", {"general.architecture": "llama"}, {})
    assert tokenizer_files(path) == {}
    assert tokenizer_of(path) is None
    assert eos_token_ids(path) == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "qwen3"}, r"pre is 'qwen3', an unsupported pre-tokenizer: did you mean 'qwen2'\?"),
        ({"pre": None}, "pre is missing: the pre-tokenizer is unknown"),
        ({"model": "t5"}, "model is 't5', and only gpt2 and llama are read"),
        ({"tokens": None}, "tokens is not an array of strings"),
        ({"tokens": ["a", "a"]}, "token_type is an array of .* for 2 tokens"),
        ({"tokens": ["a", "a"], "token_type": None}, "tokens is the token 'a' twice"),
        ({"merges": None}, "merges is not an array of strings"),
        ({"merges": ["a b c"]}, "merges is 'a b c' at 0, which does not join two tokens to a token"),
        ({"merges": ["nospace"]}, "merges is 'nospace' at 0"),
        ({"eos_token_id": "x"}, "eos_token_id is a string of 1 bytes, not the id of a token"),
        ({"add_bos_token": 1}, "add_bos_token is 1, not true or false"),
    ],
)
def test_what_cannot_be_rebuilt_is_named(tmp_path, change, message):
    named = {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    path = write(tmp_path / "m.gguf", metadata(trained("gpt-2"), "gpt-2", **named), {})
    with pytest.raises(CheckpointError, match=message) as caught:
        tokenizer_of(path)
    assert str(caught.value).startswith(str(path))


def test_another_tokenizer_overrides(checkpoint, tmp_path):
    """One that cannot be rebuilt is no error where another is given."""
    source = checkpoint("LlamaForCausalLM")
    unknown = metadata(trained("gpt-2"), "unheard-of")
    path = write(
        tmp_path / "model.gguf", metadata_of(source.config) | unknown, tensors_of(source.config, source.tensors)
    )
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre is 'unheard-of'.*--tokenizer"):
        load_model(path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre is 'unheard-of'"):
        convert(path, tmp_path / "out", progress=None)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made = trained("gpt-2")
    made.save(str(folder / "tokenizer.json"))
    loaded = load_model(path, tokenizer=folder)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("fox") == made.encode("fox").ids
    convert(path, tmp_path / "out", tokenizer=folder, progress=None)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("spelled", "ends"),
    [
        (["<end_of_turn>"], (1, 3)),  # Gemma: eos is <eos>
        (["<|im_end|>", "<|endoftext|>"], (1, 3, 4)),
        (["<|eot_id|>", "<|start_header_id|>"], (1, 3)),
        (["<|end|>"], (1, 3)),
        (["<|end|>", "<|return|>", "<|call|>"], (1, 4, 5)),  # gpt-oss: <|end|> is not the end of its answer
        (["<|user|>", "<|channel|>"], (1,)),
    ],
)
def test_special_tokens_that_end_a_turn_by_their_spelling(checkpoint, tmp_path, spelled, ends):
    source = checkpoint()
    tokens = ["<bos>", "<end>", "<im_end>", *spelled, *(["<|im_end|>"] if "<|im_end|>" not in spelled else [])]
    kinds = np.array([3, 3, 1, *[3] * len(spelled), *[1] * (len(tokens) - 3 - len(spelled))], np.int32)
    metadata = {
        **metadata_of(source.config),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.eos_token_id": 1,
    }
    path = write(tmp_path / "model.gguf", metadata, tensors_of(source.config, source.tensors))
    assert eos_token_ids(path) == ends
