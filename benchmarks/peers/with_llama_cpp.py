"""llama.cpp as a peer, through llama-cpp-python's binding of its C interface.

All requests of a call run at once in sequences of their own: a batch holds the newest token of each that decodes and,
up to its size, what is left of the prompts, as llama.cpp's own server does.
"""

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np

from benchmarks.peers.workload import CACHE_TOKENS, MAX_SEQS

BATCH_TOKENS = 2048  # llama.cpp's own default; it computes them 512 at a time


class LlamaCpp:
    compiles_shapes = False

    def __init__(self, folder: Path, num_threads: int):
        llama_cpp.llama_log_set(_QUIET, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        file = folder if folder.suffix == ".gguf" else folder / "model-f32.gguf"
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), settings)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot open {file.name}")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = CACHE_TOKENS
        options.n_batch = BATCH_TOKENS
        options.n_seq_max = MAX_SEQS
        options.n_threads = options.n_threads_batch = num_threads
        options.kv_unified = True  # one pool of cells, so that a single request may be longer than its share
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        if len(prompts) > MAX_SEQS:
            raise ValueError(f"{len(prompts)} requests, and {MAX_SEQS} sequences")
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_clear(memory, True)
        answers: list[list[int]] = [[] for _ in prompts]
        stored = [0] * len(prompts)  # tokens of each in the cache
        running = set(range(len(prompts)))
        while running:
            rows = self._fill(prompts, answers, stored, running)
            if llama_cpp.llama_decode(self._context, self._batch) != 0:
                raise RuntimeError("llama_decode failed")
            for sequence, row in rows.items():
                answers[sequence].append(self._best(row))
                if len(answers[sequence]) == lengths[sequence]:
                    running.discard(sequence)
                    llama_cpp.llama_memory_seq_rm(memory, sequence, -1, -1)
        return answers

    def _fill(
        self, prompts: list[list[int]], answers: list[list[int]], stored: list[int], running: set[int]
    ) -> dict[int, int]:
        """Puts the next tokens in the batch; returns which row's logits are which sequence's next token."""
        self._batch.n_tokens = 0
        rows: dict[int, int] = {}
        for sequence in sorted(running, key=lambda one: not answers[one]):  # those that decode come first
            prompt = prompts[sequence]
            if answers[sequence]:
                self._add(answers[sequence][-1], stored[sequence], sequence, True)
                stored[sequence] += 1
                rows[sequence] = self._batch.n_tokens - 1
                continue
            room = BATCH_TOKENS - self._batch.n_tokens
            for token in prompt[stored[sequence] : stored[sequence] + room]:
                is_last = stored[sequence] == len(prompt) - 1
                self._add(token, stored[sequence], sequence, is_last)
                stored[sequence] += 1
                if is_last:
                    rows[sequence] = self._batch.n_tokens - 1
        return rows

    def _add(self, token: int, position: int, sequence: int, is_read: bool) -> None:
        row, batch = self._batch.n_tokens, self._batch
        batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position, 1
        batch.seq_id[row][0], batch.logits[row] = sequence, is_read
        batch.n_tokens += 1

    def _best(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


@llama_cpp.llama_log_callback
def _QUIET(level, text, data):
    pass
