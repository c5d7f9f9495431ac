"""`jaxinfer train-head`: trains a head that drafts for a model from its hidden states."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxinfer.cli.bench import read_integers
from jaxinfer.cli.command import UsageError, resumes, say
from jaxinfer.cli.draft_measures import measure_rounds, measure_speeds, speed_line
from jaxinfer.cli.options import as_json, model_argument, overwrite
from jaxinfer.cli.output import console, write_json, write_text
from jaxinfer.cli.prompts import read_chats
from jaxinfer.cli.training_data import WRITERS, answered_prompts, read_documents, writer
from jaxinfer.options import MISSING, option
from jaxinfer.progress import Stage
from jaxinfer.tables import make_table

if TYPE_CHECKING:
    from checkpoints_convert import SpeculatorsForm
    from jaxinfer.api.llm import LLM
    from jaxinfer.training.acceptance import Acceptance
    from jaxinfer.training.head_data import HeadTexts
    from jaxinfer.training.heads import HeadOptions, HeadResult, HeadTraining

_data = partial(option, group="The data")
_head = partial(option, group="The head")
_training = partial(option, group="Training")
MAX_VOCAB = 8192  # of a default draft vocabulary
MAX_MEMORY = 0.9  # share of what is free


@dataclass(frozen=True, kw_only=True)
class TrainHeadOptions:
    target: str = model_argument()
    kind: Literal["eagle3", "dflash"] = option(
        "eagle3", "eagle3 drafts one token after another, dflash a block at once.", "KIND"
    )
    out: Path = option(MISSING, "Folder for the head; it appears when it is complete.", "PATH")
    format: Literal["published", "speculators"] = option(
        "published",
        "Form of the files: published as the authors of EAGLE-3 and DFlash publish heads, speculators as that library "
        "writes and opens them.",
    )
    prompts: list[Path] | None = _data(
        None,
        'Prompts, one per line, that the model answers first; in .jsonl, {"prompt": "..."} or {"messages": [...]}. The '
        "model's chat template is applied, if it has one. May be repeated.",
        "PATH",
    )
    own_prompts: int | None = _data(
        None,
        "In place of --prompts: so many samples of what the model itself says where a user's message begins (Magpie, "
        "arXiv 2406.08464), and after beginnings of requests for code, lists, explanations and summaries, in turn. Of "
        "a model with a chat template; no other data are needed.",
        "N",
        min=4,
    )
    texts: list[Path] | None = _data(
        None,
        "A text file, or a folder of them, in place of prompts; may be repeated. One document per file. For demo, "
        "without either: Python files.",
        "PATH",
    )
    answers: int | None = _data(
        None,
        "Number of answers, or of texts that the model continues. Default: one for each prompt; texts are used as they "
        "are.",
        "N",
        min=1,
    )
    sampled: float = _data(
        0.25, "Share of the answers that are sampled at temperature 1, 0..1; the rest is greedy.", "X"
    )
    length: int = _data(256, "Tokens of a row. A prompt and its answer have at most so many.", "N", min=16)
    answer_tokens: int | None = _data(
        None, "Tokens of an answer, at most. Default: as many as fit in a row.", "N", min=2
    )
    held_out: int = _data(32, "Prompts or texts that are held out to measure acceptance, at most.", "N", min=1)
    draft_vocab_size: int | None = _head(
        None,
        "Tokens that the head drafts: the most frequent ones of the data; 0 for all. Default: a fourth of the model's, "
        "at most 8,192; all for dflash.",
        "N",
        min=0,
    )
    unroll: int = _head(4, "Tokens that an eagle3 head learns to draft in a row.", "N", min=1)
    one_step: float = _training(
        0.0,
        "Share of the steps, the first ones, in which an eagle3 head learns to draft one token: such a step costs "
        "less than half of one that unrolls.",
        "X",
    )
    block_size: int = _head(8, "Tokens of a dflash block, the first of which is not drafted.", "N", min=2, max=32)
    layers: int | None = _head(None, "Layers of a dflash head. Default: 2.", "N", min=1)
    taps: str | None = _head(
        None, "States of the model that the head reads, from 0, the embedding. Default: EAGLE-3's three.", "N,N,N"
    )
    init: Literal["layer", "random"] = _head(
        "layer", "Layers begin as copies of the model's last ones, or with random weights."
    )
    steps: int | None = _training(None, "Optimizer steps. Default: 1000.", "N", min=1)
    minutes: float | None = _training(
        None, "In place of --steps: as many as fit in this time, with the answers. The first steps are timed.", "X"
    )
    batch_size: int = _training(8, "Rows of a step.", "N", min=1)
    anchors: int | None = _training(
        None, "Places of a row after which is drafted. Default: all; for dflash a fourth of its tokens.", "N", min=1
    )
    loss: Literal["kl", "lk"] = _training(
        "kl", "kl: forward KL; lk: the chance that a sampled draft is accepted (arXiv 2602.23881)."
    )
    temperature: float = _training(
        1.0, "Temperature of the model in the loss; below 1 its first choice gets more weight.", "X"
    )
    prompt_weight: float = _training(0.05, "What a prompt's tokens count in the loss, beside 1 for an answer's.", "X")
    learning_rate: float = _training(3e-3, "Peak learning rate.", "X")
    lm_head_rate: float = _training(
        1.0, "Learning rate of the vocabulary head of an eagle3 head, as a share of that of the rest.", "X"
    )
    store_states: bool = _training(
        False, "Compute the model's states once, and keep them in bfloat16 in the work folder, for several epochs."
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = _training(
        "auto",
        "What the model's states and the head's products are computed in; what is trained stays float32. auto is "
        "bfloat16 on a TPU, a GPU and a CPU with AMX, float32 on another CPU.",
    )
    patience: int = _training(0, "Evaluations without a better acceptance that end training; 0 for none.", "N", min=0)
    seed: int = _training(0, "The same seed gives the same head.", "N")
    mesh: str | None = _training(
        None,
        "Devices to run on, such as data=2,model=4: rows are sharded along data, the model and the head along model. "
        "By default one device.",
        "AXES",
    )
    concurrency: str = option(
        "1,4", "Numbers of answers at a time for which the head's speed beside plain decoding is measured.", "N,N"
    )
    work_dir: Path | None = option(None, "Folder for answers and training checkpoints. Default: OUT.training.", "PATH")
    dtype: Literal["float32", "bfloat16", "float16"] = option("bfloat16", "Type of the written weights.")
    overwrite: bool = overwrite("Replace an existing head.")
    as_json: bool = as_json("One JSON object.")


def train_head(options: TrainHeadOptions) -> None:
    """Train a head that drafts for a model.

    The model answers prompts, or continues texts, and the head learns from its hidden states which tokens it will
    choose. Acceptance is measured on held-out prompts, with the true tokens before each draft and in rounds of the
    engine. An interrupted run continues when the command is repeated.

    Example: jaxinfer train-head ./model --prompts prompts.txt --out ./head; then --draft ./head
    """
    began, out = time.monotonic(), options.out
    loads = _check(options)
    with Stage("reading the data"):
        chats = read_chats(options.prompts) if options.prompts else []
        documents = [] if chats or options.own_prompts else _read_documents(options)
    work_dir = options.work_dir or out.with_name(out.name + ".training")
    with Stage(f"loading {options.target}"):
        from jaxinfer.api.llm import LLM
        from jaxinfer.training.head_mesh import HeadPlacement, check_fit
        from jaxinfer.training.heads import HeadTraining
        from jaxinfer.training.heads import train_head as train

        llm = LLM(options.target, max_model_len=options.length, max_seqs=WRITERS, mesh=options.mesh)
    with llm, resumes("from the last training checkpoint"), Stage("training a head"):
        if llm.tokenizer is None:
            raise UsageError(f"{llm.name} has no tokenizer, so the data cannot be tokenized")
        check_fit(llm.fit)
        HeadPlacement(llm.mesh, batch_size=options.batch_size)
        own = _head_options(llm, options)
        form = _form(llm, options, own)
        texts = _texts(llm, chats, documents, options, work_dir)
        training = HeadTraining(llm.config, llm.params, texts, own, llm.mesh)
        _check_memory(training.memory())
        result = train(training, work_dir=work_dir, began=began)
        made = result.config, result.params
        rounds = measure_rounds(llm, made, texts.held_out, own.num_drafts)
        speeds = measure_speeds(llm, made, texts.held_out, loads)
        _export(llm, training, result, (rounds, speeds), options, form)
    measured = {"before": result.before, "after": result.after, "rounds": rounds}
    if options.as_json:
        write_json(
            {
                "path": out,
                "num_steps": result.num_steps,
                "num_texts": result.num_texts,
                "num_tokens": result.num_tokens,
                "history": [{"step": step, **values} for step, values in result.history],
                **{name: figures(acceptance) for name, acceptance in measured.items()},
                "speedup": speeds,
            }
        )
        return
    rows = [
        [name, f"{acceptance.tokens_per_round:.2f}", f"{acceptance.rate:.1%}", _shares(acceptance.by_position)]
        for name, acceptance in measured.items()
    ]
    console().print(make_table(("", "tokens a round", "accepted", "by position"), rows))
    write_text(f"{speed_line(speeds)}\n{out}\n")


def figures(acceptance: "Acceptance") -> dict[str, Any]:
    """Acceptance as JSON values."""
    return {
        "acceptance": acceptance.rate,
        "tokens_per_round": acceptance.tokens_per_round,
        "acceptance_by_position": list(acceptance.by_position),
        "num_tokens": acceptance.num_tokens,
    }


def _shares(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.0%}" for rate in rates)


def _check(options: TrainHeadOptions) -> list[int]:
    """Numbers of answers at a time. Raises before anything is loaded."""
    if options.out.exists() and not options.overwrite:
        raise FileExistsError(f"{options.out} exists: --overwrite replaces it")
    given = [name for name in ("prompts", "own_prompts", "texts") if getattr(options, name)]
    if len(given) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"the data are given by one option, not by {names}")
    if not given and options.target != "demo":
        raise UsageError(
            "no data: --prompts takes a file of prompts, --own-prompts lets the model write them, --texts takes texts"
        )
    if options.steps is not None and options.minutes is not None:
        raise UsageError("give --steps or --minutes, not both")
    if options.kind == "eagle3" and options.layers not in (None, 1):
        raise UsageError("--layers is for dflash: an eagle3 head has one layer")
    if options.kind == "dflash" and options.one_step:
        raise UsageError("--one-step is for eagle3: a dflash head drafts a block at once")
    _read_taps(options.taps)
    return read_integers(options.concurrency, "--concurrency")


def _read_documents(options: TrainHeadOptions) -> list[str]:
    if options.texts:
        return read_documents(options.texts, "--texts")
    from jaxinfer.training.corpus import standard_library

    return list(standard_library().train)


def _read_taps(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text is not None else ()
    except ValueError:
        raise UsageError(f"--taps: {text!r} is not a list of states, such as 2,15,27") from None


def _head_options(llm: "LLM", options: TrainHeadOptions) -> "HeadOptions":
    from jaxinfer.training.heads import HeadOptions

    is_block, size = options.kind == "dflash", options.draft_vocab_size
    if size is None:
        size = default_vocab_size(is_block, llm.config.vocab_size)
    names = ("kind", "minutes", "unroll", "one_step", "block_size", "loss", "temperature", "prompt_weight",
             "batch_size", "length", "learning_rate", "lm_head_rate", "patience", "seed")  # fmt: skip
    return HeadOptions(
        num_steps=options.steps or (None if options.minutes else 1000),
        num_layers=options.layers or (2 if is_block else 1),
        num_anchors=options.anchors,
        draft_vocab_size=size,
        taps=_read_taps(options.taps),
        copies=options.init == "layer",
        stores_states=options.store_states,
        compute_dtype=training_dtype() if options.compute_dtype == "auto" else options.compute_dtype,
        **{name: getattr(options, name) for name in names},
    )


def _form(llm: "LLM", options: TrainHeadOptions, own: "HeadOptions") -> "SpeculatorsForm | None":
    """Fields of the speculators library's form beside the head's; None for the published form.

    Raises CheckpointError, before anything is trained, for a head that the form cannot express.
    """
    if options.format == "published":
        return None
    from checkpoints_convert import SpeculatorsForm, huggingface_config
    from jaxinfer.store.names import find_model
    from jaxinfer.training.head_start import head_config

    model = find_model(options.target, fetch=False)
    verifier = str(Path(model.source[0]).resolve()) if model.hub is None else model.hub.repository
    form = SpeculatorsForm(verifier, llm.config.architecture, own.num_drafts)
    sizes = {"num_layers": own.num_layers, "block_size": own.block_size, "mask_token": 0}
    huggingface_config(head_config(llm.config, own.kind, taps=own.taps, **sizes), form)
    return form


def training_dtype() -> Literal["float32", "bfloat16"]:
    """The faster dtype for products on the default device."""
    import jax

    info = Path("/proc/cpuinfo")
    has_amx = info.exists() and "amx_bf16" in info.read_text(encoding="utf-8")
    return "bfloat16" if jax.default_backend() != "cpu" or has_amx else "float32"


def default_vocab_size(is_block: bool, vocab_size: int) -> int:
    """Tokens that a head drafts if no number is given; 0 for all."""
    return 0 if is_block else min(vocab_size // 4, MAX_VOCAB)


def _texts(
    llm: "LLM",
    chats: Sequence[Sequence[dict[str, Any]]],
    documents: Sequence[str],
    options: TrainHeadOptions,
    work_dir: Path,
) -> "HeadTexts":
    """The texts of the data, of which the model writes what it is to write."""
    from jaxinfer.training.head_data import HeadTextOptions, continuations

    wanted = HeadTextOptions(
        length=options.length,
        answer_tokens=options.answer_tokens,
        num_answers=options.answers,
        sampled=options.sampled,
        held_out_texts=options.held_out,
        seed=options.seed,
    )
    if chats or options.own_prompts:
        return answered_prompts(llm, chats, options.own_prompts, wanted, work_dir)
    encoded = [llm.get_tokenizer().encode_content(text) for text in documents if text]
    return continuations(encoded, writer(llm), wanted, work_dir, target=llm.fingerprint(), show=None)


def _check_memory(parts: dict[str, int]) -> None:
    """Prints what training needs; raises ValueError, with the numbers, if it does not fit."""
    total, free = sum(parts.values()), free_memory()
    listed = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in parts.items())
    say(f"training needs about {total / 2**20:,.0f} MiB: {listed}")
    if free is not None and total > MAX_MEMORY * free:
        raise ValueError(
            f"training needs about {total / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB of memory are free: lower "
            "--batch-size, --anchors or --draft-vocab-size"
        )


def free_memory() -> int | None:
    """Bytes of the host's memory that are available; None if unknown."""
    from jaxinfer.engine.memory import system_memory

    return system_memory()


