"""What calibration must bring on the embedded model: less error than rounding, in every layer and on held-out text.

Linear layers are judged on the text they were calibrated on; decoder layers and the model on files nobody trained on.
"""

from functools import cache

import numpy as np
import pytest

import checkpoints_convert
from jaxinfer.calibration import CalibrationOptions, FloatModel, quantize_model
from jaxinfer.calibration.capture import LayerProgram
from jaxinfer.calibration.inputs import split_rows
from jaxinfer.calibration.layer_state import dequantized
from jaxinfer.data import embedded_path
from jaxinfer.text import Tokenizer
from jaxinfer.training.corpus import standard_library

pytestmark = [pytest.mark.slow, pytest.mark.optimized]  # its programs run for longer than they take to compile
MAX_KL = {4: 0.045}  # nats per token; the bound for 4 bits in groups of 128


@cache
def demo():
    config, params = checkpoints_convert.load(embedded_path("demo"), dtype="float32")
    return config, params, FloatModel.of(config, params)


@cache
def rows():
    """(tokens to calibrate on, held-out tokens), from files that training saw and files that it did not."""
    tokenizer = Tokenizer.from_dir(embedded_path("demo"))

    def of(texts, num_rows, length):
        encoded = [tokenizer.encode_content(text) for text in texts]
        found = split_rows(encoded, tokenizer.eos_token_id, num_rows=num_rows, length=length, seed=0)
        return np.concatenate([found.calibration, found.held_out])

    corpus = standard_library()
    return of(corpus.train[::20], 16, 192), of(corpus.held_out, 24, 256)


@cache
def result(method: str, bits: int):
    tokens, held_out = rows()
    return quantize_model(demo()[2], CalibrationOptions(method, bits), None if method == "rtn" else tokens, held_out)


@cache
def float_states():
    """Held-out hidden states of the float model before each layer, and after the last."""
    config, params, _ = demo()
    states = [np.asarray(params["embed"])[rows()[1][:8]]]
    for number in range(config.num_layers):
        states.append(np.asarray(LayerProgram.of(config, number).forward(params["layers"][str(number)], states[-1])))
    return states


def layer_errors(method: str, bits: int) -> list[float]:
    """Squared error of each decoder layer's own share of the residual stream, given exact held-out inputs."""
    config, states, found = demo()[0], float_states(), []
    for number in range(config.num_layers):
        params = dequantized(result(method, bits).params["layers"][str(number)])
        outputs = LayerProgram.of(config, number).forward(params, states[number])
        found.append(float(np.square(np.asarray(outputs) - states[number + 1], dtype=np.float64).sum()))
    return found


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_it_beats_rounding_in_every_layer_and_on_held_out_text(method, bits):
    found, rounded = result(method, bits), result("rtn", bits)
    for layer in found.layers:
        for name, error in layer.errors.items():
            assert error.error < error.rounded, (layer.number, name)
    for number, (error, nearest) in enumerate(zip(layer_errors(method, bits), layer_errors("rtn", bits), strict=True)):
        assert error < nearest, number
    assert found.quality.kl < rounded.quality.kl
    assert found.quality.perplexity < rounded.quality.perplexity
    assert found.quality.top1_agreement > rounded.quality.top1_agreement
    assert found.quality.kl <= MAX_KL.get(bits, np.inf)


def test_8_bits_lose_next_to_nothing():
    _, held_out = rows()
    model = demo()[2]
    assert quantize_model(model, CalibrationOptions("rtn", 8), None, held_out).quality.kl <= 0.002
    assert quantize_model(model, CalibrationOptions("smoothquant", 8), rows()[0], held_out[:8]).quality.kl <= 0.01
