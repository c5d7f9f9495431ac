"""The training loop: optax, progress, checkpoints, and the same run after a kill."""

import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from optax.contrib import MuonDimensionNumbers, muon

from jaxinfer.files import atomic_writer
from jaxinfer.models import Params
from jaxinfer.progress import Stage
from jaxinfer.quantization.on_device import unpack_params
from jaxinfer.quantization.tree import check_plain
from jaxinfer.training.head_mesh import state_shardings
from jaxinfer.training.objectives import Objective

NUM_KEPT = 2  # checkpoints
MUON_PARTS = ("layers", "taps_proj")  # parts of a model whose matrices map hidden states to hidden states
History = list[tuple[int, dict[str, float]]]
_TIMED_STEPS = 4


@dataclass(frozen=True)
class TrainOptions:
    """Attributes:
    num_steps: optimizer steps. learning_rate: its highest value, after `warmup_steps`; the last
      `decay_fraction` of the steps falls linearly to zero (Hu et al. 2024, warmup-stable-decay).
    checkpoint_every: steps between checkpoints. log_every: steps between points of the loss curve.
    evaluate_every: steps between evaluations, where there is one to make.
    lm_head_rate: the learning rate of the vocabulary head, as a share of that of the rest.
    """

    num_steps: int
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 50
    decay_fraction: float = 0.5
    max_gradient_norm: float = 1.0
    checkpoint_every: int = 50
    log_every: int = 10
    evaluate_every: int = 100
    lm_head_rate: float = 1.0


@dataclass(frozen=True)
class TrainResult:
    """Trained float32 parameters, and the loss curve as (step, metrics) pairs."""

    params: Params
    history: tuple[tuple[int, dict[str, float]], ...]


def make_optimizer(options: TrainOptions) -> optax.GradientTransformation:
    """Muon (Jordan 2024; update size of Liu et al. 2025) for the matrices of the layers, AdamW for the rest."""
    decay_steps = max(int(options.num_steps * options.decay_fraction), 1)
    peak = options.learning_rate
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, options.warmup_steps),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, decay_steps),
        ],
        [options.warmup_steps, options.num_steps - decay_steps],
    )

    def is_matrix_of_a_layer(params: Params) -> Any:
        def decide(path, leaf):
            in_layers = any(getattr(part, "key", None) in MUON_PARTS for part in path)
            return MuonDimensionNumbers() if in_layers and leaf.ndim == 2 else None

        return jax.tree_util.tree_map_with_path(decide, params)

    def is_lm_head(params: Params) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, leaf: path[0].key == "lm_head", params)

    slower = [] if options.lm_head_rate == 1 else [optax.masked(optax.scale(options.lm_head_rate), is_lm_head)]
    return optax.chain(
        optax.clip_by_global_norm(options.max_gradient_norm),
        muon(
            schedule,
            weight_decay=options.weight_decay,
            adam_b2=0.95,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=cast(Any, is_matrix_of_a_layer),
        ),
        *slower,
    )


def train(
    params: Params,
    objective: Objective,
    batch_at: Callable[[int], Any],
    options: TrainOptions,
    *,
    checkpoint_dir: Path,
    given: tuple[Any, ...] = (),
    evaluate: Callable[[Params], dict[str, float]] | None = None,
    is_done: Callable[[History], bool] = lambda history: False,
    early: tuple[int, Objective] | None = None,
    description: str = "train",
    show_progress: bool = True,
) -> TrainResult:
    """Minimises `objective(params, batch, *given)` over the batches `batch_at(step)`, which are pytrees of arrays.

    The metrics of `evaluate(params)` are added to those of the step. The run ends early where `is_done` says so of the
    loss curve so far. The first steps, as many as `early` says, minimise its objective instead. A run resumes from the
    newest checkpoint in `checkpoint_dir`, with the result of a run without interruption, since a batch depends on its
    step alone. `params` are donated, `given` are not.

    Raises:
      ValueError: quantized parameters; a checkpoint that is damaged or of other parameters, with the file.
      FloatingPointError: the loss is not finite, with the step. Checkpoints are kept.
    """
    params = unpack_params(params)
    check_plain(params, "training")
    optimizer = make_optimizer(options)
    start, step_fn = training_programs(objective, optimizer, params)
    num_early, early_fn = (
        (0, step_fn) if early is None else (early[0], training_programs(early[1], optimizer, params)[1])
    )
    state, first, history = _restored(checkpoint_dir, start(params))
    shown: dict[str, str] = {}
    show = None if show_progress else False
    with Stage(description, options.num_steps, "step", initial=first, show=show) as stage:
        for step in range(first, 0 if is_done(history) else options.num_steps):
            make_step = early_fn if step < num_early else step_fn
            state, metrics = make_step(state, jax.tree.map(jnp.asarray, batch_at(step)), given)
            done = step + 1
            is_last = done == options.num_steps
            is_evaluated = evaluate is not None and (done % options.evaluate_every == 0 or is_last)
            if done % options.log_every == 0 or is_last or is_evaluated:
                values = {name: float(value) for name, value in metrics.items()}
                if not all(math.isfinite(value) for value in values.values()):
                    raise FloatingPointError(f"step {step}: {json.dumps(values)}; lower learning_rate")
                if evaluate is not None and is_evaluated:
                    values |= evaluate(state["params"])
                history.append((done, values))
                shown |= {name: f"{value:.3f}" for name, value in values.items()}
                stage.describe(", ".join(f"{name}={value}" for name, value in shown.items()))
            is_last |= is_evaluated and is_done(history)
            if done % options.checkpoint_every == 0 or is_last:
                _save(checkpoint_dir, done, state, history)
            stage.update()
            if is_last:
                break
    return TrainResult(params=state["params"], history=tuple(history))


