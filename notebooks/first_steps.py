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
# # First steps
#
# Load a model, generate, stream, sample with seeds, ask for log-probabilities, score a text, and look inside at the hidden
# states. The model is `demo`, which comes with the package: a Llama of 10.7 M parameters that completes Python. Nothing is
# downloaded; it takes less than a minute on a CPU.

# %%
import matplotlib.pyplot as plt
import numpy as np

from jaxinfer import LLM, SamplingParams

# %% [markdown]
# ## Load
#
# `LLM` takes a folder with a checkpoint, a Hugging Face id, a GGUF file, `"demo"`, or live parameters. It reserves memory for
# keys and values when it is made: `max_seqs` answers at once, each of at most `max_model_len` tokens with its prompt.
# `explain()` says what was really allocated and chosen; `print(llm.explain())` shows all of it.

# %%
llm = LLM("demo", max_seqs=4, max_model_len=256)
facts = llm.explain().to_dict()
for group, name in (("model", "parameters"), ("model", "dtype"), ("cache", "pages"), ("cache", "bytes per token")):
    print(f"{name:<16}{facts[group][name]:>12}")

# %% [markdown]
# ## Generate
#
# `temperature=0` takes the most probable token at each step (greedy). `generate` takes one prompt or a list, as text or token
# ids, and answers in the order of the prompts.

# %%
greedy = SamplingParams(temperature=0, max_tokens=32)
output = llm.generate("def read_lines(path):", greedy)[0]
print(output.prompt + output.outputs[0].text)
print(f"\nended by {output.outputs[0].finish_reason}, after {len(output.outputs[0].token_ids)} tokens")

# %% [markdown]
# ## Stream
#
# `stream` yields text as it is made. The pieces add up to the answer: characters that need several tokens wait until they are
# whole, and nothing of a stop string is ever shown.

# %%
pieces = [delta.text for delta in llm.stream("def read_lines(path):", greedy)]
print(pieces[:6])
assert "".join(pieces) == output.outputs[0].text

# %% [markdown]
# ## Seeds
#
# Sampling draws tokens by their probability. Here the noise of a token is a function of the request's seed and the token's
# position, and of nothing else. So a request gives the same tokens alone and among others: what else is in the batch does
# not show. An answer reports its seed, with which it can be had again.

# %%
prompts = ["class Stack:", "def main(", "import os\n", "async def connect("]
sampled = SamplingParams(temperature=0.8, seed=7, max_tokens=24)
alone = llm.generate(prompts[0], sampled)[0].outputs[0]
among_others = llm.generate(prompts, sampled)[0].outputs[0]
assert alone.token_ids == among_others.token_ids

three = llm.generate(prompts[0], SamplingParams(temperature=0.8, n=3, seed=7, max_tokens=24))[0].outputs
again = llm.generate(prompts[0], SamplingParams(temperature=0.8, seed=three[2].seed, max_tokens=24))[0].outputs[0]
assert three[0].token_ids == alone.token_ids and again.token_ids == three[2].token_ids
for answer in three:
    print(answer.seed, repr(answer.text[:60]))

# %% [markdown]
# ## Log-probabilities
#
# `logprobs=2` reports each chosen token's log-probability and those of the two best. They are the model's own, before
# temperature or any other change: what the model thinks, not how it was sampled.

# %%
answer = llm.generate("def close(self):", SamplingParams(temperature=0, max_tokens=8, logprobs=2))[0].outputs[0]
for token, entries in zip(answer.token_ids, answer.logprobs, strict=True):
    best = ", ".join(f"{one.decoded_token!r} {np.exp(one.logprob):.0%}" for one in entries.values())
    print(f"{llm.tokenizer.decode([token])!r:<12}{best}")

# %% [markdown]
# ## Score
#
# `score` gives the log-probability of a text that you choose, after a prompt: the way to compare candidates, and how
# multiple-choice benchmarks are run. `raw` is of the model; `processed` is under sampling parameters, if some are given.
# A longer text is less probable: where lengths differ, compare per token.

