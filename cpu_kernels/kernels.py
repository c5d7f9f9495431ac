"""Compiled kernels by name: registered with XLA, in a table that other kernels call, or called from Python.

To compile one takes Numba seconds, to load one from Numba's cache 40 ms, and to import Numba 0.4 s. The object code of
each is therefore kept where `keep_in` says, and linked by LLVM alone. Without such a place, or where an entry does not
fit, Numba compiles it. No kernel is linked whose symbols are not all there: LLVM would end the process.
"""

import atexit
import contextlib
import ctypes
import json
import os
import platform
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax

THREAD_SLOTS, PACKED_LOOPS = "jaxinfer_thread_slots", "jaxinfer_packed_loops"
_SHARED = {THREAD_SLOTS: 16 * 64, PACKED_LOOPS: 128 * 8}  # memory of the process that kernels share, bytes


class Compiled(Protocol):
    """A C function of `frames.compiled`: its name and address, and the object code that it is in, empty where that is
    not known."""

    @property
    def symbol(self) -> str: ...
    @property
    def address(self) -> int: ...
    @property
    def object_code(self) -> bytes: ...


class Store(Protocol):
    """A place where object code is kept, by keys. `read` gives only what was written under the key, undamaged."""

    def read(self, key: str) -> bytes | None: ...
    def write(self, key: str, content: bytes) -> None: ...
    def remove(self, key: str, why: str) -> None: ...


class _Loaded(NamedTuple):
    place: int | None  # in the table, None of a handler
    held: Any  # what the address is valid as long as


store: Store | None = None  # set by `keep_in`
_loaded: dict[str, _Loaded] = {}
_functions: dict[str, tuple[Callable[..., int], Any]] = {}
_expected: dict[str, subprocess.Popen[bytes]] = {}
_lock = threading.RLock()
# Its own: modules that a kernel is made of take it while they are imported, by any thread.
_shared_lock = threading.Lock()
_POLL_SECONDS, _PATIENCE_SECONDS = 0.05, 60  # compiling takes five seconds; one that hangs is not waited for


def keep_in(given: Store | None) -> None:
    """Object code is read from a store, and written to it, from here on; None: Numba is always asked."""
    global store
    store = given


def register(name: str, compile_kernel: Callable[[], Compiled]) -> str:
    """Registers a handler of XLA's FFI under a name, once a process; returns the name.

    compile_kernel: compiles it, where it is not kept; imports what it needs, so that Numba is imported there only.
    """
    with _lock:
        if name not in _loaded:
            address, held = _kept(name, None) or _expected_one(name) or _new(name, None, compile_kernel)
            _enter(name, None, address, held)
    return name


def place(name: str, index: int, compile_kernel: Callable[[], Compiled]) -> None:
    """Writes the address of a kernel to the table `PACKED_LOOPS`, once a process."""
    with _lock:
        if name not in _loaded:
            address, held = _kept(name, index) or _new(name, index, compile_kernel)
            _enter(name, index, address, held)


def function(name: str, num_arguments: int, compile_kernel: Callable[[], Compiled]) -> Callable[..., int]:
    """A kernel as a function of Python: of int64, among them addresses; other threads run meanwhile."""
    with _lock:
        if name not in _functions:
            address, held = _kept(name, None) or _new(name, None, compile_kernel)
            kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * num_arguments)
            _functions[name] = kind(address), held
        return _functions[name][0]


def is_kept(name: str) -> bool:
    """Tells whether a handler of this name is loaded, or would be without Numba, or another process compiles it."""
    with _lock:
        is_coming = name in _expected and _expected[name].poll() is None
        return name in _loaded or is_coming or (store is not None and store.read(_key(name, None)) is not None)


