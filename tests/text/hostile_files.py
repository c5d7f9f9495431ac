"""Tokenizer files that harm whoever reads them without care, and a process that reads each of them and measures.

`python -m tests.text.hostile_files NAME...` prints a JSON line per file: the error, CPU seconds and peak memory.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LETTERS = {char: index for index, char in enumerate("abcdefghijklmnopqrstuvwxyz Ġ")}
NUM = len(LETTERS)
Files = Mapping[str, str | bytes]
FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"


def spec(**fields: Any) -> dict[str, Any]:
    model = {"type": "BPE", "vocab": LETTERS, "merges": []} | fields.pop("model", {})
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", **empty, "added_tokens": [], "model": model, **fields}


def token(content: Any, number: Any = NUM, **flags: Any) -> dict[str, Any]:
    names = ("single_word", "lstrip", "rstrip", "normalized")
    return {"id": number, "content": content, **dict.fromkeys(names, False), "special": True, **flags}


def sequence(kind: str, steps: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: steps}


def replace(pattern: Any, content: Any) -> dict[str, Any]:
    pattern = pattern if isinstance(pattern, dict) else {"String": pattern}
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def template(single: list[Any], special: Any) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}


def nested(kind: str, children: str, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "Fuse" if kind == "decoder" else "NFC" if kind == "normalizer" else "Whitespace"}
    for _ in range(depth):
        found = sequence(children, [found])
    return found


def charsmap(data: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


TEXT = {"Sequence": {"id": "A", "type_id": 0}}
START = {"SpecialToken": {"id": "<s>", "type_id": 0}}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def unigram(vocab: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "Unigram", "unk_id": 0, "vocab": vocab, **fields}


Kind = tuple[str, Callable[[], Any]]
"""What the error says (a regular expression), and a function that makes the tokenizer.json (or all files by name)."""

_GROWTH: dict[str, Kind] = {
    "replacements grow the text 20-fold seven times": (
        r"normalizer\.normalizers\[2\] could make a text 8e\+03 times longer",
        lambda: spec(normalizer=sequence("normalizers", [replace("a", "a" * 20)] * 7)),
    ),
    "replacements feed one another": (
        r"normalizer\.normalizers\[1\] could make a text",
        lambda: spec(normalizer=sequence("normalizers", [replace("abc"[i], "abcd"[i + 1] * 50) for i in range(3)])),
    ),
    "a regex replacement feeds itself": (
        r"normalizer\.normalizers\[2\] could make a text",
        lambda: spec(normalizer=sequence("normalizers", [replace({"Regex": r"\p{L}"}, "ab cd ef")] * 5)),
    ),
    "a replacement of 10 MB": (
        r"normalizer\.content has 10000000 bytes; at most 1024",
        lambda: spec(normalizer=replace("a", "b" * 10_000_000)),
    ),
    "a replacement 1024 times as long": (
        r"normalizer could make a text 1\.02e\+03 times longer; at most 500 times",
        lambda: spec(normalizer=replace("a", "b" * 1024)),
    ),
    "an empty pattern": (
        r"normalizer\.pattern\.String must be a text that is not empty",
        lambda: spec(normalizer=replace("", "x")),
    ),
    "an empty regex": (
        r"normalizer\.pattern\.Regex must be a text that is not empty",
        lambda: spec(normalizer=replace({"Regex": ""}, "x" * 1000)),
    ),
    "a regex that matches nothing everywhere": (
        r"normalizer could make a text 1e\+03 times longer",
        lambda: spec(normalizer=replace({"Regex": "z*"}, "x" * 1000)),
    ),
    "a prefix of 10 MB": (
        r"normalizer\.prepend has 10000000 bytes",
        lambda: spec(normalizer={"type": "Prepend", "prepend": "a" * 10_000_000}),
    ),
    "bytes as letters thirty times in the normalizer": (
        r"normalizer\.normalizers\[8\] could make a text",
        lambda: spec(normalizer=sequence("normalizers", [{"type": "ByteLevel"}] * 30)),
    ),
    "bytes as letters thirty times in the pre-tokenizer": (
        r"pre_tokenizer\.pretokenizers\[5\] could make a text",
        lambda: spec(pre_tokenizer=sequence("pretokenizers", [BYTE_LEVEL] * 30)),
    ),
    "marks between all letters": (
        r"pre_tokenizer\.pretokenizers\[2\] could make a text",
        lambda: spec(
            pre_tokenizer=sequence(
                "pretokenizers",
                [{"type": "Metaspace", "replacement": chr(0x2581 + i), "prepend_scheme": "always"} for i in range(9)],
            )
        ),
    ),
    "a decoder that grows the text": (
        r"decoder\.decoders\[2\] could make a text",
        lambda: spec(decoder=sequence("decoders", [replace("a", "a" * 20)] * 7)),
    ),
    "a decoder of empty suffixes": (
        r"decoder\.decoders\[0\]\.suffix has 0 bytes",
        lambda: spec(decoder=sequence("decoders", [{"type": "BPEDecoder", "suffix": ""}] * 30)),
    ),
    "a decoder of empty delimiters": (
        r"decoder\.word_delimiter_token has 0 bytes",
        lambda: spec(decoder={"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "", "cleanup": True}),
    ),
    "100,000 normalizers": (
        r"normalizer has 100000 steps",
        lambda: spec(normalizer=sequence("normalizers", [{"type": "NFKC"}] * 100_000)),
    ),
    "100,000 pre-tokenizers": (
        r"pre_tokenizer has 100000 steps",
        lambda: spec(pre_tokenizer=sequence("pretokenizers", [{"type": "Whitespace"}] * 100_000)),
    ),
    "a charsmap that replaces a letter by 1 MB": (
        r"precompiled_charsmap has a replacement of 1000000 bytes",
        lambda: spec(normalizer=charsmap(b"\x04\0\0\0" + bytes(4) + b"x" * 1_000_000)),
    ),
}

_BROKEN: dict[str, Kind] = {
    "a charsmap with a trie of 4 GB": (
        r"precompiled_charsmap has 20 bytes, of which 4294967295 should be its trie",
        lambda: spec(normalizer=charsmap(b"\xff" * 20)),
    ),
    "an empty charsmap": (r"precompiled_charsmap has 0 bytes", lambda: spec(normalizer=charsmap(b""))),
    "a charsmap that is not base64": (
        r"precompiled_charsmap is not base64",
        lambda: spec(normalizer={"type": "Precompiled", "precompiled_charsmap": "!!"}),
    ),
    "a charsmap that is null": (
        r"precompiled_charsmap must be a base64 text, got None",
        lambda: spec(normalizer={"type": "Precompiled", "precompiled_charsmap": None}),
    ),
    "a charsmap that points outside of itself": (
        r"tokenizer\.json is not a tokenizer that works",
        lambda: spec(normalizer=charsmap(b"\x04\0\0\0" + b"\0\xff\xff\x7f" + b"x\0")),
    ),
    "pieces of no length": (
        r"pre_tokenizer\.length must be an integer from 1",
        lambda: spec(pre_tokenizer={"type": "FixedLength", "length": 0}),
    ),
    "a decoder that strips more than there is": (
        r"tokenizer\.json is not a tokenizer that works",
        lambda: spec(decoder={"type": "Strip", "content": "a", "start": 0, "stop": 10}),
    ),
    "a decoder that strips far more than there is": (
        r"decoder\.stop must be an integer from 0 to 64, got 10000000000",
        lambda: spec(decoder={"type": "Strip", "content": "a", "start": 0, "stop": 10**10}),
    ),
    "a decoder without a type": (r"decoder\.type must be one of", lambda: spec(decoder={"x": 1})),
    "an unknown normalizer": (
        r"normalizer\.type must be one of .*got 'Shell'",
        lambda: spec(normalizer={"type": "Shell"}),
    ),
    "a normalizer that is a number": (r"normalizer must be an object, got 7", lambda: spec(normalizer=7)),
    "a merge shorter than the prefix": (
        r"model\.merges\[0\] is \['a', 'b'\]: its right side does not start with '####",
        lambda: spec(model={"continuing_subword_prefix": "#" * 100, "merges": [["a", "b"]]}),
    ),
    "a prefix that cuts a letter in two": (
        r"model\.merges\[0\] is .*does not start with 'é'",
        lambda: spec(model={"continuing_subword_prefix": "é", "vocab": {"a": 0, "xé": 1, "aé": 2}, "merges": ["a xé"]}),
    ),
    "a merge of unknown tokens": (
        r"tokenizer\.json is not a tokenizer that tokenizers can load: Token `zz` out of vocabulary",
        lambda: spec(model={"merges": [["a", "zz"]]}),
    ),
    "a merge of three": (r"tokenizer\.json is not a tokenizer.*Merges", lambda: spec(model={"merges": ["a b c"]})),
    "a prefix of 1 MB": (
        r"model\.continuing_subword_prefix has 1000000 bytes",
        lambda: spec(model={"continuing_subword_prefix": "#" * 1_000_000}),
    ),
    "a suffix of 1 MB": (
        r"model\.end_of_word_suffix has 1000000 bytes",
        lambda: spec(model={"end_of_word_suffix": "#" * 1_000_000}),
    ),
    "words of any length": (
        r"model\.max_input_chars_per_word must be an integer from 0 to 1000",
        lambda: spec(model={"type": "WordPiece", "unk_token": "a", "max_input_chars_per_word": 10**9}),
    ),
    "an unknown model": (r"tokenizer\.json is not a tokenizer", lambda: spec(model={"type": "Markov"})),
    "an id beyond 32 bits": (
        r"model\.vocab\['a'\] must be from 0 to 16777215",
        lambda: spec(model={"vocab": {"a": 10**400}}),
    ),
    "an id of four billion": (r"model\.vocab\['a'\] must be from 0", lambda: spec(model={"vocab": {"a": 2**32 - 1}})),
    "a negative id": (r"model\.vocab\['a'\] must be from 0 .*got -1", lambda: spec(model={"vocab": {"a": -1}})),
    "an id that is true": (
        r"model\.vocab\['a'\] must be a token id, got True",
        lambda: spec(model={"vocab": {"a": True}}),
    ),
    "an id that is a fraction": (r"model\.vocab\['a'\] must be a token id", lambda: spec(model={"vocab": {"a": 1.5}})),
    "a vocabulary that is a number": (r"model\.vocab must be an object", lambda: spec(model={"vocab": 5})),
    "a token of 10 MB": (
        r"model\.vocab has a token of 10000000 characters",
        lambda: spec(model={"vocab": {**LETTERS, "x" * 10_000_000: NUM}}),
    ),
    "a scored token of 10 MB": (
        r"model\.vocab has a token of 10000000 characters; at most 2048",
        lambda: spec(model=unigram([["a", 0.0], ["x" * 10_000_000, -1.0]])),
    ),
    "scored tokens with nothing in common": (
        r"model\.vocab needs a trie of \d+ nodes; at most 2500000",
        lambda: spec(model=unigram([[f"{i:06}" + "x" * 1000, 0.0] for i in range(12_000)])),
    ),
    "a score that is infinite": (
        r"tokenizer\.json is not valid JSON: Infinity",
        lambda: spec(model=unigram([["a", float("inf")]])),
    ),
    "a score too large for a float": (
        r"model\.vocab\[0\] has the score inf",
        lambda: json.dumps(spec(model=unigram([["a", 12345.5]]))).replace("12345.5", "1e999"),
    ),
    "an unknown token that is none": (
        r"model\.unk_id must be an integer from 0 to 0",
        lambda: spec(model=unigram([["a", 0]], unk_id=7)),
    ),
    "a template that names what is not there": (
        r"post_processor\.single\[0\] is neither",
        lambda: spec(post_processor=template([START, TEXT], {})),
    ),
    "a template of the text B": (
        r"post_processor\.single\[0\] is neither",
        lambda: spec(post_processor=template([{"Sequence": {"id": "B", "type_id": 0}}], {})),
    ),
    "a template that repeats the text": (
        r"post_processor\.single must have the text A once, not 50 times",
        lambda: spec(post_processor=template([TEXT] * 50, {})),
    ),
    "a template of 100,000 times 1,000 tokens": (
        r"post_processor\.special_tokens needs 1 to 64 ids",
        lambda: spec(
            post_processor=template(
                [START] * 100_000 + [TEXT], {"<s>": {"id": "<s>", "ids": [1] * 1000, "tokens": ["a"] * 1000}}
            )
        ),
    ),
    "a template of 100,000 tokens": (
        r"post_processor\.single must be a list of at most 64 pieces",
        lambda: spec(
            post_processor=template([START] * 100_000 + [TEXT], {"<s>": {"id": "<s>", "ids": [1], "tokens": ["a"]}})
        ),
    ),
    "100,000 post-processors": (
        r"post_processor\.processors must be a list of at most 16",
        lambda: spec(
            post_processor=sequence(
                "processors", [{"type": "BertProcessing", "sep": ["a", 1], "cls": ["b", 2]}] * 100_000
            )
        ),
    ),
    "another version": (r"Unknown tokenizer version '2\.0'", lambda: spec(version="2.0")),
}


def _nested_json(depth: int) -> str:
    return json.dumps(spec()).replace('"version"', '"x": ' + "[" * depth + "]" * depth + ', "version"', 1)


_COUNTS: dict[str, Kind] = {
    "200,000 added tokens": (
        r"added_tokens has 200000 tokens; at most 100000",
        lambda: spec(added_tokens=[token(f"<t{i}>", NUM + i) for i in range(200_000)]),
    ),
    "an added token of 10 MB": (
        r"added_tokens\[0\] has 10000000 characters",
        lambda: spec(added_tokens=[token("x" * 10_000_000)]),
    ),
    "added tokens of 50 MB together": (
        r"added_tokens has \d+ characters in all; at most 4194304",
        lambda: spec(added_tokens=[token(f"{i:05}" + "x" * 1000, NUM + i) for i in range(50_000)]),
    ),
    "an added token with a huge id": (
        r"added_tokens\[0\]\.id must be from 0",
        lambda: spec(added_tokens=[token("x", 2**40)]),
    ),
    "an added token that is a list": (r"added_tokens\[0\] must be an object", lambda: spec(added_tokens=[["x"]])),
    "an added token without text": (
        r"added_tokens\[0\] needs a text as content",
        lambda: spec(added_tokens=[token(5)]),
    ),
    "added tokens that are a text": (r"added_tokens must be a list", lambda: spec(added_tokens="x")),
    "200,000 tokens in the configuration": (
        r"tokenizer_config\.json: added_tokens_decoder has 200000 tokens; at most 100000",
        lambda: {
            FILE: spec(),
            CONFIG: {"added_tokens_decoder": {str(NUM + i): {"content": f"<t{i}>"} for i in range(200_000)}},
        },
    ),
    "a token of 10 MB in the configuration": (
        r"special tokens\[0\] has 10000000 characters",
        lambda: {FILE: spec(), CONFIG: {"eos_token": "x" * 10_000_000}},
    ),
    "declared tokens that are a list": (
        r"tokenizer_config\.json: added_tokens_decoder must be an object",
        lambda: {FILE: spec(), CONFIG: {"added_tokens_decoder": [1]}},
    ),
    "a declared id of 5,000 digits": (
        r"tokenizer_config\.json: bad added_tokens_decoder entry",
        lambda: {FILE: spec(), CONFIG: {"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}},
    ),
    "an added_tokens.json of lists": (
        r"added_tokens\.json: '<x>' must have a token id, got \[\]",
        lambda: {FILE: spec(), "added_tokens.json": {"<x>": []}},
    ),
    "a configuration nested 100,000 levels deep": (
        r"tokenizer_config\.json is not valid JSON: it is nested too deeply",
        lambda: {FILE: spec(), CONFIG: '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}"},
    ),
    "a configuration with a number of 10,000 digits": (
        r"tokenizer_config\.json is not valid JSON: Exceeds the limit",
        lambda: {FILE: spec(), CONFIG: '{"x": ' + "9" * 10_000 + "}"},
    ),
    "a file nested 100,000 levels deep": (
        r"tokenizer\.json is not valid JSON: it is nested",
        lambda: _nested_json(100_000),
    ),
    "normalizers nested 60 levels deep": (
        r"normalizer(\.normalizers\[0\])+ has 1 steps at depth 9",
        lambda: spec(normalizer=nested("normalizer", "normalizers", 60)),
    ),
    "pre-tokenizers nested 60 levels deep": (
        r"pre_tokenizer(\.pretokenizers\[0\])+ has 1 steps at depth 9",
        lambda: spec(pre_tokenizer=nested("pre_tokenizer", "pretokenizers", 60)),
    ),
    "decoders nested 60 levels deep": (
        r"decoder(\.decoders\[0\])+ has 1 steps at depth 9",
        lambda: spec(decoder=nested("decoder", "decoders", 60)),
    ),
    "three million lists": (
        r"has \d+ times '\['",
        lambda: json.dumps(spec())[:-1] + ', "x": [' + "[]," * 3_000_000 + "[]]}",
    ),
    "a million objects": (
        r"has \d+ times '\{'",
        lambda: json.dumps(spec())[:-1] + ', "x": [' + "{}," * 1_000_000 + "{}]}",
    ),
    "ten million numbers": (
        r"has \d+ times ','",
        lambda: json.dumps(spec())[:-1] + ', "x": [' + "1," * 10_000_000 + "1]}",
    ),
    "a file of 100 MB": (
        r"tokenizer\.json has \d+ bytes; at most 67108864",
        lambda: json.dumps(spec()) + " " * 100_000_000,
    ),
    "a configuration of 100 MB": (
        r"tokenizer_config\.json has \d+ bytes; at most 67108864",
        lambda: {FILE: spec(), CONFIG: "{}" + " " * 100_000_000},
    ),
    "two normalizers, the second harmless": (
        r"tokenizer\.json is not valid JSON: the key 'normalizer' is given twice",
        lambda: json.dumps(spec()).replace('"normalizer": null', '"normalizer": {"type": "Shell"}, "normalizer": null'),
    ),
    "a file that is a list": (r"tokenizer\.json: the file must hold a JSON object", lambda: "[]"),
    "a file that is not UTF-8": (r"tokenizer\.json is not valid UTF-8", lambda: {FILE: b"\xff\xfe{}"}),
    "an empty file": (r"tokenizer\.json is not valid JSON", lambda: ""),
}

_REGEXES = {
    "nested repetition": (r"(a+)+$", "a repeated group can match in more than one way"),
    "equal alternatives, repeated": (r"(a|a)*$", "a repeated group"),
    "words and optional spaces, repeated": (r"(?:\w+\s?)*$", "a repeated group"),
    "options in a repetition": (r"(?:a?){30}a{30}", "a repeated group"),
    "overlapping ranges, repeated": (r"(?:[а-я]|[г-ё])+$", "a repeated group"),
    "thirty options": ("a?" * 30 + "a" * 30, "more than 4096 ways"),
    "thirty choices": ("(a|a)" * 30 + "x", "more than 4096 ways"),
    "three runs of the same letter": (r"a*a*a*b", "two of its repetitions"),
    "a scan from every letter": (r"[\s\S]*\x00", "one of its repetitions"),
    "a scan in a lookahead": (r"(?=[\s\S]*x)\w", "one of its repetitions"),
    "a lazy scan": (r".*?\x00", "one of its repetitions"),
    "a backreference": (r"(.)\1", "is not supported"),
    "a recursion": (r"(?<x>a\g<x>?b)", "is not supported"),
    "a condition": (r"(a)?(?(1)b|c)", "is not supported"),
    "a callout": (r"(*FAIL)", "a callout"),
    "nested 4,000 levels deep": ("(" * 4000 + "a" + ")" * 4000, "nested more than 32 levels"),
    "200,000 words": ("|".join(f"w{i}" for i in range(200_000)), "at most 16384"),
    "5,000 classes of letters": ("|".join(f"[{chr(0x4E00 + i)}]" for i in range(5000)), "at most 16384"),
    "4,000 classes of letters, repeated": (
        f"(?:{'|'.join('[' + chr(0x4E00 + i) + ']' for i in range(4000))})+x",
        "too many classes",
    ),
    "a bracket without its end": (r"[a-", "it ends in the middle"),
}


def _of_regexes() -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    for name, (regex, reason) in _REGEXES.items():
        kinds[f"a regex: {name}"] = (
            rf"pre_tokenizer\.pattern\.Regex .*{reason}",
            lambda regex=regex: spec(pre_tokenizer=split(regex)),
        )
    kinds["a regex in the normalizer"] = (
        r"normalizer\.pattern\.Regex .*a repeated group",
        lambda: spec(normalizer=replace({"Regex": "(a+)+$"}, "x")),
    )
    kinds["a regex in the decoder"] = (
        r"decoder\.pattern\.Regex .*a repeated group",
        lambda: spec(decoder=replace({"Regex": "(a+)+$"}, "x")),
    )
    return kinds


KINDS: dict[str, Kind] = {**_GROWTH, **_BROKEN, **_COUNTS, **_of_regexes()}


def write(name: str, directory: Path) -> None:
    made = KINDS[name][1]()
    files = made if isinstance(made, dict) and FILE in made else {FILE: made}
    for file, content in files.items():
        text = content if isinstance(content, (str, bytes)) else json.dumps(content)
        (directory / file).write_bytes(text if isinstance(text, bytes) else text.encode())


def read(directory: Path) -> str:
    """What a user gets to see: the error, or "" if the files work."""
    from jaxinfer.text import Tokenizer

    try:
        tokenizer = Tokenizer.from_dir(directory)
        for text in ("hello", "a" * 5000, "é a" * 1000):
            tokenizer.decode(tokenizer.encode(text))
            tokenizer.encode_content(text)
    except ValueError as error:
        return str(error)
    except BaseException as error:  # what a user should not get to see
        return "".join(traceback.format_exception(error))
    return ""


def measure(name: str) -> dict[str, Any]:
    """Reads the files in a process of its own, made by a fork of this one."""
    import jaxinfer.text  # noqa: F401  so that the import is not measured

    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as output:
        writer = os.fork()
        if writer == 0:
            write(name, Path(directory))
            os._exit(0)
        os.waitpid(writer, 0)
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
            resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
            output.write(read(Path(directory)).encode())
            output.flush()
            os._exit(0)
        _, status, usage = os.wait4(child, 0)
        output.seek(0)
        return {
            "name": name,
            "error": output.read().decode(),
            "status": status,
            "seconds": usage.ru_utime + usage.ru_stime,
            "megabytes": usage.ru_maxrss / 1024,
        }


if __name__ == "__main__":
    for one in sys.argv[1:] or KINDS:
        print(json.dumps(measure(one)), flush=True)
