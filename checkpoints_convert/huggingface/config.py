"""config.json: from Hugging Face's fields to a `ModelConfig` and back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import CONFIG, read_json
from checkpoints_convert.formats import quantization_method
from checkpoints_convert.formats.module import FormatError
from checkpoints_convert.huggingface.families import (
    ARCHITECTURE_ALIASES,
    BY_TYPE,
    FAMILIES,
    TYPE_ALIASES,
    WRAPPERS,
    family_of,
    first_architecture,
    text_part,
)
from checkpoints_convert.huggingface.families_heads import (
    HEADS,
    TOLD_BY_FILES,
    SpeculatorsForm,
    head_part,
    is_head,
    mtp_part,
)
from checkpoints_convert.huggingface.family import Family, Fields, read_settings, write_settings
from checkpoints_convert.huggingface.rope import rope_config, rope_fields
from jaxinfer.checks import did_you_mean, whole_numbers
from jaxinfer.models import ModelConfig, RopeConfig

MAX_LAYERS = 1000
_DTYPES = ("float32", "bfloat16", "float16", "float64")
# Fields that families may rename, and those of ModelConfig.
_COMMON = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "norm_eps",
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Values by which models that embed texts ask for attention in both directions.
_BIDIRECTIONAL: dict[str, tuple[Any, ...]] = {"is_causal": (False,), "use_bidirectional_attention": (True, "all")}


def model_config(data: Mapping[str, Any], where: str | Path = CONFIG) -> ModelConfig:
    """The model configuration of a parsed config.json, with the defaults of Transformers 5.

    For a model of text and images, that of the text part. Its dtype is the declared one, by default float32; the dtype
    of a loaded model depends on the tensors.

    Raises:
      CheckpointError: an unsupported architecture, activation, rotary embedding or quantization, by name; all fields
        that are missing or of the wrong type. Code named in `auto_map` is never run.
    """
    try:
        return _model_config(data, where)
    except (TypeError, AttributeError, ArithmeticError, LookupError, RecursionError) as error:
        # What no check foresaw in a file that may come from anyone.
        raise CheckpointError(where, f"holds values that do not fit, {type(error).__name__}: {error}") from error


def _model_config(data: Mapping[str, Any], where: str | Path) -> ModelConfig:
    family, data = family_for(data, where)
    problems: list[str] = []
    fields = Fields(data, problems, names=family.names)
    _check_supported(data, fields, family)
    num_layers, num_heads = fields.integer("num_hidden_layers", most=MAX_LAYERS), fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    each = max(1, hidden_size // num_heads)
    head_dim = fields.integer("head_dim", each if fields.is_null("head_dim") else family.head_dim or each)
    if family.names.get("head_dim", "") is None and not problems:
        if hidden_size % num_heads:
            fields.problem("hidden_size", f"{hidden_size} is not a multiple of the {num_heads} attention heads")
        elif data.get("head_dim") not in (None, head_dim):
            declared = data["head_dim"]
            problems.append(f"head_dim {declared!r} is not supported for {family.architecture}, only {head_dim} is")
    num_kv_heads = num_heads if fields.is_null("num_key_value_heads") else family.num_kv_heads or num_heads
    max_positions = fields.integer("max_position_embeddings", family.max_position_embeddings)
    window = _window(fields, family)
    layer_types = _layer_types(fields, family, num_layers, window)
    rope, local_rope = _rotations(data, problems, family, head_dim, max_positions, layer_types)
    inner = None if family.inner_factor is None else family.inner_factor * hidden_size
    values = {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size", *([] if inner is None else [inner])),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("num_key_value_heads", num_kv_heads),
        "head_dim": head_dim,
        "norm_eps": fields.number("rms_norm_eps", family.norm_eps, most=1.0),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", family.is_tied),
        **{
            name: fields.boolean(bias, False) if isinstance(bias := getattr(family, name), str) else bias
            for name in ("qkv_bias", "output_bias", "mlp_bias")
        },
        "qk_norm": family.qk_norm,
        "activation": _activation(fields, family),
        "sliding_windows": _windows(fields, layer_types, window),
        "rotated_layers": _rotated_layers(fields, family, layer_types, window is not None),
        "max_position_embeddings": max_positions,
        "dtype": declared_dtype(data, problems) or "float32",
        **family.fixed,
        **read_settings(fields, family.settings),
    }
    try:
        for part in family.parts:
            values |= part.build(fields, values | {"rope": rope})
        if problems:
            raise CheckpointError(where, *problems)
        return ModelConfig(
            architecture=family.architecture,
            rope=rope,
            local_rope=None if local_rope == rope else local_rope,
            **values,
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(where, *(problems or [str(error)])) from None


def family_for(data: Mapping[str, Any], where: str | Path = CONFIG) -> tuple[Family, Mapping[str, Any]]:
    """The family of a parsed config.json, and its fields (of the text part, if any) with the family's defaults.

    Raises CheckpointError for an unsupported architecture, with the nearest name.
    """
    data = text_part(head_part(whole_numbers(data)))
    family = _family(data, where)
    data = {**family.defaults, **data, **({"tie_word_embeddings": True} if is_headless(data) else {})}
    return family, data if family.normalize is None else family.normalize(data)


def is_head_folder(folder: Path) -> bool:
    """True if the files of a folder are those of a trained head that drafts for another model."""
    return (folder / CONFIG).is_file() and is_head(read_json(folder / CONFIG))


def mtp_config(data: Mapping[str, Any], where: str | Path = CONFIG) -> dict[str, Any]:
    """The config.json of the head for multi-token prediction in a model's files. Raises CheckpointError for a model
    that has none that is read."""
    text = text_part(whole_numbers(data))
    if (head := mtp_part(text)) is None:
        name = first_architecture(text)
        raise CheckpointError(where, f"no layers for multi-token prediction of {name} are read, or its files have none")
    return head


def is_headless(data: Mapping[str, Any]) -> bool:
    """True if config.json is of a model without a head, as models that embed texts are saved (`MistralModel`). Its
    parameters are those of the family with tied embeddings."""
    name = first_architecture(data)
    return name is not None and name.endswith("Model") and _with_head(name) in FAMILIES


def _with_head(name: str) -> str:
    return f"{name.removesuffix('Model')}ForCausalLM"


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


def huggingface_config(config: ModelConfig, speculators: SpeculatorsForm | None = None) -> dict[str, Any]:
    """The config.json of a model, readable by Transformers 4 and 5, or of a head that drafts in the form of those who
    publish it or, with `speculators`, of that library.

    Raises CheckpointError if the architecture cannot express the configuration, naming the fields.
    """
    if config.architecture not in (FAMILIES if config.draft_head is None else HEADS):
        raise CheckpointError(
            CONFIG, f"no architecture {config.architecture!r}{did_you_mean(config.architecture, FAMILIES)}"
        )
    family = family_of(config)
    data: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        **{family.names.get(name) or name: getattr(config, field) for name, field in _COMMON.items()},
        family.names.get("hidden_act") or "hidden_act": _activation_name(family, config),
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": config.dtype,
        **rope_fields(config, family.rope),
        **_window_fields(family, config),
    }
    for name, own in family.names.items():
        if own is None:
            data.pop(name, None)
    if family.rope.rotated == "listed":
        data["no_rope_layers"] = [int(config.rope_of(layer) is not None) for layer in range(config.num_layers)]
    for name in ("qkv_bias", "output_bias", "mlp_bias"):
        if isinstance(field := getattr(family, name), str):
            data[field] = getattr(config, name)
    data |= {**write_settings(config, family.settings), **family.written}
    for part in family.parts:
        data |= part.express(config)
    if family.express is not None:
        data |= family.express(config)
    if speculators is not None:
        data = speculators.config(config, data)
    _check_round_trip(config, data)
    return data


def _rotations(
    data: Mapping[str, Any],
    problems: list[str],
    family: Family,
    head_dim: int,
    max_positions: int,
    layer_types: tuple[str, ...],
) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotation, and that of the layers with a window where they have their own."""
    options = {"form": family.rope, "max_position_embeddings": max_positions}
    width = head_dim
    if family.global_head_dim is not None:
        width = Fields(data, problems).integer("global_head_dim", family.global_head_dim)
    rope = rope_config(data, problems, **options, head_dim=width, layer_types=layer_types)
    local_rope = None
    if family.rope.local_theta is not None:
        local_rope = rope_config(data, problems, **options, head_dim=head_dim, is_local=True)
    for rotation, whole in ((rope, width), (local_rope, head_dim)):
        if rotation is not None and rotation.rotary_dim != whole and not family.rope.has_partial and not problems:
            share = f"{rotation.rotary_dim} of {whole} dimensions"
            problems.append(f"partial_rotary_factor: {family.architecture} rotates whole heads, this asks for {share}")
    return rope, local_rope


