"""Writes tests/oracle/golden/real_token_ids.json: what llama.cpp makes of 60 texts with the tokenizers of two models.

Needs llama-cpp-python and the models of `make models`. Run twice, it writes the same ids.
"""

import ctypes
import json
from pathlib import Path

import llama_cpp

from benchmarks.real.models import MODELS
from jaxinfer.store import find_path
from tests.real.texts import TEXTS

PATH = Path(__file__).parent / "golden" / "real_token_ids.json"


@llama_cpp.llama_log_callback
def _log(level, text, data):
    pass


def token_ids(path: Path) -> list[list[int]]:
    """Of each text: with what the file adds (BOS), and with control tokens written in the text recognised."""
    settings = llama_cpp.llama_model_default_params()
    settings.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
    if not model:
        raise SystemExit(f"llama.cpp cannot open {path.name}")
    vocab = llama_cpp.llama_model_get_vocab(model)
    found = []
    for text in TEXTS:
        data = text.encode()
        room = len(data) + 8
        ids = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(vocab, data, len(data), ids, room, True, True)
        if count < 0:
            raise SystemExit(f"{text!r:.60} has {-count} tokens, more than {room}")
        found.append(ids[:count])
    llama_cpp.llama_model_free(model)
    return found


def main() -> None:
    llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
    golden = {name: {"sha256": model.sha256, "ids": token_ids(find_path(name))} for name, model in MODELS.items()}
    lines = ",\n".join(
        f' "{name}": {{"sha256": "{one["sha256"]}", "ids": [\n  '
        + ",\n  ".join(json.dumps(ids, separators=(",", ":")) for ids in one["ids"])
        + "\n ]}"
        for name, one in golden.items()
    )
    PATH.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    print(f"{len(TEXTS)} texts, {len(golden)} models, {PATH.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
