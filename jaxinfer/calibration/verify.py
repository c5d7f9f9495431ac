"""Do two sets of parameters compute the same? Layer by layer, so that weights in floats are held for one at a time."""

import jax
import numpy as np

from jaxinfer.calibration.capture import LayerProgram
from jaxinfer.calibration.layer import dequantized
from jaxinfer.calibration.quality import logits
from jaxinfer.models import ModelConfig, Params


def logit_difference(config: ModelConfig, params: Params, other: Params, tokens: np.ndarray) -> tuple[float, float]:
    """The largest absolute difference of logits, infinite where one is NaN, and the largest logit of `params`.

    Args:
      tokens: int32 [rows, T].
    """
    largest = difference = 0.0
    for row in tokens:
        first, second = (np.asarray(_logits(config, each, row[None])) for each in (params, other))
        worst = np.abs(first - second).max()
        difference = max(difference, float("inf") if np.isnan(worst) else float(worst))
        largest = max(largest, float(np.abs(first).max()))
    return difference, largest


def _logits(config: ModelConfig, params: Params, tokens: np.ndarray) -> jax.Array:
    hidden = np.asarray(params["embed"])[tokens].astype(np.float32)
    for number in range(config.num_layers):
        hidden = LayerProgram.of(config, number).forward(dequantized(params["layers"][str(number)]), hidden)
    return logits(config, {name: leaf for name, leaf in params.items() if name != "layers"}, hidden)
