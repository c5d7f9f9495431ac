"""config.json and generation_config.json: what the model is, and what its authors generate with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints_convert.errors import CheckpointError, did_you_mean
from checkpoints_convert.files import CONFIG, read_json
from checkpoints_convert.formats import FormatError, quantization_method
from checkpoints_convert.huggingface.families import FAMILIES, Bias, Family, family_of
from checkpoints_convert.huggingface.fields import Fields
from checkpoints_convert.huggingface.rope import rope_config, rope_fields
from jaxinfer.models import ModelConfig

_SILU = ("silu", "swish")
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def model_config(data: Mapping[str, Any], where: str | Path = CONFIG) -> ModelConfig:
    """The configuration a parsed config.json describes, with the defaults of Transformers 5.

    Its dtype is the declared one, float32 when none is; the tensors decide what a loaded model has.

    Raises:
      CheckpointError: an architecture, activation, rotation or quantization we do not have, by name; fields that are
        missing or ill typed, all of them at once. Code named in `auto_map` is never run.
    """
    family = _family(data, where)
    problems: list[str] = []
    fields = Fields(data, problems)
    num_layers, num_heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", family.head_dim or max(1, hidden_size // num_heads))
    max_positions = fields.integer("max_position_embeddings", family.max_position_embeddings)
    window = _window(fields, family)
    layer_types = _layer_types(fields, family, num_layers, window)
    rope = rope_config(
        data, problems, head_dim=head_dim, max_position_embeddings=max_positions, layer_types=layer_types
    )
    if rope.rotary_dim != head_dim and not family.has_partial_rotary and not problems:
        asked = f"{rope.rotary_dim} of {head_dim} dimensions"
        problems.append(f"partial_rotary_factor: {family.architecture} rotates whole heads, this asks for {asked}")
    activation = data.get("hidden_act", "silu")
    if activation not in _SILU:
        fields.problem("hidden_act", f"{activation!r} is not supported for {family.architecture}, only 'silu' is")
    try:
        quantization_method(data)
    except FormatError as error:
        fields.problem("quantization_config:", str(error))
    values = {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("num_key_value_heads", family.num_kv_heads or num_heads),
        "head_dim": head_dim,
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", False),
        "qkv_bias": _bias(fields, family.qkv_bias),
        "output_bias": _bias(fields, family.output_bias),
        "mlp_bias": _bias(fields, family.mlp_bias),
        "sliding_windows": _windows(fields, layer_types, window),
        "max_position_embeddings": max_positions,
        "dtype": declared_dtype(data, problems) or "float32",
    }
    if problems:
        raise CheckpointError(where, *problems)
    try:
        return ModelConfig(architecture=family.architecture, rope=rope, qk_norm=family.qk_norm, **values)
    except ValueError as error:
        raise CheckpointError(where, str(error)) from None


def declared_dtype(data: Mapping[str, Any], problems: list[str]) -> str | None:
    """The `dtype` or, in files before Transformers 5, `torch_dtype` of config.json."""
    name = "dtype" if data.get("dtype") is not None else "torch_dtype"
    value = data.get(name)
    if value is None:
        return None
    dtype = value.removeprefix("torch.") if isinstance(value, str) else value
    if dtype not in _DTYPES:
        problems.append(f"{name} {value!r} is not one of {', '.join(_DTYPES)}")
        return None
    return dtype


def huggingface_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model, readable by Transformers 4 and 5.

    Raises CheckpointError when the architecture cannot express the configuration, naming the fields.
    """
    if config.architecture not in FAMILIES:
        raise CheckpointError(
            CONFIG, f"no architecture {config.architecture!r}{did_you_mean(config.architecture, FAMILIES)}"
        )
    family = family_of(config)
    data: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": config.dtype,
        **rope_fields(config.rope),
        **_window_fields(family, config),
    }
    for name, value in (
        ("qkv_bias", config.qkv_bias),
        ("output_bias", config.output_bias),
        ("mlp_bias", config.mlp_bias),
    ):
        if isinstance(field := getattr(family, name), str):
            data[field] = value
    _check_round_trip(config, data)
    return data


def generation_config(directory: str | Path) -> dict[str, Any]:
    """The checkpoint's generation_config.json as it is, or {} without one."""
    path = Path(directory) / "generation_config.json"
    return read_json(path) if path.exists() else {}


def eos_token_ids(directory: str | Path) -> tuple[int, ...]:
    """Ids that end a generation: those of generation_config.json and config.json together, in that order."""
    return tuple(dict.fromkeys(id for data in _both(directory) for id in _token_ids(data, "eos_token_id", directory)))


