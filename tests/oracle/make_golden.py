"""Writes tests/oracle/golden: for each variant a checkpoint as Transformers saves it, and what it computes.

Run by `make golden`, with torch and Transformers. Run twice, it writes the same bytes. With names of variants as
arguments it writes only those.
"""

import json
import shutil
import sys

import numpy as np
import torch
import transformers
from families import GOLDEN, MIN_DISTINCT, MIN_MARGIN, VARIANTS, Variant
from reference import compute, rope, set_up
from rope_cases import CASES
from safetensors.numpy import save_file


def main(names: list[str]) -> None:
    set_up()
    for name in names or VARIANTS:
        print(write(VARIANTS[name]))
    if not names:
        print(write_rope())
    size = sum(path.stat().st_size for path in GOLDEN.rglob("*"))
    print(f"{GOLDEN.name}: {size / 2**20:.2f} MiB")


def write(variant: Variant) -> str:
    """Replaces the variant's folder; returns a line about it."""
    reference = compute(variant)
    assert reference.margin > MIN_MARGIN
    assert reference.num_distinct >= MIN_DISTINCT
    shutil.rmtree(variant.folder, ignore_errors=True)
    reference.model.save_pretrained(variant.folder)
    positions = np.array(variant.logit_positions, np.int32)
    tensors = {"prompt": reference.prompt, "positions": positions, "logits": reference.logits[positions]}
    for i, (prompt, output) in enumerate(reference.greedy):
        tensors[f"greedy.{i}.prompt"] = np.array(prompt, np.int32)
        tensors[f"greedy.{i}.output"] = np.array(output, np.int32)
    made = {
        "seed": reference.seed,
        "margin": round(reference.margin, 5),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    # One key: safetensors writes several in random order.
    save_file(tensors, variant.folder / "golden.safetensors", {"made": json.dumps(made)})
    sizes = ", ".join(f"{path.name} {path.stat().st_size:,}" for path in sorted(variant.folder.iterdir()))
    return (
        f"{variant.name}: seed {reference.seed}, margin {reference.margin:.4f}, "
        f"{reference.num_distinct} distinct tokens, logits std {reference.logits.std():.2f}; bytes: {sizes}"
    )


def write_rope() -> str:
    """Replaces rope.json; returns a line about it."""
    cases = {}
    for case in CASES:
        frequencies, scaling = rope(case)
        cases[case.name] = {"config": case.ours, "frequencies": frequencies, "scaling": scaling}
    path = GOLDEN / "rope.json"
    path.write_text(json.dumps(cases, indent=1) + "\n")
    return f"{path.name}: {len(cases)} rotations, {path.stat().st_size:,} bytes"


if __name__ == "__main__":
    main(sys.argv[1:])
