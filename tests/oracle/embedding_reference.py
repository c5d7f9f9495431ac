"""Vectors of sentence-transformers and Transformers for the cases of embedding_cases.py. Needs torch."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer

_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)


def embed(folder: Path, texts: Sequence[str], **options: object) -> np.ndarray:
    """float32 [texts, D] by sentence-transformers, on the CPU."""
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    return model.encode(list(texts), convert_to_numpy=True, show_progress_bar=False, **options)


def scores(folder: Path, query: str, documents: Sequence[str], instruction: str) -> np.ndarray:
    """float32 [documents], each pair by itself, as the model card of Qwen3-Reranker computes them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    begin = tokenizer.encode(f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n", add_special_tokens=False)
    end = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", add_special_tokens=False)
    labels = [tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes")]
    found = []
    for document in documents:
        pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        ids = begin + tokenizer.encode(pair, add_special_tokens=False) + end
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1, labels]
        found.append(torch.nn.functional.log_softmax(logits, dim=0)[1].exp().item())
    return np.array(found, np.float32)
