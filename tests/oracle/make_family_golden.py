"""Writes tests/oracle/golden/families: what Transformers computes for each case of family_cases.py.

Run by `make golden`, with torch and Transformers. Run twice, it writes the same bytes. With names of cases as arguments
it writes only those.
"""

import json
import sys

import numpy as np
import torch
import transformers
from families import MIN_DISTINCT, MIN_MARGIN
from family_cases import (
    CASES,
    FOLDER,
    GREEDY_LENGTHS,
    NUM_TOKENS,
    POSITIONS,
    SEEDS,
    Case,
    family_weights,
    prompt_tokens,
)
from reference import MAX_SEEDS, greedy, set_up
from safetensors.numpy import save_file


def main(names: list[str]) -> None:
    set_up()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names or CASES:
        print(write(CASES[name]), flush=True)


def build(case: Case, tied: bool, seed: int) -> transformers.PreTrainedModel:
    """The model in float32 with plain attention."""
    options = case.config(tied)
    config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in stored_tensors(model).items():
            parameter.copy_(torch.from_numpy(family_weights(name, tuple(parameter.shape), seed, case)))
    return model.eval()


def stored_tensors(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a checkpoint holds: parameters, and the one buffer that is learned."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    return dict(model.named_parameters()) | buffers


def states(model: transformers.PreTrainedModel, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 logits [T, V], and hidden states [L + 1, T, D]: the embedding, after each layer but the last, and after
    the final norm."""
    with torch.no_grad():
        out = model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False, output_hidden_states=True)
    return out.logits[0].float().numpy(), torch.stack(out.hidden_states)[:, 0].float().numpy()


def clear_greedy(case: Case, first_seed: int) -> tuple[int, float, list[tuple[list[int], list[int]]]]:
    """The first seed whose greedy answers neither loop nor hang on a near-tie, the smallest margin, and the answers."""
    for seed in range(first_seed, first_seed + MAX_SEEDS):
        model = build(case, case.ties[0], seed)
        answers, margins = [], []
        for length in GREEDY_LENGTHS:
            tokens = prompt_tokens(seed)[:length].tolist()
            output, margin = greedy(model, tokens)
            if margin <= MIN_MARGIN or len(set(output)) < MIN_DISTINCT:
                break
            answers.append((tokens, output))
            margins.append(margin)
        else:
            return seed, min(margins), answers
    raise RuntimeError(f"{case.name}: no seed in {MAX_SEEDS} gives clear answers")


def write(case: Case) -> str:
    """Replaces the case's file; returns a line about it."""
    tensors: dict[str, np.ndarray] = {}
    made = {"torch": torch.__version__, "transformers": transformers.__version__, "configs": {}, "shapes": {}}
    for tied in case.ties:
        kind = "tied" if tied else "untied"
        for seed in SEEDS:
            model = build(case, tied, seed)
            logits, hidden = states(model, prompt_tokens(seed)[:NUM_TOKENS])
            # The second kind differs by its head only: less of it tells as much.
            positions = list(POSITIONS if tied == case.ties[0] else POSITIONS[1::2])
            tensors[f"{kind}.{seed}.logits"] = logits[positions]
            if tied == case.ties[0]:
                tensors[f"{seed}.hidden"] = np.ascontiguousarray(hidden[:, positions])
        made["configs"][kind] = json.loads(model.config.to_json_string()) | {"architectures": [case.architecture]}
        shared = {"lm_head.weight"} if tied else set()
        made["shapes"][kind] = {
            name: list(tensor.shape) for name, tensor in stored_tensors(model).items() if name not in shared
        }
    seed, margin, answers = clear_greedy(case, case.first_seed)
    made["greedy"] = {"seed": seed, "margin": round(margin, 5)}
    for i, (_, output) in enumerate(answers):
        tensors[f"greedy.{i}"] = np.array(output, np.uint8)
    path = FOLDER / f"{case.name}.safetensors"
    save_file(tensors, path, {"made": json.dumps(made)})
    return f"{case.name}: greedy seed {seed}, margin {margin:.4f}, {path.stat().st_size:,} bytes"


if __name__ == "__main__":
    main(sys.argv[1:])