def seconds_per_step(
    params: Params, objective: Objective, batch_at: Callable[[int], Any], options: TrainOptions, given: tuple[Any, ...]
) -> float:
    """Seconds of an optimizer step with its batch, after the first ones, of which the longest compile. Copies of the
    parameters are trained."""
    start, step_fn = training_programs(objective, make_optimizer(options), params)
    state, seconds = start(jax.tree.map(jnp.copy, params)), []
    for step in range(_TIMED_STEPS):
        began = time.perf_counter()
        state, metrics = step_fn(state, jax.tree.map(jnp.asarray, batch_at(step)), given)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def training_programs(
    objective: Objective, optimizer: optax.GradientTransformation, params: Params
) -> tuple[Callable, Callable]:
    """Jitted: the state that training begins with, and one optimizer step, to which the state is donated. On a mesh the
    state lies as the parameters do, of which only the places count here."""

    def start(params):
        return {"params": params, "optimizer": optimizer.init(params)}

    def step(state, batch, given):
        gradients, metrics = jax.grad(objective, has_aux=True)(state["params"], batch, *given)
        updates, opt_state = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": opt_state}, metrics

    placed = state_shardings(jax.eval_shape(start, params), params)
    if placed is None:
        return jax.jit(start), jax.jit(step, donate_argnums=0)
    return jax.jit(start, out_shardings=placed), jax.jit(step, donate_argnums=0, out_shardings=(placed, None))


def _save(directory: Path, step: int, state: dict[str, Any], history: History) -> None:
    """Writes a checkpoint, and removes all but the newest ones. Raises OSError, with the file."""
    directory.mkdir(parents=True, exist_ok=True)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    arrays = {jax.tree_util.keystr(path): np.asarray(leaf, _stored(leaf)) for path, leaf in leaves}
    with atomic_writer(directory / f"{step:08}.npz") as file:
        np.savez(file, allow_pickle=False, history=np.array(json.dumps(history)), **arrays)
    _remove_old(directory)


def _remove_old(directory: Path) -> None:
    """Removes all checkpoints but the newest ones."""
    for path in _checkpoints(directory)[:-NUM_KEPT]:
        path.unlink()


def _restored(directory: Path, state: dict[str, Any]) -> tuple[dict[str, Any], int, History]:
    """State, number of steps done and loss curve of the newest checkpoint, or of a run that begins."""
    _remove_old(directory)  # what is left by a run that was killed after it wrote its last one
    if not (paths := _checkpoints(directory)):
        return state, 0, []

    def read(path: Any, leaf: jax.Array) -> jax.Array:
        array = jnp.asarray(file[jax.tree_util.keystr(path)], leaf.dtype).reshape(leaf.shape)
        return jax.device_put(array, leaf.sharding) if isinstance(leaf.sharding, NamedSharding) else array

    try:
        with np.load(paths[-1], allow_pickle=False) as file:
            history = [(step, values) for step, values in json.loads(str(file["history"]))]
            return jax.tree_util.tree_map_with_path(read, state), int(paths[-1].stem), history
    except Exception as error:  # numpy and zipfile raise many types
        raise ValueError(f"{paths[-1]} is damaged, or of another model ({error}): remove it") from None


def _checkpoints(directory: Path) -> list[Path]:
    """All checkpoints, the oldest first."""
    return sorted(directory.glob("[0-9]*.npz"))


def _stored(leaf: jax.Array) -> Any:
    """The dtype in a file: NumPy has no bfloat16."""
    return np.float32 if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
