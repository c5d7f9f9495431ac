"""Host memory of reading a real size: the shapes of Llama-3.2-1B, 2.3 GiB in bfloat16, half a GiB of it one tensor."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
HEADERS = Path(__file__).parent / "headers" / "llama-3.2-1b.json"
MODEL_BYTES = 2 * 1_235_814_400
LIMIT = 2**29

MEASURED = """
import json, sys, threading, time
import jax, numpy as np, psutil
import checkpoints_convert
process = psutil.Process()
jax.device_put(np.zeros(4)).block_until_ready()
before = peak = process.memory_info().rss
done = False
def watch():
    global peak
    while not done:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.002)
watcher = threading.Thread(target=watch)
watcher.start()
start = time.monotonic()
if sys.argv[1] == "load":
    params = jax.block_until_ready(checkpoints_convert.load(sys.argv[2])[1])
else:
    checkpoints_convert.convert(sys.argv[2], sys.argv[3], progress=None)
seconds = time.monotonic() - start
done = True
watcher.join()
print(json.dumps({"bytes": peak - before, "seconds": seconds}))
"""


@pytest.fixture(scope="module")
def checkpoint_1b(tmp_path_factory):
    """Written tensor by tensor, with the same few MiB of weights again and again."""
    directory = tmp_path_factory.mktemp("1b")
    data = json.loads(HEADERS.read_text())
    (directory / "config.json").write_text(json.dumps(data["config"]))
    header, position = {}, 0
    for name, (dtype, shape) in data["tensors"].items():
        for layer in range(data["config"]["num_hidden_layers"]) if "{layer}" in name else [""]:
            size = 2 * math.prod(shape)
            header[name.format(layer=layer)] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [position, position + size],
            }
            position += size
    raw = json.dumps(header).encode()
    block = np.random.default_rng(0).integers(0, 0x4000, 2**21, dtype=np.uint16).tobytes()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for start in range(0, position, len(block)):
            file.write(block[: position - start])
    return directory


def measured(*arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_reading_holds_little_beside_the_model(checkpoint_1b, capsys):
    found = measured("load", checkpoint_1b)
    native = checkpoint_1b.parent / "native-1b"
    converting = measured("convert", checkpoint_1b, native)
    native_found = measured("load", native)
    with capsys.disabled():
        for name, figures, model in (
            ("load, Hugging Face", found, MODEL_BYTES),
            ("load, native", native_found, MODEL_BYTES),
            ("convert", converting, 0),
        ):
            print(
                f"\n{name}: {(figures['bytes'] - model) / 2**30:.2f} GiB beside the model, {figures['seconds']:.1f} s"
            )
    assert found["bytes"] - MODEL_BYTES < LIMIT
    assert native_found["bytes"] - MODEL_BYTES < LIMIT
    assert converting["bytes"] < MODEL_BYTES
