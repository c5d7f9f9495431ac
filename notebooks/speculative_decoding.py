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
# # Speculative decoding
#
# Making one token reads all weights of the model. Checking several tokens at once reads them once too. So let something
# cheap, the *draft*, propose k tokens, let the model, the *target*, check all of them in one pass, and keep those that it
# would have chosen itself, and one more of its own. A *round* gives 1 to k + 1 tokens for one reading of the weights (Leviathan
# et al. 2023, *Fast Inference from Transformers via Speculative Decoding*; Chen et al. 2023).
#
# This notebook shows with the embedded pair `demo` and `demo-draft` that the answer does not change, how much is accepted,
# and how the speedup follows from acceptance and costs. Nothing is downloaded; it takes less than a minute on a CPU.

# %%
import statistics

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch

from jaxinfer import LLM, SamplingParams
from jaxinfer.speculative import best_length, expected_speedup

OPTIONS = {"max_seqs": 1, "max_model_len": 192, "prefill_chunk": 31}
PROMPTS = ["class Stack:\n    def __init__(self):", "import os\n\ndef read_lines(path):", "def close(self):", "class Error(Exception):"]
params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
sampled = SamplingParams(temperature=0.6, seed=3, max_tokens=64, ignore_eos=True)


def measure(llm, times=4):
    """Answers to the prompts, and the seconds of a token after the first: the least of several runs of each prompt, which
    other work on the machine disturbs least."""
    outputs = [llm.generate(prompt, params)[0] for prompt in PROMPTS]  # compiles, and is the answer
    runs = [[llm.generate(prompt, params)[0].timings.time_per_output_token for prompt in PROMPTS] for _ in range(times)]
    return [output.outputs[0] for output in outputs], np.min(runs, axis=0).mean()


with LLM("demo", **OPTIONS) as plain:
    answers, plain_seconds = measure(plain)
    plain_tokens = plain.generate(PROMPTS[0], sampled)[0].outputs[0].token_ids
    tokenizer = plain.tokenizer
print(f"plain decoding: {plain_seconds * 1e3:.2f} ms a token")

# %% [markdown]
# ## Rounds, one by one
#
# `stream` yields what each round brings: the accepted tokens of the draft, and then the target's own. This answer is sampled, not
# greedy: the noise of a token is a function of seed and position, so the target knows which token it would sample at each
# place, and the draft, which samples with the same noise, agrees more often (Daliri et al. 2024).

# %%
LENGTH = 4
with LLM("demo", draft="demo-draft", num_draft_tokens=LENGTH, **OPTIONS) as llm:
    rounds = [delta.token_ids for delta in llm.stream(PROMPTS[0], sampled) if delta.token_ids]
first, *rounds = rounds  # the first token comes of reading the prompt
made = [*first, *(token for tokens in rounds for token in tokens)]
for start in range(0, 24, 8):
    for name, tokens in (("plain", plain_tokens), ("drafted", made)):
        print(f"{name:<8}", *(f"{tokenizer.decode([token])!r:<12}" for token in tokens[start : start + 8]))
assert made == plain_tokens

# %% [markdown]
# Token by token the answer is that of plain decoding: not *a* good answer, but the same one. A drafted token is kept only if it is the
# one that the target itself chooses at that place, so a bad draft costs time and never quality. (`acceptance="maximal"` is the
# rule of Leviathan et al.: more is accepted, and the tokens are others of the same distribution.)

# %%
figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
accepted_color, own_color = "#a6d96a", "#fdae61"
shown = rounds[:10]
for row, tokens in enumerate(shown):
    for column, token in enumerate(tokens):
        color = own_color if column == len(tokens) - 1 else accepted_color
        axes.add_patch(plt.Rectangle((column + 0.5, row - 0.5), 1, 1, facecolor=color, edgecolor="white"))
        axes.text(column + 1, row, repr(tokenizer.decode([token]))[1:-1][:14], ha="center", va="center", fontsize=8)
per_round = statistics.mean(len(tokens) for tokens in rounds)
axes.set(
    xlim=(0.5, LENGTH + 1.5), ylim=(len(shown) - 0.5, -0.5), xticks=range(1, LENGTH + 2), yticks=range(len(shown)),
    xlabel=f"place in the round ({LENGTH} tokens are drafted)", ylabel="round",
    title=f"A round gives {per_round:.1f} tokens on average, all of them the target's choice",
)  # fmt: skip
handles = [Patch(color=accepted_color, label="drafted and accepted"), Patch(color=own_color, label="the target's own")]
axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
plt.show()

# %% [markdown]
# ## Acceptance
#
# Let α be the chance that a drafted token is accepted, given that those before it were. If it were the same everywhere, a round
# with k drafted tokens would give
#
# E(k) = 1 + α + α² + ... + αᵏ = (1 - αᵏ⁺¹) / (1 - α)
#
# tokens on average (Leviathan et al. 2023, equation 1). We draft 1, 4 and 8 tokens, and count.

