"""Quantizing a model layer by layer: memory holds one layer's float weights and the hidden states of the text."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.calibration.capture import STACKS, KeptInputs, LayerProgram, experts_at_once
from jaxinfer.calibration.inputs import FloatModel, ReadUnit, in_chunks, rounded
from jaxinfer.calibration.journal import CalibrationJournal
from jaxinfer.calibration.layer_state import (
    CalibratedLayer,
    Chunks,
    LinearError,
    QuantizedLayer,
    dequantized,
    find,
    linear_names,
)
from jaxinfer.calibration.options import KEEP_AS_IS, CalibrationOptions
from jaxinfer.calibration.quality import Quality, compare
from jaxinfer.calibration.scaling import awq, smoothquant
from jaxinfer.calibration.stacks import gptq_stacks
from jaxinfer.models import ModelConfig, Params, abstract_params, keeps_float32
from jaxinfer.quantization import QuantizedArray, quantize
from jaxinfer.quantization.gptq import gptq
from jaxinfer.quantization.tree import is_quantized


@dataclass(frozen=True)
class LayerReport:
    """A finished decoder layer.

    Attributes:
      errors: of its linear layers, by name.
      divergence: squared difference of the held-out hidden states after the layer from the float model's, over their
        squares; what all layers so far add up to. None without a held-out text.
      value_divisors, notes: as of `QuantizedLayer`.
      is_resumed: whether an earlier run had finished it.
    """

    number: int
    errors: dict[str, LinearError]
    divergence: float | None
    value_divisors: tuple[float | None, ...] = ()
    notes: tuple[str, ...] = ()
    is_resumed: bool = False


@dataclass(frozen=True)
class CalibrationResult:
    """A quantized model, of which one part is read at a time.

    Attributes:
      read: as of `FloatModel`; dense parameters are float32, rounded to `CalibrationOptions.dtype`. Layers are read
        from the journal, if there is one, which must be open.
      rest: names of the parameters outside the layers.
      hidden: hidden states [rows, T, D] of the held-out text after the last layer, or None.
    """

    config: ModelConfig
    read: ReadUnit
    rest: tuple[str, ...]
    layers: list[LayerReport]
    quality: Quality | None
    hidden: np.ndarray | None

    @cached_property
    def params(self) -> Params:
        """The whole model."""
        layers = {str(number): self.read(f"layers.{number}") for number in range(self.config.num_layers)}
        return {**{name: self.read(name) for name in self.rest}, "layers": layers}


def quantize_model(
    model: FloatModel,
    options: CalibrationOptions,
    tokens: np.ndarray | None = None,
    held_out: np.ndarray | None = None,
    *,
    journal: CalibrationJournal | None = None,
    report: Callable[[LayerReport], None] = lambda done: None,
) -> CalibrationResult:
    """Quantizes the linear layers of a model, the first decoder layer first.

    GPTQ is calibrated on the hidden states of the quantized layers before it, AWQ and SmoothQuant on those of the float
    model, as by their authors.

    Args:
      tokens: int32 [rows, T], to calibrate on; may be None for rounding to nearest.
      held_out: int32 [rows, T], to measure the quality of the result on.
      journal: keeps finished layers on the disk, instead of in memory, so that a killed run resumes; the caller removes
        it. Without one, memory holds the result's layers.
      report: called after each decoder layer.

    Raises:
      ValueError: no tokens for a method that needs them, or out of the vocabulary; options that fit no layer; an
        expert whose Hessian does not fit `options.expert_memory`; values too large for `options.dtype`.
    """
    check_input(model.config, options, tokens, held_out)
    streams = _Streams.begin(model, options, tokens, held_out)
    if journal is not None:
        journal.begin(fingerprint_of(model, options, tokens))
    reports: list[LayerReport] = []
    held: dict[int, Params] = {}
    for number in range(model.config.num_layers):
        params, done = _advance(model, options, number, streams, journal)
        if journal is None:
            held[number] = params
        del params
        reports.append(done)
        report(done)

    def read(name: str) -> Params:
        if not name.startswith("layers."):
            return jax.tree.map(lambda leaf: rounded(leaf, options.dtype), model.read(name))
        number = int(name.removeprefix("layers."))
        return held[number] if journal is None else journal.read(number)[0]

    quality = hidden = None
    if held_out is not None:
        chunks = zip(streams.float_held_out, streams.held_out, in_chunks(held_out), strict=True)
        quality = compare(model.config, *_heads(model, options.dtype), chunks)
        hidden = np.concatenate(streams.held_out)
    return CalibrationResult(model.config, read, model.rest, reports, quality, hidden)


def fingerprint_of(model: FloatModel, options: CalibrationOptions, tokens: np.ndarray | None) -> dict[str, Any]:
    """JSON-ready values that determine the result of a calibration."""
    return {
        "model": model.fingerprint,
        "config": model.config.to_dict(),
        "options": options.to_dict(),
        "tokens": digest(tokens),
    }


ParamPath = tuple[str, ...]


def abstract_weights(config: ModelConfig, options: CalibrationOptions) -> dict[ParamPath, QuantizedArray]:
    """The quantized weights of the result, by path, as abstract arrays: from shapes alone, before any calibration."""
    layers = abstract_params(config)["layers"]
    weights: dict[ParamPath, QuantizedArray] = {}
    for number in range(config.num_layers):
        for name in linear_names(LayerProgram.of(config, number)):
            bits = options.bits_of(f"layers.{number}.{name}")
            if bits != KEEP_AS_IS:
                shape = find(layers[str(number)], name)["weight"].shape
                weights["layers", str(number), *name.split("."), "weight"] = _quantized(shape, bits, options)
    return weights


def all_linears(config: ModelConfig) -> list[str]:
    """Names of a model's linear layers, such as "layers.0.mlp.down_proj"."""
    return [
        f"layers.{number}.{name}"
        for number in range(config.num_layers)
        for name in linear_names(LayerProgram.of(config, number))
    ]


