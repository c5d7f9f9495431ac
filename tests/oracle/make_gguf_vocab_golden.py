"""Writes tests/oracle/golden/gguf_vocabularies.json: llama.cpp's token ids of small vocabularies in GGUF files.

Needs llama-cpp-python. The vocabularies are those of tests/checkpoints_convert/gguf/vocabularies.py.
"""

import ctypes
import json
import re
import tempfile
from pathlib import Path

import llama_cpp

from tests.checkpoints_convert.gguf.gguf_writer import write
from tests.checkpoints_convert.gguf.vocabularies import CASES, texts_of
from tests.oracle.make_real_golden import _log, opened, tokenized

PATH = Path(__file__).parent / "golden" / "gguf_vocabularies.json"


def ids_of(name: str) -> list[list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "vocab.gguf", CASES[name](), {})
        model, vocab = opened(path, vocab_only=True)
        ids = [tokenized(vocab, text) for text in texts_of(name)]
        llama_cpp.llama_model_free(model)
    return ids


def main() -> None:
    llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    text = json.dumps({name: ids_of(name) for name in CASES}, indent=1)
    text = re.sub(r"\[[\d,\s]*\]", lambda match: re.sub(r"\s+", "", match[0]), text)  # a line for each text
    PATH.write_text(f"{text}\n", encoding="utf-8")
    print(f"{len(CASES)} vocabularies, {PATH.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
