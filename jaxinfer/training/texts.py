"""Texts to train on: documents, and what the target writes, which is kept on disk while it is written."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.files import atomic_writer, write_text_atomically
from jaxinfer.progress import Stage

HELD_OUT_SHARE = 0.05  # of the tokens
CHUNK = 512  # texts generated, and kept, at once
NO_TOKEN = -1  # after the end of a text


@dataclass(frozen=True)
class TargetTextRequest:
    """A request for text of the target: `num_tokens` new tokens, or fewer where an end of text is not ignored."""

    prompt: tuple[int, ...]
    num_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool = True


Generate = Callable[[list[TargetTextRequest]], list[list[int]]]  # the new tokens of each


@dataclass(frozen=True)
class Documents:
    """Token ids of whole documents, and of those that are held out."""

    train: tuple[np.ndarray, ...]
    held_out: tuple[np.ndarray, ...]
    separator: int | None = None

    @classmethod
    def divide(
        cls, documents: Sequence[Sequence[int]], separator: int | None = None, *, most: int | None = None
    ) -> "Documents":
        """Holds out some documents, at most `most`, chosen by the hash of their tokens, or the last part of a single
        one.

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
        count = count if most is None else min(count, most)
        return cls(tuple(arrays[count:]), tuple(arrays[:count]), separator)

    def stream(self) -> np.ndarray:
        """All documents to train on, one after the other."""
        between = [] if self.separator is None else [np.asarray([self.separator], np.int32)]
        return np.concatenate([part for document in self.train for part in (*between, document)])


@dataclass(frozen=True)
class ContinuationOptions:
    """Attributes:
    num_texts: texts of `length` tokens with their prompts, which are beginnings of `min_prompt` to `max_prompt` tokens
      taken from documents; `at_start` of them are the start of one.
    sampled: share that is sampled at `sampling_temperature`; the others are greedy.
    held_out_texts: greedy continuations of held-out prompts of `held_out_prompt` tokens.
    """

    length: int
    num_texts: int
    min_prompt: int
    max_prompt: int
    held_out_prompt: int
    held_out_texts: int
    at_start: float
    sampled: float
    sampling_temperature: float
    seed: int


def continuation_requests(documents: Documents, options: ContinuationOptions) -> list[TargetTextRequest]:
    """Requests for texts to train on; each depends on its number alone."""
    chosen = [document for document in documents.train if len(document) >= options.max_prompt]
    if not chosen and options.num_texts:
        raise ValueError(f"no document of the data has the {options.max_prompt} tokens of a prompt")
    lengths = np.array([len(document) for document in chosen], float)
    requests = []
    for number in range(options.num_texts):
        random = np.random.default_rng((options.seed, 1, number))
        length = int(random.integers(options.min_prompt, options.max_prompt + 1))
        is_start, is_sampled = random.random() < options.at_start, random.random() < options.sampled
        by_length = None if is_start else lengths / lengths.sum()  # every position is equally likely
        document = chosen[random.choice(len(chosen), p=by_length)]
        start = 0 if is_start else int(random.integers(len(document) - length + 1))
        temperature = options.sampling_temperature if is_sampled else 0.0
        requests.append(_continuation(document[start : start + length], options.length, temperature, number))
    return requests


def held_out_requests(documents: Documents, options: ContinuationOptions) -> list[TargetTextRequest]:
    """Requests for greedy texts after prompts that are spread over what is held out."""
    length = options.held_out_prompt
    pieces = [
        document[start : start + length]
        for document in documents.held_out
        for start in range(0, len(document) - length + 1, length)
    ]
    if not pieces:
        raise ValueError(f"no held-out document has the {length} tokens of a prompt: more data is needed")
    count = min(options.held_out_texts, len(pieces))
    return [_continuation(pieces[i * len(pieces) // count], options.length, 0.0, i) for i in range(count)]


def _continuation(prompt: np.ndarray, length: int, temperature: float, number: int) -> TargetTextRequest:
    return TargetTextRequest(tuple(prompt.tolist()), length - len(prompt), temperature, number)


def write_texts(
    folder: Path, requests: Sequence[TargetTextRequest], length: int, generate: Generate, *, show: bool | None
) -> np.ndarray:
    """Rows int32 [N, length] of prompts and what the target wrote, with NO_TOKEN after the end.

    They are kept in `folder`, CHUNK texts a file: where a run is repeated, only what is missing is generated. Raises
    ValueError for a text of fewer tokens than were asked for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chunks = [np.zeros((0, length), np.int32)]
    paths = {start: folder / f"{start:06d}.npy" for start in range(0, len(requests), CHUNK)}
    num_done = sum(len(requests[start : start + CHUNK]) for start, path in paths.items() if path.exists())
    with Stage(f"generating {folder.name}", len(requests), "text", initial=num_done, show=show) as stage:
        for start, path in paths.items():
            if not path.exists():
                some = requests[start : start + CHUNK]
                rows = np.full((len(some), length), NO_TOKEN, np.int32)
                for row, request, text in zip(rows, some, generate(list(some)), strict=True):
                    whole, most = [*request.prompt, *text], len(request.prompt) + request.num_tokens
                    if len(whole) > most or (request.ignore_eos and len(whole) < most):
                        raise ValueError(f"a text of {len(whole)} tokens where {most} were asked for")
                    row[: len(whole)] = whole
                with atomic_writer(path) as file:
                    np.save(file, rows)
                stage.update(len(some))
            chunks.append(np.load(path))
    return np.concatenate(chunks)


def claim_folder(work_dir: Path, name: str, settings: dict[str, Any]) -> None:
    """Writes the settings of a run to the file `name`; raises ValueError if `work_dir` has those of a different run."""
    path = work_dir / name
    if not path.exists():
        work_dir.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps(settings, indent=2) + "\n")
        return
    earlier = json.loads(path.read_text(encoding="utf-8"))
    for key, value in json.loads(json.dumps(settings)).items():
        if earlier.get(key) != value:
            raise ValueError(f"{work_dir} is of a run with {key}={earlier.get(key)!r}, not {value!r}: choose another")


def digest(*arrays: np.ndarray) -> str:
    """A hash of arrays, for `claim_folder`."""
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(array.tobytes())
    return whole.hexdigest()[:16]
