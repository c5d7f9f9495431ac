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
# # The model in your own JAX code
#
# A model here is a configuration and a nested dict of arrays. `bind(config, params)` makes Flax modules of them while JAX
# traces, so that no module crosses `jax.jit`: your functions take the dict, as they take any other pytree, and so do
# `jax.grad`, optax and `jax.export`. This notebook runs the model under `jit`, reads hidden states, trains, writes its own
# decode loops over both kinds of cache, and exports a function. The model is the embedded `demo` of 10.7 M parameters.
# Nothing is downloaded; it takes less than a minute on a CPU.

# %%
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax import lax

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import CachedAttention, PagedAttention, attend_without_cache, init_cache, init_paged_cache
from jaxinfer.models import bind, collect
from jaxinfer.quantization import dequantize_params
from pallas_kernels import portable

# %% [markdown]
# ## Parameters as float arrays
#
# `llm.params` is what the engine runs: on a CPU in packed form, on any device perhaps quantized, and read-only. For gradients
# it has to be float arrays: `dequantize_params` makes them. (Without an `LLM`, `checkpoints_convert.load(path,
# dtype="float32")` returns configuration and parameters of a checkpoint.)

# %%
with LLM("demo", max_seqs=2, max_model_len=128) as llm:
    config, tokenizer = llm.config, llm.tokenizer
    params = jax.tree.map(jnp.copy, dequantize_params(llm.params))  # ours: they outlive the LLM
print({name: jax.tree.map(jnp.shape, part) for name, part in params["layers"]["0"]["mlp"].items()})

# %% [markdown]
# ## Forward, under `jit`
#
# A decoder takes tokens and positions, int32 `[..., T]`, and a function that attends. `attend_without_cache` attends to the
# sequences themselves: for training and for scores. `decoder.logits` is apart, since a decode step needs it at one position
# only.


