"""Object code of kernels that is kept: linked without Numba, and never where it does not fit."""

import ctypes
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import pytest

pytest.importorskip("numba", reason="kernels for CPUs need Numba")

import llvmlite.binding as llvm
import numba
from numba import types

from cpu_kernels import adapter_matmul as adapter_kernel
from cpu_kernels import frames, kernels, memory, zeros
from cpu_kernels import quantized_matmul as matmul_kernel
from cpu_kernels.packed_matmul import kernel as packed_kernel
from cpu_kernels.packed_matmul import packing, table
from cpu_kernels.paged_attention import kernel as attention_kernel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="object code is kept in ELF only")

HANDLERS = {"copy": memory.copy_handler, "zeros": zeros.zeros_handler}
MATMULS = ("int8", "int4", "float32", "transposed_int8", "transposed_int4", "transposed_float32")
SLOW_HANDLERS = {
    "packed_matmul": packed_kernel.packed_matmul,
    "paged_attention": attention_kernel.attention_handler,
    "adapter_matmul": adapter_kernel.adapter_matmul,
    **{f"matmul_{name}": getattr(matmul_kernel, name) for name in MATMULS},
}
LOOPS = {name: lambda name=name: table.compile_loop(name) for name in table.PLACES}
FAST = {**HANDLERS, **{name: LOOPS[name] for name in ("multiply_nibbles_1", "prepare_scaled")}}
SLOW = {**SLOW_HANDLERS, **packing.KERNELS, **{name: loop for name, loop in LOOPS.items() if name not in FAST}}
LAST_PLACE = 127  # in the table of loops, whose first places are in use

FIND_MISSING = """
import sys
from cpu_kernels import kernels
print(*(name for name in sys.argv[1:] if not kernels._has_symbol(name)))
assert "numba" not in sys.modules
"""
USE_ZEROS = """
import sys
from pathlib import Path
import jax.numpy as jnp
import numpy as np
from jaxinfer.kept_files import KeptFiles
from pallas_kernels import cpu_calls
from cpu_kernels import kernels
kernels.keep_in(KeptFiles(Path(sys.argv[1]), 2**20))
is_ready = kernels.load_kept({"jaxinfer_zeros": None})
used = jnp.full((20_000,), 0x7F, jnp.uint8).block_until_ready()
del used
assert not np.asarray(cpu_calls.untouched_zeros((5_000,), jnp.dtype(jnp.float32))).view(np.uint8).any()
print(is_ready, "numba" in sys.modules)
"""


class _Slow:
    """A kernel whose compilation lets other threads run."""

    object_code, symbol = b"", "slow"

    def __init__(self, counts, address):
        counts.append(self)
        time.sleep(0.02)
        self.address = address


@pytest.mark.parametrize("kind", ["register", "place", "function", "shared"])
def test_threads_that_need_a_kernel_at_once_share_it(monkeypatch, kind):
    """The engine's thread and that of `compile_ahead` meet: XLA refuses a second handler under a name."""
    made, gate = [], threading.Barrier(8)
    pointer = ctypes.cast(ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda frame: 0), ctypes.c_void_p)
    monkeypatch.setattr(kernels, "_loaded", {})
    monkeypatch.setattr(kernels, "_functions", {})
    monkeypatch.setattr(kernels, "_SHARED", {**kernels._SHARED, "test_shared": 64})
    registered = []
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda name, *_, **__: registered.append(name))

    def call(_):
        gate.wait()
        if kind == "shared":
            return kernels.address_of_shared("test_shared")
        compile_kernel = partial(_Slow, made, pointer.value)
        if kind == "register":
            return kernels.register("test_slow", compile_kernel)
        if kind == "place":
            return kernels.place("test_slow", LAST_PLACE, compile_kernel)
        return kernels.function("test_slow", 1, compile_kernel)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(call, range(8)))
    assert all(one == found[0] for one in found)
    assert len(made) == (0 if kind == "shared" else 1)
    assert registered == (["test_slow"] if kind == "register" else [])


