"""Writes golden/heads: what the speculators library and Transformers compute for head_cases.py.

Run by `make golden-heads`, with torch, in an environment of its own. Run twice, it writes the same bytes. With names of
cases as arguments it writes only those. Every head is written as it is published and read by the library's own code.
"""

import json
import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import loguru
import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from speculators import SpeculatorModelConfig
from speculators.convert.mtp.converter import MTPConverter
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dflash import core as dflash_core
from speculators.models.dflash2 import DFlash2DraftModel
from speculators.models.dspark import DSparkDraftModel
from speculators.models.dspark import core as dspark_core
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3 import core as eagle3_core
from speculators.models.mtp import MTPDraftModel
from transformers.cache_utils import DynamicCache, MtpCache
from transformers.modeling_layers import MtpModel

from tests.oracle.head_cases import (
    BLOCK_WINDOW,
    EAGLE_WINDOW,
    FOLDER,
    HEAD_CASES,
    NUM_STATES,
    NUM_STEPS,
    ROWS,
    SEEDS,
    WIDTH,
    HeadCase,
    HeadShapes,
    embedding_and_head,
    head_tensors,
    inputs,
    write_checkpoint,
    write_target,
)

Outputs = dict[str, torch.Tensor]
_CLASSES = {
    "eagle3": Eagle3DraftModel,
    "dflash": DFlashDraftModel,
    "dflash2": DFlash2DraftModel,
    "dspark": DSparkDraftModel,
}
# What the library's heads have and no file holds: parts of the target, from which it trains.
_VERIFIER = re.compile(r"verifier_(norm|lm_head)\.weight")
_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_MAX_BYTES = 150_000


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    loguru.logger.remove()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for case in HEAD_CASES:
        if case.like is None and case.name in (names or [case.name]):
            print(write_golden(case), flush=True)


def write_golden(case: HeadCase) -> str:
    """Replaces the case's file; returns a line about it."""
    made = HeadShapes(_head_shapes(case), _target_shapes(case))
    run = {"eagle3": _eagle3, "dflash": _dflash, "dflash2": _dflash2, "dspark": _dspark, "mtp": _mtp}[case.kind]
    tensors: dict[str, np.ndarray] = {}
    for seed in SEEDS:
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            outputs = run(case, seed, made, write_checkpoint(Path(folder) / "head", case, seed, made))
        for name, tensor in outputs.items():
            array = np.ascontiguousarray(tensor.numpy())
            if not np.isfinite(array).all():
                raise RuntimeError(f"{case.name}: {name} is not finite")
            tensors[f"{seed}.{name}"] = array.astype(np.float32 if array.dtype.kind == "f" else np.int32)
    versions = {name: version(name) for name in ("torch", "transformers", "speculators")}
    about = {**versions, "anchors": list(case.anchors), "head": made.head, "target": made.target}
    # One key: safetensors writes several in random order.
    save_file(tensors, case.path, {"made": json.dumps(about)})
    size = case.path.stat().st_size
    if size > _MAX_BYTES:
        raise RuntimeError(f"{case.name}: {size:,} bytes")
    found = ", ".join(f"{name.removeprefix('0.')} {list(tensors[name].shape)}" for name in tensors if name[0] == "0")
    return f"{case.name}: {found}, {size:,} bytes"


def _head_shapes(case: HeadCase) -> dict[str, list[int]]:
    """Names and shapes of the head's published tensors."""
    if case.kind == "mtp":
        return _mtp_shapes(case)
    config = read_config(case.config)
    config.speculators_config.verifier.name_or_path = None
    state = _CLASSES[case.kind](config).state_dict()
    borrowed = ("" if case.has_embedding else "embed_tokens.", "" if case.has_head else "lm_head.")
    return {
        name: list(tensor.shape)
        for name, tensor in state.items()
        if not _VERIFIER.match(name) and not name.startswith(tuple(filter(None, borrowed)) or "-")
    }


