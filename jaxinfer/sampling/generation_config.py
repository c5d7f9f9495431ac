"""Defaults from a checkpoint's generation_config.json."""

import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxinfer.checks import NO_TOKEN, whole_numbers
from jaxinfer.sampling.params import MIN_TEMPERATURE, SamplingParams, SamplingParamsError

_APPLIED = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_INTEGERS = ("top_k", "max_new_tokens")
_SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p")

# Fields that do not affect which tokens a decoder-only model generates.
_DESCRIPTIVE = {
    "_from_model_config",
    "architectures",
    "bos_token_id",
    "cache_implementation",
    "decoder_start_token_id",
    "do_sample",
    "dtype",
    "eos_token_id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "return_dict_in_generate",
    "return_legacy_cache",
    "torch_dtype",
    "transformers_version",
    "trust_remote_code",
    "use_cache",
}

# Values of other Hugging Face fields that have no effect; None, False and empty containers have none in any field.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "diversity_penalty": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "length_penalty": (1,),
    "max_length": (20,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "prompt_lookup_num_tokens": (0,),
    "top_h": (0,),
    "typical_p": (1,),
}


class GenerationDefaults(NamedTuple):
    """Contents of a generation_config.json: parameters, end-of-sequence ids, and what was not applied: names, or
    names and values that are invalid."""

    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    ignored: tuple[str, ...]


def from_generation_config(config: Mapping[str, Any], **overrides: Any) -> GenerationDefaults:
    """Reads Hugging Face's generation_config.json; `overrides` are fields of `SamplingParams` and take precedence.

    `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty` and `max_new_tokens` are applied, as in vLLM; null
    means not given. `"do_sample": false` means greedy decoding; temperature and filters are then reported as ignored,
    as Transformers does. Without `do_sample`, the file's values and our defaults apply, as in vLLM; Transformers would
    decode greedily.

    `ignored` lists, sorted, the options that are set but not supported (beams, n-gram bans, `max_length`, ...), and
    those with a value that `SamplingParams` refuses, as `top_p=1.5`, for the caller to warn about: a default, which
    each request can override, does not close a model. A temperature below the least one means greedy. Raises
    `SamplingParamsError` for invalid overrides and ends of sequences.
    """
    do_sample = config.get("do_sample")
    is_greedy = do_sample is False
    values: dict[str, Any] = {"temperature": 0.0} if is_greedy else {}
    ignored = [] if do_sample is None or isinstance(do_sample, bool) else [_shown("do_sample", do_sample)]
    for name, value in config.items():
        if name in _APPLIED:
            if value is None:
                continue
            if is_greedy and name in _SAMPLING_ONLY:
                ignored.append(name)
            elif (applied := _applied(name, value)) is None:
                ignored.append(_shown(name, value))
            else:
                values |= applied
        elif name not in _DESCRIPTIVE and not _is_neutral(name, value):
            ignored.append(name)
    params = SamplingParams.from_dict({**values, **overrides})
    return GenerationDefaults(params, _eos_token_ids(config.get("eos_token_id")), tuple(sorted(ignored)))


def _applied(name: str, value: Any) -> dict[str, Any] | None:
    """The value by the name of our field; None for one that is invalid."""
    value = whole_numbers(value) if name in _INTEGERS else value
    if name == "temperature" and isinstance(value, float) and 0 < value < MIN_TEMPERATURE:
        value = 0.0
    try:
        SamplingParams.from_dict({_APPLIED[name]: value})
    except SamplingParamsError:
        return None
    return {_APPLIED[name]: value}


def _shown(name: str, value: Any) -> str:
    return f"{name}={reprlib.repr(value)}"


def _is_neutral(name: str, value: Any) -> bool:
    return value is None or value is False or value in _NEUTRAL.get(name, ()) or value in ([], {}, "")


def _eos_token_ids(value: Any) -> tuple[int, ...]:
    listed = whole_numbers(list(value) if isinstance(value, list | tuple) else [value])
    ids = [token for token in listed if token not in NO_TOKEN]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise SamplingParamsError(
                "eos_token_id", f"eos_token_id must be a token id or a list of them, got {value!r}"
            )
    return tuple(dict.fromkeys(ids))