# %%
LENGTHS = (1, 4, 8)
stats, seconds = {}, {}
for length in LENGTHS:
    with LLM("demo", draft="demo-draft", num_draft_tokens=length, **OPTIONS) as llm:
        found, seconds[length] = measure(llm)
    assert [one.token_ids for one in found] == [one.token_ids for one in answers]  # exact, whatever is drafted
    stats[length] = sum((one.speculation for one in found[1:]), found[0].speculation)
    print(
        f"k = {length}: {stats[length].acceptance_rate:.0%} of the drafted tokens accepted, alpha "
        f"{stats[length].conditional_rate:.2f}, {stats[length].mean_accepted_length:.2f} tokens a round"
    )

# %% [markdown]
# The share of *all* drafted tokens that is accepted falls with k, because what comes after a rejected token is lost however good it
# is. α hardly changes: it is a property of the pair and the text. The counts lie a little below the formula, because the last
# round of an answer is cut short, and because α is not the same everywhere.
#
# ## What it costs, and what it gains
#
# Let c be the time to draft a token and v that to check a round, both in units of a plain step. Then
#
# speedup(k) = E(k) / (v + k c)
#
# (theorem 3.8 with v = 1: on an accelerator, checking a few tokens takes as long as making one). c is what the draft takes when it
# decodes alone; v is what then remains of a round's measured time.

# %%
with LLM("demo-draft", **OPTIONS) as draft:
    _, draft_seconds = measure(draft)
with LLM("demo", **OPTIONS) as plain:  # once more, as the machine may have been busier at the start
    plain_seconds = min(plain_seconds, measure(plain)[1])
cost = draft_seconds / plain_seconds
measured = {length: plain_seconds / seconds[length] for length in LENGTHS}
round_cost = {length: stats[length].mean_accepted_length / measured[length] for length in LENGTHS}
verify = {length: max(round_cost[length] - length * cost, 0.1) for length in LENGTHS}
alpha = stats[LENGTHS[-1]].conditional_rate
for length in LENGTHS:
    print(f"k = {length}: v = {verify[length]:.2f}, c = {cost:.2f}, {measured[length]:.2f}x plain decoding")

# %% [markdown]
# Two lines are drawn with the one α of the longest draft. The first takes v = 1, as an accelerator would nearly have it. The
# second takes the v that was measured here: on a CPU, which is short of arithmetic, checking k + 1 tokens takes longer than making
# one. The dots are measured. Times on a busy machine scatter; acceptance does not.

# %%
ks = np.arange(1, 13)
ideal = [expected_speedup(alpha, int(k), cost) for k in ks]
slope, intercept = np.polyfit(LENGTHS, [verify[length] for length in LENGTHS], 1)
here = [expected_speedup(alpha, int(k), cost, max(intercept + slope * k, 0.1)) for k in ks]
best = best_length(alpha, cost, int(ks[-1]))
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
left.plot(ks, [sum(alpha**place for place in range(k + 1)) for k in ks], color="tab:gray", label=f"formula, α = {alpha:.2f}")
left.plot(LENGTHS, [stats[length].mean_accepted_length for length in LENGTHS], "o", color="tab:blue", label="counted")
left.set(
    xlabel="tokens drafted in a round, k", ylabel="tokens made in a round", ylim=(0, None),
    title=f"One acceptance rate, {alpha:.0%}, nearly explains all lengths",
)  # fmt: skip
right.axhline(1, color="black", linewidth=0.8, linestyle=":", label="plain decoding")
right.plot(ks, ideal, color="tab:gray", label=f"formula, c = {cost:.2f}, v = 1")
right.plot(ks, here, color="tab:gray", linestyle="--", label="formula, v as measured")
right.plot(LENGTHS, [measured[length] for length in LENGTHS], "o", color="tab:blue", label="measured")
right.axvline(best, color="tab:green", linewidth=0.8, linestyle="--", label=f"best k for v = 1: {best}")
right.set(
    xlabel="tokens drafted in a round, k", ylabel="speedup over plain decoding", ylim=(0, None),
    title="Longer drafts pay until they are rejected too early",
)  # fmt: skip
for axes in (left, right):
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# In practice leave `num_draft_tokens="auto"`: the engine measures both costs and acceptance while it runs, and drafts as many as
# gain most, down to none. `jaxinfer speculate-report` makes such a table for your own prompts and draft.

# %%
counted = [stats[length].mean_accepted_length for length in LENGTHS]
formula = [sum(alpha**place for place in range(length + 1)) for length in LENGTHS]
assert np.allclose(counted, formula, rtol=0.15), (counted, formula)
assert counted == sorted(counted) and stats[1].acceptance_rate > stats[8].acceptance_rate
assert all(value <= length + 1 for value, length in zip(counted, LENGTHS, strict=True))