def _mtp_shapes(case: HeadCase) -> dict[str, list[int]]:
    config = _target_config(case)
    if config.model_type.startswith("qwen3_"):
        names = {
            "input_proj.": "fc.",
            "final_layernorm.": "norm.",
            "hidden_layernorm.": "pre_fc_norm_hidden.",
            "token_layernorm.": "pre_fc_norm_embedding.",
        }
        found = {}
        for name, tensor in MTPDraftModel(_mtp_config(config)).mtp_layers[0].state_dict().items():
            prefix = next((prefix for prefix in names if name.startswith(prefix)), None)
            end = f"layers.0.{name}" if prefix is None else names[prefix] + name.removeprefix(prefix)
            found[f"mtp.{end}"] = list(tensor.shape)
        return _apart(found)
    model = MtpModel(_target(config), config.num_mtp_layers)
    own = {"post_norm.": "shared_head.norm.", "enorm.": "enorm.", "hnorm.": "hnorm.", "eh_proj.": "eh_proj."}
    found = {}
    for number, layer in enumerate(model.layers):
        prefix = f"model.layers.{config.num_hidden_layers + number}."
        for name, tensor in layer.state_dict().items():
            start = next((start for start in own if name.startswith(start)), None)
            end = name.removeprefix("mtp_block.") if start is None else own[start] + name.removeprefix(start)
            found[prefix + end] = list(tensor.shape)
        if config.model_type == "deepseek_v3":
            embedding = [config.vocab_size, config.hidden_size]
            found |= {f"{prefix}embed_tokens.weight": embedding, f"{prefix}shared_head.head.weight": embedding}
    return _apart(found)


def _target_shapes(case: HeadCase) -> dict[str, list[int]]:
    """Names and shapes of the target's published tensors."""
    config = _target_config(case)
    prefix = "model.language_model." if "text_config" in case.target else "model."
    found = {
        re.sub(r"^model\.", prefix, name): list(tensor.shape) for name, tensor in _target(config).state_dict().items()
    }
    return _apart(found)


def _apart(found: dict[str, list[int]]) -> dict[str, list[int]]:
    """Each expert's matrices by themselves, as published, in place of Transformers' tensors of all experts."""
    shapes: dict[str, list[int]] = {}
    for name, shape in found.items():
        match = _FUSED.fullmatch(name)
        if not match:
            shapes[name] = shape
            continue
        rows = shape[1] // 2 if match[2] == "gate_up_proj" else shape[1]
        parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
        shapes |= {
            f"{match[1]}.{number}.{part}.weight": [rows, shape[2]] for number in range(shape[0]) for part in parts
        }
    return shapes


def _target_config(case: HeadCase) -> transformers.PretrainedConfig:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case.target))
        config = transformers.AutoConfig.from_pretrained(folder)
    config = config.get_text_config()
    config._attn_implementation = "eager"
    return config


def _target(config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def read_config(data: dict[str, Any]) -> SpeculatorModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(data))
        config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return config


def _load(case: HeadCase, seed: int, made: HeadShapes, folder: Path) -> Any:
    """The library's model from the files of the head and of its target."""
    config = read_config(json.loads((folder / "config.json").read_text()))
    target = write_target(folder.with_name("target"), case, seed, made)
    config.speculators_config.verifier.name_or_path = str(target)
    model = _CLASSES[case.kind].from_pretrained(folder, config=config, dtype=torch.float32).eval()
    embedding, head = embedding_and_head(case, seed, made)
    own = head_tensors(case, seed, made)
    if not case.has_embedding:
        # The library looks for an embedding that is missing only if Transformers has left NaN in its place.
        model.embed_tokens.weight.copy_(torch.from_numpy(embedding))
    state = model.state_dict()
    for name, values in (own | {"embed_tokens.weight": embedding, "lm_head.weight": head}).items():
        if not np.array_equal(state[name].numpy(), values):
            raise RuntimeError(f"{case.name}: {name} was not read")
    if tuple(model.target_layer_ids) != case.taps:
        raise RuntimeError(f"{case.name}: the library takes the states {model.target_layer_ids}")
    return model


def _given(case: HeadCase, seed: int) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.astype(array.dtype)) for name, array in inputs(case, seed).items()}


def _eagle3(case: HeadCase, seed: int, made: HeadShapes, folder: Path) -> Outputs:
    model = _load(case, seed, made, folder)
    logits, states = eagle3_steps(model, case, seed)
    outputs = {"logits": logits, "states": states}
    if model.uses_sliding_window_attn:
        with mock.patch.object(eagle3_core, "extend_dense_mask_for_draft_tokens", _moving_window):
            outputs["position_logits"], outputs["position_states"] = eagle3_steps(model, case, seed)
    return outputs


