# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Training a head that drafts
#
# A draft for speculative decoding need not be a second model. A *head* is one layer that reads the hidden states which the
# target has computed anyway, and guesses what the target will say after the next token: EAGLE-3 (Li et al. 2025). It belongs
# to its target alone, so most targets have none. This notebook trains one for the embedded model in about two minutes on a
# CPU, and looks at where it is right and where it is wrong.

# %%
import tempfile
import time
from pathlib import Path

import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.training.corpus import held_out_files, standard_library
from jaxinfer.training.head_data import HeadTexts
from jaxinfer.training.head_rows import pieces
from jaxinfer.training.heads import HeadOptions, HeadTraining, train_head

began = time.monotonic()
llm = LLM("demo", max_model_len=256)
tokenizer = llm.get_tokenizer()

# %% [markdown]
# ## Data
#
# The embedded model writes Python. The head learns from files of the standard library as they are: at every place it is
# told the target's whole distribution, so that a token of text teaches more than which token came next. Files that neither
# model saw are held out. (For a chat model, `jaxinfer train-head --own-prompts` lets the target write prompts and answers.)

# %%
encoded = [tokenizer.encode_content(text) for text in standard_library().train[:150]]
held_out = [tokenizer.encode_content(text) for _, text in held_out_files(12)]
texts = HeadTexts(
    train=tuple(pieces(encoded, 128)),
    held_out=tuple(pieces([tokens[:128] for tokens in held_out], 128)),
)
print(f"{len(texts.train):,} pieces of text to train on, {len(texts.held_out)} held out")

# %% [markdown]
# ## Training
#
# Chains of three tokens are unrolled: the second token is drafted from what the head itself made for the first, as it will be
# when it drafts. In the first part of the steps only one token is drafted (`one_step`), which costs less and teaches most.
# The head drafts 1,024 of the target's 4,096 tokens, the most frequent ones: its last product is most of its cost.

# %%
options = HeadOptions(
    "eagle3",
    num_steps=80,
    one_step=0.6,
    unroll=3,
    draft_vocab_size=1024,
    batch_size=8,
    length=128,
    lm_head_rate=0.1,
    learning_rate=4e-3,
    evaluate_every=40,
    checkpoint_every=80,
)
training = HeadTraining(llm.config, llm.params, texts, options)
result = train_head(training, work_dir=Path(tempfile.mkdtemp()), show_progress=False)
print(f"{result.num_steps} steps; {time.monotonic() - began:.0f} s since the start")
for when, measured in (("before", result.before), ("after", result.after)):
    print(f"{when:6} {measured.tokens_per_round:.2f} tokens a round, draft tokens in a row accepted:", end=" ")
    print(", ".join(f"{rate:.0%}" for rate in measured.by_position))

# %% [markdown]
# ## In the engine
#
# The answers are the target's own, with the head and without: what it drafts is only accepted where the target says the same.

# %%
prompts = [tokenizer.decode(tokens[:32]) for tokens in held_out[:6]]
greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
plain = llm.generate(prompts, greedy, use_tqdm=False)
with LLM(
    (llm.config, llm.params, tokenizer), draft=(result.config, result.params), num_draft_tokens=3, max_model_len=256
) as drafting:
    drafted = drafting.generate(prompts, greedy, use_tqdm=False)
    stats = drafting.speculation_stats()
assert [one.outputs[0].token_ids for one in plain] == [one.outputs[0].token_ids for one in drafted]
print(f"{stats.mean_accepted_length:.2f} tokens a round; the answers are equal")

# %% [markdown]
# ## Where it is right and where it is wrong
#
# At each place of the held-out text: how many tokens, from there on, would the head draft as the target chooses them (which
# need not be the text's own)? What a rule of the language or of layout decides is drafted well; names, and what a line is
# about, the target knows from far more than one layer, and there the head stops.

# %%
import matplotlib.pyplot as plt

COLORS = ("#f4c7c3", "#e3efda", "#b5d99c", "#6fb86f")


def draw_text(axes, text, num_lines=12, width=72):
    """Draws tokens in monospaced type, each over the colour of how many are drafted right from it."""
    row = column = 0
    runs = np.cumprod(text.is_right, axis=1).sum(axis=1)
    for token, run in zip(text.tokens, runs, strict=True):
        for part in tokenizer.decode([int(token)]).replace("\t", "    ").splitlines(keepends=True):
            shown = part.rstrip("\n")
            if column + len(shown) > width:
                row, column = row + 1, 0
            if row >= num_lines:
                return
            if shown:
                axes.add_patch(plt.Rectangle((column, -row - 0.8), len(shown), 1, color=COLORS[run], linewidth=0))
                for place, letter in enumerate(shown):
                    axes.text(column + place + 0.5, -row - 0.3, letter, family="monospace", ha="center", va="center")
            column += len(shown)
            if part.endswith("\n"):
                row, column = row + 1, 0


figure, (left, right) = plt.subplots(1, 2, figsize=(14, 4.2), width_ratios=(2.4, 1), layout="constrained")
draw_text(left, result.drafted[0])
left.set(xlim=(0, 72), ylim=(-12, 0.6), title="tokens drafted right in a row: none (red) to three (dark green)")
left.axis("off")


def kind(token):
    """What a token is, by its text."""
    text = tokenizer.decode([int(token)])
    if not text.strip():
        return "space, line ends"
    if not any(letter.isalnum() for letter in text):
        return "punctuation"
    return "words that begin" if text[0].isspace() else "rest of words"


kinds = np.array([kind(token) for text in result.drafted for token in text.tokens])
is_right = np.concatenate([text.is_right[:, 0] for text in result.drafted])
names = sorted(set(kinds), key=lambda name: is_right[kinds == name].mean())
shares = [is_right[kinds == name].mean() for name in names]
right.barh([f"{name} ({np.mean(kinds == name):.0%})" for name in names], shares, color="#6fb86f")
right.set(xlim=(0, 1), xlabel="first draft token right", title=f"of all tokens {is_right.mean():.0%}")
right.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
llm.close()
assert result.after.tokens_per_round > result.before.tokens_per_round + 0.2
assert max(shares) > min(shares) + 0.1
