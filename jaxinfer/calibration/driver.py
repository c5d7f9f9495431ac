"""A model quantized layer by layer: at most one layer's float weights, and the hidden states of the text, are held."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.calibration.capture import LayerProgram
from jaxinfer.calibration.journal import Journal
from jaxinfer.calibration.layer import LinearError, dequantized, linear_names, quantize_layer
from jaxinfer.calibration.options import CalibrationOptions
from jaxinfer.calibration.quality import Quality, compare
from jaxinfer.models import ModelConfig, Params

CHUNK_TOKENS = 4096  # of hidden states on the device at once
ReadUnit = Callable[[str], Params]


@dataclass(frozen=True)
class FloatModel:
    """A model to quantize, of which one part is read at a time.

    Attributes:
      read: gives the parameters of a unit, "layers.3" or any other name in `rest`, as a nested dict below its name.
      rest: names of the parameters that belong to no layer: embed, final_norm, lm_head.
      fingerprint: changes when the weights do.
    """

    config: ModelConfig
    read: ReadUnit
    rest: tuple[str, ...]
    fingerprint: str = ""

    @classmethod
    def of(cls, config: ModelConfig, params: Params) -> "FloatModel":
        """Of parameters in memory."""

        def read(name: str) -> Params:
            return params["layers"][name.removeprefix("layers.")] if name.startswith("layers.") else params[name]

        return cls(config, read, tuple(name for name in params if name != "layers"))

    def layer(self, number: int) -> Params:
        """float32 parameters of a layer."""
        return jax.tree.map(_float32, self.read(f"layers.{number}"))

    def without_layers(self) -> Params:
        """float32 parameters of everything else."""
        return {name: jax.tree.map(_float32, self.read(name)) for name in self.rest}


@dataclass(frozen=True)
class LayerReport:
    """A finished decoder layer.

    Attributes:
      errors: of its linear layers, by name.
      divergence: squared difference of the held-out hidden states after the layer from the float model's, over their
        squares; what all layers so far add up to. None without a held-out text.
      is_resumed: whether an earlier run had finished it.
    """

    number: int
    errors: dict[str, LinearError]
    divergence: float | None
    is_resumed: bool = False


@dataclass(frozen=True)
class CalibrationResult:
    """Attributes:
    params: the quantized model's, what is not quantized in float32 but rounded to what the model is stored in.
    hidden: its hidden states of the held-out text after the last layer, [rows, T, D], None without one.
    """

    params: Params
    layers: list[LayerReport]
    quality: Quality | None
    hidden: np.ndarray | None


def quantize_model(
    model: FloatModel,
    options: CalibrationOptions,
    tokens: np.ndarray | None = None,
    held_out: np.ndarray | None = None,
    *,
    work_dir: Path | None = None,
    report: Callable[[LayerReport], None] = lambda done: None,
) -> CalibrationResult:
    """Quantizes the linear layers of a model, the first decoder layer first.

    GPTQ sees the hidden states that the quantized layers before it make, AWQ and SmoothQuant those of the float model,
    as their authors do.

    Args:
      tokens: int32 [rows, T], what to calibrate on; may be None for round-to-nearest.
      held_out: int32 [rows, T], what to judge the result by.
      work_dir: keeps finished layers, so that a run that was killed goes on; removed by whoever asked for it.
      report: called after each decoder layer.

    Raises:
      ValueError: no tokens for a method that needs them, or out of the vocabulary; options that fit no layer.
    """
    config = model.config
    _check_tokens(config, options, tokens, held_out)
    programs = [LayerProgram.of(config, number) for number in range(config.num_layers)]
    names = [f"layers.{i}.{name}" for i, program in enumerate(programs) for name in linear_names(program)]
    options.check_keep(names)
    rest = model.without_layers()
    stored_rest = jax.tree.map(lambda leaf: leaf.astype(options.dtype).astype(jnp.float32), rest)
    streams = _Streams.begin(rest, stored_rest, options, tokens, held_out)
    params: Params = {**stored_rest, "layers": {}}
    reports: list[LayerReport] = []
    fingerprint = {
        "model": model.fingerprint,
        "config": config.to_dict(),
        "options": options.to_dict(),
        "tokens": _digest(tokens),
    }
    with Journal(work_dir, fingerprint) if work_dir is not None else nullcontext() as journal:
        for number, program in enumerate(programs):
            original = model.layer(number)
            is_resumed = journal is not None and number in journal
            if journal is not None and is_resumed:
                done, errors = journal.read(number)
                errors = {name: LinearError(**error) for name, error in errors.items()}
            else:
                done, errors = quantize_layer(program, number, original, streams.calibration, options)
                if journal is not None:
                    journal.write(number, done, {name: asdict(error) for name, error in errors.items()})
            is_last = number == config.num_layers - 1
            # Weights alone need no program of their own; activations that are rounded too do.
            runnable = done if options.method == "smoothquant" else dequantized(done)
            streams.advance(program, original, runnable, options, is_last=is_last)
            params["layers"][str(number)] = done
            reports.append(LayerReport(number, errors, streams.divergence(), is_resumed))
            report(reports[-1])
    quality = hidden = None
    if held_out is not None:
        chunks = zip(streams.float_held_out, streams.held_out, in_chunks(held_out), strict=True)
        quality = compare(config, rest, stored_rest, chunks)
        hidden = np.concatenate(streams.held_out)
    return CalibrationResult(params, reports, quality, hidden)


@dataclass
class _Streams:
    """Hidden states on their way through the layers, in the host's memory, in chunks that the device takes.

    calibration: what the next layer is calibrated on. held_out: of the quantized model; float_held_out: of the other.
    """

    calibration: list[np.ndarray]
    held_out: list[np.ndarray]
    float_held_out: list[np.ndarray]

    @classmethod
    def begin(cls, rest, stored_rest, options, tokens, held_out) -> "_Streams":
        def embedded(params: Params, tokens: np.ndarray | None) -> list[np.ndarray]:
            if tokens is None:
                return []
            table = np.asarray(params["embed"])
            return [table[chunk] for chunk in in_chunks(tokens)]

        return cls(
            embedded(stored_rest if options.method == "gptq" else rest, tokens),
            embedded(stored_rest, held_out),
            embedded(rest, held_out),
        )

    def advance(
        self, program: LayerProgram, original: Params, quantized: Params, options: CalibrationOptions, *, is_last: bool
    ) -> None:
        run = partial(_run, program)
        if not is_last:
            self.calibration = run(quantized if options.method == "gptq" else original, self.calibration)
        self.held_out = run(quantized, self.held_out)
        self.float_held_out = run(original, self.float_held_out)

    def divergence(self) -> float | None:
        if not self.held_out:
            return None
        pairs = list(zip(self.held_out, self.float_held_out, strict=True))
        difference = sum(float(np.sum(np.square(a - b), dtype=np.float64)) for a, b in pairs)
        return difference / sum(float(np.sum(np.square(b), dtype=np.float64)) for _, b in pairs)


def in_chunks(rows: np.ndarray) -> list[np.ndarray]:
    """Rows [rows, T] in pieces of about `CHUNK_TOKENS` tokens."""
    count = max(CHUNK_TOKENS // rows.shape[1], 1)
    return [rows[first : first + count] for first in range(0, len(rows), count)]


def _run(program: LayerProgram, params: Params, chunks: list[np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(program.forward(params, chunk)) for chunk in chunks]


def _check_tokens(
    config: ModelConfig, options: CalibrationOptions, tokens: np.ndarray | None, held_out: np.ndarray | None
) -> None:
    if options.needs_activations and tokens is None:
        raise ValueError(f"{options.method} needs a text to calibrate on")
    for name, given in (("tokens", tokens), ("held_out", held_out)):
        if given is None:
            continue
        if given.ndim != 2 or not given.size or not np.issubdtype(given.dtype, np.integer):
            raise ValueError(f"{name} must be integers [rows, T], got {given.dtype} {given.shape}")
        if given.min() < 0 or given.max() >= config.vocab_size:
            raise ValueError(
                f"{name} lie in [{given.min()}, {given.max()}], the vocabulary in [0, {config.vocab_size})"
            )


def _digest(tokens: np.ndarray | None) -> str | None:
    import hashlib

    if tokens is None:
        return None
    return hashlib.sha256(repr(tokens.shape).encode() + np.ascontiguousarray(tokens, np.int32).tobytes()).hexdigest()


def _float32(leaf: Any) -> jax.Array:
    return jnp.asarray(leaf).astype(jnp.float32)
