"""SmolLM2 learns from a reward by a LoRA that its engine serves: GRPO on policy, an adapter per step."""

import ast
import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.models.adapter import Adapter, LowRank
from jaxinfer.quantization import dequantize_params
from jaxinfer.training.corpus import held_out_files, standard_library
from jaxinfer.training.objectives import sequence_logits

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.optimized]
RANK, SCALE, LENGTH, MAX_TOKENS = 8, 2.0, 72, 48
NUM_STEPS, NUM_PROMPTS, GROUP_SIZE, NUM_GROUPS = 12, 8, 8, 4
SAMPLING = SamplingParams(temperature=1, max_tokens=MAX_TOKENS, stop=["\n\n"])
MODULES = ("q_proj", "v_proj", "up_proj", "down_proj")


def signatures(texts):
    pattern = r"^ *(def [a-zA-Z]\w*)\((?:self, )?(\w+(?:, \w+){0,2})\):"
    return sorted({f"{name}({names}):" for text in texts for name, names in re.findall(pattern, text, re.MULTILINE)})


def reward(signature, output):
    """One for a body that ended, that parses, and has two statements of which half are distinct (notebooks/grpo.py)."""
    if output.finish_reason != "stop":
        return 0.0
    try:
        function = ast.parse(signature + output.text).body[0]
    except (SyntaxError, ValueError):
        return 0.0
    own = [ast.dump(node) for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
    return float(len(own) >= 2 and len(set(own)) >= len(own) / 2)


def sample(llm, prompts, num_answers, seed, adapter):
    params = [replace(SAMPLING, n=num_answers, seed=seed * 10_000 + number) for number in range(len(prompts))]
    outputs = llm.generate(prompts, params, adapter=adapter, use_tqdm=False)
    rewards = [[reward(one, own) for own in output.outputs] for one, output in zip(prompts, outputs, strict=True)]
    return outputs, np.array(rewards)


def adapted(params, pairs):
    def add(path, weight):
        name = ".".join(key.key for key in path).removesuffix(".weight")
        return weight + SCALE * pairs[name][0] @ pairs[name][1] if name in pairs else weight

    return jax.tree.map_with_path(add, params)


def as_adapter(pairs):
    return Adapter({name: LowRank(a, b, SCALE) for name, (a, b) in jax.device_get(pairs).items()})


def batch_of(outputs, rewards):
    deviation = rewards.std(1, keepdims=True)
    advantages, groups = (rewards - rewards.mean(1, keepdims=True)) / (deviation + 1e-4), np.flatnonzero(deviation)
    shape = NUM_GROUPS * GROUP_SIZE, LENGTH
    tokens, is_answer, weights = np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(shape[0], np.float32)
    rows = ((group, number) for group in groups[:NUM_GROUPS] for number in range(GROUP_SIZE))
    for row, (group, number) in enumerate(rows):
        prompt, own = outputs[group].prompt_token_ids, outputs[group].outputs[number].token_ids
        tokens[row, : len(prompt) + len(own)] = [*prompt, *own]
        is_answer[row, len(prompt) : len(prompt) + len(own)] = 1
        weights[row] = advantages[group, number]
    return tokens, is_answer, weights


@pytest.mark.timeout(7200)
def test_a_lora_learns_from_a_reward(model_path):
    room = {"max_adapters": 2, "max_adapter_rank": RANK, "adapter_modules": MODULES}
    with LLM(str(model_path("smollm2")), max_seqs=32, max_model_len=128, **room) as llm:
        config, params = llm.config, dequantize_params(llm.params.copy())
        held_out = signatures(text for _, text in held_out_files(20))[::2][:64]
        prompts = [one for one in signatures(standard_library().train[:150]) if one not in held_out]
        prompts = [one for one in prompts if len(llm.tokenizer.encode(one)) <= LENGTH - MAX_TOKENS]
        random = np.random.default_rng(0)
        names = {
            "layers." + ".".join(key.key for key in path).removesuffix(".weight"): weight.shape
            for path, weight in jax.tree.leaves_with_path(params["layers"])
            if weight.ndim == 2 and path[-2].key in MODULES
        }
        pairs = {
            name: (
                np.float32(random.normal(size=(size[0], RANK)) / size[0] ** 0.5),
                np.zeros((RANK, size[1]), np.float32),
            )
            for name, size in names.items()
        }
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))

        def loss_of(pairs, tokens, is_answer, advantages):
            logits = sequence_logits(config, adapted(params, pairs), tokens[:, :-1])
            logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)[..., 0]
            return -jnp.sum(logprobs * is_answer[:, 1:] * advantages[:, None]) / jnp.maximum(jnp.sum(is_answer), 1)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def train_step(pairs, state, *batch):
            updates, state = optimizer.update(jax.grad(loss_of)(pairs, *batch), state, pairs)
            return optax.apply_updates(pairs, updates), state

        state = optimizer.init(pairs)
        _, before = sample(llm, held_out, 2, 1, None)
        print(f"held out, at the start: {before.mean():.3f}", flush=True)
        for step in range(NUM_STEPS):
            llm.load_adapter("policy", as_adapter(pairs), replace=step > 0)
            chosen = random.choice(prompts, NUM_PROMPTS, replace=False).tolist()
            outputs, rewards = sample(llm, chosen, GROUP_SIZE, 2 + step, "policy")
            pairs, state = train_step(pairs, state, *batch_of(outputs, rewards))
            print(f"step {step + 1}: {rewards.mean():.3f}", flush=True)
        llm.load_adapter("policy", as_adapter(pairs), replace=True)
        _, after = sample(llm, held_out, 2, 1, "policy")
    gains = after.mean(1) - before.mean(1)
    error = gains.std(ddof=1) / len(gains) ** 0.5
    print(f"held out, at the end: {after.mean():.3f}, {gains.mean() / error:.1f} standard errors more")
    assert gains.mean() > 3 * error
