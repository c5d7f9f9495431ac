"""Programs compiled before their first use, several at once."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from jax.stages import Lowered

from jaxinfer.checks import num_cores

Report = Callable[[str], None]
MAX_JOBS = 8  # compilers of large models take gigabytes

# For `jax.jit` of large programs. XLA:CPU cuts a program into 32 LLVM modules, to compile them side by side; on two
# cores that takes a third longer than one module (9.3 s and 6.8 s for `decode` of 30 layers), and several programs
# side by side use the cores anyway.
COMPILER_OPTIONS: dict[str, Any] = {"xla_cpu_parallel_codegen_split_count": 1} if num_cores() <= 4 else {}


@dataclass(frozen=True)
class Program:
    """A program by name: `lower` traces it, and `run` calls it with nothing to do (or another program's does)."""

    name: str
    lower: Callable[[], Lowered]
    run: Callable[[], object] = lambda: None


def default_jobs() -> int:
    """As many as there are cores for this process, at most `MAX_JOBS`."""
    return min(num_cores(), MAX_JOBS)


def compile_programs(programs: Iterable[Program], num_jobs: int, report: Report = lambda name: None) -> None:
    """Traces the programs in turn while `num_jobs` others are compiled: XLA does not hold the interpreter.

    JAX's call of a program then finds the result. `report` gets the name of each when it is compiled. An error of one
    ends all.
    """
    if num_jobs == 1:
        for program in programs:
            program.lower().compile()
            report(program.name)
        return
    names: dict[Future[Any], str] = {}

    def report_compiled(done: Iterable[Future[Any]]) -> None:
        for future in done:
            future.result()
            report(names.pop(future))

    with ThreadPoolExecutor(num_jobs, "jaxinfer-compile") as pool:
        try:
            for program in programs:
                names[pool.submit(program.lower().compile)] = program.name
                report_compiled([future for future in names if future.done()])
            report_compiled(as_completed(list(names)))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
