"""Training heads that draft for a target (`models.draft_head`), from the target's own hidden states.

The target computes its states in each step, outside of the gradient, so that they need no room on disk; or once for all
rows.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.files import write_text_atomically
from jaxinfer.models import ModelConfig, Params, abstract_params
from jaxinfer.quantization.on_device import dequantize_params
from jaxinfer.quantization.tree import weights
from jaxinfer.speculative import HeadDraft, head_for
from jaxinfer.training import corpus
from jaxinfer.training.acceptance import Acceptance
from jaxinfer.training.head_data import HeadTexts
from jaxinfer.training.head_mesh import HeadPlacement
from jaxinfer.training.head_meter import DraftedPlaces, HeadMeter, acceptance_of, make_batch
from jaxinfer.training.head_objectives import (
    STEP_DECAY,
    HeadBatch,
    HeadLoss,
    computed_in,
    drafted_tokens,
    head_objective,
)
from jaxinfer.training.head_rows import chosen_anchors, draft_vocabulary, index_of, pack
from jaxinfer.training.head_start import head_config, initial_params
from jaxinfer.training.loop import History, TrainOptions, seconds_per_step, train
from jaxinfer.training.target_states import StoredStates, Target
from jaxinfer.training.texts import claim_folder, digest

MIN_STEPS = 10  # of a run that is given minutes


@dataclass(frozen=True)
class HeadOptions:
    """Attributes:
    kind: "eagle3" or "dflash". num_steps: optimizer steps on `batch_size` rows of `length` tokens; None for as many as
      fit in `minutes`, of the whole run.
    unroll: steps of a chain, each on what the head gave in the one before. block_size: tokens of a block.
    one_step: share of the optimizer steps, the first ones, in which chains have one step: these cost a fraction, and
      most of what a head learns is the same in all steps.
    num_layers: of a head that drafts blocks; the other has one.
    num_anchors: places of a row after which is drafted; None for all, or of blocks a fourth of the row's tokens.
    draft_vocab_size: tokens that the head drafts, 0 for all. taps: numbers of the target's states, () for the default.
    copies: layers begin as copies of the target's last ones.
    loss: "kl" or "lk"; temperature: divides the target's logits in it.
    prompt_weight: what a prompt's tokens count, beside one for what the target wrote.
    stores_states: the target's states of all rows are computed once and kept on disk, in bfloat16.
    compute_dtype: "float32" or "bfloat16", of the target's passes and of products of the head; what is trained, its
      gradients and its optimizer are float32.
    lm_head_rate: the learning rate of the head's own vocabulary head, which begins as the target's, beside the others'.
    patience: evaluations without a better acceptance after which training ends; 0 for none.
    """

    kind: str
    num_steps: int | None = None
    minutes: float | None = None
    unroll: int = 4
    one_step: float = 0.0
    block_size: int = 8
    num_layers: int = 1
    num_anchors: int | None = None
    draft_vocab_size: int = 0
    taps: tuple[int, ...] = ()
    copies: bool = True
    loss: HeadLoss = "kl"
    temperature: float = 1.0
    prompt_weight: float = 0.05
    batch_size: int = 8
    length: int = 256
    learning_rate: float = 3e-3
    lm_head_rate: float = 1.0
    decay_fraction: float = 0.5
    warmup_steps: int = 20
    stores_states: bool = False
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    patience: int = 0
    checkpoint_every: int = 20
    evaluate_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.num_steps is None) == (self.minutes is None):
            raise ValueError("give num_steps or minutes")
        for name in (
            "num_steps",
            "minutes",
            "unroll",
            "num_layers",
            "num_anchors",
            "batch_size",
            "temperature",
            "lm_head_rate",
        ):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.draft_vocab_size < 0 or self.patience < 0:
            raise ValueError("draft_vocab_size and patience must not be negative")
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"compute_dtype={self.compute_dtype!r} is neither float32 nor bfloat16")
        if not 0 <= self.prompt_weight <= 1:
            raise ValueError(f"prompt_weight must be in 0..1, got {self.prompt_weight}")
        if not 0 <= self.one_step < 1:
            raise ValueError(f"one_step must be at least 0 and below 1, got {self.one_step}")
        if self.one_step and self.is_block:
            raise ValueError(f"one_step={self.one_step:g} is of chains: a head of kind {self.kind} drafts blocks")
        if self.kind == "eagle3" and self.num_layers != 1:
            raise ValueError(f"a head of kind eagle3 has one layer, got num_layers={self.num_layers}")

    @property
    def is_block(self) -> bool:
        return self.kind == "dflash"

    @property
    def num_drafts(self) -> int:
        """Draft tokens of an anchor."""
        return self.block_size - 1 if self.is_block else self.unroll

    @property
    def distance(self) -> int:
        """From an anchor to the place after which its first draft token is said."""
        return 0 if self.is_block else 1

    @property
    def step_weights(self) -> np.ndarray:
        """float32 [N], what the draft tokens weigh: in blocks less by 1/e over half of one."""
        numbers = np.arange(self.num_drafts)
        return np.asarray(np.exp(-2 * numbers / self.block_size) if self.is_block else STEP_DECAY**numbers, np.float32)

    def anchors_of(self, most: int) -> int:
        """Anchors of a row, if a row has `most` places for them."""
        return max(1, min(most, self.num_anchors or (self.length // 4 if self.is_block else most)))

    def train_options(self, num_steps: int) -> TrainOptions:
        return TrainOptions(
            num_steps,
            learning_rate=self.learning_rate,
            warmup_steps=min(self.warmup_steps, num_steps // 4),
            decay_fraction=self.decay_fraction,
            checkpoint_every=self.checkpoint_every,
            evaluate_every=self.evaluate_every,
            lm_head_rate=self.lm_head_rate,
        )


@dataclass(frozen=True)
class HeadResult:
    """A trained head.

    Attributes:
      config, params: its own, float32, as they are saved. history: the loss curve.
      before, after: acceptance on held-out texts, with the true tokens before each draft.
      num_steps: made. num_texts, num_tokens: of the data, without what is held out.
      drafted: what it drafts in each held-out text.
    """

    config: ModelConfig
    params: Params
    history: tuple[tuple[int, dict[str, float]], ...]
    before: Acceptance
    after: Acceptance
    num_steps: int
    num_texts: int
    num_tokens: int
    drafted: tuple[DraftedPlaces, ...] = ()


class HeadTraining:
    """All of a run but its loop: the head, its rows, its target's states, and how much memory they take.

    Raises ValueError for a target that gives no states, a draft vocabulary larger than its vocabulary, too little data,
    and as `HeadPlacement` for a mesh.
    """

    def __init__(
        self,
        target: ModelConfig,
        target_params: Params,
        texts: HeadTexts,
        options: HeadOptions,
        mesh: Mesh | None = None,
    ):
        self.target, self.options, self.texts = target, options, texts
        self.placement = HeadPlacement(mesh, target, options.batch_size)
        if options.length > target.max_length:
            raise ValueError(f"length={options.length} is more than the {target.max_length} the target takes")
        size = options.draft_vocab_size
        tokens = draft_vocabulary(texts.train, size, target.vocab_size) if size else None
        tokens = None if size == target.vocab_size else tokens
        self.index = None if tokens is None else index_of(tokens, target.vocab_size)
        self.share_covered = _share_covered(texts.train, self.index)
        config = head_config(
            target,
            options.kind,
            vocab_size=None if tokens is None else len(tokens),
            num_layers=options.num_layers,
            taps=options.taps,
            block_size=options.block_size,
            mask_token=_mask_token(texts, target.vocab_size),
        )
        self.config, self.tokens = config, tokens
        is_packed = not target.recurrent_layers  # whose states run through a whole row
        self.rows = pack(texts.train, options.length, options.prompt_weight, is_packed=is_packed)
        self.held_out = pack(texts.held_out, options.length, 0.0, is_packed=is_packed)
        self.is_anchor = self.rows.anchors(options.distance)
        self.num_anchors = options.anchors_of(int(self.is_anchor.sum(axis=1).max()))
        self.target_params = target_params

    def memory(self) -> dict[str, int]:
        """Bytes that training takes beside the loaded target, by what they are for."""
        options, target, head = self.options, self.target, self.config
        rows, length, drafts = options.batch_size, options.length, self.num_anchors * options.num_drafts
        size = head.vocab_size if self.tokens is None else len(self.tokens)
        num_params = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(head)))
        dense = sum(
            jnp.dtype(options.compute_dtype).itemsize * int(np.prod(leaf.shape))
            for leaf in weights(self.target_params)
            if not isinstance(leaf, jax.Array) or leaf.dtype != options.compute_dtype
        )
        return {
            f"the target as {options.compute_dtype}": dense,
            "the head, its gradients and its optimizer": 5 * 4 * num_params,
            "a step of the target": target_bytes(target, rows, length, size),
            "a step of the head": head_bytes(head, rows, length, drafts, size),
        }


def target_bytes(target: ModelConfig, rows: int, length: int, draft_vocab_size: int) -> int:
    """Bytes that the target's pass over a step's rows takes: states of a layer, scores, logits of a row, and those of
    the head's vocabulary."""
    inner = max(target.intermediate_size, target.hidden_size)
    of_rows = rows * length * (8 * target.hidden_size + 3 * inner + 2 * target.num_heads * length)
    return 4 * (of_rows + 3 * length * target.vocab_size + 2 * rows * length * draft_vocab_size)


