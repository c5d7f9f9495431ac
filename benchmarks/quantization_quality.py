"""What few bits cost: KL, perplexity and top-1 agreement of the embedded model by each method, on held-out text.

    python -m benchmarks.quantization_quality [--methods NAME,NAME] [--json PATH]

Calibrated on files of the standard library that the model was trained on, measured on those it never saw. KL is
KL(float32 || quantized) of the next token in nats; bytes are those of the linear layers' weights with their scales,
also as a share of bfloat16.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import checkpoints_convert
from jaxinfer.calibration import CalibrationOptions, FloatModel, quantize_model, quantize_within
from jaxinfer.calibration.inputs import split_rows
from jaxinfer.data import embedded_path
from jaxinfer.models import ModelConfig, Params
from jaxinfer.quantization import RECIPES, QuantizedArray, quantize_params
from jaxinfer.text import Tokenizer
from jaxinfer.training.corpus import standard_library
from jaxinfer.training.objectives import sequence_logits

NUM_CALIBRATION, NUM_HELD_OUT, LENGTH = 64, 128, 256
BATCH = 8
RECIPE_NAMES = ("int8", "w8a8", "fp8", "w8a8-fp8", "nf4", "nf4-dq", "mxfp4")
CALIBRATED = {
    "smoothquant w8a8": CalibrationOptions("smoothquant", 8),
    **{
        f"{method} int{bits}-g128{'' if symmetric else '-asym'}": CalibrationOptions(method, bits, symmetric=symmetric)
        for bits, symmetric in ((4, True), (4, False), (3, True))
        for method in ("rtn", "awq", "gptq")
    },
}
AUTO = {"auto KL 0.005": 0.005}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", help=f"default: all of {', '.join([*RECIPE_NAMES, *CALIBRATED, *AUTO])}")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = arguments.methods.split(",") if arguments.methods else [*RECIPE_NAMES, *CALIBRATED, *AUTO]
    for name in names:
        if name not in (*RECIPES, *CALIBRATED, *AUTO):
            parser.error(f"no method is called {name!r}")
    config, params = checkpoints_convert.load(_demo(), dtype="float32")
    tokens, held_out = texts()
    measure = Measure(config, params, held_out)
    print(f"demo, {held_out.size:,} held-out tokens, calibrated on {tokens.size:,}; {jax.devices()[0].device_kind}")
    print(f"{'method':<22}{'bits':>6}{'bytes':>11}{'of bf16':>9}{'KL':>9}{'perplexity':>12}{'top-1':>8}")
    rows = [{"method": "float32", **measure(params)}]
    show(rows[0])
    for name in names:
        start = time.monotonic()
        rows.append({"method": name, **measure(quantized(config, params, name, tokens, held_out))})
        rows[-1]["seconds"] = round(time.monotonic() - start, 1)
        show(rows[-1])
    if arguments.json:
        report = {"num_tokens": held_out.size, "num_calibration_tokens": tokens.size, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def texts() -> tuple[np.ndarray, np.ndarray]:
    """int32 [rows, LENGTH] to calibrate on, and held out."""
    corpus, tokenizer = standard_library(), Tokenizer.from_dir(_demo())

    def rows(texts: tuple[str, ...], count: int) -> np.ndarray:
        encoded = [tokenizer.encode_content(text) for text in texts]
        found = split_rows(encoded, tokenizer.eos_token_id, num_rows=count, length=LENGTH, seed=0)
        return np.concatenate([found.calibration, found.held_out])

    return rows(corpus.train[::7], NUM_CALIBRATION), rows(corpus.held_out, NUM_HELD_OUT)


def quantized(config: ModelConfig, params: Params, name: str, tokens: np.ndarray, held_out: np.ndarray) -> Params:
    """The parameters as a method makes them."""
    if name in RECIPES:
        return quantize_params(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), name)
    model = FloatModel.of(config, params)
    if name in AUTO:
        # The budget is met on other text than the table's.
        result = quantize_within(model, CalibrationOptions(), AUTO[name], tokens[8:], tokens[:8]).result
    else:
        result = quantize_model(model, CALIBRATED[name], tokens if CALIBRATED[name].needs_activations else None)
    return result.params


class Measure:
    """Compares parameters with those in floats, on the same text."""

    def __init__(self, config: ModelConfig, params: Params, held_out: np.ndarray):
        self._held_out = held_out
        self._logits: Callable[..., jax.Array] = jax.jit(lambda params, tokens: sequence_logits(config, params, tokens))
        self._exact = [np.asarray(jax.nn.log_softmax(self._logits(params, tokens))) for tokens in self._batches()]

    def __call__(self, params: Params) -> dict[str, Any]:
        # Activations as in float32 checkpoints, whatever the scales and norms are stored in.
        floats = jax.tree.map(
            lambda leaf: leaf if isinstance(leaf, QuantizedArray) else leaf.astype(jnp.float32),
            params,
            is_leaf=lambda leaf: isinstance(leaf, QuantizedArray),
        )
        kl = nll = agreeing = 0.0
        for tokens, exact in zip(self._batches(), self._exact, strict=True):
            found = np.asarray(jax.nn.log_softmax(self._logits(floats, tokens)))
            kl += float(np.sum(np.exp(exact) * (exact - found), dtype=np.float64))
            nll -= float(np.take_along_axis(found[:, :-1], tokens[:, 1:, None], -1).sum(dtype=np.float64))
            agreeing += float((found.argmax(-1) == exact.argmax(-1)).sum())
        size, targets = self._held_out.size, self._held_out[:, 1:].size
        num_bytes, num_weights = size_of_linears(params)
        return {
            "bits_per_weight": 8 * num_bytes / num_weights,
            "num_bytes": num_bytes,
            "of_bf16": num_bytes / (2 * num_weights),
            "kl": kl / size,
            "perplexity": float(np.exp(nll / targets)),
            "top1_agreement": agreeing / size,
        }

    def _batches(self) -> list[np.ndarray]:
        return [self._held_out[first : first + BATCH] for first in range(0, len(self._held_out), BATCH)]


def size_of_linears(params: Params) -> tuple[int, int]:
    """Bytes of the linear layers' weights with what belongs to them, as a device packs them, and how many weights."""
    num_bytes = num_weights = 0
    is_quantized = lambda leaf: isinstance(leaf, QuantizedArray)  # noqa: E731
    for leaf in jax.tree.leaves(params["layers"], is_leaf=is_quantized):
        if leaf.ndim >= 2:
            num_weights += int(np.prod(leaf.shape))
            num_bytes += leaf.num_bytes if is_quantized(leaf) else leaf.nbytes
    return num_bytes, num_weights


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['method']:<22}{row['bits_per_weight']:>6.2f}{row['num_bytes']:>11,}{row['of_bf16']:>9.1%}{row['kl']:>9.5f}"
        f"{row['perplexity']:>12.3f}{row['top1_agreement']:>8.2%}"
    )
    sys.stdout.flush()


def _demo() -> Path:
    path = embedded_path("demo")
    if path is None:
        raise FileNotFoundError("the embedded model is missing")
    return path


if __name__ == "__main__":
    main()
