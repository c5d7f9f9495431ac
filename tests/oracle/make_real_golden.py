"""Writes tests/oracle/golden/real_models.json: llama.cpp's token ids of 60 texts and its losses, for two models.

Needs llama-cpp-python and the models of `make models`. llama.cpp rounds activations to 8 bits, in a way that depends on
the CPU: the third digit of a loss may differ on another machine.
"""

import ctypes
import json
import re
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.real.models import MODELS
from jaxinfer.store import find_path
from tests.real.texts import HELD_OUT, LICENSE, LONG, LONG_START, TEXTS

PATH = Path(__file__).parent / "golden" / "real_models.json"


@llama_cpp.llama_log_callback
def _log(level, text, data):
    pass


def opened(path: Path, *, vocab_only: bool) -> tuple[Any, Any]:
    """The model and its vocabulary."""
    settings = llama_cpp.llama_model_default_params()
    settings.vocab_only = vocab_only
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
    if not model:
        raise SystemExit(f"llama.cpp cannot open {path.name}")
    return model, llama_cpp.llama_model_get_vocab(model)


def tokenized(vocab: Any, text: str) -> list[int]:
    """With what the file adds (BOS), and with control tokens written in the text recognised."""
    data = text.encode()
    room = len(data) + 8
    ids = (llama_cpp.llama_token * room)()
    count = llama_cpp.llama_tokenize(vocab, data, len(data), ids, room, True, True)
    if count < 0:
        raise SystemExit(f"{text!r:.60} has {-count} tokens, more than {room}")
    return ids[:count]


def loss(model: Any, vocab: Any, ids: list[int], start: int) -> float:
    """Mean nats of the tokens from `start` on, after those before."""
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = len(ids)
    context = llama_cpp.llama_init_from_model(model, options)
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for row, token in enumerate(ids):
        batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = token, row, 1, True
        batch.seq_id[row][0] = 0
    if llama_cpp.llama_decode(context, batch) != 0:
        raise SystemExit("llama_decode failed")
    size = llama_cpp.llama_vocab_n_tokens(vocab)
    total = 0.0
    for row in range(start - 1, len(ids) - 1):
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, row), (size,)).astype(np.float64)
        total += np.logaddexp.reduce(logits) - logits[ids[row + 1]]
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    return round(total / (len(ids) - start), 4)


def golden_of(path: Path) -> dict[str, Any]:
    model, vocab = opened(path, vocab_only=False)
    short, long = tokenized(vocab, HELD_OUT), tokenized(vocab, LICENSE.read_text(encoding="utf-8"))[:LONG]
    found = {
        "loss": loss(model, vocab, short, 1),
        "long_loss": loss(model, vocab, long, LONG_START),
        "ids": [tokenized(vocab, text) for text in TEXTS],
    }
    llama_cpp.llama_model_free(model)
    return found


def main() -> None:
    llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    golden = {name: {"sha256": model.sha256, **golden_of(find_path(name))} for name, model in MODELS.items()}
    text = json.dumps(golden, indent=1)
    text = re.sub(r"\[[\d,\s]*\]", lambda match: re.sub(r"\s+", "", match[0]), text)  # a line for each text
    PATH.write_text(f"{text}\n", encoding="utf-8")
    losses = ", ".join(f"{name} {one['loss']} and {one['long_loss']} nats" for name, one in golden.items())
    print(f"{len(TEXTS)} texts, {losses}, {PATH.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
