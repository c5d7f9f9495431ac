"""The texts that heads are trained on: answers to prompts or continuations that the target writes first, or documents
as they are; and some that are held out."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from jaxinfer.training.head_rows import DraftedText, pieces, written_texts
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

MIN_ANSWER = 8  # tokens for which a row must have room after a prompt
MAX_PROMPT = 64  # tokens of a prompt that the target writes itself, where rows are long enough
MAX_TEXT_PROMPT = 160  # and of one that begins with more than a line, after which a text follows
LINE = 5  # tokens
OWN_TEMPERATURE = 0.8  # at which it writes them


@dataclass(frozen=True)
class HeadTexts:
    """Texts to train on, and those that measure acceptance."""

    train: tuple[DraftedText, ...]
    held_out: tuple[DraftedText, ...]

    def __post_init__(self) -> None:
        for name in ("train", "held_out"):
            if not getattr(self, name):
                raise ValueError(f"no text to {'train on' if name == 'train' else 'hold out'}: more data is needed")


@dataclass(frozen=True)
class HeadTextOptions:
    """Attributes:
    length: tokens of a text with its prompt, at most. answer_tokens: of an answer, at most; None up to `length`.
    num_answers: answers that are sampled, or texts that the target continues; None for an answer to each prompt, and
      for documents as they are.
    sampled: share of them at `sampling_temperature`; the others are greedy, and those of held-out prompts.
    held_out_texts: at most so many.
    """

    length: int = 256
    answer_tokens: int | None = None
    num_answers: int | None = None
    sampled: float = 0.25
    sampling_temperature: float = 1.0
    held_out_texts: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.length < 2 * MIN_ANSWER:
            raise ValueError(f"length must be at least {2 * MIN_ANSWER}, got {self.length}")
        if self.answer_tokens is not None and self.answer_tokens < 2:
            raise ValueError(f"answer_tokens must be at least 2, got {self.answer_tokens}")
        if not 0 <= self.sampled <= 1:
            raise ValueError(f"sampled must be in 0..1, got {self.sampled}")
        if self.held_out_texts < 1:
            raise ValueError(f"held_out_texts must be at least 1, got {self.held_out_texts}")
        if self.num_answers is not None and self.num_answers < 1:
            raise ValueError(f"num_answers must be at least 1, got {self.num_answers}")


def answers(
    prompts: Sequence[Sequence[int]],
    generate: Generate,
    options: HeadTextOptions,
    work_dir: Path,
    *,
    target: str,
    show: bool | None,
) -> HeadTexts:
    """Answers of the target to prompts that leave room for them; where more are wanted than there are prompts, further
    ones are sampled. `target` tells it from others.

    Raises ValueError for a `work_dir` with answers of another run, with the setting that differs.
    """
    _claim(work_dir, prompts, options, target)
    fitting = [prompt for prompt in prompts if len(prompt) <= options.length - MIN_ANSWER]
    if len(fitting) < 2:
        raise ValueError(
            f"{len(fitting)} of {len(prompts)} prompts leave room for an answer in {options.length} tokens: at least 2 "
            "are needed"
        )
    divided = Documents.divide(fitting, most=options.held_out_texts)
    count = options.num_answers or len(divided.train)
    requests = [
        _answer(divided.train[number % len(divided.train)], options, number, number >= len(divided.train))
        for number in range(count)
    ]
    held_out = [_answer(prompt, options, number, None) for number, prompt in enumerate(divided.held_out)]
    return _written(requests, held_out, generate, options, work_dir, show)


def _claim(work_dir: Path, data: Sequence[Sequence[int]], options: HeadTextOptions, target: str) -> None:
    arrays = (np.asarray([len(tokens), *tokens], np.int64) for tokens in data)
    claim_folder(work_dir, "texts.json", {**asdict(options), "target": target, "data": digest(*arrays)})


def own_prompts(
    beginnings: Sequence[Sequence[int]],
    header: Sequence[int],
    count: int,
    generate: Generate,
    options: HeadTextOptions,
    work_dir: Path,
    *,
    target: str,
    show: bool | None,
) -> list[list[int]]:
    """Prompts that the target writes itself: what it samples after the `header` that its chat template puts before a
    user's message (Xu et al. 2024, Magpie, arXiv 2406.08464), and after one of `beginnings` of such a message, in turn;
    an empty one leaves all to the target, and those that leave no room are left out. Of `count` samples those that end
    within MAX_PROMPT tokens, or within MAX_TEXT_PROMPT after a beginning that is as long as a line, each once, with
    their beginning, without the header. `target` as of `answers`.

    Raises ValueError if fewer than 2 do.
    """
    room = options.length - len(header) - MIN_ANSWER
    beginnings = [beginning for beginning in beginnings if len(beginning) + MIN_ANSWER <= room]
    if not beginnings:
        raise ValueError(f"{options.length} tokens have no room for {len(header)} of a chat template and a prompt")
    settings = {"count": count, "length": options.length, "seed": options.seed, "target": target}
    heads = [np.asarray([*header, *beginning], np.int32) for beginning in beginnings]
    claim_folder(work_dir, "own_prompts.json", {**settings, "header": digest(*heads)})

    def most(beginning: Sequence[int]) -> int:
        return min(MAX_TEXT_PROMPT if len(beginning) >= LINE else MAX_PROMPT, room) - len(beginning)

    chosen = [beginnings[number % len(beginnings)] for number in range(count)]
    requests = [
        TargetTextRequest(
            (*header, *beginning), most(beginning), OWN_TEMPERATURE, options.seed * 1_000_003 + number, ignore_eos=False
        )
        for number, beginning in enumerate(chosen)
    ]
    longest = len(header) + min(MAX_TEXT_PROMPT, room)
    rows = write_texts(work_dir / "prompts", requests, longest, generate, show=show)
    texts = [(row[row != NO_TOKEN], request) for row, request in zip(rows, requests, strict=True)]
    ended = [
        text[len(header) :].tolist()
        for text, request in texts
        if len(request.prompt) < len(text) < len(request.prompt) + request.num_tokens
    ]
    prompts = [list(prompt) for prompt in dict.fromkeys(map(tuple, ended))]
    if len(prompts) < 2:
        raise ValueError(
            f"{len(prompts)} of {count} prompts that the model wrote itself ended within {most(())} tokens"
        )
    return prompts


def _answer(prompt: np.ndarray, options: HeadTextOptions, number: int, is_sampled: bool | None) -> TargetTextRequest:
    """A request for an answer, sampled or greedy by chance unless it must be sampled; None: must be greedy."""
    by_chance = np.random.default_rng((options.seed, 1, number)).random() < options.sampled
    is_sampled = False if is_sampled is None else is_sampled or bool(by_chance)
    temperature = options.sampling_temperature if is_sampled else 0.0
    room = min(options.length - len(prompt), options.answer_tokens or options.length)
    return TargetTextRequest(tuple(prompt.tolist()), room, temperature, number, ignore_eos=False)


def continuations(
    documents: Sequence[Sequence[int]],
    generate: Generate,
    options: HeadTextOptions,
    work_dir: Path,
    *,
    target: str,
    show: bool | None,
) -> HeadTexts:
    """Documents that the target continues, from their beginnings and from within; without `num_answers`, documents in
    pieces. As `answers` otherwise."""
    _claim(work_dir, documents, options, target)
    divided = Documents.divide(documents)
    if options.num_answers is None:
        held_out = pieces(divided.held_out, options.length)[: options.held_out_texts]
        return HeadTexts(tuple(pieces(divided.train, options.length)), tuple(held_out))
    short, long = max(1, options.length // 8), options.length // 2
    wanted = ContinuationOptions(
        length=options.length,
        num_texts=options.num_answers,
        min_prompt=short,
        max_prompt=long,
        held_out_prompt=min(long, options.length // 4),
        held_out_texts=options.held_out_texts,
        at_start=0.4,
        sampled=options.sampled,
        sampling_temperature=options.sampling_temperature,
        seed=options.seed,
    )
    requests, held_out = continuation_requests(divided, wanted), held_out_requests(divided, wanted)
    return _written(requests, held_out, generate, options, work_dir, show)


def _written(
    requests: Sequence[TargetTextRequest],
    held_out: Sequence[TargetTextRequest],
    generate: Generate,
    options: HeadTextOptions,
    work_dir: Path,
    show: bool | None,
) -> HeadTexts:
    def texts(name: str, some: Sequence[TargetTextRequest]) -> tuple[DraftedText, ...]:
        return tuple(written_texts(some, write_texts(work_dir / name, some, options.length, generate, show=show)))

    return HeadTexts(held_out=texts("held_out", held_out), train=texts("answers", requests))