def _check_supported(data: Mapping[str, Any], fields: Fields, family: Family) -> None:
    """Reports values that the family refuses, and unsupported quantization methods."""
    for name, (value, reason) in family.refused.items():
        if data.get(name) == value:
            fields.problem(name, f"is {str(value).lower()}, which is not supported: {reason}")
    for name, values in family.supported.items():
        if (value := data.get(name)) is not None and value not in values:
            known = " and ".join(map(repr, values)) or "null"
            fields.problem(name, f"{value!r} is not supported for {family.architecture}, only {known} is")
    for name, values in _BIDIRECTIONAL.items():
        if (value := data.get(name)) in values and value is not None:
            shown = str(value).lower()
            fields.problem(name, f"is {shown}, which is not supported: tokens would attend to those after them")
    try:
        quantization_method(data)
    except FormatError as error:
        fields.problem("quantization_config:", str(error))


def _family(data: Mapping[str, Any], where: str | Path) -> Family:
    if (names := data.get("architectures")) is None:
        kind = data.get("model_type")
        kind = TYPE_ALIASES.get(kind, kind) if isinstance(kind, str) else kind
        if isinstance(kind, str) and kind in BY_TYPE:
            return BY_TYPE[kind]
        raise CheckpointError(where, f"architectures is missing, and model_type {kind!r} does not tell it")
    if (declared := first_architecture(data)) is None:
        raise CheckpointError(where, f"architectures must be a list of names, got {names!r}")
    name = ARCHITECTURE_ALIASES.get(declared, declared)
    if "draft_head" in data and name in HEADS:
        return HEADS[name]
    if name in FAMILIES or is_headless(data):
        return FAMILIES[name if name in FAMILIES else _with_head(name)]
    # A misspelt ending, not another model's name.
    stem = declared.partition("For")[0]
    same_model = [name for name in (*FAMILIES, *WRAPPERS) if name.partition("For")[0] == stem]
    hint = did_you_mean(declared, same_model, cutoff=0.9, otherwise=";")
    needs_code = " Its auto_map asks for code from the repository, which is never run." if data.get("auto_map") else ""
    raise CheckpointError(
        where,
        f"the architecture {declared!r} is not supported{hint} `jaxinfer models` lists those that are.{needs_code}",
    )


