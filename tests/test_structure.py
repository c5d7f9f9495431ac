"""The house: imports point down, no room and no module is in a circle."""

import ast
import functools
import re
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxinfer", "pallas_kernels", "cpu_kernels", "checkpoints_convert")
FILES = sorted(path for top in PACKAGES for path in (ROOT / top).rglob("*.py"))
MAY_IMPORT_CHECKPOINTS = (
    "jaxinfer.loading",
    "jaxinfer.loaded_tokenizers",
    "jaxinfer.saving",
    "jaxinfer.store",
    "jaxinfer.cli",
    "checkpoints_convert",
)
# The words that were replaced, as identifiers.
REPLACED_WORDS = {
    *("NOT_SOUND", "is_held", "_give_room", "_make_known", "took_time", "took_rounds", "purse", "STRANGE", "hiccup"),
    *("Told", "Lab", "Asked", "About", "How", "Seen", "Bundle", "Terms", "NO_TERMS", "besides_bytes"),
    *("pinned", "coded", "settle", "found", "HeavyPages", "KeptPages", "BestPages", "PromptPasses"),
    *("bring_back", "let_go", "num_lacking", "goes_first", "MAX_LOOKED_AT", "neighbours_apart"),
    *("outputs_together", "_Several"),
}
# How no docstring begins: with a verb or with the thing, not with a clause about it.
NO_OPENING = re.compile(r"(What|Where|Whether|The same|Of|Nobody|One who)\b")


def floors() -> dict[str, int]:
    """The rooms by floor, from the table in jaxinfer/README.md."""
    found = {}
    for line in (ROOT / "jaxinfer/README.md").read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"\| (\d+) \| (.*) \|", line):
            for name in re.findall(r"`([\w/]+?)(?:/|\.py)`", match[2]):
                is_top = name in PACKAGES
                found[name if is_top else f"jaxinfer.{name.replace('/', '.')}"] = int(match[1])
    return found


FLOORS = floors()


def module_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imported(path: Path) -> set[str]:
    """Names that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(module: str) -> str | None:
    """The innermost room that a module is in."""
    found = [name for name in FLOORS if module == name or module.startswith(name + ".")]
    return max(found, key=len, default=None)


def violations(path: Path, names: set[str]) -> list[str]:
    """Imports of a file that point up, or reach checkpoints_convert from where it is not used."""
    module = module_of(path)
    own = room(module)
    if own is None:  # the package's own __init__, which resolves names lazily
        return []
    found = []
    for name in sorted(names):
        other = room(name)
        if other in (None, own):
            continue
        if FLOORS[other] > FLOORS[own] or (other == "checkpoints_convert" and own not in MAY_IMPORT_CHECKPOINTS):
            found.append(f"{module} imports {name}")
    return found


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """Nodes of a directed graph that are in a circle or lead only to nodes that are; [] where there is none."""
    left = {node: set(others) for node, others in arrows.items()}
    while ends := [node for node, others in left.items() if not others & left.keys()]:
        for node in ends:
            del left[node]
    return sorted(left)


@pytest.mark.slow
def test_imports_point_down():
    found = {str(path.relative_to(ROOT)): violations(path, imported(path)) for path in FILES}
    assert {path: upward for path, upward in found.items() if upward} == {}


def test_an_import_that_points_up_is_found():
    assert violations(ROOT / "jaxinfer/models/x.py", {"jaxinfer.engine.request"})
    assert violations(ROOT / "jaxinfer/engine/x.py", {"checkpoints_convert"})
    assert not violations(ROOT / "jaxinfer/cache/x.py", {"jaxinfer.models", "pallas_kernels"})


def test_kernels_know_nothing_of_the_package():
    """Those of `cpu_kernels` know nothing of `pallas_kernels` either, which calls them."""
    for own, others in (("pallas_kernels", {"cpu_kernels"}), ("cpu_kernels", set())):
        found = {path: imported(path) for path in FILES if room(module_of(path)) == own}
        assert found
        names = {name for one in found.values() for name in one}
        assert {name.split(".")[0] for name in names} & set(PACKAGES) <= {own} | others


def test_every_module_is_on_a_floor():
    assert [module_of(path) for path in FILES if room(module_of(path)) is None] == ["jaxinfer"]


def test_no_room_is_in_a_circle():
    arrows: dict[str, set[str]] = {name: set() for name in FLOORS}
    for path in FILES:
        own = room(module_of(path))
        if own is not None:
            arrows[own] |= {other for name in imported(path) if (other := room(name)) not in (None, own)}
    assert circle(arrows) == []
    assert circle({**arrows, "pallas_kernels": {"jaxinfer.cli"}}) != []  # the check finds one where there is one


def test_no_module_is_in_a_circle():
    """Packages' own __init__ files stand for their names and are left out."""
    modules = {module_of(path): path for path in FILES if path.name != "__init__.py"}
    assert (
        circle({name: {other for other in imported(path) if other in modules} for name, path in modules.items()}) == []
    )


