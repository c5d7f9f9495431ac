"""Distilling a draft from a target, mostly on text that the target generated (on-policy).

On-policy text and divergences after Agarwal et al. 2024 (GKD) and Zhou et al. 2024 (DistillSpec).
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.files import atomic_writer, write_text_atomically
from jaxinfer.models import ModelConfig, Params, RopeConfig, init_params
from jaxinfer.progress import Stage
from jaxinfer.quantization.on_device import unpack_params
from jaxinfer.quantization.tree import check_plain
from jaxinfer.training import corpus
from jaxinfer.training.acceptance import Acceptance, AcceptanceMeter
from jaxinfer.training.loop import TrainOptions, TrainResult, train
from jaxinfer.training.objectives import distillation

HELD_OUT_SHARE = 0.05  # of the tokens
CHUNK = 256  # texts generated, and kept, at once


@dataclass(frozen=True)
class TargetTextRequest:
    """A request for text of the target: `num_tokens` new tokens, ignoring the end of text."""

    prompt: tuple[int, ...]
    num_tokens: int
    temperature: float
    seed: int


Generate = Callable[[list[TargetTextRequest]], list[list[int]]]  # the new tokens of each


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

    def train_options(self) -> TrainOptions:
        return TrainOptions(
            self.num_steps,
            learning_rate=self.learning_rate,
            warmup_steps=min(self.warmup_steps, self.num_steps // 2),
            decay_fraction=self.decay_fraction,
            checkpoint_every=self.checkpoint_every,
            evaluate_every=self.evaluate_every,
        )


@dataclass(frozen=True)
class Documents:
    """Token ids of whole documents, and of those that are held out."""

    train: tuple[np.ndarray, ...]
    held_out: tuple[np.ndarray, ...]
    separator: int | None = None

    @classmethod
    def divide(cls, documents: Sequence[Sequence[int]], separator: int | None = None) -> "Documents":
        """Holds out some documents, chosen by the hash of their tokens, or the last part of a single one.

        `separator` is the id between documents, where the tokenizer has one.
        """
        arrays = [np.asarray(document, np.int32) for document in documents if len(document)]
        if not arrays:
            raise ValueError("the data has no tokens")
        if len(arrays) == 1:
            end = int(len(arrays[0]) * (1 - HELD_OUT_SHARE))
            return cls((arrays[0][:end],), (arrays[0][end:],), separator)
        arrays.sort(key=lambda array: hashlib.sha256(array.tobytes()).digest())
        ends = np.cumsum([len(array) for array in arrays])
        count = min(int(np.searchsorted(ends, HELD_OUT_SHARE * ends[-1])) + 1, len(arrays) - 1)
        return cls(tuple(arrays[count:]), tuple(arrays[:count]), separator)

    def stream(self) -> np.ndarray:
        """All documents to train on, one after the other."""
        between = [] if self.separator is None else [np.asarray([self.separator], np.int32)]
        return np.concatenate([part for document in self.train for part in (*between, document)])


_LATENT_HEAD_DIM = 64  # head width of the draft of a model with latent attention


@dataclass(frozen=True)
class DistillResult:
    """The draft's float32 parameters, the loss curve, and its acceptance on held-out text before and after."""

    config: ModelConfig
    params: Params
    history: tuple[tuple[int, dict[str, float]], ...]
    before: Acceptance
    after: Acceptance


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
        target = _as_llama(target)
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


def _as_llama(target: ModelConfig) -> ModelConfig:
    """A model of the plain family with the target's vocabulary, positions and rotation."""
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
    documents: Documents,
    generate: Generate,
    options: DistillOptions,
    *,
    work_dir: Path,
    show_progress: bool = True,
) -> DistillResult:
    """Trains a draft from its `initial` float32 parameters, which are donated; the target's stay as they are.

    Texts, checkpoints and the settings stay in `work_dir`: repeated after an interruption, the run goes on and ends as
    it would have.

    Raises:
      ValueError: vocabularies that differ; sequences longer than the target takes; too little data; a `work_dir` of
        another run, with the setting that differs.
    """
    if draft.vocab_size != target.vocab_size:
        raise ValueError(f"the draft has {draft.vocab_size} tokens, the target {target.vocab_size}")
    if options.length > target.max_length:
        raise ValueError(f"length={options.length} is more than the {target.max_length} the target takes")
    stream = documents.stream()
    _claim(work_dir, {**asdict(options), "target": _name(target), "draft": _name(draft), "data": _digest(stream)})
    writer = _TextWriter(documents, generate, options, work_dir, None if show_progress else False)
    meter = AcceptanceMeter(draft, writer.held_out(), options.held_out_prompt)
    before = meter(initial)
    rows, prompt_lengths = writer.train()
    objective = distillation(target, draft, options.loss, options.temperature)
    num_data = options.batch_size - options.num_on_policy

    def batch_at(step: int) -> dict[str, np.ndarray]:
        chosen = corpus.rows_at(len(rows), step, options.num_on_policy, options.seed)
        tokens, is_prompt = rows[chosen], np.arange(1, options.length + 1) < prompt_lengths[chosen, None]
        weights = np.where(is_prompt, options.prompt_weight, 1.0)
        if num_data:
            data = corpus.batch_at(stream, step, batch_size=num_data, length=options.length, seed=options.seed)[:, :-1]
            tokens = np.concatenate([tokens, data])
            weights = np.concatenate([weights, np.full(data.shape, options.data_weight)])
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
    return DistillResult(draft, result.params, result.history, before, meter(result.params))