class Kept(dict):
    """A store, and why entries were removed."""

    def __init__(self):
        self.reasons = []

    def read(self, key):
        return self.get(key)

    def write(self, key, content):
        self[key] = content

    def remove(self, key, why):
        del self[key]
        self.reasons.append(why)


def add(a, b):
    return a + b


class Adder:
    """The kernel `add`, of one process after another."""

    def __init__(self):
        self.num_compiled = 0
        self._compile = frames.compiled(add, types.int64(types.int64, types.int64))

    def compile(self):
        self.num_compiled += 1
        return self._compile()

    def is_compiled(self):
        """Tells whether a new process compiles it."""
        before = self.num_compiled
        for cached in (kernels._functions, kernels._loaded):
            cached.clear()
        kernels.machine.cache_clear()
        assert kernels.function("test_add", 2, self.compile)(3, 4) == 7
        return self.num_compiled > before


@pytest.fixture
def kept(monkeypatch):
    """A store of its own, and a process that has no kernel yet."""
    before = kernels.store
    monkeypatch.setattr(kernels, "_functions", {})
    monkeypatch.setattr(kernels, "_loaded", {})
    store = Kept()
    kernels.keep_in(store)
    yield store
    kernels.keep_in(before)
    monkeypatch.undo()
    kernels.machine.cache_clear()


@pytest.fixture(scope="module")
def adder():
    return Adder()


