"""Distilling a draft from a target, mostly on text that the target generated (on-policy).

On-policy text and divergences after Agarwal et al. 2024 (GKD) and Zhou et al. 2024 (DistillSpec).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import ModelConfig, Params, RopeConfig, init_params
from jaxinfer.quantization.on_device import unpack_params
from jaxinfer.quantization.tree import check_plain
from jaxinfer.training import corpus
from jaxinfer.training.acceptance import Acceptance, AcceptanceMeter
from jaxinfer.training.head_data import HeadTexts
from jaxinfer.training.head_rows import DraftedText, one_each
from jaxinfer.training.loop import TrainOptions, TrainResult, train
from jaxinfer.training.objectives import distillation
from jaxinfer.training.texts import (
    NO_TOKEN,
    ContinuationOptions,
    Documents,
    Generate,
    TargetTextRequest,
    claim_folder,
    continuation_requests,
    digest,
    held_out_requests,
    write_texts,
)


@dataclass(frozen=True)
class DistillOptions:
    """Attributes:
    num_steps: optimizer steps, each on `batch_size` sequences of `length` tokens.
    loss: "fkl", "rkl" or "tv"; temperature: divides the target's logits in it.
    on_policy: share of the sequences that the target wrote; the others are data.
    num_texts: how many it writes, each after a prompt of `min_prompt` to `max_prompt` tokens of the data, of which
      `at_start` are the start of a document; most greedily, `sampled` of them at `sampling_temperature`.
    prompt_weight: what a prompt's tokens count in the loss, beside one for what the target wrote; data_weight: the
      same for tokens of data. Their divergence is far larger than that of the target's own text.
    held_out_texts: greedy continuations of held-out prompts that measure acceptance.
    """

    num_steps: int
    learning_rate: float = 3e-3
    loss: str = "fkl"
    temperature: float = 0.6
    on_policy: float = 0.9
    batch_size: int = 12
    length: int = 256
    num_texts: int = 3584
    min_prompt: int = 32
    max_prompt: int = 128
    at_start: float = 0.4
    sampled: float = 0.25
    sampling_temperature: float = 0.7
    prompt_weight: float = 0.05
    data_weight: float = 1.0
    held_out_texts: int = 32
    decay_fraction: float = 0.5
    warmup_steps: int = 50
    checkpoint_every: int = 50
    evaluate_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_size", "num_texts", "min_prompt", "held_out_texts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("on_policy", "at_start", "sampled", "prompt_weight", "data_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in 0..1, got {getattr(self, name)}")
        if not self.min_prompt <= self.max_prompt < self.length:
            raise ValueError(
                f"prompts of {self.min_prompt}..{self.max_prompt} tokens must be shorter than length={self.length}"
            )
        if self.num_on_policy and self.num_texts < self.num_on_policy:
            raise ValueError(f"num_texts={self.num_texts} do not fill the {self.num_on_policy} of one batch")

    @property
    def num_on_policy(self) -> int:
        """Sequences of a batch that the target generated."""
        return round(self.batch_size * self.on_policy)

    @property
    def held_out_prompt(self) -> int:
        """Tokens of a held-out prompt: half the length, at most `max_prompt`."""
        return min(self.max_prompt, self.length // 2)

    def continuations(self) -> ContinuationOptions:
        names = ("length", "min_prompt", "max_prompt", "held_out_prompt", "held_out_texts", "at_start", "sampled",
                 "sampling_temperature", "seed")  # fmt: skip
        num_texts = self.num_texts if self.num_on_policy else 0
        return ContinuationOptions(num_texts=num_texts, **{name: getattr(self, name) for name in names})

    def train_options(self) -> TrainOptions:
        return TrainOptions(
            self.num_steps,
            learning_rate=self.learning_rate,
            warmup_steps=min(self.warmup_steps, self.num_steps // 2),
            decay_fraction=self.decay_fraction,
            checkpoint_every=self.checkpoint_every,
            evaluate_every=self.evaluate_every,
        )


_LATENT_HEAD_DIM = 64  # head width of the draft of a model with latent attention


@dataclass(frozen=True)
class DistillResult:
    """The draft's float32 parameters, the loss curve, its acceptance on held-out texts before and after, and those."""

    config: ModelConfig
    params: Params
    history: tuple[tuple[int, dict[str, float]], ...]
    before: Acceptance
    after: Acceptance
    held_out: tuple[DraftedText, ...] = ()


