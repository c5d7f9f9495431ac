"""Quantizing the stacks of experts of one decoder layer, expert by expert.

An expert's statistics are over the tokens that the router sends to it.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxinfer.calibration.capture import InputStatistics
from jaxinfer.calibration.layer_state import CalibratedLayer, LinearError, find
from jaxinfer.quantization import QuantizedArray, quantize
from jaxinfer.quantization.awq import best_scale, candidate_scales, clip, relative_sizes, scaled_error, squared_outputs
from jaxinfer.quantization.gptq import gptq


def tokens_needed(width: int) -> int:
    """Tokens that an expert needs for GPTQ of `width` inputs; with fewer it is rounded to nearest.

    A quarter of the inputs. Measured on other text, as a share of the error of rounding to nearest (a trained mixture
    of 8 experts, 3 bits, 64 inputs): with 64 tokens or more the mean was 0.15 and the worst expert had 0.87; with 16
    to 63 the mean was 0.3 and the worst 1.6; with fewer the mean was 0.7. With a minimum of 64 instead of 16 the KL of
    the model was larger on little text (0.0047, not 0.0030) and no smaller on much; likewise with a minimum of one
    (0.0049, not 0.0038).
    """
    return -(-width // 4)


def gptq_stacks(state: CalibratedLayer, names: Sequence[str]) -> None:
    """GPTQ of the stacks `names`, which have the same input, with a Hessian for each expert."""
    stacks = [_Stack(state, name) for name in names]
    for number, statistics in enumerate(state.expert_statistics(names[0], state.result)):
        for stack in stacks:
            if not stack.has_enough(statistics):
                stack.add(number, stack.rounded(stack.weight[number]), statistics)
                continue
            try:
                quantized, _ = gptq(stack.weight[number], statistics.hessian, stack.grid, state.options.gptq)
            except ValueError as error:
                raise ValueError(f"layers.{state.number}.{stack.name}, expert {number}: {error}") from None
            stack.add(number, quantized, statistics)
    _finish(state, stacks)


def common_losses(state: CalibratedLayer, names: Sequence[str], candidates: Sequence[jax.Array]) -> list[list[float]]:
    """Squared errors of the outputs, summed over experts, for each candidate scale [K] of the shared input and each of
    the stacks `names`."""
    stacks = [_Stack(state, name) for name in names]
    losses = [[jnp.float32(0)] * len(stacks) for _ in candidates]
    for number, statistics in enumerate(state.expert_statistics(names[0])):
        for column, stack in enumerate(stacks):
            weight = stack.weight[number]
            for row, scale in zip(losses, candidates, strict=True):
                row[column] += scaled_error(weight, scale, statistics.hessian, stack.grid)
    return [[float(loss) for loss in row] for row in losses]


def own_scales(state: CalibratedLayer, name: str) -> jax.Array:
    """float32 [E, K]: for each expert of a stack, the scale of its input with the least error of the outputs; 1 if it
    has too few tokens."""
    stack, scales = _Stack(state, name), []
    for number, statistics in enumerate(state.expert_statistics(name)):
        weight, relative = stack.weight[number], None
        if not stack.has_enough(statistics):
            scales.append(jnp.ones(len(weight)))
            continue
        if state.options.duo_scaling:
            relative = relative_sizes([weight], stack.grid.group_size)
        candidates = candidate_scales(statistics.mean_absolute, relative)
        errors = [scaled_error(weight, scale, statistics.hessian, stack.grid) for scale in candidates]
        scales.append(best_scale(candidates, [[float(error)] for error in errors]))
    return jnp.stack(scales)


def relative_sizes_of_stack(weight: jax.Array, group_size: int | None) -> jax.Array:
    """`relative_sizes` of the concatenated weights [E, K, N] of all experts, without copying them."""
    return sum((relative_sizes([expert], group_size) for expert in weight), jnp.float32(0)) / len(weight)


def round_stacks(state: CalibratedLayer, names: Sequence[str], rows: jax.Array, columns: dict[str, jax.Array]) -> None:
    """Rounds the stacks `names`, which have the same input, after multiplying each weight by `rows` [K] or [E, K] and
    dividing it by `columns` [E, N], if any. AWQ clips first, if an expert has enough tokens."""
    stacks = [_Stack(state, name) for name in names]
    looks = state.options.method == "awq"
    nothing = (None for _ in range(len(stacks[0].weight)))
    for number, statistics in enumerate(state.expert_statistics(names[0]) if looks else nothing):
        row = rows if rows.ndim == 1 else rows[number]
        for stack in stacks:
            column = columns[stack.name][number] if stack.name in columns else jnp.float32(1)
            weight = stack.weight[number] * row[:, None] / column
            if statistics is not None and state.options.clip and stack.has_enough(statistics):
                weight = clip(weight, statistics.hessian / (row[:, None] * row), stack.grid)
            stack.add(number, stack.rounded(weight), statistics, row, column)
    _finish(state, stacks)


def _finish(state: CalibratedLayer, stacks: Sequence["_Stack"]) -> None:
    """Finishes stacks with the same input, and notes experts with too few tokens."""
    for stack in stacks:
        stack.finish()
    if few := stacks[0].num_few:
        names = " and ".join(stack.name for stack in stacks)
        least = tokens_needed(stacks[0].width)
        state.notes.append(
            f"{names}: {few} of {len(stacks[0].weight)} experts had fewer than {least} tokens: rounded to nearest"
        )


class _Stack:
    """A stack of experts that is being quantized, expert by expert."""

    def __init__(self, state: CalibratedLayer, name: str):
        self.name, self.grid = name, state.options.grid(state.bits(name))
        self._state, self.weight = state, state.weight(name)  # weight: [E, K, N]
        self._quantized: list[QuantizedArray] = []
        self._sums, self.num_few = jnp.zeros(3), 0

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    def has_enough(self, statistics: InputStatistics) -> bool:
        return int(statistics.num_tokens) >= tokens_needed(self.width)

    def rounded(self, weight: jax.Array) -> QuantizedArray:
        recipe = self._state.options.recipe(self._state.bits(self.name))
        return quantize(weight, recipe, scale_dtype=self._state.options.dtype)

    def add(
        self,
        number: int,
        quantized: QuantizedArray,
        statistics: InputStatistics | None,
        rows: jax.Array | float = 1.0,
        columns: jax.Array | float = 1.0,
    ) -> None:
        """Appends an expert's quantized weight and its errors. Before it was quantized, its rows were multiplied by
        `rows` [K] and its columns divided by `columns` [N]; the errors are without both."""
        self._quantized.append(quantized)
        if statistics is None:
            return
        self.num_few += not self.has_enough(statistics)
        weight = self.weight[number]
        rows = jnp.broadcast_to(jnp.asarray(rows), len(weight))
        parts = (quantized.dequantize() / rows[:, None] * columns - weight, self.rounded(weight).dequantize() - weight)
        self._sums += jnp.stack([squared_outputs(part, statistics.hessian) for part in (*parts, weight)])

    def finish(self) -> None:
        """Replaces the weight by the quantized stack, and records its error on the calibration tokens."""
        if any(weight.permutation is not None for weight in self._quantized):
            order = jnp.arange(self.width, dtype=jnp.int32)
            self._quantized = [
                replace(weight, permutation=order) if weight.permutation is None else weight
                for weight in self._quantized
            ]
        whole = jax.tree.map(lambda *parts: jnp.stack(parts), *self._quantized)
        error, nearest, total = map(float, self._sums)
        errors = (error / total, nearest / total) if total > 0 else (None, None)
        find(self._state.result, self.name)["weight"] = whole
        self._state.errors[self.name] = LinearError(
            *errors, self._state.bits(self.name), len(self.weight), self.num_few
        )  # fmt: skip
