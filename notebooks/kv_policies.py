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
# # Which keys a cache can drop
#
# A KV cache grows with every token. A *policy* keeps only a part of it, and so changes the answers: a token can no longer attend to
# what was dropped. This notebook shows where the attention of the embedded model goes, what four policies keep of a prompt, and what
# the next tokens lose by it. Nothing is downloaded; it takes less than a minute on a CPU.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jaxinfer.cache.policy.kinds import parse_policy
from jaxinfer.cache.policy.scores import QueryMoments, expected_attention_scores, kept_positions, keydiff_scores, snapkv_scores
from jaxinfer.loading import load_model
from jaxinfer.models import bind
from jaxinfer.models.rope import Positions, rotate
from jaxinfer.training.corpus import held_out_files

NUM_PROMPT, NUM_NEXT, NUM_TEXTS = 384, 64, 3
model = load_model("demo")
config = model.config
num_layers, num_kv_heads = config.num_layers, config.num_kv_heads
# Python files that the model was not trained on: a prompt, and the tokens that follow it.
texts = [model.tokenizer.encode(text)[: NUM_PROMPT + NUM_NEXT] for _, text in held_out_files(NUM_TEXTS)]

# %% [markdown]
# ## One pass that can be looked into
#
# The decoder calls `attend(layer, q, k, v)` for its attention, so we can pass a function that writes down queries, keys and values, and
# that masks keys. `is_kept` says for each layer and key head which keys each query may see.


# %%
@jax.jit
def attention(q, k, is_kept):
    """Probabilities [key heads, query heads of each, queries, keys]."""
    groups = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    scores = jnp.einsum("qhgk,shk->hgqs", groups, k) * q.shape[-1] ** -0.5
    return jax.nn.softmax(jnp.where(is_kept[:, None], scores, -jnp.inf), axis=-1)


@jax.jit
def run(tokens, is_kept):
    """Log-probabilities of the next token, and queries, keys and values of each layer."""
    seen = []

    def attend(layer, q, k, v, window=None):
        seen.append((q, k, v))
        return jnp.einsum("hgqs,shk->qhgk", attention(q, k, is_kept[layer]), v).reshape(q.shape)

    decoder = bind(config, model.params)
    hidden = decoder(tokens, jnp.arange(len(tokens)), attend)
    return jax.nn.log_softmax(decoder.logits(hidden)), seen


length = NUM_PROMPT + NUM_NEXT
causal = np.broadcast_to(np.tril(np.ones((length, length), bool)), (num_layers, num_kv_heads, length, length))
full = [run(jnp.array(tokens), causal) for tokens in texts]
# [texts, layers, query heads, queries, keys], of the tokens after the prompt
weights = np.array([[attention(q, k, causal[0]) for q, k, _ in seen] for _, seen in full])
weights = weights.reshape(NUM_TEXTS, num_layers, config.num_heads, length, length)[..., NUM_PROMPT:, :]

# %% [markdown]
# ## Where attention goes
#
# The attention of the 64 tokens after the prompt, by distance. Layers differ: layer 0 spreads its attention over everything, layer 1
# looks most at the last three tokens, and layer 5 at those 16 to 63 tokens back. More than a quarter goes far back in every layer.
#
# In large models the first tokens are *sinks*: they get a large share of attention whatever they are, and a model from which
# they are taken fails (Xiao et al. 2023, *Efficient Streaming Language Models with Attention Sinks*, section 3). This small model has
# none: its first four tokens get about 1 %, no more than any other four.

