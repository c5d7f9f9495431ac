"""`jaxinfer plan`: whether a model fits chips that this machine does not have, and its roofline there."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.api.options import LLMOptions
from jaxinfer.cli.bench import check_picture, read_integers
from jaxinfer.cli.command import UsageError, say
from jaxinfer.cli.options import as_json, given, given_values, model_argument
from jaxinfer.cli.output import write_report
from jaxinfer.extras import install_hint
from jaxinfer.options import MISSING, option
from jaxinfer.progress import Stage

if TYPE_CHECKING:
    from jaxinfer.planning import PlanRequest


NUM_LINES = 20  # of native code, printed after an error
SHARED = (
    *("dtype", "quantize", "requantize", "revision", "kv_dtype", "kv_policy"),
    *("page_size", "prefill_chunk", "memory_fraction", "draft", "num_draft_tokens", "offload"),
)


@given(LLMOptions, SHARED)
@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    model: str = model_argument("A checkpoint's folder (a config.json is enough), a GGUF file, or a hub id.")
    on: str = option(MISSING, "Chips, such as v6e:2x2, v5e:4x4, h200x1 or h100x8.", "PLACE")
    mesh: str | None = option(
        None, "Such as model=4 or data=2,model=4; default: the model is sharded over all devices.", "AXES"
    )
    max_seqs: int = option(64, "Answers generated at once.", "N", min=1)
    context: int | None = option(
        None, "Tokens of a prompt with its answer; default: the model's limit, at most 4,096.", "N", min=1
    )
    batch: str | None = option(None, "Batch sizes of the roofline.", "N,N,...")
    whole: bool | None = option(
        None, "Compile all layers, or a few of each kind; default: the faster.", flag="--whole/--few-layers"
    )
    compile_: bool = option(
        True, "--no-compile only counts: a second instead of minutes, less exact.", flag="--compile/--no-compile"
    )
    trace: Path | None = option(
        None,
        "JSON lines with the lengths of requests, such as a batch's results: choose the sizes of programs so that at "
        "most 10 % of what they compute is padding.",
        "FILE",
    )
    max_programs: int | None = option(
        None, "With --trace: limit of the programs; default: 16, or what the engine has without it.", "N", min=1
    )
    picture: Path | None = option(None, "Draw memory and tokens/s, as .png, .svg or .pdf.", "FILE")
    as_json: bool = as_json("One JSON object.")


@contextlib.contextmanager
def native_messages_hidden() -> Iterator[None]:
    """Keeps from the terminal what native code writes to standard error (absl's log, lines of the compilers). Its last
    lines are printed if JAX or a compiler fails."""
    with contextlib.ExitStack() as stack:
        try:
            terminal = os.dup(2)
        except OSError:  # it is closed
            yield
            return
        stack.callback(os.close, terminal)
        lines = stack.enter_context(tempfile.TemporaryFile())
        with contextlib.suppress(AttributeError, OSError, ValueError):
            if sys.stderr.fileno() == 2:  # Python's own messages still reach the terminal
                again = os.dup(terminal)
                stream = stack.enter_context(open(again, "w", 1, sys.stderr.encoding, "backslashreplace"))
                stack.enter_context(contextlib.redirect_stderr(stream))
        sys.stderr.flush()
        os.dup2(lines.fileno(), 2)
        stack.callback(os.dup2, terminal, 2)
        try:
            yield
        except (RuntimeError, NotImplementedError):
            lines.seek(0)
            for line in lines.read().decode(errors="replace").splitlines()[-NUM_LINES:]:
                say(f"  {line}")
            raise


@native_messages_hidden()  # importing JAX beside a GPU's compiler writes the first ones
def plan(options: PlanOptions) -> None:
    """Plan a model for chips before renting them.

    The programs of the engine are compiled for the chips from the configuration and the headers of a checkpoint. The
    report says whether everything fits, the bytes of each part, the tokens of cache that remain, and the least time per
    token; if the model does not fit, also the cheapest change that makes it fit.
    """
    with Stage("starting"):
        import jax

        if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
            jax.config.update("jax_platforms", "cpu")  # the chips of this machine are not needed
        from jaxinfer.planning import changes, make_plan

    check_picture(options.picture, "--picture")
    with Stage("planning") as stage:
        request = plan_request(options)

        def progress(step: str) -> None:
            stage.describe(f"compiling {step}")

        memory_plan = make_plan(request, whole=options.whole, compiles=options.compile_, progress=progress)
        helping = [] if memory_plan.fits else changes(memory_plan, compiles=options.compile_, progress=progress)
    if options.picture is not None:
        from jaxinfer.planning.picture import draw

        draw(memory_plan, options.picture)
    write_report(memory_plan.to_dict(helping), lambda _: memory_plan.to_text(helping) + "\n", as_json=options.as_json)


def plan_request(options: PlanOptions) -> "PlanRequest":
    """Raises ValueError for what is out of range, and as `loading.load_shapes`."""
    from jaxinfer.cache.policy.kinds import extends_length
    from jaxinfer.engine.options import EngineOptions
    from jaxinfer.loading import for_length, load_draft_shapes, load_shapes
    from jaxinfer.planning import PlanRequest, parse_place
    from jaxinfer.planning.trace import read_trace
    from jaxinfer.store import alias_options
    from pallas_kernels import ahead_of_time

    place = parse_place(options.on)
    missing = ahead_of_time.missing_compiler(place.chip.name) if options.compile_ and place.chip.can_compile else None
    if missing is not None:
        raise RuntimeError(f"{missing}: {install_hint('aot')}; --no-compile counts without it")
    values = given_values(options)
    dtype = values.get("dtype", "auto")
    loading = {name: values[name] for name in ("dtype", "quantize", "requantize", "revision") if name in values}
    drafting = options.draft or alias_options(options.model).get("draft")
    config, params = load_shapes(options.model, **loading)
    config, length = for_length(config, options.context, has_policy=extends_length(values.get("kv_policy")))
    if options.max_programs is not None and options.trace is None:
        raise UsageError(f"--max-programs {options.max_programs} needs --trace FILE")
    if drafting is None and "num_draft_tokens" in values:
        raise UsageError(f"--num-draft-tokens {options.num_draft_tokens} needs --draft")
    names = ("page_size", "prefill_chunk", "memory_fraction", "kv_dtype", "kv_policy", "num_draft_tokens")
    engine_options = EngineOptions(
        max_model_len=length,
        max_seqs=options.max_seqs,
        **{name: values[name] for name in names if name in values},
    )
    draft = load_draft_shapes(drafting, options.model, config, params, length, dtype)
    return PlanRequest(
        *(options.model, config, params, place, engine_options, options.mesh, draft),
        batches=() if options.batch is None else tuple(read_integers(options.batch, "--batch")),
        offload=values.get("offload", 0),
        trace=() if options.trace is None else read_trace(options.trace, length),
        max_programs=options.max_programs,
    )
