"""The programs of a head's training, with abstract arguments: what a chip that is not there would run."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import ModelConfig, Params, abstract_params, parameter_shardings
from jaxinfer.parallel import AnyMesh
from jaxinfer.speculative import HeadDraft, head_for
from jaxinfer.training.head_mesh import HeadPlacement, state_shardings
from jaxinfer.training.head_objectives import HeadBatch, computed_in, head_objective
from jaxinfer.training.head_start import head_config
from jaxinfer.training.heads import HeadOptions
from jaxinfer.training.loop import make_optimizer, training_programs
from jaxinfer.training.target_states import Target

OBSERVE, LOG_PROBS, STEP = "target", "target's choices", "step"


class HeadProgram(NamedTuple):
    """A jitted function with its arguments, and the other arrays that are there while it runs."""

    function: Any
    arguments: tuple[Any, ...]
    held: tuple[Any, ...]


def head_programs(
    target: ModelConfig, target_params: Params, options: HeadOptions, mesh: AnyMesh | None = None
) -> dict[str, HeadProgram]:
    """By name: the target's pass over the rows of a step, what it says of the head's vocabulary, and a step of the head
    and its optimizer.

    `target_params` are dense; of all arrays shapes are enough. A draft is made after all places of a row that may have
    one. Raises ValueError as `HeadTraining`.
    """
    placement = HeadPlacement(mesh, target, options.batch_size)
    size = options.draft_vocab_size
    index = None if size in (0, target.vocab_size) else np.minimum(np.arange(target.vocab_size, dtype=np.int32), size)
    head = head_config(
        target,
        options.kind,
        vocab_size=None if index is None else size,
        num_layers=options.num_layers,
        taps=options.taps,
        block_size=options.block_size,
        mask_token=0,
    )
    config, taps = head_for(head, target)
    target_params = jax.eval_shape(partial(computed_in, options.compute_dtype), target_params)
    dense = _placed(target_params, mesh and parameter_shardings(mesh, target, whole_if_uneven=True))
    params = {name: leaf for name, leaf in abstract_params(head, jnp.float32).items() if name != "draft_index"}
    params = _placed(params, placement.head_shardings(head, params))
    fixed = {} if index is None else {"draft_index": jax.ShapeDtypeStruct(index.shape, jnp.int32)}
    ((whole, together),) = HeadDraft("head", config, {**params, **fixed}, taps).models(target, dense)
    given = {name: leaf for name, leaf in together.items() if name not in params}

    def rows(tree: Any) -> Any:
        return _placed(tree, mesh and jax.tree.map(placement.row_sharding, tree))

    def numbers(*shape: int, dtype: Any = jnp.int32) -> Any:
        return rows(jax.ShapeDtypeStruct((options.batch_size, *shape), dtype))

    rest = {name: leaf for name, leaf in dense.items() if name not in given}

    observe, log_probs = Target(target, dense, taps, index, options.temperature, placement).programs
    tokens, counts = numbers(options.length), numbers(options.length, dtype=jnp.float32)
    seen = rows(jax.eval_shape(observe, dense, tokens, tokens, tokens))
    said = jax.eval_shape(log_probs, dense, seen.hidden, seen.total)
    said = _placed(said, mesh and placement.token_sharding(said))
    anchors = numbers(options.anchors_of(options.length - options.distance - 1))
    batch = HeadBatch(tokens, tokens, tokens, counts, anchors, seen.states, said, seen.best)
    weights = options.step_weights[: options.num_drafts]
    objective = head_objective(whole, options.loss, options.unroll, weights, options.compute_dtype)
    start, step = training_programs(objective, make_optimizer(options.train_options(1000)), params)
    state = jax.eval_shape(start, params)
    state = _placed(state, state_shardings(state, params))
    return {
        OBSERVE: HeadProgram(observe, (dense, tokens, tokens, tokens), (state,)),
        LOG_PROBS: HeadProgram(log_probs, (dense, seen.hidden, seen.total), (state, seen.states, seen.best)),
        STEP: HeadProgram(step, (state, batch, (given,)), (rest, seen.hidden)),
    }


def _placed(tree: Any, shardings: Any) -> Any:
    """Shapes with their shardings, if any."""
    if shardings is None:
        return tree
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, shardings
    )