@lru_cache(maxsize=64)
def _quantized(shape: tuple[int, ...], bits: int, options: CalibrationOptions) -> QuantizedArray:
    def rounded(weight: jax.Array) -> QuantizedArray:
        return quantize(weight, options.recipe(bits), scale_dtype=options.dtype)

    weight = jax.eval_shape(rounded, jax.ShapeDtypeStruct(shape, jnp.float32))
    is_permuted = options.method == "gptq" and options.gptq.act_order and not options.gptq.static_groups
    if not is_permuted or options.grid(bits).num_groups(shape[-2]) == 1:
        return weight
    return replace(weight, permutation=jax.ShapeDtypeStruct(shape[:-1], jnp.int32))


def _advance(
    model: FloatModel, options: CalibrationOptions, number: int, streams: "_Streams", journal: CalibrationJournal | None
) -> tuple[Params, LayerReport]:
    """Quantizes a layer, or reads it from the journal, and advances the hidden states. When it returns, the float
    weights are released."""
    program = LayerProgram.of(model.config, number)
    original = model.layer(number)
    is_resumed = journal is not None and number in journal
    if journal is not None and is_resumed:
        params, record = journal.read(number)
        errors = {name: LinearError(**error) for name, error in record["errors"].items()}
        done = QuantizedLayer(params, errors, tuple(record["value_divisors"]), tuple(record.get("notes", ())))
    else:
        done = quantize_layer(program, number, original, streams.calibration, options)
        _check_finite(done.params, f"layers.{number}", options.dtype)
        if journal is not None:
            errors = {name: asdict(error) for name, error in done.errors.items()}
            record = {"errors": errors, "value_divisors": done.value_divisors, "notes": done.notes}
            journal.write(number, done.params, record)
    # Dequantized weights share the float program; quantized activations need another.
    runnable = dequantized(done.params, keeps_activations=True)
    is_last = number == model.config.num_layers - 1
    streams.advance(program, original, runnable, options, done.kept, is_last=is_last)
    report = LayerReport(number, done.errors, streams.divergence(), done.value_divisors, done.notes, is_resumed)
    return done.params, report


