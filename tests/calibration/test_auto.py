"""Bits by sensitivity: measured alone, chosen greedily, corrected until the budget holds."""

from dataclasses import replace

import numpy as np
import pytest

from jaxinfer.calibration import (
    CalibrationOptions,
    FloatModel,
    Keep,
    choose_bits,
    measure_sensitivity,
    quantize_model,
    quantize_within,
)
from jaxinfer.calibration.auto import Sensitivity
from jaxinfer.calibration.journal import CalibrationJournal

OPTIONS = CalibrationOptions("rtn", 3, group_size=16, dtype="float32")


@pytest.fixture(scope="module")
def model(config, params):
    return FloatModel.of(config, params)


@pytest.fixture(scope="module")
def sensitivity(model, held_out):
    return measure_sensitivity(model, OPTIONS, held_out, [3, 8])


@pytest.mark.slow
def test_each_part_is_measured_alone(model, sensitivity, held_out):
    parts = [f"layers.{i}.{part}" for i in range(3) for part in ("attention", "mlp")]
    assert list(sensitivity.kl) == parts
    for part, bits in ((parts[1], 3), (parts[4], 8)):
        alone = replace(OPTIONS, keep=(Keep("*"), Keep(part, bits)))
        quality = quantize_model(model, alone, None, held_out).quality
        assert sensitivity.kl[part][bits] == pytest.approx(quality.kl, rel=1e-3, abs=1e-7)
    for part in parts:
        assert sensitivity.kl[part][16] == 0 < sensitivity.kl[part][8] < sensitivity.kl[part][3]
        assert sensitivity.num_bytes[part][3] < sensitivity.num_bytes[part][8] < sensitivity.num_bytes[part][16]


def test_bits_go_where_they_bring_most():
    kl = {"a": {4: 0.5, 8: 0.01, 16: 0.0}, "b": {4: 0.1, 8: 0.01, 16: 0.0}, "c": {4: 0.1, 8: 0.01, 16: 0.0}}
    sizes = {name: {4: 4 * size, 8: 8 * size, 16: 16 * size} for name, size in (("a", 10), ("b", 10), ("c", 100))}
    sensitivity = Sensitivity(kl, sizes)
    assert choose_bits(sensitivity, 1.0) == {"a": 4, "b": 4, "c": 4}
    assert choose_bits(sensitivity, 0.3) == {"a": 8, "b": 4, "c": 4}
    assert choose_bits(sensitivity, 0.13) == {"a": 8, "b": 8, "c": 4}
    assert choose_bits(sensitivity, 0.03) == {"a": 8, "b": 8, "c": 8}
    assert choose_bits(sensitivity, 0.0) == {"a": 16, "b": 16, "c": 16}


@pytest.mark.slow
def test_the_budget_holds_and_fewer_bits_would_break_it(model, held_out):
    lowest = quantize_model(model, OPTIONS, None, held_out).quality.kl
    found = quantize_within(model, OPTIONS, lowest / 3, None, held_out)
    assert found.kls[0] == pytest.approx(lowest)
    assert found.kls[-1] == found.result.quality.kl <= lowest / 3 < found.kls[0]
    assert set(found.counts()) >= {3, 8} or set(found.counts()) >= {3, 16}
    for part, bits in found.bits.items():
        number, name = part.split(".")[1:]
        weight = next(iter(found.result.params["layers"][number][name].values()))["weight"]
        assert (16 if not hasattr(weight, "scheme") else weight.scheme.bits) == bits
    easy = quantize_within(model, OPTIONS, 2 * lowest, None, held_out)
    assert easy.counts() == {3: 6}
    assert len(easy.kls) == 1


@pytest.mark.slow
def test_another_calibration_begins_anew_after_an_interrupted_search(model, tokens, held_out, tmp_path):
    def kill(done):
        raise KeyboardInterrupt

    def search(max_kl, **more):
        with CalibrationJournal(tmp_path / "work") as journal:
            return quantize_within(model, OPTIONS, max_kl, tokens, held_out, journal=journal, **more).result

    def plain(options):
        with CalibrationJournal(tmp_path / "work") as journal:
            return quantize_model(model, options, tokens, held_out, journal=journal)

    with pytest.raises(KeyboardInterrupt):
        search(100, report=kill)
    assert [layer.is_resumed for layer in search(100).layers] == [True, False, False]
    assert not any(layer.is_resumed for layer in search(200).layers)
    with pytest.raises(KeyboardInterrupt):
        search(100, report=kill)
    assert not any(layer.is_resumed for layer in plain(OPTIONS).layers)
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == [
        "calibration.json", *(f"layers.{number}.npz" for number in range(3)),
    ]  # fmt: skip
    assert not any(layer.is_resumed for layer in search(100).layers)
    assert not list((tmp_path / "work").glob("layers.*"))


@pytest.mark.slow
def test_a_kept_part_is_left_alone(model, held_out):
    keep = (Keep("layers.0.mlp", 8),)
    found = quantize_within(model, replace(OPTIONS, keep=keep), 1.0, None, held_out)
    assert found.result.params["layers"]["0"]["mlp"]["up_proj"]["weight"].scheme.bits == 8


def test_what_cannot_hold_is_told(model, tokens, held_out):
    with pytest.raises(ValueError, match="max_kl must be positive, got 0"):
        quantize_within(model, OPTIONS, 0, None, held_out)
    with pytest.raises(ValueError, match="smoothquant has 8 bits everywhere"):
        quantize_within(model, CalibrationOptions("smoothquant", 8), 0.1, tokens, held_out)
    everything = replace(OPTIONS, keep=(Keep("*", 2),))
    with pytest.raises(ValueError, match=r"no choice of bits had a KL of at most 1e-09: measured \d+\.\d+, "):
        quantize_within(model, everything, 1e-9, None, np.asarray(held_out))
