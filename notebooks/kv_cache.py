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
# # How a KV cache works
#
# Attention compares each new token with all tokens before it: its *query* with their *keys*, and then takes a weighted sum of
# their *values*. Keys and values of a token never change once it is computed, because later tokens cannot influence earlier
# ones. So they are kept. Without a cache, making token n + 1 computes n tokens again; with one, it computes one.
#
# What the cache costs is memory, and how that memory is laid out decides how many requests fit. This notebook compares two
# layouts on the embedded model, counts what each wastes, and draws the engine's real page tables. Nothing is downloaded; it
# takes less than a minute on a CPU.

# %%
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch

from jaxinfer import LLM, SamplingParams

MAX_SEQS, MAX_MODEL_LEN, PAGE_SIZE = 4, 256, 16
llm = LLM(
    "demo", max_seqs=MAX_SEQS, max_model_len=MAX_MODEL_LEN, page_size=PAGE_SIZE, num_pages=49, prefill_chunk=28,
    steps_per_dispatch=1,
)  # fmt: skip
config = llm.config

# %% [markdown]
# ## What a token takes
#
# Each layer keeps a key and a value for each *key head*. Grouped-query attention (Ainslie et al. 2023) lets several query
# heads share a key head, which makes the cache smaller by that factor: here 8 query heads share 2.
#
# bytes per token = 2 (key and value) x layers x key heads x head width x bytes of a number

# %%
bytes_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
print(f"{bytes_per_token:,} bytes per token; a Llama 3.1 8B in bfloat16: {2 * 32 * 8 * 128 * 2:,}")
assert bytes_per_token == llm.explain().to_dict()["cache"]["bytes per token"]

# %% [markdown]
# ## Contiguous
#
# The simple layout gives each of `max_seqs` slots one row of `max_model_len` tokens. Nobody knows beforehand how long an
# answer becomes, so every row is as long as the longest allowed. Kwon et al. (2023, *Efficient Memory Management for Large
# Language Model Serving with PagedAttention*, section 1) measured that systems built so used only 20 to 38 % of the cache
# for tokens.
#
# ## Pages
#
# The paged layout cuts memory into pages of a few tokens, as an operating system does. A sequence owns a list of pages, its
# *page table*; they may lie anywhere, and it gets the next one when the last is full. At most one page of each sequence is
# partly empty. Page 0 is the null page: it stands where a table has no entry, and nobody owns it.
#
# Here are ten requests of very different lengths for four slots. We run the engine step by step and note after each step
# which pages every running sequence owns, and how many tokens are stored: `engine.snapshot()` tells.

# %%
random = np.random.default_rng(0)
prompt_lengths = random.integers(4, 32, size=10)
answer_lengths = random.integers(8, 120, size=10)
prompts = [random.integers(1, config.vocab_size, size=length).tolist() for length in prompt_lengths]
params = [SamplingParams(temperature=0, max_tokens=int(length), ignore_eos=True) for length in answer_lengths]


def run(llm, requests):
    """Steps the engine until the requests are done: their answers, and what each step left, {number: (pages, tokens)}."""
    numbers = {}
    for number, request in enumerate(requests):
        numbers |= dict.fromkeys(llm.submit(request), number)
    history = []
    while llm.engine.has_work:
        llm.engine.step()
        running = llm.engine.snapshot().running
        history.append({numbers[one.sequence]: (list(one.pages), one.num_stored) for one in running})
    return [sequence.output for sequence in numbers], history


requests = [llm.prepare(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
answers, history = run(llm, requests)
print(f"{len(requests)} requests, {sum(map(len, answers))} tokens in {len(history)} steps")

# %% [markdown]
# The page map: time goes to the right, each row is a page of the pool, and colour is the request that owns it. A request's pages
# need not be neighbours. When it ends, they can go to the next one at once; while there are pages that were never used, the
# engine takes those first, since what the others hold may be wanted again (see the last section).

# %%
num_pages = llm.explain().to_dict()["cache"]["pages"]
owner = np.full((num_pages, len(history)), np.nan)
for step, running in enumerate(history):
    for number, (pages, _) in running.items():
        owner[pages, step] = number

colors = plt.get_cmap("tab10")
figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
axes.imshow(owner, cmap=colors, vmin=-0.5, vmax=9.5, aspect="auto", origin="lower", interpolation="nearest")
most = max(len({page for pages, _ in running.values() for page in pages}) for running in history)
contiguous_pages = MAX_SEQS * MAX_MODEL_LEN // PAGE_SIZE
axes.set(
    xlabel="step of the engine",
    ylabel=f"page ({PAGE_SIZE} tokens each)",
    title=f"Pages go from one request to the next: {most} at most, where four whole rows take {contiguous_pages}",
)
handles = [Patch(color=colors(number), label=f"request {number}") for number in range(len(requests))]
axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), title="owner", frameon=False)
plt.show()

# %% [markdown]
# ## Waste, counted
#
# Of the memory that is reserved at a step, the share that holds no token: in pages, the empty ends of last pages; in rows, the
# rest of every row that is in use.