# %%
def logits_of(params, tokens):
    """float32 [B, T, V]."""
    decoder = bind(config, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return decoder.logits(decoder(tokens, positions, attend_without_cache))


def loss_of(params, tokens):
    """Mean cross-entropy per token, in nats."""
    logits = logits_of(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


text = '''class Thermostat:
    """Keeps a greenhouse between two temperatures."""

    def __init__(self, coldest, warmest):
        self.coldest, self.warmest = coldest, warmest

    def decide(self, temperature):
        if temperature < self.coldest:
            return "heat"
        return "vent" if temperature > self.warmest else "wait"
'''
tokens = jnp.asarray([tokenizer.encode(text)])
untrained = params
print(f"{tokens.shape[1]} tokens, {jax.jit(loss_of)(untrained, tokens):.3f} nats each")

# %% [markdown]
# It is what `LLM.score` computes, in batches and with its cache, for the same parameters.

# %%
with LLM((config, untrained, tokenizer), max_seqs=2, max_model_len=128) as llm:
    score = llm.score(tokens.tolist(), use_tqdm=False)[0]
assert np.isclose(score.loss, jax.jit(loss_of)(untrained, tokens), atol=1e-4)

# %% [markdown]
# ## Hidden states
#
# `collect` makes a *tap*: a function that the decoder calls with each of its hidden states, and that keeps those you name.
# `jaxinfer.models.tap_names(config)` lists them.

# %%
layers = [f"layers.{layer}.residual" for layer in range(config.num_layers)]


@jax.jit
def residuals(params, tokens):
    """float32 [layers, B, T, D]: the residual stream after each layer."""
    found, tap = collect(layers)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    bind(config, params)(tokens, positions, attend_without_cache, tap)
    return jnp.stack([found[name] for name in layers])


before = residuals(untrained, tokens)
print(before.shape)

# %% [markdown]
# ## A gradient, and a step of optax
#
# The same dict is what an optimizer updates. The step takes it donated, so that old and new weights are not held at once; the
# first call gets a copy, since `untrained` is needed later.

# %%
optimizer = optax.adam(3e-4)


@functools.partial(jax.jit, donate_argnames=("params", "state"))
def train_step(params, state, tokens):
    loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


trained = jax.tree.map(jnp.copy, untrained)
state, losses = optimizer.init(trained), []
for _ in range(12):
    trained, state, loss = train_step(trained, state, tokens)
    losses.append(float(loss))
print(" ".join(f"{loss:.2f}" for loss in losses))
assert losses[1] < losses[0] and losses[-1] < losses[0] / 2

# %% [markdown]
# ## Generate with what was trained
#
# An `LLM` of live parameters needs no files, and its `save(folder)` writes a checkpoint that Transformers opens. The answers
# here are what our own loops below must repeat.

# %%
NUM_TOKENS, MAX_LENGTH, PAGE_SIZE = 24, 64, 16
prompts = [tokenizer.encode(start) for start in ("class Thermostat:", "    def decide(self,")]
greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
with LLM((config, trained, tokenizer), max_seqs=2, max_model_len=MAX_LENGTH) as llm:
    answers = [output.outputs[0] for output in llm.generate(prompts, greedy, use_tqdm=False)]
expected = [answer.token_ids for answer in answers]
print(answers[0].text)

# %% [markdown]
# ## A decode loop over the preallocated cache
#
# `init_cache` makes a pytree with `MAX_LENGTH` token slots per row. `CachedAttention` is an attend function over it: it
# writes the keys and values of the tokens of this pass, attends to all that the rows hold, and has the new cache afterwards.
# The pass over the prompts and the decode steps are the same call with other lengths; the steps are a `lax.scan`, so that the
# host is not asked between tokens. The cache is donated: XLA updates it in place.


# %%
def step(params, cache, tokens, starts, lengths):
    """The new cache, and the most probable next token [B] after tokens [B, T], of which `lengths` [B] are real."""
    num_rows, width = tokens.shape
    attend = CachedAttention(cache, jnp.arange(num_rows), starts, lengths, width)
    decoder = bind(config, params)
    hidden = decoder(tokens, starts[:, None] + jnp.arange(width), attend)
    last = hidden[jnp.arange(num_rows), lengths - 1]
    return attend.cache, decoder.logits(last).argmax(axis=-1)


@functools.partial(jax.jit, donate_argnames="cache")
def generate(params, cache, tokens, lengths):
    cache, token = step(params, cache, tokens, jnp.zeros_like(lengths), lengths)

    def decode(carry, number):
        cache, token = carry
        cache, following = step(params, cache, token[:, None], lengths + number, jnp.ones_like(lengths))
        return (cache, following), token

    (cache, _), found = lax.scan(decode, (cache, token), jnp.arange(NUM_TOKENS))
    return cache, found.T


lengths = jnp.asarray([len(prompt) for prompt in prompts])
padded = jnp.asarray([prompt + [0] * (int(lengths.max()) - len(prompt)) for prompt in prompts])
cache = init_cache(config, len(prompts), MAX_LENGTH, "float32")
print(f"{sum(leaf.nbytes for leaf in jax.tree.leaves(cache)):,} bytes in {len(jax.tree.leaves(cache))} arrays")
cache, own = generate(trained, cache, padded, lengths)
assert own.tolist() == expected

# %% [markdown]
# ## The same over pages
#
# `init_paged_cache` makes a pool of pages, and a page table says which pages a sequence owns, in order. Page 0 is the null
# page, which nobody owns. The tokens of a pass are *ragged*: all sequences in one row without padding, with the start and
# length of each. Here each sequence gets its pages before the loop; an engine hands them out as they fill.


# %%
def ragged_step(params, cache, page_table, tokens, positions, starts, lengths, kv_lengths):
    """The new cache, and the most probable next token [S] of sequences in tokens [T]."""
    attend = PagedAttention(cache, page_table, starts, lengths, kv_lengths)
    decoder = bind(config, params)
    hidden = decoder(tokens, positions, attend)
    return attend.cache, decoder.logits(hidden[starts + lengths - 1]).argmax(axis=-1)


@functools.partial(jax.jit, donate_argnames="cache")
def generate_paged(params, cache, page_table, tokens, positions, lengths):
    ones, rows = jnp.ones_like(lengths), jnp.arange(lengths.shape[0])
    starts = jnp.cumsum(lengths) - lengths
    cache, token = ragged_step(params, cache, page_table, tokens, positions, starts, lengths, lengths)

    def decode(carry, number):
        cache, token = carry
        at = lengths + number
        cache, following = ragged_step(params, cache, page_table, token, at, rows, ones, at + 1)
        return (cache, following), token

    (cache, _), found = lax.scan(decode, (cache, token), jnp.arange(NUM_TOKENS))
    return cache, found.T


pages_each = -(-(int(lengths.max()) + NUM_TOKENS) // PAGE_SIZE)
cache = init_paged_cache(config, 1 + pages_each * len(prompts), PAGE_SIZE, "float32")
page_table = jnp.asarray(1 + np.random.default_rng(0).permutation(pages_each * len(prompts)).reshape(len(prompts), -1))
print(page_table)
ragged = jnp.asarray(np.concatenate(prompts))
positions = jnp.asarray(np.concatenate([np.arange(len(prompt)) for prompt in prompts]))
cache, own = generate_paged(trained, cache, page_table, ragged, positions, lengths)
assert own.tolist() == expected

# %% [markdown]
# ## Export
#
# `jax.export` writes a traced function as StableHLO, which runs where this package is not installed. Kernels of one platform
# would not: within `portable()` a function is traced with operations of XLA alone, for all platforms at once. The weights
# stay its argument.

# %%
with portable():
    exported = jax.export.export(jax.jit(logits_of), platforms=["cpu", "cuda", "tpu"])(trained, tokens)
written = exported.serialize()
read = jax.export.deserialize(written)
print(f"{len(written):,} bytes for {', '.join(read.platforms)}")
assert np.allclose(read.call(trained, tokens), jax.jit(logits_of)(trained, tokens), atol=1e-3)

# %% [markdown]
# ## What training moved
#
# The loss by step, and how far the residual stream after each layer is from where it was, relative to its length: a small
# change of every layer's weights adds up from layer to layer.

# %%
after = residuals(trained, tokens)
moved = np.asarray(jnp.linalg.norm(after - before, axis=-1) / jnp.linalg.norm(before, axis=-1)).mean(axis=(1, 2))

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
left.plot(range(1, len(losses) + 1), losses, marker="o", color="tab:blue")
left.set(xlabel="step", ylabel="loss (nats per token)", ylim=(0, None), title="A text is learned in a few steps")
right.bar(range(config.num_layers), moved, color="tab:orange")
right.set(xlabel="layer", ylabel="relative change", title="Later layers' states move more")
for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
assert moved[-1] > moved[0], moved
assert all(np.isfinite(leaf).all() for leaf in map(np.asarray, jax.tree.leaves(trained)))
