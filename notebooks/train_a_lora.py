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
# # Training a LoRA and serving it
#
# A LoRA adapter (Hu et al. 2021) adds a product of two thin matrices to each weight and leaves the weights themselves alone.
# This notebook trains one on the embedded model with optax, hands its arrays to the engine that serves the model, and writes
# it in the form of PEFT. The adapter teaches the model to begin a function with a docstring that names its parameters.
# It takes about two minutes on a CPU and downloads nothing.

# %%
import functools
import re
import tempfile
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from checkpoints_convert.adapters import save_adapter
from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import attend_without_cache
from jaxinfer.models import bind
from jaxinfer.models.adapter import Adapter, LowRank
from jaxinfer.quantization import dequantize_params
from jaxinfer.training.corpus import held_out_files, standard_library

RANK, SCALE = 8, 2.0  # scale = alpha / rank, with alpha = 16

# %% [markdown]
# ## The model, twice
#
# One engine answers throughout. It has room for two adapters of rank 8, which is made at the start. For training we take the
# parameters out of it, as float arrays (see the notebook `own_code`). They are never changed.

# %%
llm = LLM("demo", max_seqs=16, max_model_len=128, max_adapters=2, max_adapter_rank=RANK)
config, tokenizer = llm.config, llm.tokenizer
params = dequantize_params(llm.params.copy())

# %% [markdown]
# ## Examples
#
# Prompts are signatures of functions in the standard library. The answer is made by a rule: a docstring with one line per
# parameter, then the end of the text. Held out are functions from files that neither the model nor the adapter is trained on.


# %%
def signatures(texts):
    """Parameters by signature, of functions with one to three plain parameters."""
    found = {}
    for text in texts:
        for name, names in re.findall(r"^ *def ([a-zA-Z]\w*)\((?:self, )?(\w+(?:, \w+){0,2})\):", text, re.MULTILINE):
            if names != "self":
                found[f"def {name}({names}):"] = names.split(", ")
    return found


def docstring(names):
    lines = "".join(f"    :param {name}:\n" for name in names)
    return f'\n    """\n{lines}    """\n'


LENGTH = 32  # tokens of an example, at most
tokens, is_answer = [], []
train = signatures(standard_library().train[:150])
for signature, names in train.items():
    prompt = tokenizer.encode(signature)
    answer = [*tokenizer.encode_content(docstring(names)), tokenizer.eos_token_id]
    padding = LENGTH - len(prompt) - len(answer)
    if padding >= 0:
        tokens.append(prompt + answer + [0] * padding)
        is_answer.append([0] * len(prompt) + [1] * len(answer) + [0] * padding)
tokens, is_answer = np.array(tokens, np.int32), np.array(is_answer, np.float32)

held_out = {one: names for one, names in signatures(text for _, text in held_out_files(20)).items() if one not in train}
held_out = dict(list(held_out.items())[:64])
print(f"{len(tokens)} examples, {len(held_out)} held out; the first:")
print(tokenizer.decode(tokens[0].tolist()))

# %% [markdown]
# ## The adapter, and the loss
#
# The adapter is a dict from the name of a weight to its A `[in, r]` and B `[r, out]`. B begins as zeros, so that nothing is
# changed at first. The loss adds `scale * A @ B` to each weight and runs the model as always; JAX differentiates through the
# sum. Only tokens of the answers count.

# %%
linear = {
    "layers." + ".".join(key.key for key in path).removesuffix(".weight"): weight.shape
    for path, weight in jax.tree.leaves_with_path(params["layers"])
    if weight.ndim == 2
}
keys = jax.random.split(jax.random.key(0), len(linear))
pairs = {
    name: (jax.random.normal(key, (inputs, RANK)) / inputs**0.5, jnp.zeros((RANK, outputs)))
    for key, (name, (inputs, outputs)) in zip(keys, linear.items(), strict=True)
}
sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (pairs, params)]
print(f"{len(pairs)} pairs; {sizes[0]:,} numbers are trained, the model has {sizes[1]:,}")