def draft_config(
    target: ModelConfig, *, num_layers: int, hidden_size: int, intermediate_size: int | None = None
) -> ModelConfig:
    """A smaller model of the target's family: its vocabulary, head width and positions, one key head per query head.
    Of a mixture of experts, of latent attention, with recurrent layers or with layers that differ in more than their
    windows, it is a Llama, with heads of 64 for latent attention.

    Raises ValueError if the heads do not fill `hidden_size`.
    """
    differs = target.kv_sources or target.global_head_dim or target.num_global_kv_heads or target.layer_inputs
    if target.moe is not None or target.mla is not None or target.layer_kinds or differs:
        target = as_llama(target)
    if hidden_size % target.head_dim:
        raise ValueError(f"width {hidden_size} is not a multiple of the target's head width {target.head_dim}")
    num_heads = hidden_size // target.head_dim
    return replace(
        target,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or 3 * hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        sliding_windows=(),
        local_rope=None,
        rotated_layers=() if target.rope_of(0) is not None else (False,) * num_layers,
        dtype="float32",
    )


def as_llama(target: ModelConfig) -> ModelConfig:
    """A model of the plain family with the target's vocabulary, sizes, positions and rotation, and one head."""
    head_dim = target.head_dim if target.mla is None else _LATENT_HEAD_DIM
    rope = RopeConfig(theta=target.rope.theta) if target.rope.kind == "proportional" else target.rope  # as Gemma 4's
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=target.num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        rope=replace(rope, rotary_dim=head_dim),
        norm_eps=target.norm_eps,
        tie_word_embeddings=target.tie_word_embeddings,
        max_position_embeddings=target.max_position_embeddings,
    )


def projected_draft(target: ModelConfig, target_params: Params, draft: ModelConfig, key: jax.Array) -> Params:
    """A draft with random layers and the target's embedding and head, projected on their leading directions (by SVD)
    and scaled to their root mean square."""
    target_params = unpack_params(target_params)
    check_plain(target_params, "a draft cut from its target")
    params = init_params(draft, key, dtype="float32")
    width = draft.hidden_size
    if width > target.hidden_size:
        raise ValueError(f"width {width} is more than the target's {target.hidden_size}")
    params["embed"] = _leading(target_params["embed"], width)
    if "lm_head" in target_params:
        params["lm_head"] = _leading(target_params["lm_head"].T, width).T
    if "position_embed" in target_params:
        params["position_embed"] = _leading(target_params["position_embed"], width)
    if "lm_head_bias" in target_params:
        params["lm_head_bias"] = jnp.array(target_params["lm_head_bias"], jnp.float32)
    return params


def spread_layers(num_layers: int, count: int) -> list[int]:
    """`count` of a model's layers, from the first to the last at equal distances; of one, the last.

    Raises ValueError for more than it has.
    """
    if count > num_layers:
        raise ValueError(f"{count} layers are more than the target's {num_layers}")
    return [num_layers - 1] if count == 1 else [round(i * (num_layers - 1) / (count - 1)) for i in range(count)]


def pruned_draft(target: ModelConfig, target_params: Params, layers: Sequence[int]) -> tuple[ModelConfig, Params]:
    """The target with only these of its layers, in this order; float32 copies.

    Raises ValueError for no layer, one that the target does not have, or one with experts: they are not trained.
    """
    target_params = unpack_params(target_params)
    check_plain(target_params, "a draft cut from its target")
    if not layers:
        raise ValueError("no layer of the target is named")
    for layer in layers:
        if not 0 <= layer < target.num_layers:
            raise ValueError(f"no layer {layer}: the target has layers 0..{target.num_layers - 1}")
        if target.experts_of(layer) is not None:
            raise ValueError(f"layer {layer} is a mixture of experts, which cannot be trained; name other layers")
    kept = {str(i): target_params["layers"][str(layer)] for i, layer in enumerate(layers)}
    config = replace(target.with_layers(layers), dtype="float32")
    return config, jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), {**target_params, "layers": kept})