@dataclass
class _Streams:
    """Hidden states between two layers, in host memory, in chunks for the device.

    calibration: for calibrating the next layer. held_out: of the quantized model; float_held_out: of the float model.
    """

    calibration: list[np.ndarray]
    held_out: list[np.ndarray]
    float_held_out: list[np.ndarray]

    @classmethod
    def begin(
        cls,
        model: FloatModel,
        options: CalibrationOptions,
        tokens: np.ndarray | None,
        held_out: np.ndarray | None,
    ) -> "_Streams":
        for name in model.rest:
            _check_finite(
                jax.tree.map(lambda leaf: rounded(leaf, options.dtype), model.read(name)), name, options.dtype
            )
        calibration = model.embedded(tokens, options.dtype if options.method == "gptq" else "float32")
        return cls(calibration, model.embedded(held_out, options.dtype), model.embedded(held_out))

    def advance(
        self,
        program: LayerProgram,
        original: Params,
        quantized: Params,
        options: CalibrationOptions,
        kept: KeptInputs | None,
        *,
        is_last: bool,
    ) -> None:
        """kept: of the calibration text, as of `QuantizedLayer`."""
        run = partial(_run, program)
        if not is_last:
            params = quantized if options.method == "gptq" else original
            self.calibration = run(params, self.calibration, kept)
        self.held_out = run(quantized, self.held_out)
        self.float_held_out = run(original, self.float_held_out)

    def divergence(self) -> float | None:
        if not self.held_out:
            return None
        pairs = list(zip(self.held_out, self.float_held_out, strict=True))
        difference = sum(float(np.sum(np.square(a - b), dtype=np.float64)) for a, b in pairs)
        return difference / sum(float(np.sum(np.square(b), dtype=np.float64)) for _, b in pairs)


def _run(
    program: LayerProgram, params: Params, chunks: list[np.ndarray], kept: KeptInputs | None = None
) -> list[np.ndarray]:
    given = (None if kept is None else kept.of_chunk(number) for number in range(len(chunks)))
    return [np.asarray(program.forward(params, chunk, inputs)) for chunk, inputs in zip(chunks, given, strict=True)]


def check_method(config: ModelConfig, options: CalibrationOptions) -> None:
    """Raises ValueError for a method that a model cannot be quantized with."""
    if config.moe is not None and options.method in ("gptq", "awq"):
        widths = dict(zip(STACKS, (config.hidden_size, config.hidden_size, config.moe.expert_size), strict=True))
        for number in config.moe.layers:
            for name, width in widths.items():
                if options.bits_of(f"layers.{number}.{name}") != KEEP_AS_IS:
                    experts_at_once(f"layers.{number}.{name}", width, options.expert_memory)
    if config.kv_sources:
        raise ValueError(
            f"{config.architecture} has layers that read the keys and values of earlier ones, and cannot be quantized "
            'layer by layer; it can be opened with quantize="int8" or another scheme'
        )
    refused = f"{options.method} is not supported for {config.architecture},"
    if options.needs_activations:
        reasons = {
            "whose router scales what the experts read": config.moe is not None and config.moe.scales_input,
            "which has recurrent layers": config.recurrent_layers,
            "whose layers have inputs of their own": _reads_more(config),
        }
        if why := next((reason for reason, is_so in reasons.items() if is_so), None):
            raise ValueError(f"{refused} {why}; rounding to nearest (rtn) is")
    if config.has_value_norm and options.method in ("awq", "smoothquant"):
        raise ValueError(f"{refused} whose values are normalized; gptq is")


def _reads_more(config: ModelConfig) -> bool:
    """Tells if a layer cannot be run from the hidden states before it alone."""
    return config.layer_inputs is not None or (config.moe is not None and config.moe.is_beside_mlp)


def check_input(
    config: ModelConfig, options: CalibrationOptions, tokens: np.ndarray | None, held_out: np.ndarray | None
) -> None:
    """Raises ValueError as `quantize_model`, before anything is read or written."""
    check_method(config, options)
    if held_out is not None and _reads_more(config):
        raise ValueError(
            f"a divergence on held-out text is not supported for {config.architecture}, whose layers have inputs of "
            "their own"
        )
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
    options.check_keep(all_linears(config))