def adapted(params, pairs):
    """The parameters with scale * A @ B added to each weight that has a pair."""

    def add(path, weight):
        name = ".".join(key.key for key in path).removesuffix(".weight")
        if name not in pairs:
            return weight
        a, b = pairs[name]
        return weight + SCALE * a @ b

    return jax.tree.map_with_path(add, params)


def loss_of(pairs, params, tokens, is_answer):
    """Mean cross-entropy per token of the answers, in nats."""
    decoder = bind(config, adapted(params, pairs))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1] - 1), tokens[:, 1:].shape)
    logits = decoder.logits(decoder(tokens[:, :-1], positions, attend_without_cache))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.average(losses, weights=is_answer[:, 1:])


# %% [markdown]
# ## Training

# %%
NUM_STEPS, BATCH_SIZE = (40, 60), 16  # steps before it is first served, and after
optimizer = optax.adamw(optax.cosine_decay_schedule(6e-3, sum(NUM_STEPS), alpha=0.1))


@functools.partial(jax.jit, donate_argnames=("pairs", "state"))
def train_step(pairs, state, params, tokens, is_answer):
    loss, gradients = jax.value_and_grad(loss_of)(pairs, params, tokens, is_answer)
    updates, state = optimizer.update(gradients, state, pairs)
    return optax.apply_updates(pairs, updates), state, loss


state, losses, random = optimizer.init(pairs), [], np.random.default_rng(0)


def train_more(pairs, state, num_steps):
    for _ in range(num_steps):
        rows = random.choice(len(tokens), BATCH_SIZE, replace=False)
        pairs, state, loss = train_step(pairs, state, params, tokens[rows], is_answer[rows])
        losses.append(float(loss))
    return pairs, state


began = time.monotonic()
pairs, state = train_more(pairs, state, NUM_STEPS[0])
print(f"{time.monotonic() - began:.0f} s; loss", " ".join(f"{loss:.2f}" for loss in losses[::8]), f"{losses[-1]:.2f}")

# %% [markdown]
# ## Serving the arrays
#
# `Adapter` holds A, B and scale by the names that we trained under. `load_adapter` copies them: no file is needed, and the
# training loop may go on with its own. Each prompt of a batch names the adapter that answers it, or none.


# %%
def as_adapter(pairs):
    return Adapter({name: LowRank(a, b, SCALE) for name, (a, b) in jax.device_get(pairs).items()}, base_model="demo")


