"""How much of a draft its target accepts: greedy text of the target after the beginnings of held-out files.

    python -m benchmarks.draft_acceptance [--target demo] [--draft demo-draft] [--json PATH]

The files are those of `jaxinfer.training.corpus.held_out_files`: none was in the embedded pair's training data.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.training.acceptance import NUM_DRAFT_TOKENS, AcceptanceMeter
from jaxinfer.training.corpus import held_out_files

NUM_FILES, PROMPT, CONTINUATION = 50, 128, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo-draft")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = continuations(arguments.target)
    with LLM(arguments.draft, max_model_len=PROMPT + CONTINUATION) as draft:
        found = AcceptanceMeter(draft.config, rows, PROMPT)(draft.params)
    print(f"{len(rows)} files, {found.num_tokens:,} tokens of {arguments.target}, draft {arguments.draft}")
    print(f"same choice             {found.agreement:.1%}")
    print(f"accepted of proposed    {found.rate:.1%} ({found.num_accepted} of {found.num_proposed}, "
          f"rounds of {NUM_DRAFT_TOKENS})")  # fmt: skip
    print(f"tokens a round          {found.tokens_per_round:.2f}")
    if arguments.json:
        report = {"target": arguments.target, "draft": arguments.draft, "rate": found.rate, **asdict(found)}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def continuations(target: str) -> np.ndarray:
    """int32 [files, PROMPT + CONTINUATION]: beginnings of files, with the target's greedy text."""
    with LLM(target, max_model_len=PROMPT + CONTINUATION) as llm:
        if llm.tokenizer is None:
            raise ValueError(f"{target} has no tokenizer")
        prompts = [llm.tokenizer.encode(text)[:PROMPT] for _, text in held_out_files(2 * NUM_FILES)]
        prompts = [prompt for prompt in prompts if len(prompt) == PROMPT][:NUM_FILES]
        params = SamplingParams(temperature=0, max_tokens=CONTINUATION, ignore_eos=True)
        outputs = llm.generate(prompts, params)
    return np.array([[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in outputs], np.int32)


if __name__ == "__main__":
    main()
