"""A model layer by layer: the result does what the parts say, and a run that was cut short goes on."""

import gc
import json
import weakref
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.calibration import CalibrationOptions, FloatModel, Keep, capture, quantize_model
from jaxinfer.calibration.driver import abstract_weights
from jaxinfer.calibration.inputs import in_chunks, split_rows
from jaxinfer.calibration.journal import CalibrationJournal
from jaxinfer.calibration.verify import compare_models
from jaxinfer.quantization import QuantizedArray, quantize_params
from jaxinfer.quantization.gptq import GptqOptions
from jaxinfer.training.objectives import sequence_logits

OPTIONS = CalibrationOptions("gptq", 3, group_size=16, dtype="float32")


def leaves_of(params):
    return [
        (jax.tree_util.keystr(path), np.asarray(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]


def same(params, others):
    for (name, leaf), (other_name, other) in zip(leaves_of(params), leaves_of(others), strict=True):
        assert (name, leaf.dtype) == (other_name, other.dtype)
        np.testing.assert_array_equal(leaf, other, err_msg=name)


@pytest.fixture(scope="module")
def model(config, params):
    return FloatModel.of(config, params)


@pytest.fixture(scope="module")
def gptq_result(model, tokens, held_out):
    return quantize_model(model, OPTIONS, tokens, held_out)


@pytest.mark.slow
def test_quality_is_that_of_the_whole_models(config, params, gptq_result, held_out):
    logits = jax.jit(sequence_logits, static_argnums=0)
    log_p, log_q = (jax.nn.log_softmax(logits(config, each, held_out)) for each in (params, gptq_result.params))
    quality = gptq_result.quality
    assert quality.kl == pytest.approx(float(jnp.mean(jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1))), rel=1e-3)
    assert quality.top1_agreement == pytest.approx(float((log_p.argmax(-1) == log_q.argmax(-1)).mean()), abs=0.01)
    for log_probs, perplexity in ((log_p, quality.float_perplexity), (log_q, quality.perplexity)):
        nll = -np.take_along_axis(np.asarray(log_probs)[:, :-1], held_out[:, 1:, None], -1).mean()
        assert perplexity == pytest.approx(float(np.exp(nll)), rel=1e-3)
    assert quality.num_tokens == held_out.size
    divergences = [layer.divergence for layer in gptq_result.layers]
    assert all(0 < value < 1 for value in divergences)


def test_without_calibration_it_is_round_to_nearest(model, params, held_out):
    found = quantize_model(model, replace(OPTIONS, method="rtn", group_size=32), None, held_out)
    same(found.params, quantize_params(params, "int3-g32"))
    assert all(error.error is None for layer in found.layers for error in layer.errors.values())


@pytest.mark.slow
def test_a_better_method_gives_a_better_model(model, tokens, held_out, gptq_result):
    rounded = quantize_model(model, replace(OPTIONS, method="rtn"), None, held_out)
    assert gptq_result.quality.kl < 0.8 * rounded.quality.kl
    all_kept = quantize_model(model, replace(OPTIONS, keep=(Keep("*"),)), tokens, held_out)
    assert all_kept.quality.kl == pytest.approx(0, abs=1e-6)


def test_layers_are_read_once_and_let_go(model, held_out):
    read, layers = [], []

    def spy(name):
        read.append((name, sum(layer() is not None for layer in layers)))
        found = jax.tree.map(jnp.array, model.read(name))
        if name.startswith("layers."):
            layers.append(weakref.ref(found["mlp"]["up_proj"]["weight"]))
        return found

    quantize_model(FloatModel(model.config, spy, model.rest), replace(OPTIONS, method="rtn"), None, held_out)
    layers_read = [name for name, _ in read if name.startswith("layers.")]
    assert layers_read == ["layers.0", "layers.1", "layers.2"]
    assert max(alive for _, alive in read) == 0


@pytest.mark.slow
def test_activations_of_8_bits_are_measured(model, tokens, held_out):
    options = CalibrationOptions("smoothquant", 8, dtype="float32", alpha=0.5)
    found = quantize_model(model, options, tokens, held_out)
    weights_alone = quantize_model(model, replace(options, method="rtn"), None, held_out)
    assert weights_alone.quality.kl < found.quality.kl < 0.05


class Killed(Exception):
    pass


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on(model, tokens, held_out, gptq_result, tmp_path):
    def kill(done):
        if done.number == 1:
            raise Killed

    def run(options=OPTIONS, tokens=tokens, model=model, **more):
        with CalibrationJournal(tmp_path / "work") as journal:
            result = quantize_model(model, options, tokens, held_out, journal=journal, **more)
            assert result.params  # read while the journal is open, and kept
            return result

    with pytest.raises(Killed):
        run(report=kill)
    (tmp_path / "work" / ".layers.2.npz.part").write_bytes(b"cut off")
    again = run()
    assert [layer.is_resumed for layer in again.layers] == [True, True, False]
    same(again.params, gptq_result.params)
    assert again.quality == gptq_result.quality
    assert [layer.errors for layer in again.layers] == [layer.errors for layer in gptq_result.layers]

    assert all(layer.is_resumed for layer in run().layers)
    for change in (
        {"options": replace(OPTIONS, method="rtn")},
        {"tokens": tokens[::-1]},
        {"model": replace(model, fingerprint="b")},
    ):
        assert not any(layer.is_resumed for layer in run(**change).layers)


@pytest.mark.slow
def test_layers_in_a_journal_are_not_held(model, tokens, held_out, tmp_path):
    """The values of at most one layer are alive when the next begins."""

    def num_values() -> int:
        gc.collect()
        return sum(array.size for array in jax.live_arrays() if array.dtype == jnp.int4)

    alive = []
    before = num_values()
    with CalibrationJournal(tmp_path / "work") as journal:
        result = quantize_model(
            model, OPTIONS, tokens, held_out, journal=journal, report=lambda done: alive.append(num_values() - before)
        )
        assert num_values() == before
        one = sum(leaf.size for leaf in jax.tree.leaves(result.read("layers.0")) if leaf.dtype == jnp.int4)
    assert one > 0
    assert max(alive) == 0


PERMUTED = replace(
    OPTIONS, bits=8, symmetric=False, dtype="bfloat16", gptq=GptqOptions(static_groups=False),
    keep=(Keep("*.up_proj", 4), Keep("*.o_proj")),
)  # fmt: skip


@pytest.fixture(scope="module")
def permuted_params(model, tokens):
    return quantize_model(model, PERMUTED, tokens).params


@pytest.mark.slow
def test_finished_layers_come_back_as_they_were(permuted_params, tmp_path):
    params = permuted_params["layers"]["0"]
    with CalibrationJournal(tmp_path / "work") as journal:
        journal.begin({"a": 1})
        assert 0 not in journal
        journal.write(0, params, {"b": 2})
        with pytest.raises(ValueError, match="another process calibrates there"):
            CalibrationJournal(tmp_path / "work").begin({"a": 1})
    with CalibrationJournal(tmp_path / "work") as journal:
        journal.begin({"a": 1})
        restored, report = journal.read(0)
        same(restored, params)
        assert report == {"b": 2}
        assert restored["mlp"]["up_proj"]["weight"].scheme == params["mlp"]["up_proj"]["weight"].scheme
        (tmp_path / "work" / "layers.0.npz").write_bytes(b"damaged")
        with pytest.raises(ValueError, match=r"layers\.0\.npz is damaged: remove it"):
            journal.read(0)
    with CalibrationJournal(tmp_path / "work") as journal:
        journal.begin({"a": 2})
        assert 0 not in journal
        part = journal.part("first")
        part.begin({"b": 1})
        part.write(0, params, {})
        journal.begin({"a": 2})
        assert 0 in part
        journal.remove()
    assert not (tmp_path / "work").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="is no calibration under way"):
        CalibrationJournal(tmp_path / "other").begin({})
    assert (tmp_path / "other" / "thesis.txt").read_text() == "mine"


