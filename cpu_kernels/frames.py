"""How a kernel reads the call frame of XLA's FFI (xla/ffi/api/c_api.h), and its compilation.

A kernel takes the frame's address, and returns 0:

    @compiled
    def handler(frame):
        if answers_metadata(frame):
            return 0
        ...
        return 0
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import create_new_module_pass_manager
from numba import carray, njit, types  # pyright: ignore[reportPrivateImportUsage]
from numba.core import ccallback, codegen, sigutils
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

from cpu_kernels import kernels

HANDLER = types.int64(types.int64)
# Byte offsets of XLA_FFI_CallFrame, XLA_FFI_Buffer, XLA_FFI_Scalar and XLA_FFI_Metadata.
EXTENSION, API, NUM_OPERANDS, OPERANDS, RESULTS, ATTRIBUTES = 8, 16, 56, 72, 112, 160
BUFFER_DATA, BUFFER_DIMS, SCALAR_VALUE = 24, 40, 8
EXTENSION_TYPE, EXTENSION_METADATA = 8, 24
METADATA_TYPE = 1
METADATA_VERSION, METADATA_TRAITS, API_VERSION = 24, 32, 32


def internal(signature: str | None = None, *, is_inlined: bool = False, suffix: str = "") -> Any:
    """`njit` of a function that kernels call: without a way in from Python, which takes as long to compile.

    With a signature it is compiled once, where otherwise each constant would be a type of its own.

    suffix: of the function's name, where several kernels have a function of the same name each. Kernels that different
    processes wrote to Numba's cache would otherwise call each other's.
    """
    options: dict[str, Any] = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    options |= {"forceinline": True} if is_inlined else {}

    def named(function: Any) -> Any:
        function.__qualname__ += suffix
        dispatcher: Any = njit(**options)(function)
        if signature is not None:
            dispatcher.get_call_template = partial(_compiled_once, dispatcher, dispatcher.get_call_template, signature)
        return dispatcher

    return named


def inlined(function: Any, *, suffix: str = "") -> Any:
    """A function that becomes part of the functions that call it. One that is called is optimized again with each of
    its callers, and theirs. `suffix` is `internal`'s."""
    function.__qualname__ += suffix
    return njit(inline="always", error_model="numpy")(function)


def _compiled_once(dispatcher: Any, get_call_template: Any, signature: str, arguments: Any, keywords: Any) -> Any:
    """`get_call_template` of a dispatcher that compiles one signature, on the first call from a kernel."""
    if not dispatcher.overloads:
        dispatcher.compile(signature)
        dispatcher.disable_compile()
    return get_call_template(arguments, keywords)


