"""The tokenizer of a GGUF file, converted once and kept between processes.

The key is a digest of the file's metadata, not of the file, and of the sources that convert it. Small tokenizers are
converted each time.
"""

import json
from pathlib import Path

from checkpoints_convert.gguf.index import GGUFIndex
from checkpoints_convert.gguf.tokenizer import convert_tokenizer
from jaxinfer.kept_files import KeptFiles, key_of, sources_key

LEAST_BYTES = 2**18  # of a tokenizer that is kept: smaller ones are converted in 30 ms
_FOLDER = Path(__file__).parent


def tokenizer_files(index: GGUFIndex) -> dict[str, str]:
    """As `convert_tokenizer`, whose result is kept."""
    kept = KeptFiles.of("tokenizers")
    if kept is None:
        return convert_tokenizer(index)
    key = key_of("tokenizer of GGUF", index.metadata_digest, sources_key(_FOLDER))
    if (content := kept.read(key)) is not None:
        return _unpacked(content)
    files = convert_tokenizer(index)
    if sum(map(len, files.values())) >= LEAST_BYTES:
        kept.write(key, _packed(files))
    return files


def _packed(files: dict[str, str]) -> bytes:
    """A line with the name and the bytes of each text; then the texts."""
    contents = {name: text.encode() for name, text in files.items()}
    sizes = json.dumps({name: len(content) for name, content in contents.items()})
    return b"".join((sizes.encode(), b"\n", *contents.values()))


def _unpacked(content: bytes) -> dict[str, str]:
    begin = content.index(b"\n") + 1
    files = {}
    for name, size in json.loads(content[:begin]).items():
        files[name] = str(memoryview(content)[begin : begin + size], "utf-8")
        begin += size
    return files