def head_bytes(
    head: ModelConfig, rows: int, length: int, num_drafts: int, draft_vocab_size: int, num_shards: int = 1
) -> int:
    """Bytes that a step of the head takes, forward and backward, over so many rows of a device with `num_drafts` draft
    tokens each. Inner widths, heads and vocabularies are cut into `num_shards` parts."""
    cut = rows * num_drafts * (5 * draft_vocab_size + 6 * head.intermediate_size)
    cut += 4 * rows * num_drafts * head.num_heads * length * head.num_layers
    return 4 * (12 * rows * num_drafts * head.hidden_size + cut // num_shards)


def train_head(
    training: HeadTraining, *, work_dir: Path, show_progress: bool = True, began: float | None = None
) -> HeadResult:
    """Trains a head; see `HeadTraining`. `began` is when the run did, by `time.monotonic`, for `minutes`.

    Checkpoints and settings stay in `work_dir`: repeated after an interruption, the run goes on and ends with the same
    weights. Raises ValueError for a `work_dir` of another run, with the setting that differs.
    """
    began = time.monotonic() if began is None else began
    options, target, rows, placement = training.options, training.target, training.rows, training.placement
    settings = {**asdict(options), "target": repr(target), "data": digest(rows.tokens, rows.weights)}
    settings["mesh"] = placement.name
    claim_folder(work_dir, "head.json", settings)
    dense = placement.target(target, computed_in(options.compute_dtype, dequantize_params(training.target_params)))
    config, taps = head_for(training.config, target)
    params = initial_params(
        target, dense, training.config, training.tokens, jax.random.key(options.seed), copies=options.copies
    )
    params.pop("draft_index", None)
    params = placement.head(training.config, params)
    fixed = {} if training.index is None else {"draft_index": jnp.asarray(training.index)}
    draft = HeadDraft("head", config, {**params, **fixed}, taps)
    ((whole, together),) = draft.models(target, dense)
    given = {name: leaf for name, leaf in together.items() if name not in params}
    own = Target(target, dense, taps, training.index, options.temperature, placement)
    stored = StoredStates(work_dir / "states", rows, own, options.batch_size) if options.stores_states else None

    def batch_at(step: int) -> HeadBatch:
        chosen = corpus.rows_at(len(rows), step, options.batch_size, options.seed)
        random = np.random.default_rng((options.seed, 3, step))
        anchors = chosen_anchors(training.is_anchor[chosen], training.num_anchors, random)
        seen = own.observe(rows, chosen) if stored is None else stored(chosen)
        log_probs = own.log_probs(seen)
        return placement.rows(make_batch(rows, chosen, anchors, seen))._replace(log_probs=log_probs)

    meter = HeadMeter(
        lambda params, batch: drafted_tokens(whole, params, placement.rows(batch), options.unroll).logits,
        training.held_out,
        own.observe,
        distance=options.distance,
        batch_size=options.batch_size,
    )
    one_step = options.one_step
    short, objective = (
        head_objective(whole, options.loss, unroll, options.step_weights[:count], options.compute_dtype)
        for unroll, count in ((1, 1), (options.unroll, options.num_drafts))
    )
    before = meter({**params, **given})

    def measure() -> float:
        """Seconds of a step of either kind, by their shares, with its part of an evaluation."""
        shares = ((objective, 1 - one_step), (short, one_step))
        return meter.seconds / options.evaluate_every + sum(
            share * seconds_per_step(params, loss, batch_at, options.train_options(1000), (given,))
            for loss, share in shares
            if share
        )

    num_steps = options.num_steps or _steps_in(options.minutes or 0, work_dir, began, measure)

    def evaluate(params: Params) -> dict[str, float]:
        measured = meter({**params, **given})
        by_position = {f"accepted_{k + 1}": rate for k, rate in enumerate(measured.by_position)}
        return {"acceptance": measured.rate, "tokens_per_round": measured.tokens_per_round, **by_position}

    result = train(
        params,
        objective,
        batch_at,
        options.train_options(num_steps),
        checkpoint_dir=work_dir / "checkpoints",
        given=(given,),
        evaluate=evaluate,
        is_done=partial(is_stalled, patience=options.patience),
        early=(int(one_step * num_steps), short),
        description=f"training the {options.kind} head",
        show_progress=show_progress,
    )
    made, drafted = result.history[-1][0], meter.drafted({**result.params, **given})
    return HeadResult(
        training.config,
        {**(result.params if placement.mesh is None else jax.device_get(result.params)), **fixed},
        result.history,
        before,
        acceptance_of(drafted),
        made,
        len(training.texts.train),
        sum(len(text.tokens) for text in training.texts.train),
        tuple(drafted),
    )


def is_stalled(history: History, patience: int) -> bool:
    """True if the last `patience` evaluations accept no more than the best one before them."""
    measured = [values["tokens_per_round"] for _, values in history if "tokens_per_round" in values]
    return 0 < patience < len(measured) and max(measured[-patience:]) <= max(measured[:-patience])


def _steps_in(minutes: float, work_dir: Path, began: float, measure: Callable[[], float]) -> int:
    """Steps for what is left of the minutes; chosen once, and kept in `work_dir`."""
    path = work_dir / "schedule.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))["num_steps"]
    seconds = measure()
    left = 60 * minutes - (time.monotonic() - began)
    num_steps = int(left / seconds)
    if num_steps < MIN_STEPS:
        raise ValueError(
            f"{max(left, 0):.0f} s of {minutes:g} minutes are left, and a step takes {seconds:.1f} s: give more "
            "minutes, or a smaller batch"
        )
    write_text_atomically(path, json.dumps({"num_steps": num_steps, "seconds_per_step": seconds}) + "\n")
    return num_steps


def _mask_token(texts: HeadTexts, vocab_size: int) -> int:
    """The last of the tokens that the texts have least often."""
    counts = np.zeros(vocab_size, np.int64)
    for text in texts.train:
        counts += np.bincount(text.tokens, minlength=vocab_size)
    return vocab_size - 1 - int(np.argmin(counts[::-1]))


def _share_covered(texts: Any, index: np.ndarray | None) -> float:
    """The share of the tokens to draft that a smaller vocabulary has."""
    tokens = np.concatenate([text.tokens[text.first :] for text in texts])
    return 1.0 if index is None else float(np.mean(index[tokens] < index.max()))
