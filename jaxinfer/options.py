"""Options described once: a dataclass field with its help, from which flags and tables in docs/ are made."""

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from typing import Any


@dataclass(frozen=True)
class Description:
    """What an option is.

    Attributes:
      help: one or two sentences; a unit, or the meaning of None, where the type does not say it.
      metavar: what stands for the value in help texts, such as "N"; "" for a switch.
      flags: how the command line writes it, such as ("--model", "-m"); () is made from the field's name.
      group: the heading of its part of a help text.
      min, max: limits that the command line checks.
      parse: reads the text of the command line where that is not a value of the field's type.
      is_argument: whether the command line takes it by its position.
    """

    help: str
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    group: str | None = None
    min: float | None = None
    max: float | None = None
    parse: Callable[[Any], Any] | None = None
    is_argument: bool = False


def option(
    default: Any, help: str, metavar: str | None = None, *, flag: str = "", hash: bool | None = None, **more: Any
) -> Any:
    """A dataclass field with its description. `default` MISSING makes it required.

    Args:
      flag: flags with spaces between, such as "--model -m" or "--copying/--no-copying". more: of `Description`.
    """
    description = Description(help, metavar, tuple(flag.split()), **more)
    return dataclasses.field(default=default, hash=hash, metadata={"option": description})


def argument(default: Any, help: str, metavar: str, **more: Any) -> Any:
    """As `option`, for what the command line takes by its position."""
    return option(default, help, metavar, is_argument=True, **more)


def describe_fields(options: type) -> dict[str, Description]:
    """The described fields of a dataclass by name, in order."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(options) if "option" in field.metadata}


__all__ = ["MISSING", "Description", "argument", "describe_fields", "option"]
