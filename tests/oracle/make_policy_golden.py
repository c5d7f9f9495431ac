"""Writes golden/policies.safetensors: what kvpress's StreamingLLM keeps of random Llamas, and their logits; and
golden/policy_scores.safetensors: what its methods that score keys keep of a prompt; and golden/prompt_policies.
safetensors: greedy answers after prompts that it compacts; and golden/policy_heavy.safetensors: what its observed
attention keeps of a prompt, with the last tokens, and logits of the tokens after that.

Run with kvpress 0.5.5, torch and Transformers in an environment of its own: kvpress needs older Transformers than the
other golden files. Run twice, it writes the same bytes. Pages are computed one by one, each attending to what the press
left of the pages before it.
"""

from types import SimpleNamespace

import numpy as np
import torch
from kvpress import (
    ExpectedAttentionPress,
    KeyDiffPress,
    KeyRerotationPress,
    ObservedAttentionPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
)
from safetensors.numpy import save_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tests.oracle.policy_cases import (
    ANSWER,
    BUDGETS,
    COMPACTED,
    CONFIG,
    EVERY,
    GOLDEN,
    HEAVY,
    HEAVY_ANSWER,
    HEAVY_BUDGETS,
    HEAVY_PROMPT,
    METHODS,
    NUM_TOKENS,
    OBSERVED,
    PAGE_SIZE,
    PROMPTS,
    SCORED,
    SCORES,
    SEEDS,
    WINDOW,
    name_of,
    tensors,
    tokens,
)

PRESSES = {
    "snapkv": lambda ratio: SnapKVPress(ratio, window_size=WINDOW),
    "pyramidkv": lambda ratio: PyramidKVPress(ratio, window_size=WINDOW),
    "keydiff": KeyDiffPress,
    "expected_attention": ExpectedAttentionPress,
}


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, np.ndarray] = {}
    scored: dict[str, np.ndarray] = {}
    compacted: dict[str, np.ndarray] = {}
    heavy: dict[str, np.ndarray] = {}
    for seed in SEEDS:
        model = LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation="eager"))
        model.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in tensors(seed).items()})
        model.eval()
        for budget in BUDGETS:
            for is_relative in (False, True):
                logits, kept = run(model, torch.from_numpy(tokens(seed))[None], budget, is_relative)
                name = name_of(seed, budget, is_relative)
                found |= {f"{name}.logits": np.ascontiguousarray(logits[7::8]), f"{name}.kept": kept}
        scored |= {f"{seed}.{name}": kept for name, kept in chosen(model, torch.from_numpy(tokens(seed))[None]).items()}
        for budget in HEAVY_BUDGETS:
            logits, kept, observed = observe(model, torch.from_numpy(tokens(seed))[None], budget)
            heavy |= {f"{seed}.{budget}.logits": logits, f"{seed}.{budget}.kept": kept}
            heavy[f"{seed}.{budget}.observed"] = observed
        answers = answered(model, torch.from_numpy(tokens(seed))[None])
        compacted |= {f"{seed}.{name}": array for name, array in answers.items()}
    for arrays, path in ((found, GOLDEN), (scored, SCORES), (compacted, COMPACTED), (heavy, HEAVY)):
        save_file(arrays, path)
        path.chmod(0o644)
        print(f"{len(arrays)} arrays, {path.stat().st_size:,} bytes")