def eagle3_steps(model: Eagle3DraftModel, case: HeadCase, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and states of each step. The library puts token 0 where no token follows: rows at the end are left out."""
    given = _given(case, seed)
    tokens = given["tokens"].long()[None, 1:]
    taps = torch.nn.functional.pad(given["taps"], (0, 0, 0, tokens.shape[1] - NUM_STATES))[None]
    logits: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    gives = model.norm if model.config.norm_output else model.layers[-1]
    hooks = [
        model.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0, :NUM_STATES])),
        gives.register_forward_hook(lambda _module, _inputs, output: states.append(output[0, :NUM_STATES])),
    ]
    model(taps, tokens, document_ids=torch.zeros_like(tokens), ttt_steps=NUM_STEPS)
    for hook in hooks:
        hook.remove()
    return torch.stack(logits), torch.stack(states)


_EXTEND = eagle3_core.extend_dense_mask_for_draft_tokens


def _moving_window(mask: torch.Tensor, length: int) -> torch.Tensor:
    """The mask of the next step, whose window has moved by one where the layer has a window."""
    has_window = bool(torch.isinf(mask[0, 0, -1, 0]))
    mask = _EXTEND(mask, length)
    if has_window:
        step = mask.shape[-1] // length - 1
        rows, keys = torch.arange(length)[:, None], torch.arange(length)[None]
        mask[0, 0, :, :length].masked_fill_(keys <= rows + step - EAGLE_WINDOW, float("-inf"))
    return mask


def _dflash(case: HeadCase, seed: int, made: HeadShapes, folder: Path) -> Outputs:
    model = _load(case, seed, made, folder)
    return block_logits(model, case, seed)[1]


def block_logits(model: DFlashDraftModel, case: HeadCase, seed: int) -> tuple[torch.Tensor, Outputs]:
    """States after the last norm [A, B, D], and logits."""
    with _anchors(case):
        hidden, logits, *_ = model._backbone_forward(**_block_inputs(case, seed))
        outputs = {"logits": _blocks(logits, model)}
        if model.uses_sliding_window_attn:
            with mock.patch.object(dflash_core, "create_anchor_block_mask_mod", _position_mask):
                outputs["position_logits"] = _blocks(model._backbone_forward(**_block_inputs(case, seed))[1], model)
    return _blocks(hidden, model), outputs


def _blocks(rows: torch.Tensor, model: DFlashDraftModel) -> torch.Tensor:
    """[A, B, ...] of [1, A * B, ...]."""
    return rows.reshape(-1, model.block_size, *rows.shape[2:])


def _block_inputs(case: HeadCase, seed: int) -> dict[str, Any]:
    given = _given(case, seed)
    tokens = given["tokens"].long()[None, :NUM_STATES]
    return {
        "hidden_states": given["taps"][None],
        "input_ids": tokens,
        "loss_mask": torch.ones_like(tokens),
        "verifier_last_hidden_states": torch.zeros(1, NUM_STATES, WIDTH),
        "document_ids": torch.zeros_like(tokens),
        "max_anchors": len(case.anchors),
    }


@contextmanager
def _anchors(case: HeadCase) -> Iterator[None]:
    """The case's anchors in place of random ones."""
    anchors = torch.tensor(case.anchors)
    selected = (anchors, torch.ones_like(anchors, dtype=torch.bool))
    with mock.patch.object(dflash_core, "select_anchors", return_value=selected):
        yield


def _position_mask(
    document_ids: torch.Tensor,
    total_seq_len: int,
    anchor_positions: torch.Tensor,
    block_size: int,
    sliding_window: int | None = None,
    sliding_window_non_causal: bool = False,
) -> tuple[Callable[..., torch.Tensor], int, int]:
    """The library's mask with z-lab's window: by the distance of a slot from what it sees."""
    num_slots = len(anchor_positions) * block_size
    anchors = anchor_positions.repeat_interleave(block_size)
    slots = anchors + torch.arange(num_slots) % block_size
    positions = torch.cat([torch.arange(total_seq_len), slots])
    blocks = torch.cat([torch.full((total_seq_len,), -1), torch.arange(num_slots) // block_size])
    assert sliding_window in (None, BLOCK_WINDOW)

    def visible(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = torch.where(
            blocks[key] < 0, positions[key] < anchors[query], blocks[key] == blocks[total_seq_len + query]
        )
        if sliding_window is None:
            return seen
        distance = slots[query] - positions[key]
        if not sliding_window_non_causal:
            seen = seen & (distance >= 0)
        return seen & (distance.abs() < sliding_window)

    return visible, num_slots, total_seq_len + num_slots


def _previous(case: HeadCase, seed: int, block_size: int) -> torch.Tensor:
    """True tokens before those that slots predict [A, B], of the target's vocabulary."""
    offsets = torch.arange(block_size)
    if not case.config["sample_from_anchor"]:
        offsets = (offsets - 1).clamp(min=0)
    return _given(case, seed)["tokens"].long()[torch.tensor(case.anchors)[:, None] + offsets]


def _path(
    case: HeadCase, seed: int, block_size: int, choose: Callable[[torch.Tensor, int], torch.Tensor]
) -> torch.Tensor:
    """Tokens [A, B] that are chosen one by one: choose(previous [A, B], slot) gives those [A] of a slot."""
    anchors = _given(case, seed)["tokens"].long()[torch.tensor(case.anchors)]
    path, previous = torch.zeros(len(anchors), block_size, dtype=torch.long), anchors[:, None].repeat(1, block_size)
    is_first_chosen = case.config["sample_from_anchor"]
    for slot in range(block_size):
        if slot > int(not is_first_chosen):
            previous[:, slot] = path[:, slot - 1]
        path[:, slot] = choose(previous, slot) if slot or is_first_chosen else anchors
    return path


def _dflash2(case: HeadCase, seed: int, made: HeadShapes, folder: Path) -> Outputs:
    model = _load(case, seed, made, folder)
    hidden, outputs = block_logits(model, case, seed)
    select = model.candidate_selector.select
    tokens = _given(case, seed)["tokens"].long()[None]
    slots = (torch.tensor(case.anchors)[:, None] + torch.arange(model.block_size)).reshape(-1)
    previous = _previous(case, seed, model.block_size)
    assert torch.equal(previous, model._predecessor_ids(tokens, slots))
    outputs["candidates"], outputs["scores"] = select(outputs["logits"], hidden, previous)

    def choose(previous: torch.Tensor, slot: int) -> torch.Tensor:
        candidates, scores = select(outputs["logits"][:, slot], hidden[:, slot], previous[:, slot])
        return candidates.gather(1, scores.argmax(1, keepdim=True))[:, 0]

    outputs["path"] = _path(case, seed, model.block_size, choose)
    return outputs


def _dspark(case: HeadCase, seed: int, made: HeadShapes, folder: Path) -> Outputs:
    model = _load(case, seed, made, folder)
    hidden, unbiased = block_logits(model, case, seed)
    found: list[torch.Tensor] = []

    def keep(logits: torch.Tensor, _targets: Any, confidence: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, dict]:
        found.extend((_blocks(logits, model), _blocks(confidence, model)))
        return None, {}

    with _anchors(case), mock.patch.object(dspark_core, "compute_metrics", keep):
        model(**_block_inputs(case, seed))

    def choose(previous: torch.Tensor, slot: int) -> torch.Tensor:
        bias = model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden)
        chosen = (unbiased["logits"] + bias)[:, slot].argmax(1)
        return chosen if model.d2t is None else chosen + model.d2t[chosen]

    path = _path(case, seed, model.block_size, choose)
    return {"logits": found[0], "confidence": found[1], "path": path}


def _mtp(case: HeadCase, seed: int, made: HeadShapes, folder: Path) -> Outputs:
    is_qwen = _target_config(case).model_type.startswith("qwen3_")
    return (_qwen_mtp if is_qwen else _layered_mtp)(case, seed, made, folder)


def _mtp_config(config: transformers.PretrainedConfig) -> SpeculatorModelConfig:
    data = {
        "speculators_model_type": "mtp",
        "transformer_layer_config": config.to_dict(),
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": NUM_STEPS}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }
    return read_config(data)


def _qwen_mtp(case: HeadCase, seed: int, made: HeadShapes, folder: Path) -> Outputs:
    config = _target_config(case)
    model = MTPDraftModel(_mtp_config(config)).eval()
    tensors = MTPConverter().convert_to_state_dict(folder)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or any(name.startswith("mtp_layers.") for name in missing):
        raise RuntimeError(f"{case.name}: missing {missing}, unexpected {unexpected}")
    embedding, head = embedding_and_head(case, seed, made)
    model.embed_tokens.weight.copy_(torch.from_numpy(embedding))
    model.lm_head.weight.copy_(torch.from_numpy(head))
    given = _given(case, seed)
    # The pass stops before tokens whose targets it lacks: one more, which is no input, makes it as long as ours.
    tokens = torch.nn.functional.pad(given["tokens"].long(), (0, 1))[None]
    rounds = torch.stack([logits[0] for logits in model(tokens, given["states"][None])[0]])

    def step(embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, **more: Any) -> torch.Tensor:
        sections = positions.expand(3, *positions.shape) if config.model_type.startswith("qwen3_5") else positions
        return model.mtp_layers[0](
            hidden_states=states,
            token_embeddings=embeds,
            position_ids=positions,
            position_embeddings=model.rotary_emb(states, sections),
            **more,
        )

    chain, states = _chain(given, model.embed_tokens, model.lm_head, step)
    _check_equal(case, chain[0], rounds[0])
    return _at_rows({"chain": chain, "states": states, "rounds": rounds})


def _layered_mtp(case: HeadCase, seed: int, made: HeadShapes, folder: Path) -> Outputs:
    main = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    # Transformers knows the numbers of these layers in published models only.
    main._keys_to_ignore_on_load_unexpected = [
        rf"model\.layers\.{main.config.num_hidden_layers + number}\." for number in range(main.config.num_mtp_layers)
    ]
    model = MtpModel.from_pretrained(main).eval()
    given = _given(case, seed)
    num_layers = len(model.layers)
    # Of a layer's last row Transformers takes the token that it drafts: rows beyond ours have that.
    states = torch.nn.functional.pad(given["states"], (0, 0, 0, num_layers - 1))[None]
    tokens = given["tokens"].long()[None, 1 : 1 + states.shape[1]]
    found: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _module, _inputs, output: found.append(output[0, :NUM_STATES]))
        for layer in model.layers
    ]
    cache = MtpCache(config=main.config.get_mtp_config())
    positions = torch.arange(1, 1 + states.shape[1])[None]
    model(tokens, states, attention_mask=None, position_ids=positions, mtp_cache=cache)
    for hook in hooks:
        hook.remove()
    layers = torch.stack([model.shared_head(rows) for rows in found])
    layer = model.layers[0]

    def step(embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, **more: Any) -> torch.Tensor:
        return layer(
            embeds, states, position_embeddings=model.rotary_emb(embeds, positions), position_ids=positions, **more
        )

    chain, chained = _chain(given, model.embed_tokens, model.shared_head, step)
    _check_equal(case, chain[0], layers[0])
    norm, layer.post_norm = layer.post_norm, torch.nn.Identity()
    before_norm, _ = _chain(given, model.embed_tokens, lambda states: model.shared_head(norm(states)), step)
    _check_equal(case, before_norm[0], layers[0])
    return _at_rows({"chain": chain, "states": chained, "layers": layers, "before_norm": before_norm})


def _at_rows(outputs: Outputs) -> Outputs:
    return {name: tensor[:, list(ROWS)] for name, tensor in outputs.items()}


def _chain(
    given: dict[str, torch.Tensor],
    embed: Callable[[torch.Tensor], torch.Tensor],
    head: Callable[[torch.Tensor], torch.Tensor],
    step: Callable[..., torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and states of each step, all rows at once: a row sees the first step's rows up to itself, and of later
    steps itself."""
    logits, found = [], []
    cache = DynamicCache()
    rows = torch.arange(NUM_STATES)
    is_seen = rows[None] <= rows[:, None]
    states = given["states"][None]
    for number in range(NUM_STEPS):
        if number:
            is_seen = torch.cat([is_seen, torch.eye(NUM_STATES, dtype=torch.bool)], dim=1)
        mask = torch.zeros(is_seen.shape).masked_fill_(~is_seen, float("-inf"))[None, None]
        embeds = embed(given["tokens"].long()[None, 1 + number : 1 + number + NUM_STATES])
        states = step(embeds, states, rows[None] + 1 + number, attention_mask=mask, past_key_values=cache)
        logits.append(head(states)[0])
        found.append(states[0])
    return torch.stack(logits), torch.stack(found)


def _check_equal(case: HeadCase, ours: torch.Tensor, library: torch.Tensor) -> None:
    """The first step of a chain that is driven here is what the library's own pass computes."""
    error = float((ours - library).abs().max())
    if error > 1e-4:
        raise RuntimeError(f"{case.name}: differs from the library's pass by {error:.1e}")


if __name__ == "__main__":
    main(sys.argv[1:])