def distill(
    target: ModelConfig,
    target_params: Params,
    draft: ModelConfig,
    initial: Params,
    data: Documents | HeadTexts,
    generate: Generate,
    options: DistillOptions,
    *,
    work_dir: Path,
    show_progress: bool = True,
) -> DistillResult:
    """Trains a draft from its `initial` float32 parameters, which are donated; the target's stay as they are.

    `data` are documents, which the target continues, or what it wrote already, which then is all that is learned.
    Texts, checkpoints and settings stay in `work_dir`: repeated after an interruption, the run goes on and ends as it
    would have.

    Raises:
      ValueError: vocabularies that differ; sequences longer than the target takes; too little data; a `work_dir` of
        another run, with the setting that differs.
    """
    if draft.vocab_size != target.vocab_size:
        raise ValueError(f"the draft has {draft.vocab_size} tokens, the target {target.vocab_size}")
    if options.length > target.max_length:
        raise ValueError(f"length={options.length} is more than the {target.max_length} the target takes")
    stream, show = data.stream() if isinstance(data, Documents) else None, None if show_progress else False
    if stream is None and options.on_policy < 1:
        raise ValueError(f"on_policy={options.on_policy}, and all the data are what the target wrote: it must be 1")
    known = np.concatenate([text.tokens for text in data.train]) if isinstance(data, HeadTexts) else data.stream()
    settings = {**asdict(options), "target": _name(target), "draft": _name(draft), "data": digest(known)}
    claim_folder(work_dir, "distill.json", settings)
    if isinstance(data, HeadTexts):
        texts, held_out = data.train, data.held_out
    else:
        texts, held_out = _continued(data, generate, options, work_dir, show)
    rows, prompt_lengths = one_each(texts, options.length)
    meter = AcceptanceMeter(draft, *one_each(held_out, options.length))
    before = meter(initial)
    objective = distillation(target, draft, options.loss, options.temperature)
    num_data = options.batch_size - options.num_on_policy

    def batch_at(step: int) -> dict[str, np.ndarray]:
        chosen = corpus.rows_at(len(rows), step, options.num_on_policy, options.seed)
        tokens, is_prompt = rows[chosen], np.arange(1, options.length + 1) < prompt_lengths[chosen, None]
        goes_on = np.concatenate([tokens[:, 1:], tokens[:, -1:]], axis=1) != NO_TOKEN
        weights = np.where(is_prompt, options.prompt_weight, 1.0) * goes_on
        tokens = np.maximum(tokens, 0)
        if stream is not None and num_data:
            given = corpus.batch_at(stream, step, batch_size=num_data, length=options.length, seed=options.seed)[:, :-1]
            tokens = np.concatenate([tokens, given])
            weights = np.concatenate([weights, np.full(given.shape, options.data_weight)])
        return {"tokens": tokens, "weights": weights.astype(np.float32)}

    def evaluate(params: Params) -> dict[str, float]:
        acceptance = meter(params)
        return {"held_out_agreement": acceptance.agreement, "acceptance": acceptance.rate}

    result: TrainResult = train(
        initial,
        objective,
        batch_at,
        options.train_options(),
        checkpoint_dir=work_dir / "checkpoints",
        given=(unpack_params(target_params),),
        evaluate=evaluate,
        description="distill",
        show_progress=show_progress,
    )
    return DistillResult(draft, result.params, result.history, before, meter(result.params), held_out)


def _continued(
    documents: Documents, generate: Generate, options: DistillOptions, work_dir: Path, show: bool | None
) -> tuple[tuple[DraftedText, ...], tuple[DraftedText, ...]]:
    """Texts that the target writes after beginnings of documents, and after held-out ones."""
    wanted = options.continuations()

    def written(name: str, requests: list[TargetTextRequest]) -> tuple[DraftedText, ...]:
        rows = write_texts(work_dir / name, requests, options.length, generate, show=show)
        return tuple(DraftedText(row, len(one.prompt)) for row, one in zip(rows, requests, strict=True))

    held_out = written("held_out", held_out_requests(documents, wanted))
    return written("texts", continuation_requests(documents, wanted)), held_out


def _leading(matrix: Any, width: int) -> jax.Array:
    """The rows [V, width] of a matrix [V, D] in its leading directions, with the same root mean square."""
    values = np.asarray(matrix, np.float32)
    left, sizes, _ = np.linalg.svd(values, full_matrices=False)
    leading = left[:, :width] * sizes[:width]
    return jnp.asarray(leading * np.sqrt(np.mean(values**2) / np.mean(leading**2)), jnp.float32)


def _name(config: ModelConfig) -> str:
    return f"{config.architecture}, {config.num_layers} layers of {config.hidden_size} and {config.intermediate_size}"
