"""Measures caches one after another: an engine for each, over weights that are loaded once."""

import gc
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxinfer.api.llm import LLM
from jaxinfer.cache import kv_dtype_name, stored_dtype
from jaxinfer.cache.policy.kinds import parse_policy
from jaxinfer.engine.cache_quality import CHUNK, compared, hidden_states, log_probs
from jaxinfer.engine.engine import Engine
from jaxinfer.loading import LoadedModel
from jaxinfer.measure.kv_report.needle import Needle, make_needles, needle_lines, score_copy
from jaxinfer.measure.kv_report.report import (
    ALL,
    FULL,
    CacheChoice,
    CacheFigures,
    NeedleCell,
    choices,
    default_policies,
)
from jaxinfer.models import compute_dtype
from jaxinfer.sampling import SamplingParams
from jaxinfer.text import Tokenizer

MAX_TEXT_TOKENS = 512
NEEDLE_PARTS = (2, 1)  # lengths of the needle task, as parts of a text


@dataclass(frozen=True)
class ReportSettings:
    """Settings that all caches share.

    Attributes:
      arguments: of `LLM`, for the engine. text_tokens: of each piece of the texts; None for 512, or what the model
        allows. num_texts: pieces, at most. num_answers, answer_tokens: greedy continuations of the first pieces.
      num_needles: lines at each depth and length of the needle task, 0 for none.
      kv_dtypes: names. policies: texts; None for everything, half and a quarter of a piece.
    """

    kv_dtypes: Sequence[str]
    policies: Sequence[str] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    text_tokens: int | None = None
    num_texts: int = 8
    num_answers: int = 8
    answer_tokens: int = 32
    num_needles: int = 4