def _as_pointer(context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


as_pointer: Any = intrinsic(_as_pointer)


@internal("int64(int64)")
def load_word(address):
    """The int64 at an address."""
    return carray(as_pointer(address), (1,), np.int64)[0]


@internal("boolean(int64)")
def answers_metadata(frame):
    """Tells whether this is the call in which XLA asks for a handler's version; answers it with XLA's own."""
    extension = load_word(frame + EXTENSION)
    if extension == 0 or load_word(extension + EXTENSION_TYPE) & 0xFFFFFFFF != METADATA_TYPE:
        return False
    metadata = load_word(extension + EXTENSION_METADATA)
    versions = carray(as_pointer(load_word(frame + API) + API_VERSION), (2,), np.int32)
    answer = carray(as_pointer(metadata + METADATA_VERSION), (2,), np.int32)
    answer[0], answer[1] = versions[0], versions[1]
    carray(as_pointer(metadata + METADATA_TRAITS), (1,), np.uint32)[0] = 0
    return True


@internal("int64(int64, int64)")
def _entry(start, index):
    """The pointer at an index of the array that the word at `start` points to."""
    return load_word(load_word(start) + 8 * index)


@internal("int64(int64)")
def num_operands(frame):
    return load_word(frame + NUM_OPERANDS)


@internal("int64(int64, int64)")
def operand(frame, index):
    """The address of an operand's data."""
    return load_word(_entry(frame + OPERANDS, index) + BUFFER_DATA)


@internal("int64(int64, int64, int64)")
def operand_size(frame, index, axis):
    """The length of an axis of an operand."""
    return _entry(_entry(frame + OPERANDS, index) + BUFFER_DIMS, axis)


@internal("int64(int64, int64)")
def result(frame, index):
    """The address of a result's data."""
    return load_word(_entry(frame + RESULTS, index) + BUFFER_DATA)


@internal("int64(int64, int64, int64)")
def result_size(frame, index, axis):
    """The length of an axis of a result."""
    return _entry(_entry(frame + RESULTS, index) + BUFFER_DIMS, axis)


@internal("int64(int64, int64)")
def attribute(frame, index):
    """An int64 attribute, by the alphabetical order of names."""
    return load_word(load_word(_entry(frame + ATTRIBUTES, index) + SCALAR_VALUE))


@internal("float32[::1](int64, int64)")
def floats(address, size):
    """float32 numbers at an address, as an array."""
    return carray(as_pointer(address), (size,), np.float32)


@internal("int32[::1](int64, int64)")
def integers(address, size):
    """int32 numbers at an address, as an array."""
    return carray(as_pointer(address), (size,), np.int32)


# Numba's classes have no types, and the parts that are changed here are its own.
_CFunc: Any = ccallback.CFunc
_CFuncCompiler: Any = vars(ccallback)["_CFuncCompiler"]


class _Compiler(_CFuncCompiler):
    def _customize_flags(self, flags: Any) -> Any:
        flags = super()._customize_flags(flags)
        flags.no_cfunc_wrapper = True  # `Kernel` adds its own
        return flags


class _OnlyLinked(codegen.JITCodeLibrary):
    """The LLVM code of a function that a kernel calls, for linking alone.

    Numba optimizes and compiles each function by itself, with all that it calls, though only the kernel's own library
    is used: half of the time that a large kernel took.
    """

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0  # Python never calls it

    @property
    def codegen(self) -> Any:
        return _WithoutEnvironments(self._codegen)


class _WithoutEnvironments:
    """A code generator for libraries that have no machine code whose environments could be set."""

    def __init__(self, generator: Any):
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def set_env(self, name: str, environment: Any) -> None:
        pass


class _Whole(codegen.JITCodeLibrary):
    """A kernel with all that it calls, less what has become part of its callers."""

    def _optimize_final_module(self) -> None:
        super()._optimize_final_module()
        _, builder = self._codegen._module_pass_manager()
        passes = create_new_module_pass_manager()
        passes.add_global_dead_code_eliminate_pass()
        passes.run(self._final_module, builder)


@contextlib.contextmanager
def _only_linked_except(name: str, generator: Any) -> Iterator[None]:
    """Libraries that are created in the block are `_OnlyLinked`, but for the kernel's own."""
    generator._library_class = lambda owner, own: (_Whole if own == name else _OnlyLinked)(owner, own)
    try:
        yield
    finally:
        del generator._library_class  # that of the class


class Kernel(_CFunc):
    """A C function that Numba compiled or read from its cache, with its object code (`kernels.Compiled`).

    Numba's own would tell Python of errors, which kernels do not have, and so need Numba's runtime.
    """

    def __init__(self, function: Any, signature: Any):
        super().__init__(function, sigutils.normalize_signature(signature), {}, {})
        self._compiler = _Compiler(function, self._targetdescr, {}, {}, Compiler)

    @global_compiler_lock
    def compile(self) -> None:
        context = self._targetdescr.target_context
        overload = self._cache.load_overload(self._sig, context)
        if overload is None:
            with _only_linked_except(self._pyfunc.__qualname__, context.codegen()):
                overload = self._compile_uncached()
            _add_c_function(context, overload)
            self._cache.save_overload(self._sig, overload)
        self._library = overload.library
        self.symbol = self._wrapper_name = overload.fndesc.llvm_cfunc_wrapper_name
        self._wrapper_address = self._library.get_pointer_to_function(self.symbol)
        # Of one from Numba's cache the engine has taken it.
        self.object_code = bytes(self._library._compiled_object or b"")


def _add_c_function(context: Any, compiled_function: Any) -> None:
    """Adds a C function, of int64 arguments and result, that calls a function which Numba compiled."""
    described, module = compiled_function.fndesc, context.create_module("c_function")
    inner = context.declare_function(module, described)
    kinds = [context.get_value_type(kind) for kind in described.argtypes]
    kind = ir.FunctionType(context.get_value_type(described.restype), kinds)
    function = ir.Function(module, kind, described.llvm_cfunc_wrapper_name)
    builder = ir.IRBuilder(function.append_basic_block())
    call = context.call_conv.call_function
    _, answer = call(builder, inner, described.restype, described.argtypes, function.args)
    builder.ret(answer)
    compiled_function.library.add_ir_module(module)


def compiled(function: Any, signature: Any = HANDLER) -> Callable[[], Kernel]:
    """A kernel, or with another signature a function that kernels call by its address: when the result is called, it is
    compiled, or read from Numba's cache where `kernels` keeps none.

    Numba compares the kernel's own file with what is cached; the hash of this package's files, in the kernel's name,
    covers what it imports.
    """
    function.__qualname__ += f"_{kernels.sources_digest()[:8]}"

    def get() -> Kernel:
        kernel = Kernel(function, signature)
        if kernels.store is None:
            with contextlib.suppress(RuntimeError):  # no folder that Numba may write
                kernel.enable_caching()
        kernel.compile()
        return kernel

    return get
