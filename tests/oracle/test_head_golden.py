"""The golden files of draft heads that `make golden-heads` writes, and the checkpoints that tests write for them."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.oracle.head_cases import (
    DRAFT_VOCAB,
    HEAD_CASES,
    NUM_STATES,
    NUM_STEPS,
    ROWS,
    SEEDS,
    VOCAB,
    WIDTH,
    HeadCase,
    embedding_and_head,
    golden,
    head_tensors,
    inputs,
    write_checkpoint,
    write_target,
)

BY_NAME = {case.name: case for case in HEAD_CASES}
MAX_BYTES = 150_000
EVERY_CASE = pytest.mark.parametrize("case", HEAD_CASES, ids=lambda case: case.name)


def expected_shapes(case: HeadCase) -> dict[str, tuple[int, ...]]:
    """Shapes of a seed's tensors in the golden file, as the docstring of head_cases.py says."""
    case = BY_NAME[case.like or case.name]
    if case.kind == "mtp":
        rows, text = len(ROWS), case.config.get("text_config", case.config)
        shapes = {"chain": (NUM_STEPS, rows, VOCAB), "states": (NUM_STEPS, rows, WIDTH)}
        if text["model_type"].startswith("qwen3_"):
            return shapes | {"rounds": (NUM_STEPS, rows, VOCAB)}
        layers = text["num_nextn_predict_layers"]
        return shapes | {"layers": (layers, rows, VOCAB), "before_norm": (NUM_STEPS, rows, VOCAB)}
    vocab = case.config["draft_vocab_size"]
    has_window = "sliding_attention" in case.config["transformer_layer_config"].get("layer_types", ())
    if case.kind == "eagle3":
        shapes = {"logits": (NUM_STEPS, NUM_STATES, vocab), "states": (NUM_STEPS, NUM_STATES, WIDTH)}
        return shapes | ({f"position_{name}": shape for name, shape in shapes.items()} if has_window else {})
    slots = (len(case.anchors), case.config["block_size"])
    shapes = {"logits": (*slots, vocab)} | ({"position_logits": (*slots, vocab)} if has_window else {})
    if case.kind == "dflash2":
        candidates = (*slots, case.config["selector_top_k"])
        shapes |= {"candidates": candidates, "scores": candidates, "path": slots}
    return shapes | ({"confidence": slots, "path": slots} if case.kind == "dspark" else {})


@EVERY_CASE
def test_golden_tensors_exist(case):
    made, stored = golden(case)
    expected = expected_shapes(case)
    found = {name: tensor.shape for name, tensor in stored.items()}
    assert found == {f"{seed}.{name}": shape for seed in SEEDS for name, shape in expected.items()}
    assert case.path.stat().st_size <= MAX_BYTES
    assert made["head"]
    assert made["target"]
    assert tuple(made["anchors"]) == case.anchors
    for name, tensor in stored.items():
        assert np.isfinite(tensor).all()
        # Flat logits would be close to those of another head.
        assert not name.endswith("logits") or tensor.std() > 1


@EVERY_CASE
def test_checkpoint_is_as_published(case, tmp_path):
    folder = write_checkpoint(tmp_path, case, 0)
    assert json.loads((folder / "config.json").read_text()) == case.config
    found = load_file(folder / "model.safetensors")
    for name, tensor in found.items():
        assert tensor.dtype == {"d2t": np.int64, "t2d": np.bool_}.get(name, np.float32), name
    if case.kind == "mtp":
        prefix = {"hub": ("mtp.", "model.layers.2."), "packed": "mtp.", "speculators": "mtp_layers.0."}[case.form]
        assert any(name.startswith(prefix) for name in found)
        assert (case.form == "speculators") != ("lm_head.weight" in found)
        return
    is_deepspec = case.form == "deepspec"
    assert ("embed_tokens.weight" in found) == (case.has_embedding or is_deepspec)
    assert ("lm_head.weight" in found) == (case.has_head or is_deepspec)
    assert any(name.startswith("midlayer.") for name in found) == (case.form == "original")
    assert found["fc.weight"].shape == (WIDTH, WIDTH * len(case.taps))


@pytest.mark.parametrize("case", [case for case in HEAD_CASES if not case.like], ids=lambda case: case.name)
def test_weights_follow_from_the_seed(case, tmp_path):
    first = load_file(write_checkpoint(tmp_path / "first", case, 0) / "model.safetensors")
    again = load_file(write_checkpoint(tmp_path / "again", case, 0) / "model.safetensors")
    other = load_file(write_checkpoint(tmp_path / "other", case, 1) / "model.safetensors")
    assert first.keys() == again.keys() == other.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
        assert not np.array_equal(first[name], other[name]), name


@pytest.mark.parametrize("case", [case for case in HEAD_CASES if case.like], ids=lambda case: case.name)
def test_another_form_has_the_same_weights(case):
    theirs, ours = head_tensors(BY_NAME[case.like], 0), head_tensors(case, 0)
    assert theirs.keys() == ours.keys()
    assert all(np.array_equal(theirs[name], ours[name]) for name in ours)
    assert BY_NAME[case.like].path == case.path


@EVERY_CASE
def test_inputs_and_borrowed_weights(case, tmp_path):
    given = inputs(case, 0)
    assert given["tokens"].shape == (NUM_STATES + NUM_STEPS,)
    assert given["tokens"].max() < VOCAB
    states = given["states" if case.kind == "mtp" else "taps"]
    assert states.shape == (NUM_STATES, WIDTH * (1 if case.kind == "mtp" else len(case.taps)))
    assert all(0 < anchor <= NUM_STATES - 4 for anchor in case.anchors)
    target = load_file(write_target(tmp_path, case, 0) / "model.safetensors")
    embedding, head = embedding_and_head(case, 0)
    own = head_tensors(case, 0)
    theirs = next(tensor for name, tensor in target.items() if name.endswith("embed_tokens.weight"))
    np.testing.assert_array_equal(embedding, own["embed_tokens.weight"] if case.has_embedding else theirs)
    np.testing.assert_array_equal(head, own["lm_head.weight"] if case.has_head else target["lm_head.weight"])


@pytest.mark.parametrize(
    "case",
    [case for case in HEAD_CASES if case.config.get("draft_vocab_size") == DRAFT_VOCAB],
    ids=lambda case: case.name,
)
def test_reduced_vocabularies(case):
    own = head_tensors(case, 0)
    tokens = np.arange(DRAFT_VOCAB) + own["d2t"]
    np.testing.assert_array_equal(tokens, np.flatnonzero(own["t2d"]))
    assert own["lm_head.weight"].shape == (DRAFT_VOCAB, WIDTH)
