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
# # Structured output
#
# A program that reads what a model writes wants JSON with the right fields, not prose that is nearly JSON. *Constrained decoding*
# makes sure of it: before each token is sampled, a **mask** takes out all tokens after which the text could no longer become what
# was asked for (Willard and Louf 2023, *Efficient Guided Generation*). What is left is sampled as ever, so a model that would have
# written a valid object anyway writes the same one.
#
# This notebook gives a schema to the embedded model, which has never seen JSON of this kind, and gets valid objects. Then it asks
# what that costs, and what is saved where the schema leaves no choice. Nothing is downloaded; it takes less than a minute on a CPU.

# %%
import json
import time

import jsonschema
import matplotlib.pyplot as plt
import numpy as np

from jaxinfer import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 12},
        "customer_age": {"type": "integer", "minimum": 0, "maximum": 120},
        "is_subscribed": {"type": "boolean"},
        "preferred_color": {"enum": ["red", "green", "blue"]},
        "visits": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 99}, "maxItems": 3},
    },
    "additionalProperties": False,
}
SCHEMA["required"] = list(SCHEMA["properties"])
NUM_ANSWERS = 8
SIZES = {"max_seqs": NUM_ANSWERS, "max_model_len": 256}
prompts = [f'data = json.loads("""  # customer {number}\n' for number in range(NUM_ANSWERS)]

# %% [markdown]
# ## A schema in, valid objects out
#
# `SamplingParams(structured=...)` takes a schema, a pydantic model, a regular expression, choices, or a grammar. The judge is the
# package `jsonschema`, not our own code. Without the schema, the same model writes Python, since that is what it was trained on.

# %%
params = [SamplingParams(structured={"json": SCHEMA}, seed=number, max_tokens=120) for number in range(NUM_ANSWERS)]
with LLM("demo", **SIZES) as llm:
    free = llm.generate(prompts[0], SamplingParams(seed=0, max_tokens=24))[0].outputs[0].text
    answers = [output.outputs[0] for output in llm.generate(prompts, params)]
print("free:", repr(free))
for answer in answers:
    jsonschema.validate(json.loads(answer.text), SCHEMA)
    print(answer.text)
assert all(answer.finish_reason == "stop" for answer in answers)

# %% [markdown]
# ## What is forced
#
# After `{"` nothing but `customer_name":"` can follow: the schema has the field first, and JSON here has no white space outside of
# strings. Such text is *forced*: it needs no model. Where a text is forced, one way to write it in tokens is allowed, the
# tokenizer's own, so that the answer does not fall into pieces that the model has never seen together.
#
# We follow an answer through its grammar and colour its tokens: those that were forced, and those that the model chose.

# %%
with LLM("demo", **SIZES) as llm:
    request = llm.prepare(prompts[0], params[0])
    place, is_forced, texts = request.grammar.start(), [], []
    for token in answers[0].token_ids:
        if token in llm.eos_token_ids:
            break
        is_forced.append(bool(place.forced))
        texts.append(llm.tokenizer.decode([token]))
        assert place.accept([token]) == 1
figure, axes = plt.subplots(figsize=(9, 1.6))
column, line = 0, 0
for text, forced in zip(texts, is_forced, strict=True):
    if column + len(text) > 78:
        column, line = 0, line + 1
    axes.text(
        column,
        -line,
        text,
        family="monospace",
        fontsize=10,
        bbox={"facecolor": "#cfe3f7" if forced else "#fbd7b5", "edgecolor": "white", "pad": 1.5},
    )
    column += len(text) + 0.6
axes.set(xlim=(0, 80), ylim=(-line - 0.5, 1), title=f"{sum(is_forced)} of {len(is_forced)} tokens are forced (blue)")
axes.axis("off")
plt.show()
assert sum(is_forced) > len(is_forced) / 3

