"""The other side of benchmarks/embedding.py, a process of its own: Transformers and sentence-transformers on the CPU.

Reads one line of JSON from standard input, writes one to standard output. Needs torch and sentence-transformers.
"""

import json
import sys
import time

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

BATCH = 32


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    torch.set_num_threads(asked["num_threads"])
    tokenizer = AutoTokenizer.from_pretrained(asked["folder"], padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModel.from_pretrained(asked["folder"], dtype=torch.float32).eval()
    encoder = SentenceTransformer(asked["folder"], device="cpu", model_kwargs={"dtype": torch.float32})
    encoder.tokenizer.pad_token = tokenizer.pad_token

    @torch.inference_mode()
    def transformers(texts: list[str]) -> np.ndarray:
        """As the model card of Qwen3-Embedding: batches in the texts' order, padded on the left."""
        found = []
        for start in range(0, len(texts), BATCH):
            batch = tokenizer(texts[start : start + BATCH], padding=True, return_tensors="pt")
            batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
            states = model(**batch, use_cache=False).last_hidden_state[:, -1]
            found.append(torch.nn.functional.normalize(states, dim=1))
        return torch.cat(found).numpy()

    def sentence_transformers(texts: list[str]) -> np.ndarray:
        """Sorts texts by their length, so that little is padded."""
        return encoder.encode(texts, batch_size=BATCH, show_progress_bar=False, normalize_embeddings=True)

    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, texts = json.loads(line)
        start = time.perf_counter()
        vectors = {"transformers": transformers, "sentence-transformers": sentence_transformers}[name](texts)
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "vectors": np.round(vectors, 6).tolist()}), flush=True)


if __name__ == "__main__":
    main()