# %%
candidates = ["os", "collections", "banana"]
scores = llm.score(["import "] * 3, candidates)
for text, score in zip(candidates, scores, strict=True):
    print(f"log P({text!r} | 'import ') = {score.raw_total:7.2f} nats, {len(score.token_ids)} tokens")
assert scores[0].raw_total == max(score.raw_total for score in scores)

# %% [markdown]
# ## Taps: the hidden states
#
# `taps` names hidden states to return, over prompt and answer: `jaxinfer.models.tap_names(llm.config)` lists them. Each is an
# array [tokens, width].
#
# With them we can ask when the model makes up its mind. The *logit lens* (nostalgebraist 2020, "interpreting GPT: the logit
# lens") sends the residual stream after each layer through the final norm and the output head, as if the later layers
# were not there, and looks at which token would come next.

# %%
from jaxinfer.models import bind, tap_names

num_layers = llm.config.num_layers
names = ["embed", *(f"layers.{layer}.residual" for layer in range(num_layers))]
assert set(names) <= set(tap_names(llm.config))
text = "def read_lines(path):\n    with open(path) as f:\n        return f."
request = llm.generate(text, SamplingParams(temperature=0, max_tokens=8, logprobs=0), taps=names)[0]
tokens = [*request.prompt_token_ids, *request.outputs[0].token_ids]
states = np.stack([request.taps[name] for name in names])
print(f"{len(names)} places x {states.shape[1]} tokens x width {states.shape[2]}")

decoder = bind(llm.config, llm.params)
logits = np.asarray(decoder.logits(decoder.final_norm(states)))
log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)

# %% [markdown]
# After the last layer the lens must say what the model said: the log-probabilities of the answer, which the engine computed
# from its cache, token by token.

# %%
first = len(request.prompt_token_ids)
reported = [next(iter(entry.values())).logprob for entry in request.outputs[0].logprobs]
recomputed = [log_probs[-1, position - 1, tokens[position]] for position in range(first, len(tokens))]
assert np.allclose(reported, recomputed, atol=1e-3), np.abs(np.subtract(reported, recomputed)).max()

# %% [markdown]
# Each column is a token that the model has read; colour is the probability that each layer gives to the token the *whole*
# model finds best there, and the words are what each layer itself finds best.

# %%
final = log_probs[-1].argmax(axis=-1)
shown = slice(len(tokens) - 14, len(tokens) - 1)
chance = np.exp(log_probs[:, np.arange(len(tokens)), final])[:, shown]
words = [[llm.tokenizer.decode([int(token)]) for token in row[shown]] for row in log_probs.argmax(axis=-1)]
read = [llm.tokenizer.decode([token]) for token in tokens[shown]]
labels = ["embedding" if name == "embed" else f"layer {name.split('.')[1]}" for name in names]
mean = chance.mean(axis=1)

figure, axes = plt.subplots(figsize=(10, 3.8), layout="constrained")
image = axes.imshow(chance, cmap="Blues", vmin=0, vmax=1, aspect="auto", origin="lower")
for row, column in np.ndindex(chance.shape):
    color = "white" if chance[row, column] > 0.5 else "black"
    axes.text(column, row, repr(words[row][column])[1:-1][:9], ha="center", va="center", fontsize=7, color=color)
axes.set_xticks(range(len(read)), [repr(word)[1:-1] for word in read], rotation=45, ha="right")
axes.set_yticks(range(len(labels)), labels)
axes.set(
    xlabel="token read (what comes next is guessed)",
    ylabel="guessed from the state after",
    title=f"The guess forms layer by layer: the final choice has {mean[1]:.0%} after layer 0, {mean[-1]:.0%} at the end",
)
figure.colorbar(image, label="probability of the final choice")
plt.show()

# %%
llm.close()
assert all(later > earlier for earlier, later in zip(mean, mean[1:], strict=False)), mean
assert mean[-1] > 2 * mean[1], mean
