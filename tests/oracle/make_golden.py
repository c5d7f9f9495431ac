"""Writes golden/families and golden/rope.json: what Transformers computes for cases.py and rope_cases.py.

Run by `make golden`, with torch and Transformers. Run twice, it writes the same bytes. With names of cases as arguments
it writes only those.
"""

import json
import sys

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

from tests.oracle import rope_cases
from tests.oracle.cases import CASES, FOLDER, GOLDEN, Case, prompt_tokens
from tests.oracle.recurrent_cases import RECURRENT_CASES
from tests.oracle.reference import build, clear_greedy, rope, set_up, states, stored_tensors


def main(names: list[str]) -> None:
    set_up()
    FOLDER.mkdir(parents=True, exist_ok=True)
    cases = {**CASES, **RECURRENT_CASES}
    for name in names or cases:
        print(write(cases[name]), flush=True)
    if not names:
        print(write_rope())


def write(case: Case) -> str:
    """Replaces the case's file; returns a line about it."""
    tensors: dict[str, np.ndarray] = {}
    made = {"torch": torch.__version__, "transformers": transformers.__version__, "configs": {}, "shapes": {}}
    for tied in case.ties:
        kind = "tied" if tied else "untied"
        for seed in case.seeds:
            model = build(case, tied, seed)
            logits, hidden = states(model, prompt_tokens(seed)[: case.num_tokens])
            # The second kind differs by its head only: less of it tells as much.
            positions = list(case.positions if tied == case.ties[0] else case.positions[1::2])
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
    # One key: safetensors writes several in random order.
    save_file(tensors, path, {"made": json.dumps(made)})
    return f"{case.name}: greedy seed {seed}, margin {margin:.4f}, {path.stat().st_size:,} bytes"


def write_rope() -> str:
    """Replaces rope.json; returns a line about it."""
    cases = {}
    for case in rope_cases.CASES:
        frequencies, scaling = rope(case)
        cases[case.name] = {"config": case.ours, "frequencies": frequencies, "scaling": scaling}
    path = GOLDEN / "rope.json"
    path.write_text(json.dumps(cases, indent=1) + "\n")
    return f"{path.name}: {len(cases)} rotations, {path.stat().st_size:,} bytes"


if __name__ == "__main__":
    main(sys.argv[1:])
