"""PyTorch's products of the shapes of Llama 3 8B, as rows in JSON lines; without JAX.

A CUDA graph has the calls of one measurement, over copies of the weights that exceed the chip's cache.
"""

import json
import statistics
import sys
import time

import torch  # pyright: ignore[reportMissingImports]

from benchmarks.on_chip import child

# Inputs and outputs of the products of a layer, by name.
LAYER = {
    "q": (4096, 4096),
    "k": (4096, 1024),
    "v": (4096, 1024),
    "o": (4096, 4096),
    "gate": (4096, 14336),
    "up": (4096, 14336),
    "down": (14336, 4096),
}
HEAD = (4096, 128256)
NUM_LAYERS = 32
MIN_BYTES = 2**28  # of the copies of a weight: several times the cache
ROWS, REPEATS = (1, 64), 20


def main() -> None:
    child.end_with_parent()
    is_tiny, device = "--tiny" in sys.argv, "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not is_tiny:
        sys.exit("torch finds no CUDA device")
    shrink = 64 if is_tiny else 1
    layer = {name: tuple(size // shrink for size in shape) for name, shape in LAYER.items()}
    head = tuple(size // shrink for size in HEAD)
    num_layers, min_bytes = (2, 2**16) if is_tiny else (NUM_LAYERS, MIN_BYTES)
    for rows in ROWS:
        for name, shape in {"o": layer["o"], "k": layer["k"], "gate": layer["gate"], "down": layer["down"]}.items():
            copies = -(-min_bytes // (2 * shape[0] * shape[1]))
            weights = [random(device, *shape) for _ in range(copies)]
            x = random(device, rows, shape[0])
            seconds = measure(lambda x=x, weights=weights: [x @ weight for weight in weights]) / copies
            num_bytes = 2 * (shape[0] * shape[1] + rows * sum(shape))
            show(f"torch {rows} rows {name} {shape[0]} x {shape[1]}", seconds, num_bytes)
            del weights
    layers = [{name: random(device, *shape) for name, shape in layer.items()} for _ in range(num_layers)]
    last = random(device, *head)
    num_bytes = 2 * (num_layers * sum(a * b for a, b in layer.values()) + head[0] * head[1])
    for rows in ROWS:
        x = random(device, rows, head[0])
        seconds = measure(lambda x=x: step(x, layers, last))
        show(f"torch step's products, {rows} rows", seconds, num_bytes)


def step(x: torch.Tensor, layers: list[dict[str, torch.Tensor]], head: torch.Tensor) -> torch.Tensor:
    """The products of a decode step, each fed by the one before, without attention and norms."""
    for weights in layers:
        q = x @ weights["q"]
        k, v = x @ weights["k"], x @ weights["v"]
        q[:, : k.shape[1]] += k * v
        x = torch.tanh(q @ weights["o"])
        x = torch.tanh(((x @ weights["gate"]) * (x @ weights["up"])) @ weights["down"])
    return x @ head


def random(device: str, *shape: int) -> torch.Tensor:
    """A random array in bfloat16 whose products stay small."""
    return torch.randn(*shape, device=device, dtype=torch.bfloat16) * shape[0] ** -0.5


def measure(call) -> float:
    """Seconds of a call, the median of its replays as a CUDA graph; on a CPU of calls."""
    if not torch.cuda.is_available():
        return statistics.median(timed(call) for _ in range(REPEATS))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # cuBLAS makes its workspaces before the capture
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    for _ in range(3):
        graph.replay()
    spent = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        spent.append(begin.elapsed_time(end) / 1e3)
    del kept
    return statistics.median(spent)


def timed(call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def show(case: str, seconds: float, num_bytes: int) -> None:
    """Prints a row."""
    print(json.dumps({"case": case, "value": seconds * 1e6, "unit": "us", "num_bytes": num_bytes}), flush=True)


if __name__ == "__main__":
    main()