def _export(
    llm: "LLM",
    training: "HeadTraining",
    result: "HeadResult",
    measured: "tuple[Acceptance, Mapping[int, float]]",
    options: TrainHeadOptions,
    form: "SpeculatorsForm | None",
) -> None:
    """Writes the head, with a card."""
    import checkpoints_convert
    from jaxinfer.training.head_card import HeadOrigin, write_head_card
    from jaxinfer.training.head_start import with_embedding

    out, sampled = options.out, f"{options.sampled:.0%} of them sampled at temperature 1, the others greedy"
    if options.prompts or options.own_prompts:
        whose = "prompts that it wrote itself" if options.own_prompts else "prompts"
        data = f"The target answered {whose} first, {sampled}."
    else:
        data = "Texts as they are." if options.answers is None else f"The target continued texts first, {sampled}."
    origin = HeadOrigin(llm.name, llm.fingerprint(), data, *measured)
    config, params = result.config, result.params
    if form is not None and not training.options.is_block:
        # The library takes the target's embedding for blocks alone: in a chain's files a missing one stays random.
        config, params = with_embedding(config, params, llm.params)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        write_head_card(Path(folder), out.name, training, result, origin)
        checkpoints_convert.save_huggingface(
            config,
            params,
            out,
            dtype=options.dtype,
            extra_files=sorted(Path(folder).iterdir()),
            speculators=form,
            overwrite=options.overwrite,
        )