# %% [markdown]
# ## Where masks come from
#
# **From the host.** A matcher ([llguidance](https://github.com/guidance-ai/llguidance)) reads the answer so far and says which
# tokens may follow. That serves every grammar, but the host has to know a token before it can compute the next mask, while an
# accelerator would rather make eight tokens in one dispatch. So the first step of a dispatch has the mask, and the other steps are
# free: if a token that wins without the mask is allowed, it would have won with the mask too. Tokens after the first one that is not
# allowed are taken back. With `grammar_memory=0` all masks come from the host.
#
# **From tables on the device.** This schema is a regular language, so a finite automaton over *tokens* knows it: `state =
# T[state, token class]`, and a mask for each state. These lie on the device, and the jitted loop follows them without the host, as
# many steps in a dispatch as a free answer has.
#
# **Forced tokens as drafts.** With a draft (here `draft="ngram"`), forced tokens are proposed by the table itself and verified in one
# pass with the others: several tokens for one pass through the model.
#
# Tokens are the same in all of these ways. We count dispatches and time. This model guesses hardly any token of JSON by itself, so
# under masks from the host the engine soon makes one step in a dispatch; with a model that knows JSON most free tokens are kept.

# %%
WAYS = {
    "host, 1 step": {"grammar_memory": 0, "steps_per_dispatch": 1},
    "host": {"grammar_memory": 0},
    "tables": {},
    "tables, forced\ntokens drafted": {"draft": "ngram", "num_draft_tokens": 6},
}


def run(llm):
    """Dispatches, seconds, and tokens of the answers."""
    sent = []
    with llm.engine.observe(sent.append):
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        elapsed = time.perf_counter() - start
    return len(sent), elapsed, [output.outputs[0].token_ids for output in outputs]


dispatches, seconds = {}, {}
for way, options in WAYS.items():
    with LLM("demo", **SIZES, **options) as llm:
        grammar = llm.prepare(prompts[0], params[0]).grammar
        table = grammar.wait()  # is built in the background
        for _ in range(2):
            run(llm)  # compiles, also what answers do at their ends
        found = [run(llm) for _ in range(3)]
    dispatches[way] = found[-1][0]
    seconds[way] = float(np.median([one[1] for one in found]))
    assert found[-1][2] == [answer.token_ids for answer in answers], way
for way in WAYS:
    print(f"{' '.join(way.split()):<30} {dispatches[way]:>4} dispatches {1e3 * seconds[way]:>6.0f} ms")
print(f"the table: {len(table.mask_of)} states, {len(table.masks)} masks, {table.num_bytes / 1024:.0f} KiB")
assert dispatches["tables"] < dispatches["host, 1 step"]

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3))
for one, values, title in zip(axes, (dispatches, seconds), ("dispatches", "seconds"), strict=True):
    one.barh(list(values), list(values.values()), color=["#c7c7c7", "#9a9a9a", "#4a7fb5", "#e08a3c"])
    one.invert_yaxis()
    one.set_title(f"{title}, {NUM_ANSWERS} objects")
axes[1].set_yticklabels([])
plt.tight_layout()
plt.show()

# %% [markdown]
# ## Where the time goes
#
# A mask from the host is cheap by itself: we compute each mask of an answer again and time it. What costs is the waiting: a dispatch
# for few tokens where a free answer would have made eight, and the device idle while the host reads tokens and writes masks.

# %%
masks = np.empty((1, place.library.vocabulary.num_words), np.uint32)
again, times = grammar.start(), []
for token in answers[0].token_ids[: len(texts)]:
    start = time.perf_counter()
    again.library.fill([again], masks)
    again.accept([token])
    times.append(1e6 * (time.perf_counter() - start))
per_dispatch = 1e6 * seconds["host, 1 step"] / dispatches["host, 1 step"]
print(f"a mask on the host: {np.median(times):.0f} us in the median, {max(times):.0f} us at most")
print(f"a dispatch of one step for {NUM_ANSWERS} answers: {per_dispatch:.0f} us")
assert np.median(times) < per_dispatch

# %% [markdown]
# Tables cost memory (`grammar_memory`, 32 MiB by default) and the time to build them once: they are built in the background, while
# answers go on under masks from the host, and kept in the cache folder for the next process. The server, files of requests and
# the command line take the same schemas: see the page *Structured output*.
