"""A 70B model planned from its headers, for 16 TPU chips of four hosts and for 8 GPUs of one.

With --slow its 80 layers; without, the same plan of fewer layers.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from checkpoints_convert import load_plan
from checkpoints_convert.checkpoint import size_of, slices_of

HEADERS = Path(__file__).parent / "headers" / "llama-3-70b.json"
NUM_BYTES = 2 * 70_553_706_496
ALL_LAYERS = 80
V5E_BYTES, GPU_BYTES = 16 * 10**9, 80 * 10**9


@pytest.fixture(scope="module", params=[4, pytest.param(ALL_LAYERS, marks=pytest.mark.slow)])
def num_layers(request):
    return request.param


@pytest.fixture(scope="module")
def num_bytes(num_layers):
    ends = 2 * (2 * 128256 + 1) * 8192  # embedding, head and the last norm
    per_layer, rest = divmod(NUM_BYTES - ends, ALL_LAYERS)
    assert rest == 0
    return ends + num_layers * per_layer


@pytest.fixture(scope="module")
def llama(num_layers):
    data = json.loads(HEADERS.read_text())
    data["config"]["num_hidden_layers"] = num_layers
    layers = range(num_layers)
    headers = {
        name.format(layer=layer): (dtype, tuple(shape))
        for name, (dtype, shape) in data["tensors"].items()
        for layer in (layers if "{layer}" in name else [""])
    }
    return data["config"], headers


@pytest.fixture(scope="module")
def on_16_chips(llama):
    return load_plan(*llama, {"model": 16}, num_hosts=4)


def times_owned(planned, path, shape):
    """How many hosts hold each cell of a parameter, on a grid as fine as the cuts."""
    hosts = planned.hosts
    edges = [sorted({edge for host in hosts for bounds in host.parts[path] for edge in bounds[axis]})
             for axis in range(len(shape))]  # fmt: skip
    assert all((found[0], found[-1]) == (0, size) for found, size in zip(edges, shape, strict=True))
    count = np.zeros([len(found) - 1 for found in edges], int)
    for host in hosts:
        for bounds in host.parts[path]:
            count[
                tuple(slice(*(found.index(edge) for edge in pair)) for found, pair in zip(edges, bounds, strict=True))
            ] += 1
    return count


def test_16_chips_of_four_hosts(on_16_chips, num_layers, num_bytes):
    planned = on_16_chips
    assert planned.num_bytes == num_bytes
    # 8 key-value heads are read whole for 16 devices; each keeps the one that its query heads see.
    kv = 2 * num_layers * 2 * 8192 * 1024
    norms = (2 * num_layers + 1) * 8192 * 2
    for host in planned.hosts:
        cut = (num_bytes - kv - norms) // 16
        assert set(host.device_bytes) == {cut + kv // 8 + norms}
        assert max(host.device_bytes) < V5E_BYTES * 0.6
        # Each byte that the host needs is read once, and no other.
        assert host.bytes_read == host.bytes_held == 4 * cut + kv + norms
        assert host.peak_bytes < 0.5 * 2**30
    for path, parts in planned.hosts[0].parts.items():
        shape = tuple(max(pair[1] for host in planned.hosts for bounds in host.parts[path] for pair in [bounds[axis]])
                      for axis in range(len(parts[0])))  # fmt: skip
        count = times_owned(planned, path, shape)
        is_whole = "norm" in ".".join(path) or {"k_proj", "v_proj"} & set(path)
        assert (count == (4 if is_whole else 1)).all(), path


def test_8_gpus_of_one_host(llama, num_layers, num_bytes):
    planned = load_plan(*llama, {"model": 8})
    (host,) = planned.hosts
    assert host.bytes_read == host.bytes_held == num_bytes
    norms = (2 * num_layers + 1) * 8192 * 2
    assert set(host.device_bytes) == {(num_bytes - norms) // 8 + norms}
    assert max(host.device_bytes) < GPU_BYTES
    for path, parts in host.parts.items():
        assert sum(map(size_of, parts)) == math.prod(max(pair[1] for pair in axis) for axis in zip(*parts, strict=True))
        assert len(parts) == (1 if "norm" in ".".join(path) else 8)
    # The embedding, 1.96 GiB, is read part by part; parts of down_proj, 448 MiB, share their rows.
    assert host.peak_bytes < 0.6 * 2**30


def test_replicas_cost_no_reading(llama, num_layers, num_bytes):
    planned = load_plan(*llama, {"data": 2, "model": 8}, num_hosts=2)
    assert [host.bytes_read for host in planned.hosts] == [num_bytes, num_bytes]
    if num_layers == ALL_LAYERS:
        assert max(planned.hosts[0].device_bytes) > V5E_BYTES  # eight chips are too few


def test_a_store_reads_rows_whole(llama, on_16_chips, num_layers):
    near = on_16_chips.hosts[0]
    far = load_plan(*llama, {"model": 16}, num_hosts=4, min_piece_bytes=2**22).hosts[0]
    assert near.parts == far.parts
    # Pieces of the rows of o_proj and down_proj are 4 and 14 KiB.
    more = num_layers * 2 * 8192 * (8192 + 28672) * 3 // 4
    assert far.bytes_read == near.bytes_read + more


@pytest.mark.parametrize(
    ("axes", "num_hosts", "message"),
    [
        ({"model": 8}, 3, "8 devices of the mesh .* cannot be shared by 3 hosts"),
        ({"model": 8}, 0, "cannot be shared by 0 hosts"),
    ],
)
def test_what_cannot_be_cut_or_shared(llama, axes, num_hosts, message):
    with pytest.raises(ValueError, match=message):
        load_plan(*llama, axes, num_hosts=num_hosts)


def test_parts_slice_arrays(on_16_chips):
    down = on_16_chips.hosts[2].parts["layers", "0", "mlp", "down_proj", "weight"]
    assert down == tuple(((first, first + 1792), (0, 8192)) for first in range(2 * 7168, 3 * 7168, 1792))
    assert slices_of(down[0]) == (slice(14336, 16128), slice(0, 8192))
