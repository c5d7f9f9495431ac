"""Data that drafts are trained on: documents, and texts that the target writes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.command import UsageError
from jaxinfer.cli.output import note

if TYPE_CHECKING:
    from jaxinfer.api.llm import LLM
    from jaxinfer.training.head_data import HeadTextOptions, HeadTexts
    from jaxinfer.training.texts import TargetTextRequest

WRITERS = 64  # texts that a model writes at a time
# Of the prompts that a model writes itself: all kinds of answers, and texts to answer from.
BEGINNINGS = (
    "",
    "Write a Python function",
    "List",
    "Summarize the following text.\n\n",
    "How",
    "Write",
    "Name",
    "Explain",
    "Why",
    "Write a Python",
    "What",
    "Give",
    "Summarize this article:\n\n",
    "I",
)


def read_documents(paths: list[Path], flag: str = "--data") -> list[str]:
    """The texts of files, and of the files in folders in the order of their names, except hidden and binary ones.
    `flag` is for error messages.

    Raises UsageError for a path that does not exist, a file that is not text, or no text at all.
    """
    documents = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"{flag} {path}: there is no such file or folder")
        if path.is_file():
            try:
                documents.append(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                raise UsageError(f"{flag} {path} is not text in UTF-8") from None
            continue
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            if any(part.startswith(".") for part in file.relative_to(path).parts):
                continue
            try:
                documents.append(file.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                note(f"{file} is not text and is skipped")
    if not any(documents):
        raise UsageError(f"{flag} {', '.join(map(str, paths))}: no text in it")
    return documents


def read_texts(paths: list[Path] | None, model: str, count: int) -> list[str]:
    """The texts of --texts, as of `read_documents`; for an embedded model, otherwise, `count` Python files that it was
    not trained on. [] for another model."""
    if paths:
        return read_documents(paths, "--texts")
    if model not in ("demo", "demo-draft"):
        return []
    from jaxinfer.training.corpus import held_out_files

    return [text for _, text in held_out_files(count)]


def writer(llm: "LLM") -> "Callable[[list[TargetTextRequest]], list[list[int]]]":
    """Generates texts with the target: greedy ones first, since noise for one row of a batch is made for all of them
    and takes a third of a step's time on a CPU."""
    from jaxinfer.sampling import SamplingParams

    def generate(requests: "list[TargetTextRequest]") -> list[list[int]]:
        texts: dict[int, list[int]] = {}
        for is_sampled in (False, True):
            chosen = [number for number, text in enumerate(requests) if (text.temperature > 0) == is_sampled]
            if chosen:
                texts |= zip(chosen, written([requests[number] for number in chosen]), strict=True)
        return [texts[number] for number in range(len(requests))]

    def written(requests: "list[TargetTextRequest]") -> list[list[int]]:
        params = [
            SamplingParams(
                temperature=text.temperature, max_tokens=text.num_tokens, seed=text.seed, ignore_eos=text.ignore_eos
            )
            for text in requests
        ]
        outputs = llm.generate([list(text.prompt) for text in requests], params, use_tqdm=False)
        for output in outputs:
            if output.outputs[0].error:
                raise RuntimeError(f"the target failed to generate a text: {output.outputs[0].error}")
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def answered_prompts(
    llm: "LLM",
    chats: Sequence[Sequence[dict[str, Any]]],
    own_prompts: int | None,
    wanted: "HeadTextOptions",
    work_dir: Path,
) -> "HeadTexts":
    """The model's answers to conversations, or to so many prompts of its own."""
    from jaxinfer.training import head_data

    tokenizer, named = llm.get_tokenizer(), {"target": llm.fingerprint(), "show": None}
    if own_prompts:
        if tokenizer.chat_template is None:
            raise UsageError(f"--own-prompts: {llm.name} has no chat template, so no user's message begins anywhere")
        beginnings = [tokenizer.encode_content(text) if text else [] for text in BEGINNINGS]
        header, write = _user_header(llm), writer(llm)
        prompts = head_data.own_prompts(beginnings, header, own_prompts, write, wanted, work_dir, **named)
        chats = [[{"role": "user", "content": tokenizer.decode(ids).strip()}] for ids in prompts]
        chats = [chat for chat in chats if chat[0]["content"]]
    if tokenizer.chat_template is not None:
        prompts = [llm.chat_prompt(messages) for messages in chats]
    elif any(len(messages) > 1 for messages in chats):
        raise UsageError(f"{llm.name} has no chat template, and the prompts have conversations of several messages")
    else:
        prompts = [tokenizer.encode(str(message.get("content", ""))) for [message] in chats]
    return head_data.answers(prompts, writer(llm), wanted, work_dir, **named)


def _user_header(llm: "LLM") -> list[int]:
    """The tokens before a user's first message."""
    one, other = (llm.chat_prompt([{"role": "user", "content": text}]) for text in ("A", "zebra"))
    same = [a == b for a, b in zip(one, other, strict=False)]
    return one[: same.index(False) if False in same else len(same)]
