"""Where a row's sampling parameters come from: the row, the job, its form, the checkpoint; and its seed."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxinfer.batch.requests import COMPLETIONS_MAX_TOKENS
from jaxinfer.batch.rows import BatchRow
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.seeds import derive_seed


@dataclass(frozen=True)
class Defaults:
    """Attributes:
    checkpoint: from generation_config. given: fields of `SamplingParams` given for the whole job.
    seed: the job's; a row without a seed has `derive_seed(seed, its number)`.
    """

    checkpoint: SamplingParams
    given: Mapping[str, Any]
    seed: int

    @classmethod
    def of(cls, checkpoint: SamplingParams, params: SamplingParams | Mapping[str, Any] | None, seed: int) -> "Defaults":
        """`params` whole, or only some fields; its seed, if it has one, is the job's. Raises SamplingParamsError."""
        given = _values(params) if isinstance(params, SamplingParams) else dict(params or {})
        SamplingParams.from_dict({"max_tokens": None, **given})
        own_seed = given.pop("seed", None)
        return cls(checkpoint, given, seed if own_seed is None else own_seed)

    def params(self, row: BatchRow) -> SamplingParams:
        """What one row is sampled with, its seed included. Raises SamplingParamsError."""
        values = {**_values(self.checkpoint), "seed": None}
        if row.request.form == "chat":
            values["max_tokens"] = None
        elif row.request.form == "completions":
            values["max_tokens"] = COMPLETIONS_MAX_TOKENS
        values |= {**self.given, **row.request.sampling}
        if row.request.echo and values["prompt_logprobs"] is None:
            values["prompt_logprobs"] = values["logprobs"]  # the text starts with the prompt, and so do they
        if values["seed"] is None:
            values["seed"] = derive_seed(self.seed, row.number)
        return SamplingParams.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """What answers depend on, as JSON data; `given` apart, since it goes before a form's own default."""
        return {"checkpoint": _json_values(_values(self.checkpoint)), "given": _json_values(self.given)}


def _values(params: SamplingParams) -> dict[str, Any]:
    return {field.name: getattr(params, field.name) for field in fields(params)}


def _json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _json_value(value) for name, value in sorted(values.items())}


def _json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    return list(value) if isinstance(value, (list, tuple)) else value
