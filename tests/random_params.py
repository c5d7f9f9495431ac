"""Random parameters of a model, without compiling the program of `init_params`."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import ModelConfig, Params, abstract_params


def random_params(config: ModelConfig, seed: int = 0) -> Params:
    """As of `init_params`: normal(0, 0.02) weights, unit norms, zero biases; float32."""
    random = np.random.default_rng(seed)

    def leaf(path, shape):
        names = [key.key for key in path]
        noise = random.normal(0, 0.02, shape.shape)
        if noise.ndim > 1:
            return jnp.asarray(noise, jnp.float32)
        is_norm = names[-1] == "weight" and "norm" in names[-2]
        return (jnp.ones if is_norm else jnp.zeros)(shape.shape, jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, abstract_params(config))
