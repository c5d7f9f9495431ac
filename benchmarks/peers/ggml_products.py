"""Products of ggml, llama.cpp's library for tensors, on a CPU, through its C interface.

The libraries lie in the folder `llama_cpp/lib` of an installed llama-cpp-python. pip compiles it for the machine's own
instruction set; for AVX2, in an environment of its own:

    CMAKE_ARGS="-DGGML_NATIVE=OFF" pip install --no-cache-dir --no-binary llama-cpp-python llama-cpp-python
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints_convert.gguf.blocks import TYPE_NAMES, TYPES, quantized_leaf
from jaxinfer.quantization import QuantizedArray

_NUMBERS = {name: number for number, name in TYPE_NAMES.items()}
_OVERHEAD = 2**20  # bytes of a context beside the numbers of its tensors
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


class _ContextOptions(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", _POINTER), ("no_alloc", ctypes.c_bool))


class _Plan(ctypes.Structure):
    """ggml_cplan."""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", _POINTER),
        ("n_threads", ctypes.c_int),
        ("threadpool", _POINTER),
        ("abort_callback", _POINTER),
        ("abort_callback_data", _POINTER),
        ("use_ref", ctypes.c_bool),
    )


class Ggml:
    """ggml's libraries of a folder."""

    def __init__(self, folder: Path):
        """Raises FileNotFoundError where the folder has none."""
        if not (folder / "libggml-cpu.so").exists():
            raise FileNotFoundError(
                f"{folder} has no libggml-cpu.so: give llama_cpp/lib of an installed llama-cpp-python"
            )
        self._base, self._cpu = (ctypes.CDLL(str(folder / f"libggml-{name}.so")) for name in ("base", "cpu"))
        self._declare()
        self._cpu.ggml_cpu_init()
        self.has_avx512 = bool(self._cpu.ggml_cpu_has_avx512())

    def _declare(self) -> None:
        base, cpu = self._base, self._cpu
        for function, result, arguments in (
            (base.ggml_init, _POINTER, [_ContextOptions]),
            (base.ggml_free, None, [_POINTER]),
            (base.ggml_new_tensor_2d, _POINTER, [_POINTER, ctypes.c_int, _LONG, _LONG]),
            (base.ggml_get_data, _POINTER, [_POINTER]),
            (base.ggml_nbytes, ctypes.c_size_t, [_POINTER]),
            (base.ggml_mul_mat, _POINTER, [_POINTER] * 3),
            (base.ggml_new_graph, _POINTER, [_POINTER]),
            (base.ggml_build_forward_expand, None, [_POINTER] * 2),
            (
                base.ggml_quantize_chunk,
                ctypes.c_size_t,
                [ctypes.c_int, _POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER],
            ),
            (cpu.ggml_graph_plan, _Plan, [_POINTER, ctypes.c_int, _POINTER]),
            (cpu.ggml_graph_compute, ctypes.c_int, [_POINTER, ctypes.POINTER(_Plan)]),
        ):
            function.restype, function.argtypes = result, arguments

    def quantize(self, weight: np.ndarray, kind: str) -> np.ndarray:
        """uint8 [N, bytes]: the outputs of a weight [K, N] as rows of ggml's type `kind`."""
        rows = np.ascontiguousarray(weight.T, np.float32)
        outputs, inputs = rows.shape
        of_type = TYPES[kind]
        stored = np.zeros((outputs, inputs // of_type.block_size * of_type.block_bytes), np.uint8)
        number = _NUMBERS[kind]
        self._base.ggml_quantize_chunk(number, rows.ctypes.data, stored.ctypes.data, 0, outputs, inputs, None)
        return stored

    def product(self, stored: np.ndarray, kind: str, x: np.ndarray, threads: int) -> "GgmlProduct":
        """Products of rows [T, K] with what `quantize` returned."""
        return GgmlProduct(self._base, self._cpu, stored, kind, x, threads)


class GgmlProduct:
    """A graph of one product; a call computes it. Weights are stored as in a GGUF file, without repacking."""

    def __init__(self, base: Any, cpu: Any, stored: np.ndarray, kind: str, x: np.ndarray, threads: int):
        rows, inputs = x.shape
        self._base, self._cpu, self._shape = base, cpu, (rows, len(stored))
        size = stored.nbytes + x.nbytes + 4 * rows * len(stored) + _OVERHEAD
        self._context = base.ggml_init(_ContextOptions(size, None, False))
        weight = base.ggml_new_tensor_2d(self._context, _NUMBERS[kind], inputs, len(stored))
        assert base.ggml_nbytes(weight) == stored.nbytes
        own = base.ggml_new_tensor_2d(self._context, _NUMBERS["F32"], inputs, rows)
        x = np.ascontiguousarray(x, np.float32)
        for tensor, array in ((weight, stored), (own, x)):
            ctypes.memmove(base.ggml_get_data(tensor), array.ctypes.data, array.nbytes)
        self._result = base.ggml_mul_mat(self._context, weight, own)
        self._graph = base.ggml_new_graph(self._context)
        base.ggml_build_forward_expand(self._graph, self._result)
        self._plan = cpu.ggml_graph_plan(self._graph, threads, None)
        self._work = np.zeros(max(self._plan.work_size, 1), np.uint8)
        self._plan.work_data = self._work.ctypes.data

    def __call__(self) -> None:
        if self._cpu.ggml_graph_compute(self._graph, ctypes.byref(self._plan)) != 0:
            raise RuntimeError("ggml could not compute a product")

    def result(self) -> np.ndarray:
        """float32 [T, N]."""
        rows, outputs = self._shape
        pointer = ctypes.cast(self._base.ggml_get_data(self._result), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, (rows, outputs)).copy()

    def free(self) -> None:
        self._base.ggml_free(self._context)


def to_quantized(stored: np.ndarray, kind: str, inputs: int) -> QuantizedArray:
    """The weight [K, N] of what `Ggml.quantize` returned."""
    with ThreadPoolExecutor(1) as executor:
        return quantized_leaf(
            TYPES[kind], lambda first, last: stored[first:last], len(stored), inputs, transpose=True, executor=executor
        )
