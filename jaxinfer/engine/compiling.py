"""Programs compiled before their first use, several at once."""

import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, update_wrapper
from typing import Any

import jax
from jax.stages import Lowered

from jaxinfer.engine.kept_programs import kept
from jaxinfer.engine.weights import ModelWeights
from pallas_kernels.platform import current_platform, num_cores

Report = Callable[[str], None]
MAX_JOBS = 8  # compilers of large models take gigabytes
UPDATE_WAIT = 0.1  # seconds until programs are compiled ahead again, where weights were being replaced

# Operations that XLA:GPU takes into a CUDA graph. With loop and conditionals inside a dispatch is one graph; otherwise
# the host reads predicates in each step.
_IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
# Of the compilers, for large programs.
# - XLA:CPU cuts a program into 32 LLVM modules, to compile them side by side; on two cores that takes a third longer
#   than one module (9.3 s and 6.8 s for `decode` of 30 layers), and several programs side by side use the cores anyway.
# - XLA:GPU would cut the sums of a product of few rows into parts, each a float32 array of all rows: further bytes and
#   launches, and sums whose order follows from the number of rows. And it would join products of the same rows whose
#   weights lie apart, and write these side by side in every step.
# - XLA:TPU gives the bfloat16 operands of a loop tiles of 16 rows on tpu7x, where arguments and products have tiles of
#   8: each dispatch copied all weights.
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"xla_cpu_parallel_codegen_split_count": 1},
    "gpu": {
        "xla_gpu_enable_command_buffer": _IN_GRAPHS,
        "xla_gpu_graph_min_graph_size": 1,  # a loop counts as one operation
        "xla_gpu_experimental_force_split_k": 1,
        "xla_gpu_dot_merger_threshold_mb": 0,
    },
    "tpu": {"xla_tpu_control_large_2nd_minor_layout_for_x16": False},
}


@cache
def compiler_options(platform: str) -> dict[str, Any]:
    """`COMPILER_OPTIONS` of a platform. Where it is that of this process, each is tried on a small program, and one
    that its compiler does not know is left out, with a warning: they come and go with releases."""
    options = COMPILER_OPTIONS.get(platform, {})
    if platform != jax.default_backend() or platform == "cpu":
        return options
    accepted = {}
    for name, value in options.items():
        try:
            jax.jit(lambda x: x + 1, compiler_options={name: value}).lower(0).compile()
            accepted[name] = value
        except jax.errors.JaxRuntimeError as error:
            warnings.warn(f"the compiler does not know {name}, programs are slower: {error}", stacklevel=2)
    return accepted


class LargeProgram:
    """`jax.jit(function, **arguments)` with the `compiler_options` of the platform that it is traced for.

    outputs: with it, the program is kept between processes (`kept_programs.kept`).
    """

    def __init__(self, function: Callable, outputs: Callable[..., Any] | None = None, **arguments: Any):
        update_wrapper(self, function)
        self._plain = jax.jit(function, **arguments)
        static = arguments.get("static_argnums", ())
        if outputs is not None:
            function = kept(function, (static,) if isinstance(static, int) else static, outputs)
        self._function, self._arguments = function, arguments
        self._jitted: dict[str, Any] = {}

    @property
    def _of_platform(self) -> Any:
        platform = current_platform()
        if platform not in self._jitted:
            options = compiler_options(platform)
            self._jitted[platform] = jax.jit(self._function, compiler_options=options, **self._arguments)
        return self._jitted[platform]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._of_platform(*arguments, **named)

    def lower(self, *arguments: Any, **named: Any) -> Lowered:
        return self._of_platform.lower(*arguments, **named)

    def eval_shape(self, *arguments: Any, **named: Any) -> Any:
        return self._plain.eval_shape(*arguments, **named)

    def _cache_size(self) -> int:
        """How many programs were compiled, as what `jax.jit` returns has it (`explanation.num_compiled`)."""
        return sum(jitted._cache_size() for jitted in self._jitted.values())


@dataclass(frozen=True)
class Program:
    """A program by name: `lower` traces it, and `run` calls it with nothing to do (or another program's does)."""

    name: str
    lower: Callable[[], Lowered]
    run: Callable[[], object] = lambda: None


def default_jobs() -> int:
    """As many as there are cores for this process, at most `MAX_JOBS`."""
    return min(num_cores(), MAX_JOBS)


def compile_programs(
    programs: Sequence[Program], num_jobs: int, report: Report = lambda name: None, *, runs: bool = False
) -> None:
    """Traces the programs in turn while `num_jobs` others are compiled: XLA does not hold the interpreter.

    JAX's call of a program then finds the result. `report` gets the name of each when it is compiled. With `runs` each
    is run once it and those before it are compiled: a first run takes long, and the next programs are traced meanwhile.
    An error of one ends all.
    """
    if num_jobs == 1:
        for program in programs:
            program.lower().compile()
            report(program.name)
            if runs:
                program.run()
        return
    futures: list[Future[object]] = []
    reported: set[Future[object]] = set()
    num_run = 0

    def advance() -> None:
        nonlocal num_run
        for program, future in zip(programs, futures, strict=False):
            if future.done() and future not in reported:
                future.result()
                reported.add(future)
                report(program.name)
        while runs and num_run < len(futures) and futures[num_run] in reported:
            programs[num_run].run()
            num_run += 1

    with ThreadPoolExecutor(num_jobs, "jaxinfer-compile") as pool:
        try:
            for program in programs:
                futures.append(pool.submit(program.lower().compile))
                advance()
            for _ in as_completed(list(futures)):
                advance()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def compile_ahead(programs: Sequence[Program], weights: Sequence[ModelWeights], is_stopped: Callable[[], bool]) -> None:
    """Compiles programs, one after another, until `is_stopped`; it waits while weights are being replaced."""

    def versions() -> list[tuple[int, bool]]:
        return [(own.version, own.is_whole) for own in weights]

    for program in programs:
        has_failed = False  # once may be of an update that was given up meanwhile
        while not is_stopped():
            before = versions()
            try:
                program.lower().compile()
                break
            except Exception:
                if has_failed and versions() == before and all(is_whole for _, is_whole in before):
                    raise
                has_failed = True
                time.sleep(UPDATE_WAIT)
        else:
            return
