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
# # Continuous batching
#
# A decode step reads all weights from memory to make one token. Reading them for sixteen answers at once takes hardly
# longer, so a server that wants throughput must keep many answers in each step: a *batch*. The question is who is in it.
#
# - **Static batching** takes a batch of requests, runs them until the *last* one is done, and then takes the next batch. An answer
#   that ends early leaves its slot empty until then, and a request that arrives meanwhile waits.
# - **Continuous batching** decides anew at every step (Yu et al. 2022, *Orca*, section 3: iteration-level scheduling). An
#   answer leaves when it ends, and a waiting request takes its slot in the next step.
#
# This notebook runs both on the same engine with the same requests, and draws who held which slot when. Nothing is downloaded; it
# takes less than a minute on a CPU.

# %%
import time

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch

from jaxinfer import LLM, SamplingParams

NUM_SLOTS, NUM_REQUESTS = 4, 16
llm = LLM("demo", max_seqs=NUM_SLOTS, max_model_len=256, prefill_chunk=28, steps_per_dispatch=1, prefix_cache=False)

# %% [markdown]
# ## The load
#
# Sixteen requests for four slots. Answer lengths are log-uniform, as those of conversations are: most are short, a few are long. End
# of sequence is ignored, so that an answer has exactly the length we ask for, and decoding is greedy, so that both ways must
# make the same tokens.

# %%
random = np.random.default_rng(1)
answer_lengths = np.exp(random.uniform(np.log(6), np.log(90), NUM_REQUESTS)).astype(int)
prompts = [random.integers(1, llm.config.vocab_size, size=random.integers(6, 24)).tolist() for _ in answer_lengths]
params = [SamplingParams(temperature=0, max_tokens=int(length), ignore_eos=True) for length in answer_lengths]
print("answer lengths in tokens:", *answer_lengths)

# %% [markdown]
# ## Run, and note who holds which slot
#
# `engine.step()` plans one dispatch, sends it, and reads the results of the one before. After each we ask for a
# `snapshot()`: who is running, in which slot, and whether it is still reading its prompt (*prefill*) or making tokens (*decode*).
#
# Static batching is the same engine, given the next four requests only when the last four are all done. So the two runs
# differ in nothing but the schedule.

# %%
PREFILL, DECODE = 1, 2


def serve(batches):
    """Runs batches of request numbers, each when the one before is done: who held which slot, doing what, each step;
    the step and the second when each request ended; the tokens."""
    requests = [llm.prepare(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    number_of = {}
    events, ended = [], {}
    start = time.perf_counter()
    for batch in batches:
        for number in batch:
            number_of |= dict.fromkeys(llm.submit(requests[number]), number)
        while llm.engine.has_work:
            progressed = llm.engine.step()
            running = llm.engine.snapshot().running
            events.append([(one.slot, number_of[one.sequence], DECODE if one.is_decoding else PREFILL) for one in running])
            for sequence in progressed:
                if sequence.is_finished:
                    ended[number_of[sequence]] = (len(events), time.perf_counter() - start)
    return events, ended, [sequence.output for sequence in number_of]


everyone = list(range(NUM_REQUESTS))
in_batches = [everyone[first : first + NUM_SLOTS] for first in range(0, NUM_REQUESTS, NUM_SLOTS)]
serve(in_batches)  # compiles, so that no time is spent on it below
static_events, static_ended, static_tokens = serve(in_batches)
events, ended, tokens = serve([everyone])
ratio = len(static_events) / len(events)
print(f"static {len(static_events)} steps, continuous {len(events)} steps: {ratio:.2f} times as many")
for name, found in (("static", static_ended), ("continuous", ended)):
    print(f"{name:<11} all done after {max(second for _, second in found.values()):.2f} s")

# %% [markdown]
# ## The timeline
#
# Each row is a slot, time goes to the right, and each colour is a request. White is a slot that nobody uses: in the
# static run, it belongs to an answer that has ended, while the longest of its batch goes on. (A request that is alone moves to
# slot 0: a program for one slot is then enough.)

# %%
colors = plt.get_cmap("tab20")


def draw(axes, events, title):
    grid = np.full((NUM_SLOTS, len(events)), np.nan)
    for step, running in enumerate(events):
        for slot, number, _ in running:
            grid[slot, step] = number
    axes.imshow(
        grid, cmap=colors, vmin=-0.5, vmax=19.5, aspect="auto", interpolation="nearest", extent=(0, len(events), 3.5, -0.5)
    )
    for slot in range(NUM_SLOTS):  # a request's number, in the middle of its time
        for number in set(grid[slot][~np.isnan(grid[slot])].astype(int)):
            middle = np.flatnonzero(grid[slot] == number).mean() + 0.5
            color = "black" if number % 2 else "white"  # every other colour is a light one
            axes.text(middle, slot, str(number), ha="center", va="center", fontsize=8, color=color)
    used = np.count_nonzero(~np.isnan(grid)) / grid.size
    axes.set(ylabel="slot", yticks=range(NUM_SLOTS), title=f"{title}: {len(events)} steps, slots used {used:.0%} of the time")
    axes.spines[["top", "right"]].set_visible(False)
    return used


figure, axes = plt.subplots(2, figsize=(10, 4.8), sharex=True, layout="constrained")
static_used = draw(axes[0], static_events, "static batches wait for their longest answer")
used = draw(axes[1], events, "continuous batching fills a slot as soon as it is free")
axes[1].set(xlabel="step of the engine", xlim=(0, len(static_events)))
handles = [Patch(color=colors(number), label=str(number)) for number in everyone]
figure.legend(handles=handles, loc="outside right center", title="request", frameon=False)
plt.show()

# %% [markdown]
# At the end of the continuous run slots are empty too: nobody is waiting any more. A server does not reach that point.
#
# ## What a user sees
#
# The throughput gained is one side. The other is when an answer is complete: in a static batch a short answer that comes
# late in the queue waits for all long ones before it.

# %%
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
share = np.arange(1, NUM_REQUESTS + 1) / NUM_REQUESTS
mean_steps = {}
for found, color, label in ((static_ended, "tab:red", "static"), (ended, "tab:blue", "continuous")):
    ends = np.sort([step for step, _ in found.values()])
    mean_steps[label] = ends.mean()
    axes.step(ends, share, where="post", color=color, marker=".", label=f"{label}: after {ends.mean():.0f} steps on average")
sooner = 1 - mean_steps["continuous"] / mean_steps["static"]
axes.set(
    xlabel="steps of the engine since all requests arrived",
    ylabel="share of answers complete",
    ylim=(0, 1.02),
    title=f"With continuous batching an answer is complete {sooner:.0%} sooner on average",
)
axes.legend(frameon=False, loc="lower right")
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## Prompts beside decoding
#
# In the continuous run a new request's prompt is read in the same steps in which the others decode. If a whole long prompt went into
# one step, everyone would wait for it; so prompts are cut into chunks of at most `prefill_chunk` tokens (Agrawal et al. 2024,
# *Sarathi-Serve*, section 4).
#
# Neither the schedule nor the neighbours change an answer: both runs made the same tokens.

# %%
mixed = sum({PREFILL, DECODE} <= {phase for *_, phase in running} for running in events)
print(f"{mixed} steps had both prompts and decoding answers")
assert tokens == static_tokens
assert [len(answer) for answer in tokens] == answer_lengths.tolist()
assert ratio > 1.3, ratio
assert used > static_used + 0.15, (used, static_used)
assert sooner > 0.1, sooner
llm.close()