def expect(name: str, process: subprocess.Popen[bytes]) -> None:
    """Another process compiles a handler and writes it to the store; `register` waits for it while that runs, for a
    minute at most. It does not outlive this process."""
    with _lock:
        _expected[name] = process
        atexit.register(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def loaded() -> dict[str, int | None]:
    """The kernels of this process: their places in the table, None of handlers."""
    with _lock:
        return {name: kernel.place for name, kernel in _loaded.items()}


def load_kept(kernels: dict[str, int | None]) -> bool:
    """Makes kernels that `loaded` named in another process ready, without Numba; False if one is not kept."""
    with _lock:
        for name, index in kernels.items():
            if name in _loaded:
                continue
            if (entry := _kept(name, index)) is None:
                return False
            _enter(name, index, *entry)
    return True


def address_of_shared(name: str) -> int:
    """The address of zeroed memory that all kernels of the process share, under the name that they have for it."""
    with _shared_lock:  # a second block under the name would leave kernels with the first
        return ctypes.addressof(_shared(name))


@cache
def _shared(name: str) -> Any:
    import llvmlite.binding as llvm

    memory = ctypes.create_string_buffer(_SHARED[name])
    llvm.add_symbol(name, ctypes.addressof(memory))
    return memory


def _enter(name: str, index: int | None, address: int, held: Any) -> None:
    if index is None:
        function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu", api_version=1)
        held = held, function
    else:
        ctypes.c_int64.from_address(address_of_shared(PACKED_LOOPS) + 8 * index).value = address
    _loaded[name] = _Loaded(index, held)


def _new(name: str, index: int | None, compile_kernel: Callable[[], Compiled]) -> tuple[int, Any]:
    kernel = compile_kernel()
    needed = undefined_symbols(kernel.object_code)
    if store is not None and needed is not None and all(map(_has_symbol, needed)):
        facts = json.dumps({"symbol": kernel.symbol, "needs": needed})
        store.write(_key(name, index), facts.encode() + b"\n" + kernel.object_code)
    return kernel.address, kernel


def _kept(name: str, index: int | None) -> tuple[int, Any] | None:
    if store is None or (content := store.read(_key(name, index))) is None:
        return None
    try:
        line, code = content.split(b"\n", 1)
        facts = json.loads(line)
        if missing := [symbol for symbol in facts["needs"] if not _has_symbol(symbol)]:
            raise ValueError(f"needs {missing[0]}, which this process does not have")
        return _linked(facts["symbol"], code)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        store.remove(_key(name, index), f"of no use ({error})")
        return None


def _expected_one(name: str) -> tuple[int, Any] | None:
    """A handler of another process, once it is there; None if that ends without it."""
    process, patience = _expected.pop(name, None), time.monotonic() + _PATIENCE_SECONDS
    while process is not None:
        is_over = process.poll() is not None or time.monotonic() > patience
        if (entry := _kept(name, None)) is not None or is_over:
            return entry
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_SECONDS)
    return None


def _linked(symbol: str, code: bytes) -> tuple[int, Any]:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
    # An engine for each: functions of the same name in two kernels are not the same.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    if not (address := engine.get_function_address(symbol)):
        raise ValueError(f"no function {symbol}")
    return address, engine


def _has_symbol(name: str) -> bool:
    import llvmlite.binding as llvm

    if name in _SHARED:
        return bool(address_of_shared(name))
    return hasattr(ctypes.CDLL(None), name) or bool(llvm.address_of_symbol(name))


def undefined_symbols(code: bytes) -> list[str] | None:
    """Symbols that an object file in ELF of 64 bits, little-endian, takes from elsewhere; None of other formats."""
    if code[:6] != b"\x7fELF\x02\x01":
        return None
    (start,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, start + size * index) for index in range(count)]
    symbols = []
    for _, kind, _, _, offset, length, link, _, _, entry in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        names = sections[link][4]
        for symbol in range(offset + entry, offset + length, entry):  # the first is none
            name, _, _, section = struct.unpack_from("<IBBH", code, symbol)
            if section == 0:
                symbols.append(code[names + name : code.index(b"\0", names + name)].decode())
    return symbols


def _key(name: str, index: int | None) -> str:
    return json.dumps([name, index, *machine()])


@cache
def machine() -> tuple[str, ...]:
    """All that compiled code depends on beside its name: sources, compilers, the processor, and Numba's settings."""
    import llvmlite.binding as llvm

    packages = (f"{name} {metadata.version(name)}" for name in ("numba", "llvmlite", "jaxlib"))
    settings = (f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NUMBA_"))
    processor = platform.machine(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    return sources_digest(), *packages, *settings, *processor


@cache
def sources_digest() -> str:
    """The hash of this package's Python files."""
    digest = sha256()
    folder = Path(__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()
