"""Writes a loaded model as a Hugging Face checkpoint: what `LLM.save` does."""

import json
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jaxinfer.loading import LoadedModel
from jaxinfer.models.host_layers import all_layers, disk_layers
from jaxinfer.quantization import dequantize_params

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
_INSTEAD = "copy its checkpoint, or convert it: jaxinfer convert SRC DST --to huggingface"


def save_model(loaded: LoadedModel, folder: str | Path, *, dtype: str, dequantize: bool, overwrite: bool) -> Path:
    """Writes a model's configuration, weights and tokenizer to `folder`. Arguments and errors as of `LLM.save`."""
    import checkpoints_convert
    from checkpoints_convert.errors import UnwritableSchemeError
    from checkpoints_convert.staging import check_destination

    _check_whole(loaded)
    check_destination(Path(folder), overwrite=overwrite, source=loaded.source)
    with ExitStack() as stack:
        files, special, kv_scales = _beside(loaded, stack)
        params = all_layers(loaded.params)
        try:
            return checkpoints_convert.save_huggingface(
                loaded.config,
                dequantize_params(params) if dequantize else params,
                folder,
                dtype,
                extra_files=files,
                extra_config=special,
                kv_scales=kv_scales,
                overwrite=overwrite,
            )
        except UnwritableSchemeError as error:
            advice = "dequantize=True writes floating-point weights"
            raise checkpoints_convert.CheckpointError(folder, f"{error.problems[0]}; {advice}") from None


def _check_whole(loaded: LoadedModel) -> None:
    """Raises ValueError for parameters that are not those of the checkpoint, one by one in this process."""
    if loaded.mesh is not None:
        raise ValueError(f"save: the weights are divided and padded for a mesh; load without mesh=, or {_INSTEAD}")
    if disk_layers(loaded.params) is not None:
        raise ValueError(f"save: the layers of {loaded.name} are on the disk, not in memory; {_INSTEAD}")
    if not loaded.has_head:
        raise ValueError(f"save: {loaded.name} has no head, and only models that generate are written")


def _beside(loaded: LoadedModel, stack: ExitStack) -> tuple[dict[str, Path | str], dict[str, Any], Any]:
    """The files beside the weights, as paths or texts by name, the special tokens in config.json, and the scales of a
    cache; some lie in a folder that `stack` removes."""
    import checkpoints_convert
    from checkpoints_convert.convert import with_tokenizer_of
    from checkpoints_convert.files import special_token

    files: dict[str, Path | str] = {}
    kv_scales, tokenizer, eos = (), loaded.tokenizer, loaded.eos_token_ids
    special: dict[str, Any] = {
        "bos_token_id": None if tokenizer is None else tokenizer.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "pad_token_id": None if tokenizer is None else tokenizer.pad_token_id,
    }
    if loaded.source is not None:
        with checkpoints_convert.open_checkpoint(loaded.source, dtype="float32", verify=False) as checkpoint:
            files, kv_scales = checkpoint.companions(with_tokenizer=False), checkpoint.kv_scales
        content = files.pop(CONFIG, "{}")
        stored = json.loads(content if isinstance(content, str) else content.read_text(encoding="utf-8-sig"))
        special |= {name: value for name in special if (value := special_token(stored, name)) is not None}
    own = None if tokenizer is None else tokenizer.files.get("tokenizer.json")
    if tokenizer is not None and (own is None or own.parent != loaded.source):
        made = Path(stack.enter_context(TemporaryDirectory()))
        tokenizer.save(made)
        files = dict(with_tokenizer_of(files, made))
    generation = {name: value for name, value in special.items() if value is not None}
    files.setdefault(GENERATION_CONFIG, json.dumps(generation, indent=2) + "\n")
    return files, special, kv_scales