@torch.no_grad()
def chosen(model, ids) -> dict[str, np.ndarray]:
    """By method and budget, the positions int16 [layers, Hkv, T] that are kept, ascending, -1 after the last."""
    inputs, cache = {}, DynamicCache()

    def remember(module, arguments, keywords):
        inputs[module.layer_idx] = keywords["hidden_states"], keywords["position_embeddings"]

    layers = [layer.self_attn for layer in model.model.layers]
    hooks = [module.register_forward_pre_hook(remember, with_kwargs=True) for module in layers]
    model(ids, past_key_values=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    found = {}
    for method in METHODS:
        for budget in SCORED:
            # Half a token more, against rounding; PyramidKV rounds its own numbers.
            extra = 0 if method == "pyramidkv" else 0.5
            press = PRESSES[method](1 - (budget + extra) / NUM_TOKENS)
            rows = []
            for module, layer in zip(layers, cache.layers, strict=True):
                module.rotary_emb = model.model.rotary_emb
                hidden, embeddings = inputs[module.layer_idx]
                known = {"position_embeddings": embeddings}
                kept = positions_kept(press, module, hidden, layer, known)
                rows.append(np.pad(kept, ((0, 0), (0, NUM_TOKENS - kept.shape[1])), constant_values=-1))
            found[f"{method}.{budget}"] = np.stack(rows).astype(np.int16)
    return found


def positions_kept(press, module, hidden, layer, known) -> np.ndarray:
    """int [Hkv, kept], ascending: the scores' order, applied to positions in place of keys."""
    scores = press.score(module, hidden, layer.keys, layer.values, None, known)
    budget_of = getattr(press, "get_layer_budget", None)
    length = layer.keys.shape[2]
    count = int(length * (1 - press.compression_ratio)) if budget_of is None else budget_of(module, length)
    return scores.topk(count, dim=-1).indices.sort(dim=-1).values[0].numpy()


class RecentPress(ObservedAttentionPress):
    """Observed attention that keeps the last `recent` tokens, as SnapKV keeps its window."""

    recent = 0

    def score(self, *args, **kwargs):
        scores = super().score(*args, **kwargs)
        if self.recent:
            scores[..., -self.recent :] = scores.max() + 1
        return scores


@torch.no_grad()
def observe(model, ids, budget: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits float32 [HEAVY_ANSWER, V] of the tokens after a prompt of which at least `budget` tokens are kept; and the
    positions int16 [layers, Hkv, kept], ascending, with the last half and without."""
    cache = DynamicCache()
    attentions = model(ids[:, :HEAVY_PROMPT], past_key_values=cache, use_cache=True, output_attentions=True).attentions
    count = -(-budget // PAGE_SIZE) * PAGE_SIZE + HEAVY_PROMPT % PAGE_SIZE
    kept, observed = [], []
    for layer, decoder_layer, weights in zip(cache.layers, model.model.layers, attentions, strict=True):
        for recent, into in ((budget // 2, kept), (0, observed)):
            press = RecentPress(1 - (count + 0.5) / HEAVY_PROMPT)
            press.recent = recent
            scores = press.score(decoder_layer.self_attn, None, layer.keys, layer.values, weights, {})
            into.append(scores.topk(count, dim=-1).indices.sort(dim=-1).values[0])
        at = kept[-1][None, :, :, None].expand(-1, -1, -1, layer.keys.shape[-1])
        layer.keys, layer.values = layer.keys.gather(2, at), layer.values.gather(2, at)
    end = HEAVY_PROMPT + HEAVY_ANSWER
    positions = torch.arange(HEAVY_PROMPT, end)[None]
    logits = model(ids[:, HEAVY_PROMPT:end], past_key_values=cache, position_ids=positions, use_cache=True).logits[0]
    return logits.numpy(), *(torch.stack(rows).numpy().astype(np.int16) for rows in (kept, observed))


@torch.no_grad()
def answered(model, ids) -> dict[str, np.ndarray]:
    """By method and budget: the positions int16 [layers, Hkv, T] that are kept, -1 after the last, the greedy answer
    int16 [ANSWER], and logits float32 [ANSWER / EVERY, V]."""
    made = {
        "snapkv": lambda budget: SnapKVPress(1 - (budget + 0.5) / NUM_TOKENS, window_size=OBSERVED),
        "keydiff": lambda budget: KeyDiffPress(1 - (budget + 0.5) / NUM_TOKENS),
        "pyramidkv": lambda budget: PyramidKVPress(1 - budget / NUM_TOKENS, window_size=OBSERVED),
        "expected_attention": lambda budget: ExpectedAttentionPress(1 - (budget + 0.5) / NUM_TOKENS),
    }
    found = {}
    model.set_attn_implementation("sdpa")  # makes no mask for a single query, so that layers may differ in length
    for method, (_, budgets) in PROMPTS.items():
        for budget in budgets:
            press, cache, kept = made[method](budget), DynamicCache(), []
            compress = press.compress

            def remember(module, hidden, keys, values, attentions, known, press=press, kept=kept, compress=compress):
                rows = positions_kept(press, module, hidden, SimpleNamespace(keys=keys, values=values), known)
                kept.append(np.pad(rows, ((0, 0), (0, NUM_TOKENS - rows.shape[1])), constant_values=-1))
                return compress(module, hidden, keys, values, attentions, known)

            press.compress = remember
            with press(model):
                logits = [model(ids, past_key_values=cache, use_cache=True).logits[0, -1]]
            answer = [int(logits[0].argmax())]
            while len(answer) < ANSWER:
                at = torch.tensor([[NUM_TOKENS + len(answer) - 1]])
                step = model(torch.tensor([[answer[-1]]]), past_key_values=cache, position_ids=at, use_cache=True)
                logits.append(step.logits[0, -1])
                answer.append(int(logits[-1].argmax()))
            name = f"{method}.{budget}"
            found[f"{name}.kept"] = np.stack(kept).astype(np.int16)
            found[f"{name}.answer"] = np.array(answer, np.int16)
            found[f"{name}.logits"] = torch.stack(logits[EVERY - 1 :: EVERY]).numpy()
    model.set_attn_implementation("eager")
    return found


@torch.no_grad()
def run(model, ids, budget: tuple[int, int], is_relative: bool) -> tuple[np.ndarray, np.ndarray]:
    """Logits float32 [T, V], and the positions int32 [pages, T] that are kept after each page, -1 after the last."""
    num_sinks, num_window = (-(-tokens // PAGE_SIZE) * PAGE_SIZE for tokens in budget)
    cache, logits, history = DynamicCache(), [], []
    positions = torch.zeros(0, dtype=torch.long)
    for start in range(0, NUM_TOKENS, PAGE_SIZE):
        first = len(positions) if is_relative else start
        at = torch.arange(first, first + PAGE_SIZE)[None]
        part = ids[:, start : start + PAGE_SIZE]
        logits.append(model(part, past_key_values=cache, position_ids=at, use_cache=True).logits[0])
        positions = torch.cat([positions, torch.arange(start, start + PAGE_SIZE)])
        positions = compress(model, cache, positions, num_sinks, num_window, is_relative)
        history.append(np.pad(positions.numpy().astype(np.int32), (0, NUM_TOKENS - len(positions)), constant_values=-1))
    return torch.cat(logits).numpy(), np.stack(history)


def compress(model, cache, positions, num_sinks: int, num_window: int, is_relative: bool):
    """Applies the press to every layer; returns the positions that stay, in order."""
    count, budget = len(positions), num_sinks + num_window
    if count <= budget:
        return positions
    press = StreamingLLMPress(compression_ratio=1 - (budget + 0.5) / count, n_sink=num_sinks)
    for layer, decoder_layer in zip(cache.layers, model.model.layers, strict=True):
        module = decoder_layer.self_attn
        module.rotary_emb = model.model.rotary_emb
        # What is kept is in the order of its score: positions go the same way, and put it back in order.
        at = positions[None, None, :, None].expand_as(layer.keys)
        _, found = press.compress(module, None, layer.keys, at, None, {})
        order = found.argsort(dim=2, stable=True)
        pair = press.compress(module, None, layer.keys, layer.values, None, {})
        if is_relative:  # which sorts
            keys, values = KeyRerotationPress(press).compress(module, None, layer.keys, layer.values, None, {})
        else:
            keys, values = (part.gather(2, order) for part in pair)
        layer.keys, layer.values = keys, values
    return found.gather(2, order)[0, 0, :, 0]


if __name__ == "__main__":
    main()
