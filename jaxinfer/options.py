"""Options described once: dataclass fields with a description, from which flags and tables of the docs are made."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass
from typing import Any

__all__ = ["MISSING", "Description", "argument", "describe", "option"]


@dataclass(frozen=True)
class Description:
    """Description of an option.

    Attributes:
      help: one or two sentences, with the unit, and with the meaning of None.
      metavar: the placeholder of the value in help texts, such as "N".
      flags: its spellings on the command line, such as ("--model", "-m"); () is "--" and the field's name.
      group: the heading in help texts.
      min, max: limits that the command line checks.
      parse: reads the text of the command line, for values that are not plain numbers or texts. With `is_repeated` it
        reads a list of texts.
      is_repeated: whether the flag may be repeated.
      is_argument: whether the command line takes it by position.
      bare: the values of an option whose flag may also stand alone, which then means the first.
    """

    help: str
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    group: str | None = None
    min: float | None = None
    max: float | None = None
    parse: Callable[[Any], Any] | None = None
    is_repeated: bool = False
    is_argument: bool = False
    bare: tuple[str, ...] = ()


def option(
    default: Any, help: str, metavar: str | None = None, flag: str = "", *, hash: bool | None = None, **more: Any
) -> Any:
    """A dataclass field with a description. `default` MISSING makes it required.

    Args:
      flag: flags separated by spaces, such as "--model -m" or "--copying/--no-copying".
      hash: as of `dataclasses.field`. more: fields of `Description`.
    """
    description = Description(help, metavar, tuple(flag.split()), **more)
    return dataclasses.field(default=default, hash=hash, metadata={"option": description})


def argument(default: Any, help: str, metavar: str, **more: Any) -> Any:
    """As `option`, for what the command line takes by position."""
    return option(default, help, metavar, is_argument=True, **more)


def describe(options: type, names: Sequence[str] | None = None) -> dict[str, Description]:
    """Descriptions of a dataclass's options, all or those of `names`, by field name."""
    return {
        field.name: field.metadata["option"]
        for field in dataclasses.fields(options)
        if "option" in field.metadata and (names is None or field.name in names)
    }
