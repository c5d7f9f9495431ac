import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore

from checkpoints_convert import CheckpointError, convert, load, store
from checkpoints_convert.checkpoint import slices_of
from checkpoints_convert.manifest import measure, read_manifest, write_manifest
from checkpoints_convert.store import NativeCheckpoint, read_native_config, write_unit


@pytest.fixture
def native(checkpoint, tmp_path):
    """A converted checkpoint and its source, bfloat16."""
    source = checkpoint("Qwen3ForCausalLM", dtype="bfloat16").write()
    convert(source, tmp_path / "native", progress=None)
    return tmp_path / "native", source


def rewrite_manifest(directory):
    """With the files as they are, and the checksums of arrays that were there before."""
    names = [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]
    arrays = read_manifest(directory).arrays
    write_manifest(directory, measure(directory, [name for name in names if name != "manifest.json"]), {}, arrays)


def test_native_form_has_the_parameters_of_its_source(native):
    directory, source = native
    (config, params), (wanted_config, wanted) = load(directory), load(source)
    assert config == wanted_config
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and jnp.array_equal(a, b), params, wanted))


def test_native_form_is_cast_on_request(native):
    directory, source = native
    config, params = load(directory, dtype="float32")
    assert {config.dtype, *(str(leaf.dtype) for leaf in jax.tree.leaves(params))} == {"float32"}
    assert jax.tree.all(jax.tree.map(jnp.array_equal, params, load(source, dtype="float32")[1]))


def test_units_are_plain_orbax_checkpoints(native):
    directory, source = native
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(directory / "params" / "layers.1")
    _, params = load(source)
    assert jnp.array_equal(found["layers.1.mlp.up_proj.weight"], params["layers"]["1"]["mlp"]["up_proj"]["weight"])


def test_progress_and_verification(native):
    directory, _ = native
    seen = []
    load(directory, verify=True, progress=lambda *what: seen.append(what))
    assert seen[-1][1] == seen[-1][2]


def flip_byte(path, position):
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 1
    path.write_bytes(data)


def test_flipped_bits_are_found_by_checksums(native):
    directory, _ = native
    largest = max(
        (directory / "params" / "embed").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0
    )
    flip_byte(largest, 1000)
    with pytest.raises(CheckpointError, match=rf"{largest.name}: its \d+ bytes have SHA-256"):
        load(directory, verify=True)


def test_missing_and_resized_files_are_found_without_checksums(native):
    directory, _ = native
    (directory / "config.json").unlink()
    with (directory / "params" / "layers.0" / "_METADATA").open("a") as file:
        file.write(" ")
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    assert caught.value.problems[0] == "config.json: missing"
    assert "params/layers.0/_METADATA" in caught.value.problems[1]
    assert "bytes, the manifest says" in caught.value.problems[1]


def test_dtype_orbax_would_cast_in_silence_is_refused(native):
    directory, _ = native
    unit = directory / "params" / "final_norm"
    shutil.rmtree(unit)
    write_unit(unit, {("final_norm", "weight"): np.ones(32, np.int8)})
    rewrite_manifest(directory)
    with pytest.raises(
        CheckpointError, match=r"final_norm: tensor 'final_norm.weight' is int8\[32\], not bfloat16\[32\]"
    ):
        load(directory)


def test_parameters_of_another_model_are_refused(native):
    directory, _ = native
    unit = directory / "params" / "final_norm"
    shutil.rmtree(unit)
    write_unit(unit, {("final_norm", "scale"): np.ones(32, np.float32)})
    rewrite_manifest(directory)
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    assert caught.value.problems == (
        "tensor 'final_norm.weight' is missing",
        "tensor 'final_norm.scale' is not of this model",
    )


def test_nan_in_a_native_checkpoint_is_refused(native):
    directory, _ = native
    unit = directory / "params" / "final_norm"
    shutil.rmtree(unit)
    write_unit(unit, {("final_norm", "weight"): np.full(32, np.nan, jnp.bfloat16)})
    rewrite_manifest(directory)
    with pytest.raises(CheckpointError, match=r"tensor 'final_norm\.weight': 32 of 32 values are NaN"):
        load(directory, verify=False)


def test_damaged_orbax_files_are_a_checkpoint_error(native):
    directory, _ = native
    (directory / "params" / "embed" / "manifest.ocdbt").write_bytes(b"damaged")
    rewrite_manifest(directory)
    with pytest.raises(CheckpointError, match="params/embed: cannot be read"):
        load(directory)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 3}, "format_version 3, this version reads 2"),
        ({"format_version": None}, "format_version None"),
        ({"model": {}}, "holds no model configuration"),
        ({"model": None}, "holds no model configuration"),
    ],
)
def test_configuration_this_version_cannot_read_is_refused(changes, message, native):
    directory, _ = native
    path = directory / "jaxinfer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=message):
        read_native_config(directory)


def test_field_of_a_newer_version_is_named(native):
    path = native[0] / "jaxinfer_config.json"
    data = json.loads(path.read_text())
    data["model"]["num_experts"] = 8
    path.write_text(json.dumps(data))
    rewrite_manifest(native[0])
    with pytest.raises(CheckpointError, match="no field num_experts: written by a newer jaxinfer"):
        load(native[0])


def test_parts_are_read_from_their_chunks(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr(store, "_CHUNK_BYTES", 1000)
    directory = tmp_path / "native"
    convert(checkpoint().write(), directory, progress=None)
    path = ("layers", "1", "mlp", "down_proj", "weight")
    with NativeCheckpoint(directory) as source:
        whole = dict(source.read("layers.1"))[path]
        parts = [((0, 12), (0, 32)), ((40, 48), (3, 4)), ((5, 6), (0, 0))]
        found = source.read_param(path, parts)
    assert [array.shape for array in found] == [(12, 32), (8, 1), (1, 0)]
    assert all(np.array_equal(array, whole[slices_of(bounds)]) for array, bounds in zip(found, parts, strict=True))


def test_a_chunk_that_is_lost_is_not_zeros(native):
    directory, _ = native
    unit = directory / "params" / "final_norm"
    base = {"driver": "file", "path": f"{unit.absolute()}/"}
    keys = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    (chunk,) = [key for key in keys.list().result() if not key.endswith((b".zarray", b".zattrs"))]
    keys.delete_range(tensorstore.KvStore.KeyRange(chunk, chunk + b"\0")).result()
    rewrite_manifest(directory)
    with pytest.raises(CheckpointError, match=r"final_norm: cannot be read, ValueError: .*chunk"):
        load(directory)
