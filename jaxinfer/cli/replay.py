"""`jaxinfer replay` and `verify-answer`: answers made again from their coordinates, and claims of answers checked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.command import ERROR, OK, USAGE, UsageError
from jaxinfer.cli.options import AdapterOptions, DraftedServingOptions, ServingOptions, as_json, open_llm
from jaxinfer.cli.output import write_report
from jaxinfer.options import MISSING, argument, option

if TYPE_CHECKING:
    from jaxinfer.api.coordinate import Coordinate
    from jaxinfer.api.llm import LLM
    from jaxinfer.api.replay import AnswerCheck

_MODEL = option(
    None, "The model that made the answers; by default the one that they name.", "MODEL", "--model -m", group="Model"
)
_FILE = "An answer with its coordinate, a coordinate, or JSON lines of either, such as the results of a batch."
_force = option(False, "Use the weights and adapters that are there, whatever those of the answers were.")
_NUM_SHOWN = 10  # answers that differ


@dataclass(frozen=True, kw_only=True)
class ReplayModelOptions(AdapterOptions, DraftedServingOptions):
    """The model, the engine, a draft, and adapters."""

    model: str | None = _MODEL  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclass(frozen=True, kw_only=True)
class ClaimModelOptions(AdapterOptions, ServingOptions):
    """The model, the engine, and adapters; the claimed tokens are the draft."""

    model: str | None = _MODEL  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    file: Path = argument(MISSING, _FILE, "FILE")
    force: bool = _force
    as_json: bool = as_json("One JSON object.")


@dataclass(frozen=True, kw_only=True)
class ClaimOptions:
    file: Path = argument(MISSING, _FILE, "FILE")
    first: int = option(0, "The first token that is checked, counted from 0 in each answer.", "A", "--from", min=0)
    last: int | None = option(None, "The token after the last one; by default the answer's end.", "B", "--to", min=1)
    force: bool = _force
    as_json: bool = as_json("One JSON object.")


def replay(model_options: ReplayModelOptions, options: ReplayOptions) -> int:
    """Generate answers again, and compare them token by token.

    FILE has the coordinates of answers, which [bold]generate --json[/bold], [bold]batch --coordinates[/bold] and a
    server (return_coordinate) write: prompt, parameters, seed, weights and program of each. All answers run in one
    batch, of any size. A program that differs is told. Answers of other weights are refused, unless --force.

    The exit code is 0 if all answers are equal, 1 if one differs, 2 if one could not be made again.
    """
    coordinates, num_without = _read(options.file)
    with _opened(model_options, coordinates) as llm:
        checks = llm.replay([coordinate for _, coordinate in coordinates], force=options.force)
        return _report(llm, coordinates, checks, num_without, as_json=options.as_json)


def verify_answer(model_options: ClaimModelOptions, options: ClaimOptions) -> int:
    """Check that claimed answers are those of a model.

    Each token from --from to --to must be the one that the sampler chooses there, after the prompt and the answer's
    tokens before it: up to 31 tokens are checked in one pass over the model. FILE, what is refused and the exit code
    are as of [bold]replay[/bold].
    """
    coordinates, num_without = _read(options.file)
    is_whole = not options.first and options.last is None  # also of answers without a token
    for where, coordinate in () if is_whole else coordinates:
        length = len(coordinate.token_ids)
        if not options.first < (length if options.last is None else options.last) <= length:
            last = "" if options.last is None else f" --to {options.last}"
            raise UsageError(f"{where}: the answer has {length} tokens, and --from {options.first}{last} is none of it")
    draft = {"draft": "claimed", "num_draft_tokens": 31}
    with _opened(model_options, coordinates, **draft) as llm:
        from jaxinfer.api.replay import Claim, check_claims

        claims = [Claim(coordinate, options.first, options.last, drafts=True) for _, coordinate in coordinates]
        checks = check_claims(llm, claims, force=options.force)
        return _report(llm, coordinates, checks, num_without, as_json=options.as_json)


def _read(file: Path) -> tuple[list[tuple[str, "Coordinate"]], int]:
    """The coordinates of a file with their places, and how many answers have none. Raises UsageError."""
    from jaxinfer.api.coordinate import Coordinate, CoordinateError, read_coordinates

    coordinates, num_without = [], 0
    try:
        for where, coordinate in read_coordinates(file):
            if isinstance(coordinate, Coordinate):
                coordinates.append((where, coordinate))
            elif coordinate is None:
                num_without += 1
            else:
                raise coordinate
    except CoordinateError as error:
        raise UsageError(str(error)) from None
    if not coordinates:
        raise UsageError(f"{file} has no coordinate: generate --json and batch --coordinates write them")
    return coordinates, num_without


def _opened(options: Any, coordinates: Sequence[tuple[str, "Coordinate"]], **more: Any) -> "LLM":
    """The model of the answers, opened as theirs was. Raises UsageError where it cannot be, for the exit code."""
    first = coordinates[0][1]
    for where, coordinate in coordinates:
        if options.model is None and coordinate.model != first.model:
            raise UsageError(
                f"{where} is an answer of {coordinate.model!r:.80}, and {coordinates[0][0]} of {first.model!r:.80}: "
                "--model says which is opened"
            )
    name = first.model if options.model is None else options.model
    known = {name: value for name, value in first.options.items() if name in _OPTIONS}
    try:
        return open_llm(replace(options, model=name), **{**known, **more})
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(f"{name} cannot be opened for these answers: {error}") from None


_OPTIONS = (
    *("dtype", "quantize", "requantize", "activations", "kv_dtype", "kv_policy", "deterministic", "tool_parser"),
    "max_model_len",
)


def _report(
    llm: "LLM",
    coordinates: Sequence[tuple[str, "Coordinate"]],
    checks: Sequence["AnswerCheck"],
    num_without: int,
    *,
    as_json: bool,
) -> int:
    """Prints the result; returns the exit code."""
    from jaxinfer.api.replay import program_differences, program_of

    here = program_of(llm)
    program: dict[str, dict[str, Any]] = {}
    for _, coordinate in coordinates:
        for name, (recorded, own) in program_differences(coordinate.program, here).items():
            entry = program.setdefault(name, {"recorded": [], "here": own})
            entry["recorded"] += [recorded] if recorded not in entry["recorded"] else []
    differing = sum(check.difference is not None for check in checks)
    refused = sum(bool(check.refused) for check in checks)
    answers = [
        {
            "answer": where,
            "index": coordinate.index,
            "num_tokens": len(coordinate.token_ids),
            "num_checked": check.num_checked,
            "is_equal": check.is_equal,
            "difference": None if check.difference is None else vars(check.difference),
            "refused": list(check.refused),
        }
        for (where, coordinate), check in zip(coordinates, checks, strict=True)
    ]
    report = {
        "model": llm.name,
        "weights": {"version": llm.weights_version, "fingerprint": llm.fingerprint_of(llm.weights_version)},
        "program": program,
        "num_equal": sum(check.is_equal for check in checks),
        "num_different": differing,
        "num_refused": refused,
        "num_without_coordinate": num_without,
        "answers": answers,
    }
    write_report(report, lambda report: _summary(report, llm), as_json=as_json)
    return ERROR if differing else USAGE if refused else OK


def _summary(report: dict[str, Any], llm: "LLM") -> str:
    lines = [
        f"program: {name} is {entry['here']!r} here, and was {' and '.join(map(repr, entry['recorded']))}"
        for name, entry in report["program"].items()
    ]
    told = [answer for answer in report["answers"] if not answer["is_equal"]]
    for answer in told[:_NUM_SHOWN]:
        if (difference := answer["difference"]) is not None:
            lines.append(f"{answer['answer']}: {_difference(difference, llm)}")
        lines += [f"{answer['answer']}: refused: {reason}" for reason in answer["refused"]]
    if len(told) > _NUM_SHOWN:
        lines.append(f"and {len(told) - _NUM_SHOWN:,} more")
    num_tokens = sum(answer["num_checked"] for answer in report["answers"])
    parts = [f"{report['num_equal']:,} of {len(report['answers']):,} answers are equal, {num_tokens:,} tokens"]
    for name, what in (("different", "differ"), ("refused", "refused"), ("without_coordinate", "without a coordinate")):
        if count := report[f"num_{name}"]:
            parts.append(f"{count:,} {what}")
    return "\n".join([*lines, " · ".join(parts)]) + "\n"


def _difference(difference: dict[str, Any], llm: "LLM") -> str:
    def shown(token: int | None) -> str:
        if token is None or llm.tokenizer is None or not llm.tokenizer.has_id(token):
            return str(token)
        return f"{token} {llm.tokenizer.decode([token], False)!r}"

    position = difference["position"]
    if difference["reason"] is not None:
        return f"from token {position}: {difference['reason']}"
    return f"token {position} is {shown(difference['claimed'])}, and {shown(difference['made'])} was made"
