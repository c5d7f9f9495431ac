"""Writes golden/embeddings.safetensors: the vectors and scores of embedding_cases.py by sentence-transformers and
Transformers. Run by `make golden`."""

import json
import tempfile
from pathlib import Path

import sentence_transformers
import torch
import transformers
from safetensors.numpy import save_file

from tests.oracle import embedding_reference
from tests.oracle.embedding_cases import CASES, FILE, INSTRUCTION, SCORED, TEXTS, write


def main() -> None:
    torch.set_num_threads(1)
    tensors = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            path = write(Path(folder) / name, case)
            if case.pooling is None:
                tensors[name] = embedding_reference.scores(path, *SCORED, INSTRUCTION)
                continue
            tensors[name] = embedding_reference.embed(path, TEXTS)
            for prompt in case.prompts:
                tensors[f"{name}.{prompt}"] = embedding_reference.embed(path, TEXTS, prompt_name=prompt)
    versions = {one.__name__: one.__version__ for one in (torch, transformers, sentence_transformers)}
    save_file(tensors, FILE, {"made": json.dumps(versions)})
    print(f"{FILE.name}: {len(tensors)} tensors, {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