class CacheReporter:
    """Measures the full cache first, then others against it.

    Quality is teacher-forced: each text is a prompt of the engine, in chunks of 64 tokens, whose keys and values are
    read back from the cache's pages. A policy is applied to prompts page by page, as it is to answers, so a token of
    the text attends to the same keys as if it had been generated. Where a policy compacts prompts, or chooses what
    answers read, the first half of each text is the prompt, and all caches are measured on the second half.

    Raises ValueError for texts of fewer than two tokens, and where no text of two tokens fits the model beside an
    answer.
    """

    def __init__(self, model: LoadedModel, documents: Sequence[str], settings: ReportSettings):
        if model.tokenizer is None:
            raise ValueError(f"{model.name} has no tokenizer, so it cannot read texts")
        self.model, self.settings = model, settings
        self.texts = pieces(
            [model.tokenizer.encode_content(text) for text in documents],
            beginning(model.tokenizer),
            self._text_tokens(),
            settings.num_texts,
        )
        self.num_tokens = max(map(len, self.texts))
        self.computed = kv_dtype_name(stored_dtype("auto", compute_dtype(model.params)))
        self.needles = self._make_needles(model.tokenizer)
        self._expected: list[np.ndarray] = []
        self._answers: list[list[int]] = []
        self._gains: list[float] = []

    @property
    def num_predicted(self) -> int:
        """Tokens of the texts that are predicted."""
        return sum(len(text) - 1 - start for text, start in zip(self.texts, self.starts, strict=True))

    @property
    def choices(self) -> list[CacheChoice]:
        """The caches to measure, the full one first."""
        policies = self.settings.policies
        policies = default_policies(self.num_tokens) if policies is None else policies
        return choices(self.settings.kv_dtypes, policies, self.computed)

    @property
    def _has_prompts(self) -> bool:
        """True if a policy treats answers in another way than prompts."""
        policies = [parse_policy(choice.kv_policy) for choice in self.choices if choice.kv_policy != ALL]
        return not all(policy.is_same_in_prompts for policy in policies)

    @property
    def starts(self) -> list[int]:
        """The first token of each text whose next one is measured."""
        return [len(text) // 2 if self._has_prompts else 0 for text in self.texts]

    def rows(self, progress: Callable[[str], None] = lambda text: None) -> Iterator[CacheFigures]:
        """Figures of each cache, the full one's first, when they are measured. `progress` gets what is done."""
        for choice in self.choices:
            yield self(choice, lambda what, name=str(choice): progress(f"{name}: {what}"))

    def __call__(self, choice: CacheChoice, progress: Callable[[str], None] = lambda text: None) -> CacheFigures:
        """Figures of one cache. A refusal is a result with its reason; only the full cache raises."""
        if not self._expected and not choice.is_full:
            self(FULL)
        row = CacheFigures(choice, self.computed if choice.kv_dtype == "auto" else choice.kv_dtype)
        try:
            progress("starting")
            with self._opened(choice) as llm:
                return self._measured(llm, row, progress)
        except (ValueError, RuntimeError, NotImplementedError, MemoryError) as error:
            if choice.is_full or "KeyboardInterrupt" in str(error):  # raised by JAX's compiler
                raise
            return replace(row, reason=str(error).strip().partition("\n")[0] or type(error).__name__)
        finally:
            gc.collect()

    def _measured(self, llm: LLM, row: CacheFigures, progress: Callable[[str], None]) -> CacheFigures:
        engine = llm.engine.engines[0]
        progress("reading the texts")
        starts = self.starts
        parts = hidden_states(
            engine, self.texts, [start or len(text) for start, text in zip(starts, self.texts, strict=True)]
        )
        states = [rows[start:] for rows, start in zip(parts, starts, strict=True)]
        if row.choice.is_full:
            self._expected = states
        texts = [text[start:] for text, start in zip(self.texts, starts, strict=True)]
        kl, surprise, agrees = compared(engine.runner.model, engine.runner.weights.value, texts, self._expected, states)
        sizes = engine.spec.pool_sizes
        # Without tokens in flight: what a sequence keeps of a text that has been read.
        kept = replace(sizes, max_model_len=self.num_tokens, dispatch_tokens=0)
        ends = ((group.at_end, group.page_bytes) for group in engine.spec.groups)
        lost = sum(at_end.num_dropped(self.num_tokens) * size for at_end, size in ends if at_end is not None)
        row = replace(
            row,
            kl=max(float(kl.mean()), 0.0),
            max_kl=max(float(kl.max()), 0.0),
            perplexity=float(np.exp(surprise.mean())),
            top1_agreement=float(agrees.mean()),
            token_bytes=sizes.token_bytes,
            sequence_bytes=kept.sequence_bytes - lost,
        )
        if self.settings.num_answers:
            progress("answering")
            row = self._answered(llm, row)
        if self.needles:
            progress("copying lines")
            row = replace(row, needle=self._needle(engine, row.choice.is_full))
        return row

    # Answers.

    def _answered(self, llm: LLM, row: CacheFigures) -> CacheFigures:
        """One answer at a time, the first twice: it compiles."""
        params = SamplingParams(temperature=0, max_tokens=self.settings.answer_tokens, ignore_eos=True, seed=0)
        prompts = self.texts[: self.settings.num_answers]
        answers, seconds = [], []
        llm.generate([prompts[0]], params, use_tqdm=False)
        for prompt in prompts:
            [output] = llm.generate([prompt], params, use_tqdm=False)
            answers.append(output.outputs[0].token_ids)
            if output.timings is not None:
                seconds.append(output.timings.time_per_output_token)
        if row.choice.is_full:
            self._answers = answers
        pairs = list(zip(self._answers, answers, strict=True))
        return replace(
            row,
            num_equal=sum(expected == answer for expected, answer in pairs),
            num_answers=len(pairs),
            equal_tokens=float(np.mean([equal_start(expected, answer) / len(expected) for expected, answer in pairs])),
            seconds_per_token=statistics.median(seconds) if seconds else None,
        )

    # The needle task.

    def _make_needles(self, tokenizer: Tokenizer) -> list[Needle]:
        filler = [token for text in self.texts for token in text]
        lines = needle_lines(self.settings.num_needles)
        lengths = [self.num_tokens // part for part in NEEDLE_PARTS] if lines else []
        encode, start = tokenizer.encode_content, beginning(tokenizer)
        return [needle for length in lengths for needle in make_needles(encode, start, filler, length, lines)]

    def _needle(self, engine: Engine, is_full: bool) -> tuple[NeedleCell, ...]:
        scores = []
        # The place before the copy is a prompt's end.
        ends = [len(needle.tokens) - needle.num_copied for needle in self.needles]
        states = hidden_states(engine, [needle.tokens for needle in self.needles], ends if self._has_prompts else None)
        for needle, rows in zip(self.needles, states, strict=True):
            scores.append(score_copy(needle, log_probs(engine, rows[-needle.num_copied - 1 : -1])))
        count, without, cells = self.settings.num_needles, 0.0, []
        for first in range(0, len(scores), count):
            needle, part = self.needles[first], scores[first : first + count]
            mean = float(np.mean([logprob for _, logprob in part]))
            if needle.depth is None:
                without = mean
                continue
            gain, num_correct = mean - without, sum(is_copied for is_copied, _ in part)
            full_gain = gain if is_full else self._gains[len(cells)]
            cells.append(NeedleCell(len(needle.tokens), needle.depth, count, num_correct, gain, full_gain))
        if is_full:
            self._gains = [cell.gain for cell in cells]
        return tuple(cells)

    # The model.

    def _text_tokens(self) -> int:
        asked, longest = self.settings.text_tokens, self.model.config.max_length
        if asked is not None:
            return asked
        room = MAX_TEXT_TOKENS if longest is None else min(MAX_TEXT_TOKENS, longest - self.settings.answer_tokens - 1)
        if room < 2:
            raise ValueError(
                f"{self.model.name} takes {longest} tokens: no text fits beside answers of "
                f"{self.settings.answer_tokens}; give fewer with --answer-tokens"
            )
        return room

    def _opened(self, choice: CacheChoice) -> LLM:
        length = self.num_tokens + self.settings.answer_tokens + 1
        values = {"max_model_len": length, "max_seqs": 1, "prefill_chunk": CHUNK, **self.settings.arguments}
        if choice.kv_dtype.startswith("fp8") and self.model.kv_scales is not None:
            values["kv_scales"] = self.model.kv_scales
        return LLM((self.model.config, self.model.params), **values, **choice.arguments)

    def close(self) -> None:
        """Frees the weights."""
        self.model.weights.release()


def beginning(tokenizer: Tokenizer) -> list[int]:
    """The tokens with which each text begins: BOS, or none."""
    first = tokenizer.encode("")[:1]
    return first if first == [tokenizer.bos_token_id] else []


def pieces(documents: Sequence[Sequence[int]], start: Sequence[int], num_tokens: int, count: int) -> list[list[int]]:
    """Up to `count` pieces of `num_tokens` tokens, `start` included: the first of each document, then the second ones.
    A document that is shorter than a piece is taken whole.

    Raises ValueError where nothing has two tokens.
    """
    size = max(num_tokens - len(start), 1)
    cut = []
    for document in documents:
        whole = range(0, len(document) - size + 1, size) or (0,)
        cut.append([[*start, *document[first : first + size]] for first in whole])
    rounds = itertools.chain.from_iterable(itertools.zip_longest(*cut))
    usable = [piece for piece in rounds if piece is not None and len(piece) > 1]
    if not usable:
        raise ValueError("the texts have fewer than two tokens")
    return usable[:count]


def equal_start(tokens: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    pairs = enumerate(zip(tokens, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(tokens), len(other)))
