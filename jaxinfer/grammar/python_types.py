"""JSON schemas of Python types, and of functions that a model may call."""

import dataclasses
import datetime
import enum
import inspect
import re
import sys
import types
import typing
import uuid
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NotRequired, Required, Union

_SIMPLE: dict[Any, dict[str, Any]] = {
    Any: {},
    object: {},
    None: {"type": "null"},
    type(None): {"type": "null"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    datetime.datetime: {"type": "string", "format": "date-time"},
    datetime.date: {"type": "string", "format": "date"},
    datetime.time: {"type": "string", "format": "time"},
    uuid.UUID: {"type": "string", "format": "uuid"},
}
_LISTS = tuple(getattr(typing, name).__origin__ for name in ("List", "Set", "FrozenSet", "Sequence", "Iterable"))
_MAPPINGS = tuple(getattr(typing, name).__origin__ for name in ("Dict", "Mapping", "MutableMapping"))
_MAX_NESTING = 50


def schema_of(annotation: Any) -> dict[str, Any]:
    """The JSON schema of a Python type; objects have no other properties than the declared ones.

    Args:
      annotation: a pydantic model, a msgspec Struct, a dataclass, a TypedDict, an Enum, a Literal, a union, a list,
        tuple, dict or simple type of these. Text in `Annotated` is a description. Or a function: then what is returned
        is a tool, with its `name`, its `description` (the docstring before its first section) and its `parameters`,
        the schema of an object, with descriptions from the `Args:` section or `:param:` lines.

    Raises TypeError for a type without a JSON schema, for a parameter without a type, and for *args, **kwargs and
    positional-only parameters; names the field or parameter.
    """
    if not inspect.isroutine(annotation):
        return _schema_of(annotation)
    description, _ = _read_docstring(annotation)
    described = {"description": description} if description else {}
    return {"name": annotation.__name__, **described, "parameters": _schema_of(annotation)}


def _schema_of(annotation: Any) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    converter = _Converter(definitions)
    if inspect.isroutine(annotation):
        schema = converter.parameters(annotation)
    else:
        schema = converter.convert(annotation, _name(annotation), 0)
    if definitions:
        if schema.keys() == {"$ref"} and list(definitions) == [_name(annotation)] and not converter.is_recursive:
            return definitions[_name(annotation)]
        schema = {**schema, "$defs": definitions}
    return schema


class _Converter:
    def __init__(self, definitions: dict[str, Any]):
        self.definitions = definitions
        self.is_recursive = False
        self._active: set[str] = set()
        self._owners: dict[str, Any] = {}

    def convert(self, annotation: Any, place: str, depth: int) -> dict[str, Any]:
        """The schema of a type; `place` is what an error names."""
        if depth > _MAX_NESTING:
            raise TypeError(f"{place}: types are nested deeper than {_MAX_NESTING} levels")
        depth += 1
        if isinstance(annotation, str):
            raise TypeError(f"{place}: the type {annotation!r} cannot be found")
        if _is_hashable(annotation) and annotation in _SIMPLE:
            return dict(_SIMPLE[annotation])
        if isinstance(annotation, typing.NewType):
            return self.convert(annotation.__supertype__, place, depth)
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is Annotated:
            schema = self.convert(arguments[0], place, depth)
            texts = [argument for argument in arguments[1:] if isinstance(argument, str)]
            return {**schema, "description": " ".join(texts)} if texts else schema
        if origin in (Required, NotRequired):
            return self.convert(arguments[0], place, depth)
        if origin in (Union, types.UnionType):
            return {"anyOf": [self.convert(argument, place, depth) for argument in arguments]}
        if origin is Literal:
            return {"enum": [argument.value if isinstance(argument, enum.Enum) else argument for argument in arguments]}
        if (container := self._container(origin or annotation, arguments, place, depth)) is not None:
            return container
        if isinstance(annotation, type):
            return self._class(annotation, place, depth)
        raise TypeError(f"{place}: {annotation!r} has no JSON schema")

    def _container(self, origin: Any, arguments: tuple, place: str, depth: int) -> dict[str, Any] | None:
        if origin is tuple:
            if len(arguments) == 2 and arguments[1] is Ellipsis:
                return {"type": "array", "items": self.convert(arguments[0], place, depth)}
            if not arguments:
                return {"type": "array"}
            items = [] if arguments == ((),) else [self.convert(argument, place, depth) for argument in arguments]
            return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
        if origin in _LISTS:
            items = {"items": self.convert(arguments[0], place, depth)} if arguments else {}
            return {"type": "array", **items}
        if origin in _MAPPINGS:
            if arguments and arguments[0] is not str:
                raise TypeError(f"{place}: names of a JSON object are text, not {arguments[0]!r}")
            values = {"additionalProperties": self.convert(arguments[1], place, depth)} if arguments else {}
            return {"type": "object", **values}
        return None

    def _class(self, kind: type, place: str, depth: int) -> dict[str, Any]:
        if issubclass(kind, enum.Enum):
            return {"enum": [member.value for member in kind]}
        module = _library_of(kind)
        if module is None and not dataclasses.is_dataclass(kind) and not typing.is_typeddict(kind):
            raise TypeError(f"{place}: {kind.__module__}.{kind.__qualname__} has no JSON schema")
        name = kind.__name__
        if self._owners.setdefault(name, kind) is not kind:
            raise TypeError(f"{place}: two types are called {name}")
        if name in self._active:
            self.is_recursive = True
        elif name not in self.definitions:
            self._active.add(name)
            self.definitions[name] = {}  # keeps its place before those within it
            if module is not None:
                self.definitions[name] = self._foreign(kind, module)
            else:
                self.definitions[name] = self._record(kind, depth)
            self._active.discard(name)
        return {"$ref": f"#/$defs/{name}"}

    def _foreign(self, kind: Any, module: Any) -> dict[str, Any]:
        """The schema that pydantic or msgspec makes, with its definitions among ours."""
        template = "#/$defs/{name}"
        if module.__name__ == "msgspec":
            (schema,), inner = module.json.schema_components([kind], ref_template=template)
        else:
            schema = kind.model_json_schema(ref_template=template.replace("{name}", "{model}"))
            inner = schema.pop("$defs", {})
        inner, schema = _closed(inner), _closed(schema)
        reference = schema.get("$ref", "").removeprefix("#/$defs/")
        if reference in inner:
            schema = inner.pop(reference)
            self.is_recursive |= f"#/$defs/{reference}" in _references([schema, inner])
        for name, definition in inner.items():
            if self.definitions.setdefault(name, definition) != definition:
                raise TypeError(f"{kind.__name__}: two types are called {name}")
        return schema

    def _record(self, kind: Any, depth: int) -> dict[str, Any]:
        """Dataclasses and TypedDicts."""
        hints, kind_name = _hints(kind), kind.__name__
        if dataclasses.is_dataclass(kind):
            names = [field.name for field in dataclasses.fields(kind) if field.init]
            missing = (dataclasses.MISSING, dataclasses.MISSING)
            required = [
                field.name
                for field in dataclasses.fields(kind)
                if field.init and (field.default, field.default_factory) == missing
            ]
        else:
            names = list(hints)
            required = [
                name
                for name in names
                if typing.get_origin(hints[name]) is Required
                or (name in kind.__required_keys__ and typing.get_origin(hints[name]) is not NotRequired)
            ]
        properties = {name: self.convert(hints[name], f"{kind_name}.{name}", depth) for name in names}
        schema = _closed_object(properties, required)
        text = inspect.cleandoc(kind.__doc__ or "")
        if text and not text.startswith((f"{kind_name}(", "dict(")):  # not those that Python makes
            schema["description"] = text
        return schema

    def parameters(self, function: Callable[..., Any]) -> dict[str, Any]:
        """An object with the parameters of a function."""
        name = getattr(function, "__name__", repr(function))
        hints = _hints(function)
        _, descriptions = _read_docstring(function)
        properties: dict[str, Any] = {}
        required: list[str] = []
        for parameter in inspect.signature(function).parameters.values():
            place = f"parameter {parameter.name!r} of {name}()"
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(f"{place}: {parameter.kind.description} parameters cannot be named in a JSON object")
            if parameter.name not in hints:
                raise TypeError(f"{place} has no type; annotate it")
            schema = self.convert(hints[parameter.name], place, 0)
            if description := descriptions.get(parameter.name):
                schema.setdefault("description", description)
            if parameter.default is parameter.empty:
                required.append(parameter.name)
            elif isinstance(parameter.default, str | int | float | None):
                schema["default"] = parameter.default
            properties[parameter.name] = schema
        return _closed_object(properties, required)


def _closed_object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _closed(schema: Any) -> Any:
    """A schema of a library in which objects have no other properties, unless it says which."""
    if isinstance(schema, list):
        return [_closed(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        key: part if key in ("enum", "const", "default", "examples") else _closed(part) for key, part in schema.items()
    }
    if closed.get("type") == "object" and isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def _references(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(_references, schema))
    if not isinstance(schema, dict):
        return set()
    inner = set().union(*map(_references, schema.values()))
    return inner | {schema["$ref"]} if isinstance(schema.get("$ref"), str) else inner


def _library_of(kind: type) -> Any | None:
    """pydantic or msgspec, if the class is a model of theirs: then the library is imported already."""
    for library, base in (("pydantic", "BaseModel"), ("msgspec", "Struct")):
        module = sys.modules.get(library)
        if module is not None and issubclass(kind, getattr(module, base)):
            return module
    return None


def _hints(owner: Any) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(owner, include_extras=True)
    except NameError as error:
        raise TypeError(f"{_name(owner)}: {error}") from error


def _name(annotation: Any) -> str:
    return getattr(annotation, "__name__", None) or str(annotation)


def _is_hashable(annotation: Any) -> bool:
    try:
        hash(annotation)
    except TypeError:
        return False
    return True


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Example|Examples|Note|Notes):?\s*$")
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)(?: ?\([^)]*\))?: *(.*)$")
_FIELD = re.compile(r"^:(\w+)(?: [^:]*?(\w+))?: *(.*)$")


def _read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The description of a function and those of its parameters, from a docstring of Google's or Sphinx's style."""
    lines = inspect.cleandoc(function.__doc__ or "").splitlines()
    description: list[str] = []
    parameters: dict[str, str] = {}
    section, name, indent = "", None, 0
    for line in lines:
        text = line.strip()
        if match := _SECTION.match(line):
            section, name, indent = match[1], None, 0
        elif match := _FIELD.match(line):
            section, name = "fields", match[2] if match[1] == "param" else None
            if name:
                parameters[name] = match[3]
        elif not section:
            description.append(text)
        elif section in ("Args", "Arguments", "Parameters", "fields"):
            depth = len(line) - len(line.lstrip())
            match = _ARGUMENT.match(text) if section != "fields" else None
            indent = indent or depth
            if match and depth <= indent:
                name = match[1]
                parameters[name] = match[2]
            elif name and text:
                parameters[name] = f"{parameters[name]} {text}".strip()
    return "\n".join(description).strip(), parameters