# %%
distance = np.arange(NUM_PROMPT, length)[:, None] - np.arange(length)
edges = (0, 1, 4, 16, 64, 256, length)
names = ("the token itself", "1 to 3 tokens", "4 to 15", "16 to 63", "64 to 255", "256 and more")
by_distance = np.array(
    [(weights * ((distance >= low) & (distance < high))).sum(-1).mean((0, 2, 3)) for low, high in zip(edges, edges[1:])]
)
sinks = weights[..., :4].sum(-1).mean((0, 3))  # [layers, heads]
near = (weights * (distance < 16)).sum(-1).mean((0, 3))

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained", width_ratios=(1.3, 1))
colors = plt.get_cmap("viridis_r")(np.linspace(0.05, 0.95, len(names)))
bottom = np.zeros(num_layers)
for share, name, color in zip(by_distance, names, colors, strict=True):
    left.bar(np.arange(num_layers), share, bottom=bottom, label=name, color=color, width=0.85)
    bottom += share
left.set(
    xlabel="layer", ylabel="share of attention", ylim=(0, 1), title=f"{by_distance[4:].sum(0).mean():.0%} goes 64 tokens back or more"
)
left.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, title="distance", reverse=True)
image = right.imshow(near, cmap="Blues", vmin=0, vmax=1, aspect="auto")
for (layer, head), share in np.ndenumerate(near):
    right.text(head, layer, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color="white" if share > 0.6 else "black")
right.set(xlabel="query head", ylabel="layer", title="% on the last 16 tokens, by head")
plt.show()

# %% [markdown]
# ## What four policies keep
#
# Each policy keeps a quarter of the prompt's keys.
#
# - **sinks(4)+window(92)** keeps the first four tokens and the last 92, whatever they are. `LLM(kv_policy=...)` does this, in whole pages.
# - **SnapKV** (Li et al. 2024) keeps the last 32 tokens, and those that these attend to: it looks at the end of the prompt.
# - **KeyDiff** (Park et al. 2025) keeps the keys that point away from the mean of all keys. It looks at keys alone.
# - **Expected Attention** (Devoto et al. 2025) keeps four sinks and the keys that later queries are expected to attend to, if they are
#   distributed as those of the prompt.
#
# The last three are scores of `jaxinfer.cache.policy.scores`, for each key head on its own, and policies of `LLM` too. For comparison, **best afterwards** takes the
# keys that the next 64 tokens did attend to most. No policy knows them.

# %%
BUDGET, LAST, NUM_SINKS = NUM_PROMPT // 4, 32, 4
policy = parse_policy(f"sinks({NUM_SINKS})+window({BUDGET - NUM_SINKS})")
turned = Positions(jnp.arange(NUM_PROMPT)).rotation(config.rope)
later = Positions(jnp.arange(NUM_PROMPT, NUM_PROMPT + 512)).rotation(config.rope)


def highest(scores, first=0, last=0):
    """bool [key heads, prompt]: the first and last tokens, and those between with the highest scores, in all BUDGET."""
    kept = np.zeros((num_kv_heads, NUM_PROMPT), bool)
    positions = first + np.asarray(kept_positions(scores, BUDGET - first - last))
    np.put_along_axis(kept, positions, True, axis=1)
    kept[:, :first] = kept[:, NUM_PROMPT - last :] = True
    return kept


def moments_of(q):
    """Mean and covariance of the prompt's queries before their rotation, without those of the sinks."""
    return QueryMoments.none(*q.shape[1:]).add(rotate(q, turned[0], -turned[1])[NUM_SINKS:])


POLICIES = {
    str(policy): lambda q, k, v: highest(jnp.zeros((num_kv_heads, 1)), policy.sinks, policy.window),
    "SnapKV": lambda q, k, v: highest(snapkv_scores(q[-LAST:], k), last=LAST),
    "KeyDiff": lambda q, k, v: highest(keydiff_scores(k)),
    "Expected Attention": lambda q, k, v: highest(expected_attention_scores(moments_of(q), k, v, later, num_sinks=NUM_SINKS)),
}
kept = {
    name: np.array([[keeps(*(part[:NUM_PROMPT] for part in layer)) for layer in seen] for _, seen in full])
    for name, keeps in POLICIES.items()
}  # bool [texts, layers, key heads, prompt]
by_key_head = weights.reshape(NUM_TEXTS, num_layers, num_kv_heads, -1, NUM_NEXT, length)[..., :NUM_PROMPT]
attended = by_key_head.sum((3, 4))
kept["best afterwards"] = np.array([[highest(jnp.array(layer)) for layer in text] for text in attended])
assert all((one.sum(-1) == BUDGET).all() for one in kept.values())

