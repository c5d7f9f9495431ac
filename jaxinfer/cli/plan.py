"""`jaxinfer plan`: whether a model fits chips that this machine does not have, and its roofline there."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxinfer.api.options import LLMOptions
from jaxinfer.cli.bench import check_picture, read_integers
from jaxinfer.cli.command import UsageError, say
from jaxinfer.cli.options import ADAPTER_ROOM, as_json, given, given_values, model_argument
from jaxinfer.cli.output import write_report
from jaxinfer.extras import install_hint
from jaxinfer.options import MISSING, option
from jaxinfer.progress import Stage

if TYPE_CHECKING:
    from jaxinfer.planning import Place, PlanRequest
    from jaxinfer.planning.head_training import HeadTrainingRequest


NUM_LINES = 20  # of native code, printed after an error
LOADING = ("dtype", "quantize", "requantize", "revision")
SHARED = (
    *(*LOADING, "kv_dtype", "kv_policy"),
    *("page_size", "prefill_chunk", "memory_fraction", "draft", "num_draft_tokens", "offload"),
    *ADAPTER_ROOM,
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
    train_head: Literal["eagle3", "dflash"] | None = option(
        None,
        "Plan the training of a head of this kind in place of an engine, with the defaults of jaxinfer train-head. "
        "--context is the tokens of a row, 256 by default.",
        "KIND",
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

        def progress(step: str) -> None:
            stage.describe(f"compiling {step}")

        if options.train_head is not None:
            from jaxinfer.planning.head_training import plan_head_training

            training = plan_head_training(
                head_training_request(options), whole=options.whole, compiles=options.compile_, progress=progress
            )
            write_report(training.to_dict(), lambda _: training.to_text(), as_json=options.as_json)
            return
        request = plan_request(options)
        memory_plan = make_plan(request, whole=options.whole, compiles=options.compile_, progress=progress)
        helping = [] if memory_plan.fits else changes(memory_plan, compiles=options.compile_, progress=progress)
    if options.picture is not None:
        from jaxinfer.planning.picture import draw

        draw(memory_plan, options.picture)
    write_report(memory_plan.to_dict(helping), lambda _: memory_plan.to_text(helping) + "\n", as_json=options.as_json)


def head_training_request(options: PlanOptions) -> "HeadTrainingRequest":
    """Raises UsageError for an option of an engine, and as `loading.load_shapes`."""
    from jaxinfer.cli.train_head import TrainHeadOptions, default_vocab_size
    from jaxinfer.loading import load_shapes
    from jaxinfer.planning.head_training import HeadTrainingRequest
    from jaxinfer.training.heads import HeadOptions

    place, values, defaults = _place(options), given_values(options), TrainHeadOptions(target="", out=Path())
    engine = set(SHARED) - {*LOADING, "memory_fraction"} | {"batch", "trace", "max_programs", "picture"}
    for name in sorted(engine & set(values)):
        raise UsageError(f"--train-head plans no engine, and --{name.replace('_', '-')} is of one")
    config, params = load_shapes(options.model, **{name: values[name] for name in LOADING if name in values})
    layers = 2 if options.train_head == "dflash" else 1
    request = HeadTrainingRequest(
        *(options.model, config, params, place),
        HeadOptions(
            options.train_head or "eagle3",
            num_steps=1000,
            num_layers=layers,
            draft_vocab_size=default_vocab_size(options.train_head == "dflash", config.vocab_size),
            length=options.context or defaults.length,
            batch_size=defaults.batch_size,
            compute_dtype="bfloat16",
        ),
        options.mesh,
        **{name: values[name] for name in ("memory_fraction",) if name in values},
    )
    data = dict(request.axes)["data"]  # each part of the devices has a row at least
    batch_size = -(-defaults.batch_size // data) * data
    return replace(request, options=replace(request.options, batch_size=batch_size))


def _place(options: PlanOptions) -> "Place":
    """The place. Raises RuntimeError if its compiler is wanted, and not installed."""
    from jaxinfer.planning import parse_place
    from pallas_kernels import ahead_of_time

    place = parse_place(options.on)
    missing = ahead_of_time.missing_compiler(place.chip.name) if options.compile_ and place.chip.can_compile else None
    if missing is not None:
        raise RuntimeError(f"{missing}: {install_hint('aot')}; --no-compile counts without it")
    return place


def plan_request(options: PlanOptions) -> "PlanRequest":
    """Raises ValueError for what is out of range, and as `loading.load_shapes`."""
    from jaxinfer.cache.policy.kinds import extends_length
    from jaxinfer.engine.options import EngineOptions
    from jaxinfer.loading import for_length, load_draft_shapes, load_shapes
    from jaxinfer.planning import PlanRequest
    from jaxinfer.planning.trace import read_trace
    from jaxinfer.store import alias_options

    place, values = _place(options), given_values(options)
    dtype = values.get("dtype", "auto")
    loading = {name: values[name] for name in LOADING if name in values}
    drafting = options.draft or alias_options(options.model).get("draft")
    config, params = load_shapes(options.model, **loading)
    config, length = for_length(config, options.context, has_policy=extends_length(values.get("kv_policy")))
    if options.max_programs is not None and options.trace is None:
        raise UsageError(f"--max-programs {options.max_programs} needs --trace FILE")
    for name in ADAPTER_ROOM if not values.get("max_adapters") else ():
        if name != "max_adapters" and name in values:
            raise UsageError(f"--{name.replace('_', '-')} needs --max-adapters N")
    if drafting is None and "num_draft_tokens" in values:
        raise UsageError(f"--num-draft-tokens {options.num_draft_tokens} needs --draft")
    names = ("page_size", "prefill_chunk", "memory_fraction", "kv_dtype", "kv_policy", "num_draft_tokens")
    names += ADAPTER_ROOM
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
