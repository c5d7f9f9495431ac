"""Programs compiled before their first use, several at once."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

import jax
from jax.stages import Lowered

from jaxinfer.engine.kept_programs import kept
from pallas_kernels.platform import current_platform, num_cores

Report = Callable[[str], None]
MAX_JOBS = 8  # compilers of large models take gigabytes

# Of the compilers, for large programs. XLA:GPU would join products of the same rows (queries, keys, values), and for
# that write their weights side by side in every step: three times the bytes of reading them. XLA:CPU cuts a program
# into 32 LLVM modules, to compile them side by side; on two cores that takes a third longer than one module (9.3 s and
# 6.8 s for `decode` of 30 layers), and several programs side by side use the cores anyway. XLA:TPU gives the bfloat16
# operands of a loop tiles of 16 rows on tpu7x, where arguments and products have tiles of 8: each dispatch copied all
# weights.
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"xla_cpu_parallel_codegen_split_count": 1},
    "gpu": {"xla_gpu_dot_merger_threshold_mb": 0},
    "tpu": {"xla_tpu_control_large_2nd_minor_layout_for_x16": False},
}
# For uniform passes as well. XLA:GPU cuts the sums of a product with few columns, to give all multiprocessors work, and
# writes a float32 array of all rows for each part: on an H100 a sixth of a layer's bytes in a pass of 256 rows, which
# fill the multiprocessors anyway. Without parts the order of a sum does not follow from the shape either.
UNIFORM_OPTIONS: dict[str, dict[str, Any]] = {
    # An experimental option of this release's compiler: a later one may refuse it.
    "gpu": {"xla_gpu_experimental_force_split_k": 1} if jax.__version_info__ < (0, 11) else {}
}


class LargeProgram:
    """`jax.jit(function, **arguments)` with `COMPILER_OPTIONS` of the platform that it is traced for, and with
    `UNIFORM_OPTIONS` where `is_uniform` of a call's arguments is true.

    outputs: with it, the program is kept between processes (`kept_programs.kept`).
    """

    def __init__(
        self,
        function: Callable,
        is_uniform: Callable[..., bool] = lambda *_, **__: False,
        outputs: Callable[..., Any] | None = None,
        **arguments: Any,
    ):
        update_wrapper(self, function)
        self._is_uniform = is_uniform
        self._plain = jax.jit(function, **arguments)
        static = arguments.get("static_argnums", ())
        if outputs is not None:
            function = kept(function, (static,) if isinstance(static, int) else static, outputs)
        plain = {platform: {**options} for platform, options in COMPILER_OPTIONS.items()}
        kinds = {False: plain, True: {name: {**plain[name], **UNIFORM_OPTIONS.get(name, {})} for name in plain}}
        self._jitted = {
            (platform, kind): jax.jit(function, compiler_options=options, **arguments)
            for kind, by_platform in kinds.items()
            for platform, options in by_platform.items()
        }

    def _of(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return self._jitted[current_platform(), bool(self._is_uniform(*arguments, **named))]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._of(arguments, named)(*arguments, **named)

    def lower(self, *arguments: Any, **named: Any) -> Lowered:
        return self._of(arguments, named).lower(*arguments, **named)

    def eval_shape(self, *arguments: Any, **named: Any) -> Any:
        return self._plain.eval_shape(*arguments, **named)

    def _cache_size(self) -> int:
        """How many programs were compiled, as what `jax.jit` returns has it (`explanation.num_compiled`)."""
        return sum(jitted._cache_size() for jitted in self._jitted.values())  # pyright: ignore[reportAttributeAccessIssue]


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