def printed_by(program, *arguments):
    """The words that a process without anything of this one prints."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("compilers", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["fast", "slow"])
def test_kernels_need_only_symbols_of_a_process_without_numba(kept, compilers):
    needed = set()
    for name, compile_kernel in compilers.items():
        found = kernels.undefined_symbols(compile_kernel().object_code)
        assert found is not None, name
        needed.update(found)
    assert {"malloc", "memset"} & needed
    missing = printed_by(FIND_MISSING, *needed, "numba_gil_ensure", "no_such_function")
    assert missing == ["numba_gil_ensure", "no_such_function"]


def test_numba_has_symbols_that_others_lack():
    """Else the test above would notice nothing."""
    assert llvm.address_of_symbol("numba_gil_ensure")


def test_every_handler_and_loop_is_covered():
    modules = [module for name, module in sys.modules.items() if name.startswith("cpu_kernels.")]
    made = [value for module in modules for value in vars(module).values()]
    handlers = {value for value in made if getattr(value, "__qualname__", "") == "compiled.<locals>.get"}
    assert len(handlers) == len(HANDLERS) + len(SLOW_HANDLERS)
    assert set(LOOPS) | set(packing.KERNELS) < set(FAST) | set(SLOW)
    assert len(LOOPS) < LAST_PLACE


def test_a_kernel_is_compiled_once(kept, adder):
    assert adder.is_compiled()
    assert not adder.is_compiled()
    assert len(kept) == 1
    assert kept.reasons == []


def test_nothing_is_kept_without_a_store(kept, adder):
    kernels.keep_in(None)
    assert adder.is_compiled()
    assert adder.is_compiled()
    assert kept == {}


@frames.internal("int64(int64)")
def twice(a):
    return 2 * a


def add_twice(a, b):
    return a + twice(b)


def subtract_twice(a, b):
    return a - twice(b)


def test_kernels_share_what_they_call_with_functions_of_python(kept):
    pair = types.int64(types.int64, types.int64)
    for name, function, expected in (("test_add_twice", add_twice, 11), ("test_subtract_twice", subtract_twice, -5)):
        assert kernels.function(name, 2, frames.compiled(function, pair))(3, 4) == expected
    assert numba.njit(lambda a: twice(a) + 1)(4) == 9


class Beside:
    """A process that ends after some looks at it, and keeps a kernel before, if it is given one."""

    def __init__(self, store, key, content):
        self._store, self._key, self._content = store, key, content
        self.num_waits = 0

    def poll(self):
        return None if self.num_waits < 3 else 0

    def wait(self, seconds):
        self.num_waits += 1
        if self.num_waits == 2 and self._content is not None:
            self._store.write(self._key, self._content)
        raise subprocess.TimeoutExpired("compile", seconds)


@pytest.mark.parametrize("comes", [True, False])
def test_a_kernel_that_another_process_compiles_is_waited_for(kept, comes, monkeypatch):
    def compile_here():
        compiled_here.append(True)
        return zeros.zeros_handler()

    compiled_here = []
    monkeypatch.setattr(kernels.jax.ffi, "register_ffi_target", lambda *_, **__: None)  # XLA takes a name once
    assert not kernels.is_kept("test_beside")
    kernels.register("test_beside", compile_here)
    ((key, content),) = kept.items()
    for one in (compiled_here, kept, kernels._loaded):
        one.clear()
    monkeypatch.setattr(kernels.atexit, "register", lambda *_: None)
    process = Beside(kept, key, content if comes else None)
    kernels.expect("test_beside", process)
    kernels.register("test_beside", compile_here)
    assert (process.num_waits, bool(compiled_here)) == ((2, False) if comes else (3, True))
    assert kernels.is_kept("test_beside")


def test_a_process_that_hangs_is_not_waited_for(kept, monkeypatch):
    monkeypatch.setattr(kernels, "_PATIENCE_SECONDS", 0)
    monkeypatch.setattr(kernels.jax.ffi, "register_ffi_target", lambda *_, **__: None)
    monkeypatch.setattr(kernels.atexit, "register", lambda *_: None)
    process = Beside(kept, None, None)
    process.poll = lambda: None
    kernels.expect("test_hangs", process)
    assert kernels.is_kept("test_hangs")  # it is coming
    assert kernels.register("test_hangs", zeros.zeros_handler) == "test_hangs"
    assert process.num_waits <= 1


def test_a_process_that_is_expected_ends_with_this_one(monkeypatch):
    registered = []
    monkeypatch.setattr(kernels.atexit, "register", lambda *entry: registered.append(entry))
    monkeypatch.setattr(kernels, "_expected", {})
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(20)"])
    kernels.expect("test_ends", process)
    ((end, *arguments),) = registered
    for _ in range(2):  # as often as it was expected
        end(*arguments)
    assert process.returncode not in (None, 0)


def with_facts(content, **changed):
    line, code = content.split(b"\n", 1)
    return json.dumps({**json.loads(line), **changed}).encode() + b"\n" + code


DAMAGES = {
    "empty": (lambda content: b"", "not enough values"),
    "no code": (lambda content: content.split(b"\n")[0], "not enough values"),
    "no facts": (lambda content: b"facts\n" + content.split(b"\n", 1)[1], "Expecting value"),
    "a list": (lambda content: b"[]\n" + content.split(b"\n", 1)[1], "list indices"),
    # The code itself needs no symbol: to link one that does would end this process.
    "needs a symbol": (lambda content: with_facts(content, needs=["no_such_function"]), "needs no_such_function"),
    "another name": (lambda content: with_facts(content, symbol="no_such_function"), "no function no_such_function"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_content_of_no_use_is_removed_and_compiled_again(kept, adder, damage, reason):
    assert adder.is_compiled()
    ((key, content),) = kept.items()
    kept[key] = damage(content)
    assert adder.is_compiled()
    (found,) = kept.reasons
    assert reason in found
    assert list(kept) == [key]
    assert not adder.is_compiled()


def plant_processor(monkeypatch):
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "another")


def plant_features(monkeypatch):
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: llvm.FeatureMap({"another": True}))


def plant_setting(monkeypatch):
    monkeypatch.setenv("NUMBA_ANOTHER", "1")


def plant_version(monkeypatch):
    version = kernels.metadata.version
    monkeypatch.setattr(kernels.metadata, "version", lambda name: "99" if name == "llvmlite" else version(name))


def plant_sources(monkeypatch):
    monkeypatch.setattr(kernels, "sources_digest", lambda: "of other sources")


PLANTS = (plant_processor, plant_features, plant_setting, plant_version, plant_sources)


@pytest.mark.parametrize("plant", PLANTS)
def test_a_kernel_of_another_kind_of_process_is_not_linked(kept, adder, plant):
    assert adder.is_compiled()
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        assert adder.is_compiled()
        assert not adder.is_compiled()
    assert not adder.is_compiled()
    assert len(kept) == 2


def test_other_sources_have_another_digest(monkeypatch, tmp_path):
    source = tmp_path / "one" / "kernel.py"
    source.parent.mkdir()
    monkeypatch.setattr(kernels, "__file__", str(source))
    digests = []
    for text in ("x = 1", "x = 2", "x = 1"):
        source.write_text(text)
        digests.append(kernels.sources_digest.__wrapped__())
    assert digests[0] == digests[2] != digests[1]
    source.rename(source.with_name("other.py"))
    assert kernels.sources_digest.__wrapped__() not in digests


def test_loops_are_written_to_the_table_by_name_and_place(kept, adder):
    """As `loaded` of one process has them, and `load_kept` of the next."""
    address = kernels.address_of_shared(kernels.PACKED_LOOPS) + 8 * LAST_PLACE
    place = ctypes.c_int64.from_address(address)
    kernels.place("test_loop", LAST_PLACE, adder.compile)
    assert kernels.loaded() == {"test_loop": LAST_PLACE}
    kernels._loaded.clear()
    place.value = 0
    assert kernels.load_kept({"test_loop": LAST_PLACE})
    assert place.value
    place.value = 0
    assert kernels.load_kept({"test_loop": LAST_PLACE})
    assert place.value == 0  # it is loaded already
    assert not kernels.load_kept({"test_loop": LAST_PLACE, "test_none": LAST_PLACE})
    kernels._loaded.clear()
    assert not kernels.load_kept({"test_loop": LAST_PLACE - 1})


@pytest.mark.slow
def test_processes_that_start_at_once_share_a_folder_and_later_ones_need_no_numba(tmp_path):
    command = [sys.executable, "-c", USE_ZEROS, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in running:
        assert process.communicate(timeout=120)[0].split() in (["False", "True"], ["True", "False"])
        assert process.returncode == 0
    assert [path.suffix for path in tmp_path.iterdir()] == [".kept"]
    assert printed_by(USE_ZEROS, str(tmp_path)) == ["True", "False"]


@pytest.mark.slow
def test_a_damaged_file_is_compiled_again(tmp_path):
    assert printed_by(USE_ZEROS, str(tmp_path)) == ["False", "True"]
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    assert printed_by(USE_ZEROS, str(tmp_path)) == ["False", "True"]
    assert len(path.read_bytes()) == len(content)
    assert printed_by(USE_ZEROS, str(tmp_path)) == ["True", "False"]


OBJECT_FILES = {
    "empty": b"",
    "Mach-O": b"\xcf\xfa\xed\xfe" + bytes(100),
    "COFF": b"\x64\x86" + bytes(100),
    "32 bits": b"\x7fELF\x01\x01" + bytes(100),
    "big-endian": b"\x7fELF\x02\x02" + bytes(100),
}


@pytest.mark.parametrize("code", OBJECT_FILES.values(), ids=OBJECT_FILES)
def test_symbols_of_other_formats_are_unknown(kept, adder, code):
    assert kernels.undefined_symbols(code) is None
    kernel = adder.compile()
    kernel.object_code = code
    assert kernels.function("test_unknown", 2, lambda: kernel)(3, 4) == 7
    assert kept == {}  # it runs, and is not kept


def test_symbols_of_an_object_file(kept):
    assert kernels.undefined_symbols(zeros.zeros_handler().object_code) == ["memset", "madvise"]
    assert kernels.undefined_symbols(memory.copy_handler().object_code) == []