def digest(tokens: np.ndarray | None) -> str | None:
    """SHA-256 of rows of tokens."""
    if tokens is None:
        return None
    return hashlib.sha256(repr(tokens.shape).encode() + np.ascontiguousarray(tokens, np.int32).tobytes()).hexdigest()


def _heads(model: FloatModel, dtype: str) -> tuple[Params, Params]:
    """Parameters outside the layers, in float32 and rounded to `dtype`; the arrays themselves if rounding changes
    nothing."""

    def stored(leaf: jax.Array) -> jax.Array:
        is_exact = dtype == "float32" or bool(jnp.array_equal(leaf.astype(dtype), leaf))
        return leaf if is_exact else rounded(leaf, dtype)

    exact = model.without_layers()
    return exact, jax.tree.map(stored, exact)


def _check_finite(params: Params, name: str, dtype: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized):
        array = leaf.scales if is_quantized(leaf) else leaf
        if bad := int(jnp.sum(~jnp.isfinite(array))):
            full = ".".join([name, *(str(key.key) for key in path)])
            what = "scales" if is_quantized(leaf) else "values"
            raise ValueError(f"{full}: {bad} of {array.size} {what} are not finite in {dtype}")


def quantize_layer(
    program: LayerProgram, number: int, params: Params, chunks: Chunks, options: CalibrationOptions
) -> QuantizedLayer:
    """Decoder layer `number` with its linear layers quantized.

    Args:
      params: float32. chunks: hidden states [B, T, D] before the layer, to calibrate on; not used for rounding to
        nearest.
    """
    state = CalibratedLayer(program, number, params, chunks, options)
    {"rtn": _rtn, "gptq": _gptq, "awq": awq, "smoothquant": smoothquant}[options.method](state)
    result = _stored(state.result, options)
    return QuantizedLayer(result, state.errors, state.value_divisors, tuple(state.notes), state.kept)


def _stored(params: Params, options: CalibrationOptions) -> Params:
    """The parameters with dense ones rounded as they are stored."""

    def stored(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, QuantizedArray) or keeps_float32([key.key for key in path]):
            return leaf
        return leaf.astype(options.dtype).astype(jnp.float32)

    return jax.tree_util.tree_map_with_path(stored, params, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray))


def _rtn(state: CalibratedLayer) -> None:
    for names in state.program.groups:
        names = tuple(name for name in names if state.is_quantized(name))
        hessian = state.statistics(names).hessian if names and state.chunks else None
        for name in names:
            state.set(name, _rounded(state, name), hessian)
    for name in filter(state.is_quantized, state.program.stacks):
        state.set(name, _rounded(state, name))


def _rounded(state: CalibratedLayer, name: str) -> QuantizedArray:
    """A weight rounded to nearest, with the weights of the error that the options have for it."""
    options, weight = state.options, state.weight(name)
    full = f"layers.{state.number}.{name}"
    importance = None if options.importance is None else options.importance.get(full)
    if importance is not None:
        if importance.size != weight.size // weight.shape[-1]:
            wanted = list(weight.shape[:-1])
            raise ValueError(f"{full}: the weights of the error have the shape {list(importance.shape)}, not {wanted}")
        importance = jnp.asarray(importance, jnp.float32).reshape(weight.shape[:-1])
    return quantize(weight, options.recipe(state.bits(name)), scale_dtype=options.dtype, importance=importance)


def _gptq(state: CalibratedLayer) -> None:
    """GPTQ in the order of computation, each linear layer with the inputs that the quantized ones before it produce
    ("true sequential")."""
    state.result = _stored(state.result, state.options)
    for names in state.program.groups:
        names = tuple(name for name in names if state.is_quantized(name))
        if not names:
            continue
        hessian = state.statistics(names, state.result).hessian
        for name in names:
            grid = state.options.grid(state.bits(name))
            try:
                quantized, _ = gptq(state.weight(name), hessian, grid, state.options.gptq)
            except ValueError as error:
                raise ValueError(f"layers.{state.number}.{name}: {error}") from None
            state.set(name, quantized, hessian)
    for names in state.program.stack_groups:
        if names := tuple(filter(state.is_quantized, names)):
            gptq_stacks(state, names)
