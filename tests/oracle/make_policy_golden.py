"""Writes golden/policies.safetensors: what kvpress's StreamingLLM keeps of random Llamas, and their logits.

Run with kvpress 0.5.5, torch and Transformers in an environment of its own: kvpress needs older Transformers than the
other golden files. Run twice, it writes the same bytes. Pages are computed one by one, each attending to what the press
left of the pages before it.
"""

import numpy as np
import torch
from kvpress import KeyRerotationPress, StreamingLLMPress
from safetensors.numpy import save_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tests.oracle.policy_cases import BUDGETS, CONFIG, GOLDEN, NUM_TOKENS, PAGE_SIZE, SEEDS, name_of, tensors, tokens


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, np.ndarray] = {}
    for seed in SEEDS:
        model = LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation="eager"))
        model.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in tensors(seed).items()})
        model.eval()
        for budget in BUDGETS:
            for is_relative in (False, True):
                logits, kept = run(model, torch.from_numpy(tokens(seed))[None], budget, is_relative)
                name = name_of(seed, budget, is_relative)
                found |= {f"{name}.logits": np.ascontiguousarray(logits[7::8]), f"{name}.kept": kept}
    save_file(found, GOLDEN)
    print(f"{len(found)} arrays, {GOLDEN.stat().st_size:,} bytes")


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
