"""The gain of drafts that need no training: n-grams on summaries and code edits, first layers; greedy answers."""

from collections.abc import Iterator
from typing import Any

from benchmarks.quality.texts import Texts
from benchmarks.speculative import Prompt, make_edits, measured
from jaxinfer import LLM

NUM_PROMPTS, ROUNDS = 12, 3
SUMMARY_CHARS, EDIT_CHARS = 1_200, 600


def measure_drafts(path: str, texts: Texts) -> Iterator[dict[str, Any]]:
    """A row for each draft and task: speed against plain decoding, tokens a round, the share accepted."""
    with LLM(path, max_seqs=1) as llm:
        tasks = {"summaries": summaries(llm, texts), "code edits": edits(llm, texts)}
        num_layers = llm.engine.spec.config.num_layers
    for draft in ("ngram", f"layers:{num_layers // 8 or 1}", f"layers:{num_layers // 3}"):
        for task, prompts in tasks.items():
            if prompts:
                with LLM(path, max_seqs=1) as plain:
                    row = measured(plain, path, [[prompt] for prompt in prompts], ROUNDS, draft=draft)
                row = {name: value for name, value in row.items() if name not in ("answers", "stats")}
                yield {"draft": draft, "task": task, "num_prompts": len(prompts), **row}


def summaries(llm: LLM, texts: Texts) -> list[Prompt]:
    """Chats that ask for a summary; none for a model without a chat template."""
    ask = "Summarize this text:\n\n{}"
    return (
        [chat(llm, ask.format(text[:SUMMARY_CHARS])) for text in texts.measured[:NUM_PROMPTS]] if has_chat(llm) else []
    )


def edits(llm: LLM, texts: Texts) -> list[Prompt]:
    """Chats that ask for the code with a name changed; for a model without a template, the beginning of that code."""
    if not has_chat(llm):
        return [edit.prompt for edit in make_edits(llm, texts.code, NUM_PROMPTS)]
    ask = "Repeat this code, but write `this` instead of `self`:\n\n```python\n{}\n```"
    code = [text[text.index("self") :][:EDIT_CHARS] for text in texts.code if "self" in text]
    return [chat(llm, ask.format(text)) for text in code[:NUM_PROMPTS]]


def has_chat(llm: LLM) -> bool:
    return llm.get_tokenizer().chat_template is not None


def chat(llm: LLM, text: str) -> Prompt:
    return list(
        llm.get_tokenizer().apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    )