class _TextWriter:
    """Text generated by the target, kept on the disk; each text depends on its number alone."""

    def __init__(
        self, documents: Documents, generate: Generate, options: DistillOptions, work_dir: Path, show: bool | None
    ):
        self._show = show
        self._documents, self._generate, self._options, self._work_dir = documents, generate, options, work_dir

    def train(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows [N, length] of prompt and text, and the lengths of the prompts."""
        options = self._options
        documents = [document for document in self._documents.train if len(document) >= options.max_prompt]
        num_texts = options.num_texts if options.num_on_policy else 0
        if not documents and num_texts:
            raise ValueError(f"no document of the data has the {options.max_prompt} tokens of a prompt")
        lengths = np.array([len(document) for document in documents], float)
        requests = []
        for number in range(num_texts):
            random = np.random.default_rng((options.seed, 1, number))
            length = int(random.integers(options.min_prompt, options.max_prompt + 1))
            is_start, is_sampled = random.random() < options.at_start, random.random() < options.sampled
            by_length = None if is_start else lengths / lengths.sum()  # every position is equally likely
            document = documents[random.choice(len(documents), p=by_length)]
            start = 0 if is_start else int(random.integers(len(document) - length + 1))
            requests.append(self._request(document[start : start + length], is_sampled, number))
        prompt_lengths = np.array([len(request.prompt) for request in requests], np.int32)
        return self._written("texts", requests), prompt_lengths

    def held_out(self) -> np.ndarray:
        """Rows [N, length]: prompts of `held_out_prompt` tokens, spread over what is held out, and greedy text."""
        length = self._options.held_out_prompt
        pieces = [
            document[start : start + length]
            for document in self._documents.held_out
            for start in range(0, len(document) - length + 1, length)
        ]
        if not pieces:
            raise ValueError(f"no held-out document has the {length} tokens of a prompt: more data is needed")
        count = min(self._options.held_out_texts, len(pieces))
        chosen = [pieces[i * len(pieces) // count] for i in range(count)]
        return self._written("held_out", [self._request(piece, False, i) for i, piece in enumerate(chosen)])

    def _request(self, prompt: np.ndarray, is_sampled: bool, number: int) -> TargetTextRequest:
        temperature = self._options.sampling_temperature if is_sampled else 0.0
        return TargetTextRequest(tuple(prompt.tolist()), self._options.length - len(prompt), temperature, number)

    def _written(self, name: str, requests: list[TargetTextRequest]) -> np.ndarray:
        folder = self._work_dir / name
        folder.mkdir(parents=True, exist_ok=True)
        chunks = [np.zeros((0, self._options.length), np.int32)]
        paths = {start: folder / f"{start:06d}.npy" for start in range(0, len(requests), CHUNK)}
        num_done = sum(len(requests[start : start + CHUNK]) for start, path in paths.items() if path.exists())
        with Stage(f"generating {name}", len(requests), "text", initial=num_done, show=self._show) as stage:
            for start, path in paths.items():
                if not path.exists():
                    some = requests[start : start + CHUNK]
                    rows = [[*request.prompt, *text] for request, text in zip(some, self._generate(some), strict=True)]
                    if short := [len(row) for row in rows if len(row) != self._options.length]:
                        raise ValueError(f"a text of {short[0]} tokens where {self._options.length} were asked for")
                    with atomic_writer(path) as file:
                        np.save(file, np.asarray(rows, np.int32))
                    stage.update(len(some))
                chunks.append(np.load(path))
        return np.concatenate(chunks)


def _leading(matrix: Any, width: int) -> jax.Array:
    """The rows [V, width] of a matrix [V, D] in its leading directions, with the same root mean square."""
    values = np.asarray(matrix, np.float32)
    left, sizes, _ = np.linalg.svd(values, full_matrices=False)
    leading = left[:, :width] * sizes[:width]
    return jnp.asarray(leading * np.sqrt(np.mean(values**2) / np.mean(leading**2)), jnp.float32)


def _claim(work_dir: Path, settings: dict[str, Any]) -> None:
    """Writes the settings of the run; raises ValueError if `work_dir` has those of a different run."""
    path = work_dir / "distill.json"
    if not path.exists():
        work_dir.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps(settings, indent=2) + "\n")
        return
    earlier = json.loads(path.read_text(encoding="utf-8"))
    for name, value in settings.items():
        if earlier.get(name) != value:
            raise ValueError(f"{work_dir} is of a run with {name}={earlier.get(name)!r}, not {value!r}: choose another")


def _name(config: ModelConfig) -> str:
    return f"{config.architecture}, {config.num_layers} layers of {config.hidden_size} and {config.intermediate_size}"


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]
