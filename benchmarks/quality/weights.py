"""The cost of few bits: KL, perplexity and top-1 agreement by each method of quantization, on held-out text.

KL is KL(float32 || quantized) of the next token in nats; bytes are those of the linear layers' weights with their
scales, also as a share of bfloat16. Published models come quantized: what is compared are the floats that their files
stand for, so a method whose grid is that of the file would have an unfair advantage (none here has).
"""

import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import checkpoints_convert
from jaxinfer.calibration import CalibrationOptions, FloatModel, quantize_model, quantize_within
from jaxinfer.calibration.inputs import split_rows
from jaxinfer.data import embedded_path
from jaxinfer.loaded_tokenizers import tokenizer_of
from jaxinfer.models import ModelConfig, Params
from jaxinfer.quantization import RECIPES, QuantizedArray, quantize_params
from jaxinfer.quantization.tree import num_parameters
from jaxinfer.text import Tokenizer
from jaxinfer.training.objectives import sequence_logits

NUM_CALIBRATION, NUM_HELD_OUT, LENGTH = 64, 128, 256
BATCH = 8
RECIPE_NAMES = ("int8", "w8a8", "fp8", "w8a8-fp8", "nf4", "nf4-dq", "mxfp4")
CALIBRATED = {
    "smoothquant w8a8": CalibrationOptions("smoothquant", 8),
    **{
        f"{method} int{bits}{'' if symmetric else '-asym'}": CalibrationOptions(method, bits, symmetric=symmetric)
        for bits, symmetric in ((4, True), (4, False), (3, True))
        for method in ("rtn", "awq", "gptq")
    },
}
AUTO = {"auto KL 0.005": 0.005}


def measure_weights(
    path: str, calibration: Sequence[str], measured: Sequence[str], done: Container[str] = ()
) -> Iterator[dict[str, Any]]:
    """Rows of float32 and of each method that is not `done`, as they are measured; a method that the shapes refuse has
    a reason."""
    folder = embedded_path(path) or Path(path)
    config, params = checkpoints_convert.load(folder, dtype="float32", requantize=None if folder.is_dir() else "dense")
    if (tokenizer := tokenizer_of(folder)) is None:
        raise ValueError(f"{path} has no tokenizer")
    tokens, held_out = (
        token_rows(tokenizer, texts, count)
        for texts, count in ((calibration, num_calibration(params)), (measured, num_held_out(config)))
    )
    measure = Measure(config, params, held_out)
    if "float32" not in done:
        sizes = {"num_tokens": held_out.size, "num_calibration_tokens": tokens.size}
        yield {"method": "float32", **sizes, **measure(params)}
    for name in (*RECIPE_NAMES, *CALIBRATED, *AUTO):
        if name in done:
            continue
        start = time.monotonic()
        try:
            row = {"method": name, **measure(quantized(config, params, name, tokens, held_out))}
        except ValueError as error:
            row = {"method": name, "reason": str(error)}
        yield {**row, "seconds": round(time.monotonic() - start, 1)}


def num_calibration(params: Params) -> int:
    """Rows to calibrate on: fewer for a larger model, of which each method passes over them several times."""
    return max(BATCH, min(NUM_CALIBRATION, 2**31 // num_parameters(params)) // BATCH * BATCH)


def num_held_out(config: ModelConfig) -> int:
    """Rows whose float32 log-probabilities take at most 1 GiB."""
    return min(NUM_HELD_OUT, 2**30 // (4 * LENGTH * config.vocab_size) // BATCH * BATCH)


def token_rows(tokenizer: Tokenizer, texts: Sequence[str], count: int) -> np.ndarray:
    """int32 [count, LENGTH]."""
    encoded = [tokenizer.encode_content(text) for text in texts]
    rows = split_rows(encoded, tokenizer.eos_token_id, num_rows=count, length=LENGTH, seed=0)
    return np.concatenate([rows.calibration, rows.held_out])


def quantized(config: ModelConfig, params: Params, name: str, tokens: np.ndarray, held_out: np.ndarray) -> Params:
    """The parameters as a method makes them."""
    if name in RECIPES:
        return quantize_params(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), name)
    model = FloatModel.of(config, params)
    if name in AUTO:
        # The budget is met on other text than the table's.
        result = quantize_within(model, CalibrationOptions(), AUTO[name], tokens[8:], tokens[:8]).result
    else:
        options = CALIBRATED[name]
        if options.bits != 8 and config.hidden_size % 128:
            options = replace(options, group_size=64)
        result = quantize_model(model, options, tokens if options.needs_activations else None)
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
            logprobs = np.asarray(jax.nn.log_softmax(self._logits(floats, tokens)))
            kl += float(np.sum(np.exp(exact) * (exact - logprobs), dtype=np.float64))
            nll -= float(np.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None], -1).sum(dtype=np.float64))
            agreeing += float((logprobs.argmax(-1) == exact.argmax(-1)).sum())
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