def _activation(fields: Fields, family: Family) -> str:
    name = fields.text("hidden_act", family.activation)
    if name not in family.activations:
        known = ", ".join(map(repr, family.activations))
        fields.problem("hidden_act", f"{name!r} is not supported for {family.architecture}, only {known} are")
        return "silu"
    return family.activations[name]


def _activation_name(family: Family, config: ModelConfig) -> str:
    names = (family.activation, *family.activations)
    return next((name for name in names if family.activations[name] == config.activation), config.activation)


def _window(fields: Fields, family: Family) -> int | None:
    """Size of the sliding window; None if config.json has null, the family's default if it has no such field."""
    is_switched = family.windows in ("late", "unrotated")
    if family.windows == "none" or (is_switched and not fields.boolean("use_sliding_window", False)):
        return None
    return fields.integer("sliding_window", None if "sliding_window" in fields.data else family.default_window)


def _layer_types(fields: Fields, family: Family, num_layers: int, window: int | None) -> tuple[str, ...]:
    """One of "full_attention" and "sliding_attention" for every layer."""
    given = fields.data.get("layer_types")
    known = (_FULL,) if family.windows == "none" else (_FULL, _SLIDING)
    if given is None:
        return _default_layer_types(fields, family, num_layers, window)
    if not isinstance(given, list):
        fields.problem("layer_types", f"must be a list, got {given!r}")
    elif unknown := [kind for kind in given if kind not in known]:
        fields.problem("layer_types", f"names {unknown[0]!r}, {family.architecture} has {' and '.join(known)}")
    elif len(given) != num_layers:
        fields.problem("layer_types", f"has {len(given)} entries for num_hidden_layers={num_layers}")
    else:
        return tuple(given)
    return (_FULL,) * num_layers


