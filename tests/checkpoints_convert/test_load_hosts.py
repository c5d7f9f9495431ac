"""Hosts of a mesh, each simulated by its part of it: what they read is theirs, right, and no more than planned."""

import math

import numpy as np
import pytest

from checkpoints_convert import CheckpointError, host_arrays, load_plan, safetensors_files
from checkpoints_convert.checkpoint import slices_of
from checkpoints_convert.huggingface.checkpoint import HuggingFaceCheckpoint
from checkpoints_convert.load import read_ahead
from checkpoints_convert.safetensors_files import SafetensorsFile
from tests.checkpoints_convert.family_files import Files, one_by_one, read

# Plain, grouped and tied, fused, cut by groups, heads rearranged, Conv1D, experts in one tensor, latent attention.
FAMILIES = ["llama", "qwen2", "gemma", "phi3", "gpt_neox", "cohere", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3"]
NAMES = {"float32": "F32", "int64": "I64", "bfloat16": "BF16"}


def headers(files: Files) -> dict:
    return {name: (NAMES[str(array.dtype)], array.shape) for name, array in files.tensors.items()}


@pytest.fixture
def counted(monkeypatch):
    """Bytes that were asked of files, in a list that tests may clear."""
    asked = []
    plain = SafetensorsFile.read_into

    def read_into(self, name, offset, buffer):
        asked.append(len(buffer.cast("B")))
        plain(self, name, offset, buffer)

    monkeypatch.setattr(SafetensorsFile, "read_into", read_into)
    return asked


def check_hosts(files, directory, axes, num_hosts, counted, min_piece_bytes):
    planned = load_plan(files.config, headers(files), axes, num_hosts=num_hosts, min_piece_bytes=min_piece_bytes)
    with HuggingFaceCheckpoint(files.write(directory)) as source:
        complete = {path: found for unit in source.units() for path, found in source.read(unit)}
        cover = {path: np.zeros(array.shape, int) for path, array in complete.items()}
        for host in planned.hosts:
            counted.clear()
            for path, arrays in read_ahead(source, host.parts, lambda _, found: found):
                for bounds, array in zip(host.parts[path], arrays, strict=True):
                    cover[path][slices_of(bounds)] += 1
                    wanted = np.ascontiguousarray(complete[path][slices_of(bounds)])
                    assert (array.dtype, array.tobytes()) == (wanted.dtype, wanted.tobytes()), path
            assert sum(counted) == host.bytes_read
        assert all((seen > 0).all() for seen in cover.values())
    return planned


QUICK = ("llama", "gpt_neox", "mixtral", "deepseek_v3")


@pytest.mark.matrix
@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_each_of_four_hosts_reads_its_own_bytes(family, tmp_path, counted, monkeypatch):
    monkeypatch.setattr(safetensors_files, "MIN_PIECE_BYTES", 1)
    files = read(family)
    planned = check_hosts(files, tmp_path, {"data": 2, "model": 4}, 4, counted, 1)
    for host in planned.hosts:
        # Two of eight devices: two of the four cuts, so half of what is cut, and what is whole.
        assert host.bytes_held < 0.8 * planned.num_bytes
        # Of a fused bias, cut by groups, it reads what lies between.
        assert host.bytes_held <= host.bytes_read <= 1.02 * host.bytes_held
    planned = check_hosts(files, tmp_path, {"model": 4}, 4, counted, 1)
    assert max(host.bytes_read for host in planned.hosts) < 0.6 * planned.num_bytes


def test_experts_of_others_are_not_read(tmp_path, counted, monkeypatch):
    monkeypatch.setattr(safetensors_files, "MIN_PIECE_BYTES", 1)
    files = one_by_one(read("mixtral"))
    planned = check_hosts(files, tmp_path, {"model": 4}, 4, counted, 1)
    stacks = [path for path in planned.hosts[1].parts if "experts" in path]
    assert {planned.hosts[1].parts[path][0][0] for path in stacks} == {(1, 2)}
    assert all(host.bytes_read == host.bytes_held for host in planned.hosts)


def test_rows_whose_pieces_are_too_small_are_read_whole(tmp_path, counted):
    files = read("llama")
    planned = check_hosts(files, tmp_path, {"model": 4}, 4, counted, safetensors_files.MIN_PIECE_BYTES)
    assert all(host.bytes_held < host.bytes_read < planned.num_bytes for host in planned.hosts)


def test_parts_side_by_side_are_read_at_once(tmp_path, counted):
    """A host with all the pieces of a row reads the row once."""
    files = read("llama")
    planned = check_hosts(files, tmp_path, {"model": 4}, 1, counted, safetensors_files.MIN_PIECE_BYTES)
    assert planned.hosts[0].bytes_read == planned.num_bytes


def test_quarter_of_a_file_and_what_is_whole(tmp_path, counted, monkeypatch):
    monkeypatch.setattr(safetensors_files, "MIN_PIECE_BYTES", 1)
    files = read("qwen3")  # its norms of heads, and four norms of width, are whole
    planned = check_hosts(files, tmp_path, {"model": 2}, 2, counted, 1)
    norms = sum(array.nbytes for name, array in files.tensors.items() if "norm" in name)
    for host in planned.hosts:
        assert host.bytes_read == (planned.num_bytes - norms) // 2 + norms


def test_only_the_owner_of_a_bad_value_sees_it(tmp_path):
    files = read("llama")
    files.tensors["model.layers.1.self_attn.q_proj.weight"][-1, 0] = np.nan
    planned = load_plan(files.config, headers(files), {"model": 4}, num_hosts=4, min_piece_bytes=1)
    with HuggingFaceCheckpoint(files.write(tmp_path)) as source:
        list(read_ahead(source, planned.hosts[0].parts, lambda _, found: None))
        size = files.tensors["model.layers.1.self_attn.q_proj.weight"].size // 4
        with pytest.raises(CheckpointError, match=rf"q_proj\.weight': 1 of {size} values are NaN"):
            list(read_ahead(source, planned.hosts[3].parts, lambda _, found: None))


def test_every_size_of_block_reads_the_same(tmp_path, monkeypatch):

    files = read("cohere")  # its heads are rearranged, within blocks and across them
    monkeypatch.setattr(safetensors_files, "MIN_PIECE_BYTES", 1)
    planned = load_plan(files.config, headers(files), {"model": 2}, num_hosts=2)
    with HuggingFaceCheckpoint(files.write(tmp_path)) as source:
        complete = {path: found for unit in source.units() for path, found in source.read(unit)}
        for block_bytes in (1, 200, 1000):
            monkeypatch.setattr(host_arrays, "BLOCK_BYTES", block_bytes)
            for path, arrays in read_ahead(source, planned.hosts[1].parts, lambda _, found: found):
                for bounds, array in zip(planned.hosts[1].parts[path], arrays, strict=True):
                    assert np.array_equal(array, complete[path][slices_of(bounds)])


def test_size_of_files_is_what_is_counted(tmp_path, counted):
    """The counter counts: a whole read is the whole file."""
    files = read("qwen2")
    with HuggingFaceCheckpoint(files.write(tmp_path)) as source:
        counted.clear()
        for unit in source.units():
            list(source.read(unit))
    assert sum(counted) == sum(4 * math.prod(array.shape) for array in files.tensors.values())


def test_large_parameters_are_split_where_that_reads_no_more(tmp_path):
    with HuggingFaceCheckpoint(read("llama").write(tmp_path)) as source:
        mlp = ("layers", "0", "mlp")
        for name, axis in (("gate_proj", 1), ("down_proj", 0)):
            path = (*mlp, name, "weight")
            shape = source._plan_of[path].shape
            step = shape[axis] // 4
            parts = [tuple((i * step, i * step + step) if a == axis else (0, size) for a, size in enumerate(shape))
                     for i in range(4)]  # fmt: skip
            size = 4 * math.prod(shape) // 4
            assert source.split(path, parts, 4 * size) == [parts]
            # Rows of gate_proj are a part's own; those of down_proj have a piece of every part.
            is_apart = name == "gate_proj"
            assert source.split(path, parts, 2 * size) == ([parts[:2], parts[2:]] if is_apart else [parts])
            assert source.split(path, parts, 1) == ([[part] for part in parts] if is_apart else [parts])