# %%
stored = np.array([sum(tokens for _, tokens in running.values()) for running in history])
paged = np.array([PAGE_SIZE * sum(len(pages) for pages, _ in running.values()) for running in history])
rows = np.array([MAX_MODEL_LEN * len(running) for running in history])
busy = stored > 0
paged_waste, rows_waste = 1 - stored[busy].sum() / paged[busy].sum(), 1 - stored[busy].sum() / rows[busy].sum()

figure, axes = plt.subplots(figsize=(9, 3.5), layout="constrained")
steps = np.arange(len(history))
kib = bytes_per_token / 1024
axes.step(steps, rows * kib, where="mid", color="tab:red", label=f"reserved as rows: {rows_waste:.0%} empty")
axes.step(steps, paged * kib, where="mid", color="tab:blue", label=f"reserved as pages: {paged_waste:.0%} empty")
axes.fill_between(steps, stored * kib, step="mid", color="tab:blue", alpha=0.25, label="tokens stored")
axes.set(
    xlabel="step of the engine",
    ylabel="memory (KiB)",
    ylim=(0, None),
    title=f"Pages waste {paged_waste:.0%} of what they reserve, rows {rows_waste:.0%}",
)
axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# Smaller pages waste less, but the tables are longer and each page is a separate copy from memory. 16 tokens on GPUs and CPUs
# and 64 on TPUs are the defaults here.
#
# The layout changes where bytes lie and no answer: the contiguous cache gives the same tokens.

# %%
with LLM("demo", max_seqs=MAX_SEQS, max_model_len=MAX_MODEL_LEN, cache="contiguous") as contiguous:
    same = [output.outputs[0].token_ids for output in contiguous.generate(prompts, params, use_tqdm=False)]
    facts = contiguous.explain().to_dict()["cache"]
reserved = (facts["pages"] - 1) * facts["bytes per page"]  # one page of MAX_MODEL_LEN tokens for each slot
assert same == answers
assert reserved == contiguous_pages * PAGE_SIZE * bytes_per_token

# %% [markdown]
# ## Sharing a beginning
#
# A page whose tokens are known can belong to several sequences. Requests often begin alike: a system prompt, a document that many
# questions are about, few-shot examples. The engine keeps the full pages of finished and running work in a tree that is
# keyed by their tokens (Zheng et al. 2024, *SGLang*, section 3), and a request whose prompt begins alike takes those pages
# instead of computing them. A page that is shared is only read; what differs goes into pages of one's own.
#
# One request computes a beginning of 80 tokens, then three more begin with it.

# %%
shared = random.integers(1, config.vocab_size, size=80).tolist()
endings = [random.integers(1, config.vocab_size, size=12).tolist() for _ in range(4)]
few = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
before = llm.engine.snapshot().counters.computed_prompt_tokens
first = llm.generate([shared + endings[0]], few)[0]
_, tables = run(llm, [llm.prepare(shared + ending, few) for ending in endings])
table = max(tables, key=lambda running: sum(len(pages) for pages, _ in running.values()))
computed = llm.engine.snapshot().counters.computed_prompt_tokens - before
asked = len(shared) + len(endings[0]) + sum(len(shared) + len(ending) for ending in endings)
print(f"{computed} of {asked} prompt tokens were computed")

# %% [markdown]
# The page tables of the four, as the device sees them: row by row the pages of a sequence in order, with the number of the
# page in the pool.

# %%
width = max(len(pages) for pages, _ in table.values())
numbers = np.zeros((len(table), width), int)
for row, (_, (pages, _)) in enumerate(sorted(table.items())):
    numbers[row, : len(pages)] = pages
owners = np.array([[np.count_nonzero(numbers == page) if page else 0 for page in row] for row in numbers])

figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
shades = {0: "white", 1: "#fdd49e", 4: "#9ecae1"}
for (row, column), page in np.ndenumerate(numbers):
    axes.add_patch(plt.Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=shades[owners[row, column]], edgecolor="white"))
    axes.text(column, row, str(page) if page else "-", ha="center", va="center", fontsize=9)
axes.set(xlim=(-0.5, width - 0.5), ylim=(len(table) - 0.5, -0.5), xticks=range(width), yticks=range(len(table)))
saved = numbers.astype(bool).sum() - len(set(numbers.ravel()) - {0})
axes.set(
    xlabel=f"place in the sequence (pages of {PAGE_SIZE} tokens)",
    ylabel="request",
    title=f"Four requests share the {len(shared)} tokens they begin with: {saved} pages saved",
)
handles = [Patch(color=shades[4], label="shared by all four"), Patch(color=shades[1], label="its own")]
axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), title="page", frameon=False)
plt.show()

# %%
num_shared = len(shared) // PAGE_SIZE
assert (owners[:, :num_shared] == 4).all() and (owners[:, num_shared:] <= 1).all(), numbers
assert saved == 3 * num_shared
assert computed == asked - 4 * num_shared * PAGE_SIZE - (len(endings[0]) // PAGE_SIZE) * PAGE_SIZE
assert paged_waste < 0.15 < 0.5 < rows_waste, (paged_waste, rows_waste)
assert all(PAGE_SIZE * len(pages) - tokens < 2 * PAGE_SIZE for running in history for pages, tokens in running.values())
llm.close()
