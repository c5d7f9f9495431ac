"""Vectors and scores of tiny models of each kind, through their files, against sentence-transformers' golden ones."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxinfer import LLM
from tests.oracle.embedding_cases import CASES, FILE, SCORED, TEXTS, write

BOUND = 1e-5  # cosine distance
QUICK = ("qwen2_cls",)
OPTIONS = {"max_seqs": 4, "prefill_chunk": 28, "max_model_len": 512, "deterministic": True}


def distance(one, other):
    """The largest cosine distance of two vectors."""
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return float(np.max(1 - np.sum(one.astype(np.float64) * other, axis=1) / lengths))


def quick(names):
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", quick(name for name, case in CASES.items() if case.pooling is not None))
def test_vectors(name, tmp_path):
    case, golden = CASES[name], load_file(FILE)
    with LLM(write(tmp_path, case), **OPTIONS) as llm:
        for prompt in (None, *case.prompts):
            wanted = golden[name if prompt is None else f"{name}.{prompt}"]
            found = llm.embed(TEXTS, prompt_name=prompt, truncate=case.max_length is not None)
            assert distance(found, wanted) <= BOUND
            assert np.abs(found - wanted).max() <= 1e-5
            alone = np.concatenate([llm.embed(text, prompt_name=prompt, truncate=True) for text in TEXTS])
            assert distance(alone, wanted) <= BOUND
        if case.max_length is not None:
            with pytest.raises(ValueError, match=r"text 3 has 43 tokens, but the checkpoint's max_seq_length is 24;"):
                llm.embed([*TEXTS[1:3], "x", TEXTS[3]])
        if case.architecture.endswith("Model"):
            with pytest.raises(ValueError, match="has no head: it makes vectors of texts"):
                llm.generate("x")
        prompted = llm.embed(TEXTS[0], prompt=case.prompts.get("query", ""))
        assert distance(prompted, llm.embed(TEXTS[0], prompt_name="query")) <= BOUND


@pytest.mark.slow
def test_scores(tmp_path):
    wanted = load_file(FILE)["qwen3_reranker"]
    with LLM(write(tmp_path, CASES["qwen3_reranker"]), **OPTIONS) as llm:
        found = llm.relevance(*SCORED)
        assert np.abs(found - wanted).max() <= 1e-5
        counters = llm.engine.scheduler.counters
        before = counters.reused_tokens
        ranked = llm.rerank(*SCORED, top_n=2)
        assert [index for index, _ in ranked] == np.argsort(-wanted)[:2].tolist()
        assert counters.reused_tokens - before >= 200 * len(SCORED[1])  # system, instruction and query
        with pytest.raises(ValueError, match=r"document 1 has \d+ tokens with its query"):
            llm.relevance(SCORED[0], ["short", "long " * 100])
        cut = llm.relevance(SCORED[0], ["short", "long " * 100], truncate=True)
        assert cut.shape == (2,)
        assert np.all((cut > 0) & (cut < 1))
