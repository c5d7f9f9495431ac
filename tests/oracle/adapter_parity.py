"""Our side of a comparison with PEFT: log-probabilities of texts under adapters."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from tests.oracle.adapter_cases import Kind

SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
_NOT_YET = ("no room for adapters of", "not served", "merge it with jaxinfer convert")


def open_llm(base: Any, adapters: Mapping[str, Path], **options: Any) -> LLM:
    """An engine for a base in float32 with adapters."""
    return LLM(base, dtype="float32", adapters=dict(adapters), max_seqs=8, max_model_len=64, **options)


@contextmanager
def expected_refusals() -> Iterator[None]:
    """Marks a test as expected to fail by adapters that cannot be served yet."""
    try:
        yield
    except ValueError as error:
        if any(text in str(error) for text in _NOT_YET):
            pytest.xfail(str(error))
        raise


def together(llm: LLM, kind: Kind, **options: Any) -> np.ndarray:
    """float64 [rows, tokens - 1] of a kind's texts in one batch, each with the adapter of its row."""
    options = {"adapter": kind.rows, **options}
    outputs = llm.generate(kind.tokens.tolist(), SCORED, use_tqdm=False, **options)
    # Of each position there is one entry, that of its token.
    return np.array(
        [[entry.logprob for one in output.prompt_logprobs[1:] for entry in one.values()] for output in outputs]
    )


def alone(llm: LLM, kind: Kind) -> np.ndarray:
    """As `together`, of one text after the other."""
    texts = zip(kind.tokens.tolist(), kind.rows, strict=True)
    return np.array([llm.score([text], adapter=adapter, use_tqdm=False)[0].raw for text, adapter in texts])


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference; NaN counts as infinity."""
    assert found.shape == expected.shape
    differences = np.abs(found - expected.astype(np.float64))
    return float(np.where(np.isnan(differences), np.inf, differences).max())