def answers(llm, signatures, adapter):
    outputs = llm.generate(signatures, greedy, adapter=adapter, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


greedy = SamplingParams(temperature=0, max_tokens=40)
first = llm.load_adapter("mine", as_adapter(pairs))
shown = ["def rotate(image, angle):", "def send_reply(address):", "def find_vcvarsall(version):"]
both = answers(llm, shown * 2, [None] * 3 + ["mine"] * 3)  # one batch
for signature, without, under in zip(shown, both[:3], both[3:], strict=True):
    print(f"# without\n{signature}{without.text}\n# with the adapter\n{signature}{under.text}")


# %% [markdown]
# How often is the docstring of a held-out function exactly the one of the rule? The adapter has learned to copy the names.


# %%
def share_right(adapter):
    found = answers(llm, list(held_out), adapter)
    return float(np.mean([one.text == docstring(names) for one, names in zip(found, held_out.values(), strict=True)]))


shares = {"no adapter": share_right(None), f"{NUM_STEPS[0]} steps": share_right("mine")}
print(shares)

# %% [markdown]
# ## The same numbers as merged weights
#
# The engine adds the low-rank product to the outputs of a layer instead of its weights. Up to rounding that is the model whose
# weights have the product added: the log-probabilities of held-out texts agree.

# %%
texts = [signature + docstring(names) for signature, names in list(held_out.items())[:16]]
served = llm.score(texts, adapter="mine", use_tqdm=False)
with LLM((config, adapted(params, pairs), tokenizer), max_seqs=16, max_model_len=128) as merged:
    expected = merged.score(texts, use_tqdm=False)
differences = [np.abs(np.subtract(one.raw, other.raw)).max() for one, other in zip(served, expected, strict=True)]
print(f"largest difference of a log-probability: {max(differences):.1e}")
assert max(differences) < 1e-3

# %% [markdown]
# ## A folder in PEFT's form
#
# `save_adapter` writes `adapter_config.json` and `adapter_model.safetensors`, the files of PEFT.
# `base_model="demo"` above is the name that the configuration gives. On the command line it is
#
# ```
# jaxinfer serve demo --adapter mine=FOLDER
# ```
#
# and requests say `"model": "mine"`. `jaxinfer convert demo OUT --merge-lora FOLDER` writes a model with it merged.

# %%
with tempfile.TemporaryDirectory() as folder:
    save_adapter(as_adapter(pairs), folder, config)
    with LLM("demo", adapters={"mine": folder}, max_seqs=16, max_model_len=128) as opened:
        assert [one.token_ids for one in answers(opened, shown, "mine")] == [one.token_ids for one in both[3:]]
        assert opened.adapters["mine"].fingerprint == first.fingerprint

# %% [markdown]
# ## Replacing it while it serves
#
# Train on, and load the new version under the same name. Requests that run meanwhile end with the version they began with. The
# cache of prefixes is keyed by a hash of the adapter's tensors, so that the new version never uses keys and values of the
# old one. No adapter has a program of its own: after one request of this size has been answered, the first request of the
# new version compiles nothing, which JAX confirms, and only waits for one copy to the device.

# %%
pairs, state = train_more(pairs, state, NUM_STEPS[1])


def time_of(function, *arguments, **keywords):
    """Milliseconds that a call takes, and what it returns."""
    began = time.perf_counter()
    result = function(*arguments, **keywords)
    return 1000 * (time.perf_counter() - began), result


compiled = []


def listen(event, seconds, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        compiled.append(seconds)


prompts = shown[1:2]
answers(llm, prompts, "mine")
before, _ = time_of(answers, llm, prompts, "mine")
jax.monitoring.register_event_duration_secs_listener(listen)
loading, second = time_of(llm.load_adapter, "mine", as_adapter(pairs), replace=True)
after = [time_of(answers, llm, prompts, "mine")[0] for _ in range(2)]
jax.monitoring.unregister_event_duration_listener(listen)
print(f"{first.fingerprint[:12]} is replaced by {second.fingerprint[:12]} in {loading:.0f} ms")
print(f"a request before {before:.0f} ms, the first one after {after[0]:.0f} ms, the second {after[1]:.0f} ms")
print(f"{len(compiled)} compilations")
for fact, value in llm.explain().groups["adapters"].items():
    print(f"  {fact:22} {value}")
assert not compiled and first.fingerprint != second.fingerprint

# %%
shares[f"{sum(NUM_STEPS)} steps"] = share_right("mine")
print(shares)
for signature, answer in zip(shown, answers(llm, shown, "mine"), strict=True):
    print(f"{signature}{answer.text}")

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
left.semilogy(range(1, len(losses) + 1), losses, color="tab:blue")
left.axvline(NUM_STEPS[0] + 0.5, color="gray", linestyle="--", linewidth=1)
left.annotate("first loaded here", (NUM_STEPS[0] + 1.5, losses[0]), color="gray", va="top")
left.set(xlabel="step", ylabel="loss (nats per token)", title="Answers of the training set")
bars = right.bar(list(shares), [100 * share for share in shares.values()], color="tab:orange")
right.bar_label(bars, fmt="%.0f%%")
right.set(ylabel="exact docstrings (%)", ylim=(0, 100), title=f"{len(held_out)} held-out functions")
for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
llm.close()
none, early, late = shares.values()
assert none == 0 and early > 0.3 and late > 0.4, shares