def bos_token_id(directory: str | Path) -> int | None:
    """The id a text begins with, or None."""
    found = [id for data in _both(directory) for id in _token_ids(data, "bos_token_id", directory)]
    return found[0] if found else None


def _both(directory: str | Path) -> list[dict[str, Any]]:
    path = Path(directory) / CONFIG
    return [generation_config(directory), read_json(path) if path.exists() else {}]


def _token_ids(data: Mapping[str, Any], name: str, where: str | Path) -> list[int]:
    value = data.get(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(id, bool) or not isinstance(id, int) or id < 0 for id in values):
        raise CheckpointError(where, f"{name} must be a token id or a list of them, got {value!r}")
    return values


def _family(data: Mapping[str, Any], where: str | Path) -> Family:
    names = data.get("architectures")
    if names is None:
        by_type = {family.model_type: family for family in FAMILIES.values()}
        kind = data.get("model_type")
        if isinstance(kind, str) and kind in by_type:
            return by_type[kind]
        raise CheckpointError(where, f"architectures is missing, and model_type {kind!r} does not tell it")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError(where, f"architectures must be a list of names, got {names!r}")
    if names[0] in FAMILIES:
        return FAMILIES[names[0]]
    needs_code = " Its auto_map asks for code from the repository, which is never run." if data.get("auto_map") else ""
    raise CheckpointError(
        where,
        f"the architecture {names[0]!r} is not supported{did_you_mean(names[0], FAMILIES)}."
        f" Supported: {', '.join(FAMILIES)}.{needs_code}",
    )


def _bias(fields: Fields, bias: Bias) -> bool:
    return fields.boolean(bias, False) if isinstance(bias, str) else bias


def _window(fields: Fields, family: Family) -> int | None:
    """Visible keys of a sliding layer; null means no window, absence the family's default."""
    is_off = family.windows == "late" and not fields.boolean("use_sliding_window", False)
    if family.windows == "none" or is_off:
        return None
    return fields.integer("sliding_window", None if "sliding_window" in fields.data else family.default_window)


def _layer_types(fields: Fields, family: Family, num_layers: int, window: int | None) -> tuple[str, ...]:
    """One of "full_attention" and "sliding_attention" for every layer."""
    given = fields.data.get("layer_types")
    if given is None:
        first = num_layers
        if window is not None:
            first = 0 if family.windows == "all" else fields.integer("max_window_layers", 28, least=0)
        return tuple("sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers))
    known = ("full_attention",) if family.windows == "none" else ("full_attention", "sliding_attention")
    if not isinstance(given, list):
        fields.problem("layer_types", f"must be a list, got {given!r}")
    elif unknown := [kind for kind in given if kind not in known]:
        fields.problem("layer_types", f"names {unknown[0]!r}, {family.architecture} has {' and '.join(known)}")
    elif len(given) != num_layers:
        fields.problem("layer_types", f"has {len(given)} entries for num_hidden_layers={num_layers}")
    else:
        return tuple(given)
    return ("full_attention",) * num_layers


def _windows(fields: Fields, layer_types: tuple[str, ...], window: int | None) -> tuple[int | None, ...]:
    if "sliding_attention" not in layer_types:
        return ()
    if window is None:
        fields.problem("layer_types", "names sliding_attention layers, but no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _window_fields(family: Family, config: ModelConfig) -> dict[str, Any]:
    windows = config.sliding_windows
    sizes = {window for window in windows if window is not None}
    window = max(sizes, default=None)
    if family.windows == "none":
        return {}
    if family.windows == "all":
        return {"sliding_window": window}
    if window is None:
        return {"use_sliding_window": False, "sliding_window": None}
    types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {
        "use_sliding_window": True,
        "sliding_window": window,
        "max_window_layers": types.index("sliding_attention"),
        "layer_types": types,
    }


def _check_round_trip(config: ModelConfig, data: Mapping[str, Any]) -> None:
    """Reads back what was written: whatever differs is something the architecture has no field for."""
    wanted, found = config.to_dict(), model_config(data).to_dict()
    for side in (wanted, found):
        del side["rope"]["sequence_length"]  # what the engine serves, not a property of the checkpoint
    if not any(wanted["sliding_windows"]):
        wanted["sliding_windows"] = ()
    differing = [name for name in wanted if wanted[name] != found[name]]
    if differing:
        raise CheckpointError(
            CONFIG,
            *(
                f"{config.architecture} cannot express {name}={wanted[name]!r}, only {found[name]!r}"
                for name in differing
            ),
        )
