"""The speculators library on a head: opens it, converts it, or trains one with its own code.

Run by `speculators_cases.py` as a process of its own, in the environment `.venv-heads`, which has no JAX.
"""

import json
import logging
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import loguru
import torch
import transformers
from safetensors.torch import save_file
from speculators import SpeculatorModel
from speculators.convert import convert_model
from speculators.models.dflash import DFlashDraftModel
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train import trainer as training
from speculators.train.data import CollateFn
from torch.utils.data import DataLoader

from tests.oracle.head_cases import DRAFT_VOCAB, MASK_TOKEN, NUM_STEPS, VOCAB, WIDTH, HeadCase, kept_tokens
from tests.oracle.make_head_golden import block_logits, eagle3_steps, read_config

ANCHORS = (1, 2, 3, 8, 15, 20)
TAPS = (1, 2, 3)
NUM_TEXTS, LENGTH, NUM_EPOCHS = 6, 48, 8


def main(command: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    loguru.logger.remove()
    {"open": open_head, "convert": convert, "train": train}[command](*arguments)


def open_head(folder: str, out: str) -> None:
    """Writes to a file the state of a head, its configuration as the library saves it, and logits at `ANCHORS`."""
    opened = SpeculatorModel.from_pretrained(folder)
    state = opened.state_dict()
    data = json.loads((Path(folder) / "config.json").read_text())
    # Plain attention, in float32.
    model = type(opened).from_pretrained(folder, config=read_config(data), dtype=torch.float32).eval()
    taps = tuple(model.target_layer_ids)
    case = HeadCase(folder, data["speculators_model_type"], data, {}, taps=taps, anchors=ANCHORS)
    with torch.no_grad():
        if case.kind == "eagle3":
            logits = eagle3_steps(model, case, 0)[0][:, list(ANCHORS)].swapaxes(0, 1)
        else:
            logits = block_logits(model, case, 0)[1]["logits"]
    with tempfile.TemporaryDirectory() as again:
        opened.config.save_pretrained(again)
        saved = json.loads((Path(again) / "config.json").read_text())
    about = {"class": type(opened).__name__, "config": saved, "taps": taps}
    about |= {name: version(name) for name in ("torch", "transformers", "speculators")}
    tensors = {f"state.{name}": tensor.clone() for name, tensor in state.items()}
    save_file(tensors | {"logits": logits.contiguous()}, out, {"made": json.dumps(about)})


def convert(kind: str, folder: str, target: str, out: str) -> None:
    """Converts a head in the published form."""
    data = json.loads((Path(folder) / "config.json").read_text())
    if kind == "eagle3":
        taps = {"eagle_aux_hidden_state_layer_ids": data["eagle_aux_hidden_state_layer_ids"]}
    else:
        # By default the converter leaves out the last layer, and then the projection does not fit.
        taps = {"aux_hidden_state_layer_ids": [layer + 1 for layer in data["dflash_config"]["target_layer_ids"]]}
    convert_model(folder, target, kind, out, validate_device="cpu", **taps)


def train(kind: str, target: str, out: str) -> None:
    """Trains a head for a target with the library's trainer; prints the losses before and after."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(target)
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
    samples = [_sample(model, seed) for seed in range(NUM_TEXTS)]
    kept = torch.from_numpy(kept_tokens(0))
    is_kept = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, value=True)
    options = {
        "draft_vocab_size": DRAFT_VOCAB,
        "verifier_name_or_path": target,
        "target_layer_ids": list(TAPS),
        "draft_attn_impl": "eager",
        "loss_fn": "kl_div",
        "loss_implementation": "eager",
    }
    if kind == "eagle3":
        layers = transformers.LlamaConfig(**_layer(config, "llama"))
        options |= {"norm_before_residual": True, "ttt_steps": NUM_STEPS, "ttt_step_loss_decay": 0.9}
        classes: Any = Eagle3DraftModel
    else:
        layers = transformers.Qwen3Config(**_layer(config, "qwen3"))
        options |= {"block_size": 4, "mask_token_id": MASK_TOKEN, "max_anchors": 8}
        classes = DFlashDraftModel
    head = classes.from_training_args(layers, t2d=is_kept, d2t=kept - torch.arange(DRAFT_VOCAB), **options)
    of_train, of_validation = classes.get_trainer_kwargs(**options)
    shift = shift_batch if kind == "eagle3" else None
    collate = CollateFn(2 * LENGTH, WIDTH, len(TAPS), dtype=torch.float32, preprocess=shift)
    loader = DataLoader(samples, batch_size=2, collate_fn=collate)
    with tempfile.TemporaryDirectory() as folder, _on_a_cpu():
        trainer = training.Trainer(
            head,
            training.TrainerConfig(
                lr=3e-3,
                num_epochs=NUM_EPOCHS,
                save_path=folder,
                train_call_kwargs=of_train,
                val_call_kwargs=of_validation,
                hidden_states_dtype=torch.float32,
                scheduler_type="none",
            ),
            loader,
            loader,
        )
        torch.manual_seed(1)
        before = trainer.val_epoch(0)
        trainer.run_training()
        torch.manual_seed(1)
        after = trainer.val_epoch(0)
        assert before is not None
        assert after is not None
        Path(out).mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copy(Path(folder) / str(NUM_EPOCHS - 1) / name, out)
    print(json.dumps([before["loss_epoch"], after["loss_epoch"]]))


@contextmanager
def _on_a_cpu() -> Iterator[None]:
    """The trainer, which counts its devices, on the only one."""
    with (
        mock.patch.object(training, "get_local_rank", return_value="cpu"),
        mock.patch.object(training, "tqdm", lambda loader, **_: loader),
        mock.patch.object(torch.accelerator, "synchronize"),
    ):
        yield


def _layer(config: transformers.PretrainedConfig, kind: str) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("max_position_embeddings", "rms_norm_eps", "rope_parameters")
    return {"num_hidden_layers": 1, "tie_word_embeddings": False, **{name: getattr(config, name) for name in names}}


def _sample(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """A text of the library's data: its states are those before the layers `TAPS`, and after the last one."""
    tokens = torch.randint(0, MASK_TOKEN, (LENGTH,), generator=torch.Generator().manual_seed(seed))
    states: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _module, _inputs, output: states.append(output[0].detach()))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(tokens[None])
    for hook in hooks:
        hook.remove()
    return {
        "hidden_states": torch.cat([states[tap - 1] for tap in TAPS], dim=-1),
        "input_ids": tokens,
        "verifier_last_hidden_states": states[-1],
        "loss_mask": torch.ones(LENGTH, dtype=torch.bool),
        "lengths": torch.tensor([LENGTH]),
        "position_ids": torch.arange(LENGTH),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