def _default_layer_types(fields: Fields, family: Family, num_layers: int, window: int | None) -> tuple[str, ...]:
    layers = range(num_layers)
    if window is None:
        sliding = [False] * num_layers
    elif family.windows == "pattern":
        full_every = fields.integer("sliding_window_pattern", family.full_every)
        sliding = [(layer + 1) % full_every != 0 for layer in layers]
    elif family.windows == "unrotated":
        sliding = [not is_rotated for is_rotated in _listed_rotations(fields, num_layers)]
    else:
        first = 0 if family.windows == "all" else fields.integer("max_window_layers", 28, least=0)
        sliding = [layer >= first for layer in layers]
    return tuple(_SLIDING if is_sliding else _FULL for is_sliding in sliding)


def _windows(fields: Fields, layer_types: tuple[str, ...], window: int | None) -> tuple[int | None, ...]:
    if _SLIDING not in layer_types:
        return ()
    if window is None:
        fields.problem("layer_types", "names sliding_attention layers, but no sliding_window is in use")
    return tuple(window if kind == _SLIDING else None for kind in layer_types)


def _rotated_layers(fields: Fields, family: Family, layer_types: tuple[str, ...], has_window: bool) -> tuple[bool, ...]:
    rotated = family.rope.rotated
    if rotated == "none":
        return (False,) * len(layer_types)
    if rotated == "windowed" or (rotated == "windowed_or_all" and has_window):
        layers = tuple(kind == _SLIDING for kind in layer_types)
    else:
        layers = _listed_rotations(fields, len(layer_types)) if rotated == "listed" else ()
    return () if all(layers) else layers


def _listed_rotations(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """`no_rope_layers` has a 1 for each layer that is rotated."""
    given = fields.data.get("no_rope_layers")
    if given is None:
        every = fields.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % every != 0 for layer in range(num_layers))
    if not isinstance(given, list) or len(given) < num_layers or any(flag not in (0, 1) for flag in given):
        fields.problem("no_rope_layers", f"must list a 0 or 1 for each of {num_layers} layers, got {given!r}")
        return (True,) * num_layers
    return tuple(map(bool, given[:num_layers]))


def _window_fields(family: Family, config: ModelConfig) -> dict[str, Any]:
    windows = [config.window(layer) for layer in range(config.num_layers)]
    window = max((size for size in windows if size is not None), default=None)
    types = [_FULL if size is None else _SLIDING for size in windows]
    if family.windows == "none":
        return {}
    if family.windows == "all":
        # Without layer_types: Transformers' Mistral has none.
        return {"sliding_window": window} if len(set(types)) == 1 else {"sliding_window": window, "layer_types": types}
    if family.windows == "pattern":
        # A window that no layer has must be one all the same.
        return {"sliding_window": window or family.default_window, "layer_types": types}
    if window is None:
        return {"use_sliding_window": False, "sliding_window": None}
    late = {"max_window_layers": types.index(_SLIDING)} if family.windows == "late" else {}
    return {"use_sliding_window": True, "sliding_window": window, **late, "layer_types": types}


def _check_round_trip(config: ModelConfig, data: Mapping[str, Any]) -> None:
    """Reads back what was written: whatever differs is something the architecture has no field for."""
    wanted, read = config.to_dict(), model_config(data).to_dict()
    for side in (wanted, read):
        for name in ("rope", "local_rope"):
            if side[name] is not None:
                del side[name]["sequence_length"]  # of the engine, not a property of the checkpoint
        if config.draft_head is not None:  # which tensors a head has is told by its files
            side["draft_head"] = {
                name: value for name, value in side["draft_head"].items() if name not in TOLD_BY_FILES
            }
    if not any(wanted["sliding_windows"]):
        wanted["sliding_windows"] = ()
    form = " in the speculators library's form" if "speculators_model_type" in data else ""
    problems = [
        f"{config.architecture}{form} cannot express {name}={value!r}, only {read[name]!r}"
        for name, value in wanted.items()
        if value != read[name]
    ]
    if problems:
        raise CheckpointError(CONFIG, *problems)
