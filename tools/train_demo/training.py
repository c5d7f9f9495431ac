"""The training of the embedded models: sizes, data, steps."""

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxinfer.files import write_text_atomically
from jaxinfer.models import ModelConfig, Params, RopeConfig, init_params
from jaxinfer.training import corpus
from jaxinfer.training.copying import with_copying
from jaxinfer.training.distill import DistillOptions, DistillResult, Documents, Generate, distill
from jaxinfer.training.loop import TrainOptions, TrainResult, train
from jaxinfer.training.objectives import Objective, next_token

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
VOCAB_SIZE = 4096
CONTEXT = 512  # tokens of a sequence in the held-out loss

TARGET = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB_SIZE,
    hidden_size=384,
    intermediate_size=896,
    num_layers=6,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    rope=RopeConfig(rotary_dim=64),
    tie_word_embeddings=True,
    max_position_embeddings=1024,
)
# The draft's initial model, trained on the same data as the target.
DRAFT_START = replace(TARGET, hidden_size=128, intermediate_size=384, num_layers=2, num_heads=2, num_kv_heads=2)


@dataclass(frozen=True)
class TrainingPhase:
    """`num_steps` optimizer steps on batches of `batch_size` sequences of `length` tokens."""

    num_steps: int
    batch_size: int
    length: int

    @property
    def num_tokens(self) -> int:
        return self.num_steps * self.batch_size * self.length


# Short sequences first, since they cost half the attention; the last phase teaches the full context.
TARGET_PHASES = (TrainingPhase(200, 24, 256), TrainingPhase(480, 12, 256), TrainingPhase(120, 6, 512))
DRAFT_PHASES = (TrainingPhase(700, 12, 256), TrainingPhase(100, 6, 512))
DISTILLATION = DistillOptions(num_steps=1000, learning_rate=3e-4, decay_fraction=0.7, temperature=0.6, on_policy=0.92)


@dataclass(frozen=True)
class DemoModel:
    """A trained model of the pair, with the figures of its model card."""

    name: str
    config: ModelConfig
    options: TrainOptions
    phases: tuple[TrainingPhase, ...]
    result: TrainResult
    held_out_loss: float
    num_train_tokens: int


@dataclass(frozen=True)
class DemoData:
    """The tokenizer, and the token streams of the corpus."""

    tokenizer: Tokenizer
    train: np.ndarray
    held_out: np.ndarray
    held_out_bytes: int
    documents: Documents


def load_data(work_dir: Path) -> DemoData:
    """Loads the corpus; trains the tokenizer once and keeps it in `work_dir`, for resumed runs."""
    texts = corpus.standard_library()
    path = work_dir / "tokenizer.json"
    if path.exists():
        tokenizer = Tokenizer.from_file(str(path))
    else:
        work_dir.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer(texts.train, VOCAB_SIZE)
        write_text_atomically(path, tokenizer.to_str(pretty=True))
    return DemoData(
        tokenizer=tokenizer,
        train=encode(tokenizer, texts.train),
        held_out=encode(tokenizer, texts.held_out),
        held_out_bytes=sum(len(text.encode()) for text in texts.held_out),
        documents=Documents(
            *(
                tuple(np.asarray(one.ids, np.int32) for one in tokenizer.encode_batch(list(some)))
                for some in (texts.train, texts.held_out)
            ),
            separator=tokenizer.token_to_id(END_OF_TEXT),
        ),
    )


def train_model(
    name: str, config: ModelConfig, phases: tuple[TrainingPhase, ...], data: DemoData, work_dir: Path
) -> DemoModel:
    """Trains one model of the pair; resumes from checkpoints in `work_dir`/`name`."""
    options = TrainOptions(sum(phase.num_steps for phase in phases))
    objective = next_token(config)

    def batch_at(step: int) -> np.ndarray:
        for phase in phases:
            if step < phase.num_steps:
                break
            step -= phase.num_steps
        return corpus.batch_at(
            data.train, step, batch_size=phase.batch_size, length=phase.length, seed=phases.index(phase)
        )

    result = train(
        init_params(config, jax.random.key(0)),
        objective,
        batch_at,
        options,
        checkpoint_dir=work_dir / name,
        description=name,
    )
    held_out = mean_loss(objective, result.params, data.held_out, batch_size=4, length=CONTEXT)
    return DemoModel(name, config, options, phases, result, held_out, len(data.train))


def distill_draft(
    target: ModelConfig,
    target_params: Params,
    start: DemoModel,
    documents: Documents,
    generate: Generate,
    options: DistillOptions,
    work_dir: Path,
) -> DistillResult:
    """The embedded draft: the initial model with copying heads, distilled from the target in `work_dir`."""
    config, initial = with_copying(start.config, start.result.params, documents.stream()[None, : options.length])
    return distill(target, target_params, config, initial, documents, generate, options, work_dir=work_dir)


def train_tokenizer(texts: tuple[str, ...], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer, trained on texts. Runs of spaces are not split, for indentation."""
    tokenizer = Tokenizer(models.BPE())
    # A word with the space or punctuation before it, single digits, runs of punctuation, line ends with indentation.
    pattern = r" ?[^\W\d]+|[^\r\n\w\s]?[^\W\d]+|\d| ?[^\s\w]+|\n+[^\S\n]*|[^\S\n]+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: tuple[str, ...]) -> np.ndarray:
    """All texts as one int32 stream, with the end-of-text token before and after each."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    stream = [np.asarray([end], np.int32)]
    for encoding in tokenizer.encode_batch(list(texts)):
        stream += [np.asarray(encoding.ids, np.int32), np.asarray([end], np.int32)]
    return np.concatenate(stream)


def mean_loss(objective: Objective, params: Params, stream: np.ndarray, *, batch_size: int, length: int) -> float:
    """Mean loss over consecutive pieces of a held-out token stream."""
    evaluate = jax.jit(lambda params, tokens: objective(params, tokens)[0])
    count = (len(stream) - 1) // length // batch_size
    if count < 1:
        raise ValueError(f"{len(stream)} tokens are too few to evaluate {batch_size} x {length}")
    starts = length * np.arange(count * batch_size).reshape(count, batch_size)
    losses = [evaluate(params, jnp.asarray(stream[row[:, None] + np.arange(length + 1)])) for row in starts]
    return float(np.mean([float(loss) for loss in losses]))
