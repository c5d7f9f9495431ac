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
# # Learning from a reward
#
# GRPO (Shao et al. 2024, DeepSeekMath, section 4) samples several answers to each prompt, rewards each, and makes those more
# likely that are better than the mean of their group. Here the embedded model learns to write function bodies that parse.
# The engine that samples and the trainer share one process: after each step `llm.update_params` gives the engine the new
# weights, in place, and compiles nothing. So every answer is sampled from the weights whose gradient is taken (on policy).
# It takes a few minutes on two CPU cores and downloads nothing.

# %%
import ast
import dataclasses
import functools
import re
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from jaxinfer import LLM, SamplingParams
from jaxinfer.quantization import dequantize_params
from jaxinfer.training.corpus import held_out_files, standard_library
from jaxinfer.training.objectives import sequence_logits

SEED = 0
NUM_STEPS, NUM_PROMPTS, GROUP_SIZE = 16, 16, 8  # per step: prompts, and answers to each
NUM_GROUPS = 6  # prompts per step whose answers are trained on, at most
MAX_TOKENS, LENGTH = 48, 72  # of an answer, and of a prompt with its answer

# %% [markdown]
# ## The model and the prompts
#
# Prompts are signatures of functions in Python's standard library. Held out are functions of files that the model was not
# trained on. An answer ends at the first empty line. The engine's weights are float32, as the trainer's are: weights that were
# rounded to bfloat16 on the way would make answers that the trainer's own model would not.

# %%
llm = LLM("demo", dtype="float32", max_seqs=48, max_model_len=128)
config, tokenizer = llm.config, llm.tokenizer
params = dequantize_params(llm.params.copy())


def signatures(texts):
    """Signatures of functions with one to three plain parameters."""
    pattern = r"^ *(def [a-zA-Z]\w*)\((?:self, )?(\w+(?:, \w+){0,2})\):"
    return sorted({f"{name}({names}):" for text in texts for name, names in re.findall(pattern, text, re.MULTILINE)})


held_out = signatures(text for _, text in held_out_files(20))[::2][:64]
train = [one for one in signatures(standard_library().train[:150]) if one not in held_out]
train = [one for one in train if len(tokenizer.encode(one)) <= LENGTH - MAX_TOKENS]
sampling = SamplingParams(temperature=1, max_tokens=MAX_TOKENS, stop=["\n\n"], logprobs=0)
print(f"{len(train)} prompts, {len(held_out)} held out, such as {held_out[1]!r}")

# %% [markdown]
# ## The reward
#
# One for a body that ended by itself, that `ast.parse` accepts, and that has at least two statements of which at least half
# are distinct; else zero. The last condition keeps the model from repeating one line.


# %%
def reward(signature, output):
    if output.finish_reason != "stop":
        return 0.0
    try:
        function = ast.parse(signature + output.text).body[0]
    except (SyntaxError, ValueError):
        return 0.0
    statements = [ast.dump(node) for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
    return float(len(statements) >= 2 and len(set(statements)) >= len(statements) / 2)


def sample(signatures, num_answers, seed):
    """Answers of the engine, `num_answers` to each signature, and their rewards [prompts, answers]."""
    params = [
        dataclasses.replace(sampling, n=num_answers, seed=seed * 10_000 + number) for number in range(len(signatures))
    ]
    outputs = llm.generate(signatures, params, use_tqdm=False)
    rewards = [
        [reward(signature, one) for one in output.outputs]
        for signature, output in zip(signatures, outputs, strict=True)
    ]
    return outputs, np.array(rewards)


_, before = sample(held_out, 4, seed=1)
error = before.mean(1).std() / len(held_out) ** 0.5
print(f"held out, at the start: {before.mean():.3f} (standard error {error:.3f})")

# %% [markdown]
# ## The step
#
# The advantage of an answer is its reward less the mean of its group, divided by the group's standard deviation. The loss is
# minus the log-probability of each token, times the advantage of its answer. Groups whose rewards are all the same teach
# nothing and are left out (Yu et al. 2025, DAPO, section 3.2). The weights have not changed since the answers were sampled, so
# that no ratio and no clipping are needed.
#
# The engine returns the log-probability with which it sampled each token. The trainer computes it again, in another program:
# the largest difference is rounding in float32. (`jaxinfer.training.fixed_forward.logprobs_fixed` has the engine's bits.)


# %%
def token_logprobs(params, tokens):
    """Log-probabilities [rows, length - 1] of tokens after the first, by the trainer's own forward pass."""
    logits = sequence_logits(config, params, tokens[:, :-1])
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)[..., 0]