def reader(params):
    return lambda name: params["layers"][name[7:]] if name.startswith("layers.") else params[name]


def changed(params, path, change):
    """The same with one leaf replaced."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: change(leaf) if ".".join(key.key for key in keys) == path else leaf,
        params,
        is_leaf=lambda leaf: isinstance(leaf, QuantizedArray),
    )


@pytest.mark.slow
def test_what_is_compared_differs_where_it_should(config, model, gptq_result, held_out):
    made = gptq_result.params
    calibrated = FloatModel(config, gptq_result.read, model.rest)

    def compare(found):
        return compare_models(calibrated, FloatModel(config, reader(found), model.rest), held_out[:2])

    same = compare(jax.tree.map(np.asarray, made))
    assert same.problems == []
    assert same.difference < 1e-5 * same.largest  # products of integers, next to weights as floats

    down, norm = "layers.2.mlp.down_proj.weight", "final_norm.weight"
    other_value = lambda leaf: replace(leaf, values=leaf.values.at[3, 5].set(jnp.int4(3 - int(leaf.values[3, 5]))))  # noqa: E731
    with_activations = lambda leaf: replace(leaf, scheme=replace(leaf.scheme, activations="int8"))  # noqa: E731
    for path, change, words in (
        (down, other_value, "1 of 2048 values differ"),
        (down, with_activations, "int3, 16 inputs a scale, activations int8 instead of int3, 16 inputs a scale"),
        (down, lambda leaf: leaf.dequantize(), "float32 not quantized instead of int3, 16 inputs a scale"),
        (
            down,
            lambda leaf: replace(leaf, scales=leaf.scales.astype("bfloat16")),
            "bfloat16[4, 32] instead of float32[4, 32]",
        ),
        (norm, lambda leaf: leaf.at[0].set(jnp.nan), "1 of 32 values differ"),
        ("embed", lambda leaf: leaf.at[63].set(0), "32 of 2048 values differ"),
    ):
        found = compare(changed(made, path, change))
        assert found.problems == [f"{path}: {words}"]
        assert found.difference == float("inf")
    other_rope = replace(config, rope=replace(config.rope, theta=500.0))
    found = compare_models(calibrated, FloatModel(other_rope, gptq_result.read, model.rest), held_out[:2])
    assert found.problems == []
    assert found.difference > 1e-3 * found.largest
    untied = replace(config, tie_word_embeddings=False), reader({**made, "lm_head": made["embed"].T})
    found = compare_models(calibrated, FloatModel(*untied, ("embed", "final_norm", "lm_head")), held_out[:2])
    assert found.problems == ["lm_head is new"]


@pytest.mark.slow
def test_the_products_of_the_model_that_was_written_are_compared(config, model, held_out, gptq_result, monkeypatch):
    """A product that is wrong with the right weights shows in the logits."""
    from jaxinfer.models import basic

    original = basic.matmul

    def wrong(x, weight, *rest):
        y = original(x, weight, *rest)
        return y * 1.01 if isinstance(weight, QuantizedArray) else y

    capture._programs.cache_clear()
    monkeypatch.setattr(basic, "matmul", wrong)
    sides = FloatModel(config, gptq_result.read, model.rest), FloatModel(config, gptq_result.read, model.rest)
    found = compare_models(*sides, held_out[:2])
    capture._programs.cache_clear()
    assert found.problems == []
    assert found.difference > 1e-3 * found.largest


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"method": "rtn", "symmetric": False},
        *(
            pytest.param(change, marks=pytest.mark.slow)
            for change in (
                {},
                {"method": "awq", "keep": (Keep("*.down_proj"), Keep("layers.0", 8))},
                {"method": "smoothquant", "bits": 8, "group_size": None},
                {"gptq": GptqOptions(static_groups=False)},
                {"gptq": GptqOptions(static_groups=False), "group_size": 64, "bits": 8},
            )
        ),
    ],
)
def test_what_a_weight_will_be_is_known_before(config, model, tokens, change):
    options = replace(OPTIONS, dtype="bfloat16", **change)
    assert_foreseen(quantize_model(model, options, tokens).params, abstract_weights(config, options))


@pytest.mark.slow
def test_what_a_permuted_weight_will_be_is_known_before(config, permuted_params):
    assert_foreseen(permuted_params, abstract_weights(config, PERMUTED))


def assert_foreseen(params, expected):
    """The quantized leaves are of the expected structure, shapes and dtypes, and no others are there."""
    found = {
        tuple(key.key for key in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            params, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray)
        )
        if isinstance(leaf, QuantizedArray)
    }
    assert found.keys() == expected.keys()
    for path, leaf in found.items():
        assert jax.tree.structure(leaf) == jax.tree.structure(expected[path])
        kinds = [[(part.shape, part.dtype) for part in jax.tree.leaves(each)] for each in (leaf, expected[path])]
        assert kinds[0] == kinds[1]


def test_values_too_large_for_the_type_are_told_at_once(config, params, held_out, tmp_path):
    options = replace(OPTIONS, method="rtn", dtype="float16")
    for path, words in (
        ("embed", "embed: 1 of 2048 values are not finite in float16"),
        ("layers.1.attention_norm.weight", "layers.1.attention_norm.weight: 1 of 32 values are not finite in float16"),
    ):
        large = FloatModel.of(config, changed(params, path, lambda leaf: leaf.at[(0,) * leaf.ndim].set(1e6)))
        with pytest.raises(ValueError, match=words):
            quantize_model(large, options, None, journal=CalibrationJournal(tmp_path / "work"))
    quantized = quantize_params(params, "int8")
    with pytest.raises(ValueError, match=r"needs floating-point parameters, but layers\.0.* is quantized"):
        FloatModel.of(config, quantized)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": None}, "gptq needs a text to calibrate on"),
        ({"tokens": np.zeros(5, np.int32)}, r"tokens must be integers \[rows, T\], got int32 \(5,\)"),
        ({"held_out": np.full((1, 4), 64)}, r"held_out lie in \[64, 64\], the vocabulary in \[0, 64\)"),
        ({"options": replace(OPTIONS, keep=(Keep("layers.7"),))}, "no linear layer is called 'layers.7'"),
    ],
)
def test_wrong_input_is_told_before_anything_is_done(model, tokens, held_out, tmp_path, change, words):
    given = {"options": OPTIONS, "tokens": tokens, "held_out": held_out} | change
    with pytest.raises(ValueError, match=words):
        quantize_model(model, **given, journal=CalibrationJournal(tmp_path / "work"))
    assert not (tmp_path / "work").exists()


def test_text_is_divided_once(tokens):
    documents = [list(range(10)), list(range(10, 33)), list(range(33, 60))]
    rows = split_rows(documents, 99, num_rows=8, length=7, seed=0)
    assert (len(rows.calibration), len(rows.held_out)) == (7, 1)
    pieces = {tuple(row) for row in [*rows.calibration.tolist(), *rows.held_out.tolist()]}
    assert len(pieces) == 8
    stream = [*documents[0], 99, *documents[1], 99, *documents[2], 99]
    assert pieces <= {tuple(stream[first : first + 7]) for first in range(0, 63, 7)}
    np.testing.assert_array_equal(rows.held_out, split_rows(documents, 99, num_rows=8, length=7, seed=0).held_out)
    with pytest.raises(ValueError, match="63 tokens of text are fewer than two pieces of 40"):
        split_rows(documents, 99, num_rows=8, length=40, seed=0)
    assert [len(chunk) for chunk in in_chunks(np.zeros((5, 2000)))] == [2, 2, 1]
    assert [len(chunk) for chunk in in_chunks(np.zeros((2, 9000)))] == [1, 1]


def test_options_are_json(tmp_path):
    assert json.loads(json.dumps(replace(OPTIONS, keep=(Keep("x", 8),)).to_dict()))["keep"] == [
        {"pattern": "x", "bits": 8}
    ]