# %% [markdown]
# A picture of the first text: for each position of the prompt, in how many of the 12 key heads of all layers its key is kept. The
# window is a block. SnapKV is a block of 32 and single tokens before it, and the other two take single tokens from everywhere: a
# token that one head drops, another one keeps.

# %%
figure, axes = plt.subplots(len(kept), 1, figsize=(10, 5), sharex=True, layout="constrained")
for axis, (name, one) in zip(axes, kept.items(), strict=True):
    heads = one[0].reshape(-1, NUM_PROMPT).sum(0)
    axis.bar(np.arange(NUM_PROMPT), heads, width=1.0, color="tab:blue")
    axis.set(ylim=(0, num_layers * num_kv_heads), yticks=(0, num_layers * num_kv_heads), xlim=(-1, NUM_PROMPT))
    axis.set_title(name, loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
axes[-1].set_xlabel("position in the prompt")
figure.supylabel("key heads that keep the token")
plt.show()

# %% [markdown]
# ## What the next tokens lose
#
# Two figures for each policy. The share of the attention to the prompt that falls on kept keys needs no second pass. The loss is the KL
# divergence of the next token's distribution from that with the full cache, in nats: the 64 tokens run again and see the kept keys
# and one another.

# %%
shares, losses = {}, {}
for name, one in kept.items():
    shares[name] = ((by_key_head * one[:, :, :, None, None]).sum(-1) / by_key_head.sum(-1)).mean()
    divergences = []
    for tokens, keys, (expected, _) in zip(texts, one, full, strict=True):
        is_kept = causal.copy()
        is_kept[:, :, NUM_PROMPT:, :NUM_PROMPT] = keys[:, :, None]
        found, _ = run(jnp.array(tokens), is_kept)
        divergences.append((jnp.exp(expected) * (expected - found)).sum(-1)[NUM_PROMPT:-1].mean())
    losses[name] = float(np.mean(divergences))
    print(f"{name:22} {shares[name]:.0%} of the attention, {losses[name]:.3f} nats")

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for name in kept:
    axes.scatter(shares[name], losses[name], s=60, zorder=2)
    axes.annotate(name, (shares[name], losses[name]), xytext=(8, 4), textcoords="offset points")
axes.set(
    xlabel="share of the attention to the prompt that is kept",
    ylabel="KL from the full cache (nats per token)",
    xlim=(0.3, 0.8),
    ylim=(0, 1.15 * max(losses.values())),
    title="A quarter of the keys: to keep more attention is not to lose less",
)
axes.spines[["top", "right"]].set_visible(False)
axes.grid(alpha=0.3, zorder=0)
plt.show()

# %% [markdown]
# SnapKV keeps more of the attention than the window and loses less. KeyDiff and Expected Attention keep more attention than the
# window, too, and yet lose more: they drop many of the last tokens, which a continued file needs most. They are made for questions that are
# not known when the prompt is cut, while SnapKV's choice serves only what its last tokens asked for. `jaxinfer kv-report` measures what a
# policy costs your model on your text.

# %%
sinks_window = str(policy)
assert sinks.max() < 0.1 and 0.005 < sinks.mean() < 0.03, sinks
assert by_distance[4:].sum(0).min() > 0.25
assert by_distance[5].argmax() == 0 and by_distance[1].argmax() == 1 and by_distance[3].argmax() == 5, by_distance
assert losses["best afterwards"] < losses["SnapKV"] < losses[sinks_window]
assert losses[sinks_window] < min(losses["KeyDiff"], losses["Expected Attention"])
assert shares[sinks_window] < min(shares[name] for name in ("SnapKV", "KeyDiff", "Expected Attention"))
