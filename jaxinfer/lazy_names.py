"""Names of a package that are imported when first used, so that those of plain Python do not import JAX."""

import importlib
from collections.abc import Callable, Collection
from typing import Any


def first_with(package: str, names: Collection[str], *modules: str) -> Callable[[str], Any]:
    """A package's `__getattr__`: one of its `names` is that of the first of its `modules` that has it."""

    def find(name: str) -> Any:
        for module in modules if name in names else ():
            imported = importlib.import_module(f"{package}.{module}")
            if hasattr(imported, name):
                return getattr(imported, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(names)}")

    return find