def too_long(path: Path) -> list[str]:
    """Files of more than 800 lines and functions of more than 100: a question, not an answer."""
    name, count = path.relative_to(ROOT), len(path.read_text(encoding="utf-8").splitlines())
    found = [f"{name}: {count} lines"] if count > 800 else []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            count = node.end_lineno - node.lineno + 1
            if count > 100:
                found.append(f"{name}: {node.name} has {count} lines")
    return found


def test_long_files_and_functions_are_named():
    for one in (one for path in FILES for one in too_long(path)):
        warnings.warn(one, stacklevel=1)


def test_a_step_of_the_engine_is_short():
    tree = parsed(ROOT / "jaxinfer/engine/engine.py")
    (step,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "step"]
    assert step.end_lineno is not None
    assert step.end_lineno - step.lineno + 1 <= 12


def unclear_words(tree: ast.AST) -> list[str]:
    """Replaced words among the identifiers, loops over `one`, and docstrings that begin with a clause."""
    problems = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute | ast.arg | ast.alias | ast.keyword):
            problems += REPLACED_WORDS.intersection(
                getattr(node, field, None) for field in ("id", "attr", "arg", "name")
            )
        elif isinstance(node, ast.For | ast.comprehension) and getattr(node.target, "id", "") == "one":
            problems.append("for one in")
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            problems += REPLACED_WORDS & {getattr(node, "name", "")}
            problems += [
                f"a docstring begins with {m[0]}" for m in [NO_OPENING.match(ast.get_docstring(node) or "")] if m
            ]
    return problems


@pytest.mark.slow
def test_words_are_clear():
    problems = {str(path.relative_to(ROOT)): unclear_words(parsed(path)) for path in FILES}
    assert {path: words for path, words in problems.items() if words} == {}


@pytest.mark.parametrize("text", ["found = 1", "[1 for one in ()]", "def f():\n  'Where it is.'", "'What it does.'"])
def test_an_unclear_word_is_found(text):
    assert len(unclear_words(ast.parse(text))) == 1


def homes_of_classes(trees: dict[str, ast.AST]) -> dict[str, list[str]]:
    """Modules that define a class, by its public name."""
    found: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module)
    return found


def test_a_public_class_name_has_one_meaning():
    homes = homes_of_classes({module_of(path): parsed(path) for path in FILES})
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_a_class_name_with_two_meanings_is_found():
    two = ast.parse("class Stage: ...\nclass _Part: ...")
    assert homes_of_classes({"one": two, "other": two}) == {"Stage": ["one", "other"]}


def test_nothing_imports_torch_or_pickle():
    forbidden = {"torch", "transformers", "pickle", "cloudpickle", "dill"}
    for path in FILES:
        assert not {name.split(".")[0] for name in imported(path)} & forbidden, path
