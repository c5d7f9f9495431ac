"""The products of ggml that ours are compared with: the same weights, and results that equal the formula."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cpu_products import merged, to_markdown
from benchmarks.peers.ggml_products import Ggml, to_quantized

ROUNDING = {"F32": 1e-6, "F16": 1e-3, "BF16": 1e-2, "Q4_1": 1e-2, "Q8_0": 1e-2}  # of activations, over the largest


@pytest.fixture(scope="module")
def ggml() -> Ggml:
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        pytest.skip("llama-cpp-python is not installed")
    return Ggml(Path(spec.origin).parent / "lib")


@pytest.mark.parametrize("kind", ROUNDING)
def test_ggml_multiplies_the_weight_that_we_read(ggml, kind):
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((96, 40), np.float32), rng.standard_normal((3, 96), np.float32)
    stored = ggml.quantize(weight, kind)
    product = ggml.product(stored, kind, x, 2)
    product()
    own = np.asarray(to_quantized(stored, kind, 96).dequantize()) if kind.startswith("Q") else weight
    assert np.abs(own - weight).max() < (0.25 if kind == "Q4_1" else 0.02)
    expected = x @ own
    np.testing.assert_allclose(product.result(), expected, atol=ROUNDING[kind] * np.abs(expected).max())
    product.free()


def test_a_folder_without_libraries_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no libggml-cpu\.so"):
        Ggml(tmp_path)


def test_the_fastest_of_the_rounds_is_shown():
    key = {"shape": (576, 1536), "form": "Q8_0", "rows": 4}
    rounds = [[{**key, "ours": 50.0}, {**key, "llama.cpp": 70.0}], [{**key, "ours": 60.0}, {**key, "llama.cpp": 65.0}]]
    table = to_markdown(merged(rounds)).splitlines()
    assert table[0] == "| inputs x outputs | weight | rows | ours | llama.cpp |"
    assert table[2:] == ["| 576 x 1,536 | Q8_0 | 4 | 60 | 70 |"]
