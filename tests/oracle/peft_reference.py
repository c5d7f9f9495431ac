"""The PEFT library on adapters of adapter_cases.py: writes their folders, and the log-probabilities of texts.

Run by `adapter_cases.py` as a process of its own, in the environment `.venv-peft`, which has no JAX.
"""

import copy
import json
import logging
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import save_file

from tests.oracle.adapter_cases import FAMILIES, GOLDEN_FAMILIES, Kind, adapter_values, kinds_of
from tests.oracle.reference import build, set_up, stored_tensors


def main(name: str, out: str, *kinds: str) -> None:
    """Writes to `out` the base of a family, a folder for each adapter of each kind, and expected.safetensors."""
    set_up()
    torch.manual_seed(0)  # of values that `fill` changes by a factor or a summand
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    family, folder = {**FAMILIES, **GOLDEN_FAMILIES}[name], Path(out)
    model = build(family.case, family.is_tied, 0)
    model.save_pretrained(folder / "base")
    # An adapter's configuration has the folder that its base was opened from.
    model = type(model).from_pretrained(folder / "base", dtype=torch.float32, attn_implementation="eager").eval()
    tensors: dict[str, np.ndarray] = {}
    for kind in kinds_of(family).values():
        if kind.name in (kinds or [kind.name]):
            found = run(copy.deepcopy(model), kind, folder / kind.name)
            tensors |= {f"{kind.name}.{way}": logprobs for way, logprobs in found.items()}
    made: dict[str, Any] = {package: version(package) for package in ("torch", "transformers", "peft")}
    made["config"] = json.loads(model.config.to_json_string()) | {"architectures": [family.case.architecture]}
    made["shapes"] = {key: list(tensor.shape) for key, tensor in stored_tensors(model).items()}
    save_file(tensors, folder / "expected.safetensors", {"made": json.dumps(made)})


def run(base: torch.nn.Module, kind: Kind, folder: Path) -> dict[str, np.ndarray]:
    """Writes the adapters of a kind; returns log-probabilities float32 [rows, tokens - 1]: "single", of row after row,
    each with its adapter alone, and "mixed", of all rows in one batch."""
    tokens, rows = torch.from_numpy(kind.tokens.astype(np.int64)), kind.rows
    # The library trains biases in the base itself.
    single = {row: logprobs(base, tokens[row : row + 1])[0] for row, name in enumerate(rows) if name is None}
    model = None
    for name, settings in kind.adapters.items():
        config = LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **settings)
        if model is None:
            model = get_peft_model(base, config, adapter_name=name)
        else:
            model.add_adapter(name, config)
        fill(model, name)
    assert isinstance(model, PeftModel)
    model.eval().save_pretrained(folder)
    for row, name in enumerate(rows):
        if name is not None:
            model.set_adapter(name)
            single[row] = logprobs(model, tokens[row : row + 1])[0]
    found = {"single": np.stack([single[row] for row in range(len(rows))])}
    if kind.is_mixed:
        found["mixed"] = logprobs(model, tokens, adapter_names=[name or "__base__" for name in rows])
        difference = np.abs(found["mixed"] - found["single"]).max()
        print(f"{kind.name}: mixed and single differ by {difference:.1e}")
    return found


def fill(model: PeftModel, adapter: str) -> None:
    """Gives an adapter's parameters random values; trained biases are of the base's Linears."""
    trains_biases = model.peft_config[adapter].bias
    count = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_own = f".{adapter}" in name and (name.endswith(f".{adapter}") or f".{adapter}." in name)
            is_bias = name.endswith(".bias") and (
                trains_biases == "all" or (trains_biases == "lora_only" and "base_layer" in name)
            )
            if not (is_own or is_bias):
                continue
            values = adapter_values(name, tuple(parameter.shape), adapter, parameter.numpy())
            parameter.copy_(torch.from_numpy(values))
            count += 1
    assert count


def logprobs(model: torch.nn.Module, tokens: torch.Tensor, **options) -> np.ndarray:
    """float32 [B, T - 1] of each token of [B, T] after those before it."""
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False, **options).logits.float()
    found = torch.log_softmax(logits[:, :-1], -1).gather(2, tokens[:, 1:, None])
    return found[..., 0].numpy()


if __name__ == "__main__":
    main(*sys.argv[1:])
