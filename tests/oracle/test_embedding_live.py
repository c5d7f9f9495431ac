"""Vectors of random texts against sentence-transformers in this process, and scores against Transformers."""

import numpy as np
import pytest

from jaxinfer import LLM
from jaxinfer.extras import install_hint
from tests.oracle.embedding_cases import CASES, INSTRUCTION, write
from tests.oracle.test_embedding_golden import BOUND, OPTIONS, distance

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def reference():
    try:
        from tests.oracle import embedding_reference
    except ImportError as error:
        pytest.fail(f"--oracle needs sentence-transformers ({error}): {install_hint('oracle')}", pytrace=False)
    return embedding_reference


def texts(count):
    random = np.random.default_rng(7)
    letters = list("abcdefghijklmnopqrstuvwxyz    ,.\näß漢")
    return ["".join(random.choice(letters, size)) for size in random.integers(0, 150, count)]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.pooling is not None])
def test_vectors(name, reference, tmp_path):
    case = CASES[name]
    folder = write(tmp_path, case)
    with LLM(folder, **OPTIONS) as llm:
        for prompt in (None, *case.prompts):
            keywords = {} if prompt is None else {"prompt_name": prompt}
            found = llm.embed(texts(40), truncate=True, **keywords)
            worst = distance(found, reference.embed(folder, texts(40), **keywords))
            print(f"{name} {prompt}: {worst:.1e}")
            assert worst <= BOUND


def test_scores(reference, tmp_path):
    folder = write(tmp_path, CASES["qwen3_reranker"])
    with LLM(folder, **OPTIONS) as llm:
        found = llm.relevance("what is it?", texts(20), truncate=True)
    wanted = reference.scores(folder, "what is it?", texts(20), INSTRUCTION)
    is_short = np.array([len(text.encode()) < 100 for text in texts(20)])
    assert is_short.sum() > 5
    worst = float(np.abs(found - wanted)[is_short].max())
    print(f"qwen3_reranker: {worst:.1e}")
    assert worst <= 1e-5