def loss_of(params, tokens, is_answer, advantages):
    logprobs = token_logprobs(params, tokens)
    return -jnp.sum(logprobs * is_answer[:, 1:] * advantages[:, None]) / jnp.sum(is_answer), logprobs


optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-4))


@functools.partial(jax.jit, donate_argnames=("params", "state"))
def train_step(params, state, *batch):
    (_, logprobs), gradients = jax.value_and_grad(loss_of, has_aux=True)(params, *batch)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, logprobs


def batch_of(outputs, rewards):
    """Tokens [rows, LENGTH] of the groups that teach something, which of them are of answers, the advantage of each row,
    and the log-probabilities with which the engine sampled them."""
    deviation = rewards.std(1, keepdims=True)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (deviation + 1e-4)
    groups = np.flatnonzero(deviation[:, 0])[:NUM_GROUPS]
    shape = NUM_GROUPS * GROUP_SIZE, LENGTH  # rows that are not used have no answer
    tokens, is_answer, sampled = np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for row, (group, number) in enumerate((group, number) for group in groups for number in range(GROUP_SIZE)):
        prompt, one = outputs[group].prompt_token_ids, outputs[group].outputs[number]
        answer = slice(len(prompt), len(prompt) + len(one.token_ids))
        tokens[row, : answer.stop] = [*prompt, *one.token_ids]
        is_answer[row, answer] = 1
        sampled[row, answer] = [next(iter(step.values())).logprob for step in one.logprobs]
    advantages = np.resize(advantages[groups], shape[0]) if len(groups) else np.zeros(shape[0])
    return tokens, is_answer, advantages.astype(np.float32), sampled


# %% [markdown]
# ## Training

# %%
random, state, curve, differences = np.random.default_rng(SEED), optimizer.init(params), [], []
spent = np.zeros(3)
began = time.monotonic()
for step in range(NUM_STEPS):
    times = [time.monotonic()]
    prompts = random.choice(train, NUM_PROMPTS, replace=False).tolist()
    outputs, rewards = sample(prompts, GROUP_SIZE, seed=1000 * (SEED + 1) + step)
    times.append(time.monotonic())
    tokens, is_answer, advantages, sampled = batch_of(outputs, rewards)
    params, state, logprobs = jax.block_until_ready(train_step(params, state, tokens, is_answer, advantages))
    times.append(time.monotonic())
    llm.update_params(params, version=f"step {step + 1}")
    times.append(time.monotonic())
    spent += np.diff(times)
    curve.append(rewards.mean())
    differences.append(np.abs(logprobs - sampled[:, 1:])[is_answer[:, 1:] > 0].max(initial=0))
    if step % 4 == 3:
        print(f"step {step + 1:3}: reward {np.mean(curve[-4:]):.3f}, {time.monotonic() - began:.0f} s")
print("seconds:", {name: round(own, 1) for name, own in zip(("sampling", "training", "update"), spent.tolist(), strict=True)})
print(f"largest difference of a log-probability between trainer and engine: {max(differences):.1e}")

# %% [markdown]
# ## Held-out prompts

# %%
outputs, after = sample(held_out, 4, seed=1)
print(
    f"held out: {before.mean():.3f} at the start, {after.mean():.3f} after {NUM_STEPS} steps; an answer of {outputs[0].outputs[0].weights}:"
)
print(held_out[0] + outputs[0].outputs[0].text)

figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
axes.plot(range(1, NUM_STEPS + 1), curve, color="tab:blue", label="prompts of the step")
axes.plot([0, NUM_STEPS], [before.mean(), after.mean()], "o", color="tab:orange", label="held-out prompts")
axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="Function bodies that parse")
axes.legend(loc="upper left")
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
llm.close()
assert max(differences) < 1e-3
assert after.mean() > before.mean() + 0.25, (before.mean(), after.mean())
