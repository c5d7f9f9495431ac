"""The training loop: optax, progress, orbax checkpoints, and the same run after a kill."""

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from optax.contrib import MuonDimensionNumbers, muon

from jaxinfer.files import naming
from jaxinfer.models import Params
from jaxinfer.progress import Stage
from jaxinfer.quantization.on_device import unpack_params
from jaxinfer.quantization.tree import check_plain
from jaxinfer.training.objectives import Objective


@dataclass(frozen=True)
class TrainOptions:
    """Attributes:
    num_steps: optimizer steps. learning_rate: its highest value, after `warmup_steps`; the last
      `decay_fraction` of the steps falls linearly to zero (Hu et al. 2024, warmup-stable-decay).
    checkpoint_every: steps between checkpoints. log_every: steps between points of the loss curve.
    evaluate_every: steps between evaluations, where there is one to make.
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
            in_layers = any(getattr(part, "key", None) == "layers" for part in path)
            return MuonDimensionNumbers() if in_layers and leaf.ndim == 2 else None

        return jax.tree_util.tree_map_with_path(decide, params)

    return optax.chain(
        optax.clip_by_global_norm(options.max_gradient_norm),
        muon(
            schedule,
            weight_decay=options.weight_decay,
            adam_b2=0.95,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=cast(Any, is_matrix_of_a_layer),
        ),
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
    description: str = "train",
    show_progress: bool = True,
) -> TrainResult:
    """Minimises `objective(params, batch, *given)` over the batches `batch_at(step)`, which are pytrees of arrays.

    The metrics of `evaluate(params)` are added to those of the step. A run resumes from the newest checkpoint in
    `checkpoint_dir`, with the result of a run without interruption, since a batch depends on its step alone.
    `params` are donated, `given` are not.

    Raises:
      ValueError: quantized parameters.
      FloatingPointError: the loss is not finite, with the step. Checkpoints are kept.
    """
    params = unpack_params(params)
    check_plain(params, "training")
    start, step_fn = _programs(objective, make_optimizer(options))
    state = start(params)
    checkpoint_dir = Path(checkpoint_dir).absolute()
    # Written before the next step, so that an error is of the step that it names.
    kept = ocp.CheckpointManagerOptions(
        max_to_keep=2, create=True, cleanup_tmp_directories=True, enable_async_checkpointing=False
    )
    with naming(checkpoint_dir):
        manager = ocp.CheckpointManager(checkpoint_dir, options=kept)
        state, first, history = _restored(manager, state)
    shown: dict[str, str] = {}
    show = None if show_progress else False
    with Stage(description, options.num_steps, "step", initial=first, show=show) as stage:
        for step in range(first, options.num_steps):
            state, metrics = step_fn(state, jax.tree.map(jnp.asarray, batch_at(step)), given)
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
            if done % options.checkpoint_every == 0 or is_last:
                saved = {"state": ocp.args.StandardSave(state), "history": ocp.args.JsonSave(cast(Any, history))}
                _save(manager, checkpoint_dir, done, ocp.args.Composite(**saved))
            stage.update()
    with naming(checkpoint_dir):
        manager.wait_until_finished()
        manager.close()
    return TrainResult(params=state["params"], history=tuple(history))


def _programs(objective: Objective, optimizer: optax.GradientTransformation) -> tuple[Callable, Callable]:
    """Jitted: the state that training begins with, and one optimizer step, to which the state is donated."""

    def start(params):
        return {"params": params, "optimizer": optimizer.init(params)}

    def step(state, batch, given):
        gradients, metrics = jax.grad(objective, has_aux=True)(state["params"], batch, *given)
        updates, opt_state = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": opt_state}, metrics

    return jax.jit(start), jax.jit(step, donate_argnums=0)


def _save(manager: ocp.CheckpointManager, directory: Path, step: int, args: ocp.args.CheckpointArgs) -> None:
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.CRITICAL)  # Orbax logs there what it then raises
    try:
        with naming(directory), _late_reports_ignored():
            manager.save(step, args=args)
    except ValueError as error:  # from TensorStore, for a full disk
        reason = str(error).splitlines()[0]
        raise OSError(f"{directory}: the training checkpoint of step {step} could not be written: {reason}") from None
    finally:
        log.setLevel(level)


class _Loop(asyncio.SelectorEventLoop):
    """Ignores what is reported when it has been closed."""

    def call_soon_threadsafe(self, callback: Any, *args: Any, **options: Any) -> Any:
        try:
            return super().call_soon_threadsafe(callback, *args, **options)
        except RuntimeError:
            if not self.is_closed():
                raise
            return None


@contextlib.contextmanager
def _late_reports_ignored() -> Iterator[None]:
    """Orbax closes its event loop at the first failed read or write; for each of the others, which then report to it,
    TensorStore prints a traceback."""
    new_event_loop = asyncio.new_event_loop
    asyncio.new_event_loop = _Loop
    try:
        yield
    finally:
        asyncio.new_event_loop = new_event_loop


def _restored(
    manager: ocp.CheckpointManager, state: dict[str, Any]
) -> tuple[dict[str, Any], int, list[tuple[int, dict[str, float]]]]:
    """State, number of steps done and loss curve of the newest checkpoint, or of a run that begins."""
    if (latest := manager.latest_step()) is None:
        return state, 0, []
    wanted = ocp.args.Composite(state=ocp.args.StandardRestore(state), history=ocp.args.JsonRestore())
    with _late_reports_ignored():
        restored = manager.restore(latest, args=wanted)
    return restored["state"], latest, [(int(step), dict(metrics)) for step, metrics in restored["history"]]
