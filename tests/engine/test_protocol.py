"""`Engine` and `Replicas` are what the protocol says, and the product uses nothing else of either."""

import inspect
import re
from pathlib import Path

import pytest

import jaxinfer
from jaxinfer import LLM
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.protocol import AnyEngine
from jaxinfer.engine.replicas import Replicas
from tests.tiny import OPTIONS

ROOT = Path(jaxinfer.__file__).parent
MEMBERS = {name: value for name, value in vars(AnyEngine).items() if not name.startswith("_")}
# Where an engine is used through a model's or a client's attribute `engine`.
USES = {"engine/client.py": "self.engine", "api/llm.py": "self.engine", "": "llm.engine"}


def lacks(kind, members=MEMBERS):
    """Methods of the protocol that a class lacks, or has with another signature."""
    methods = {name: one for name, one in members.items() if inspect.isfunction(one)}
    return [name for name, one in methods.items() if not is_like(getattr(kind, name, None), one)]


def is_like(method, wanted):
    """Compares names, kinds, types and defaults of the arguments, and what is returned."""
    if not inspect.isfunction(method):
        return False
    is_manager = inspect.isgeneratorfunction(inspect.unwrap(method))  # whose own type is that of the generator
    (found, returned), (arguments, returns) = parts(method), parts(wanted)
    return found == arguments and (is_manager or returned == returns)


def parts(method):
    found = inspect.signature(method, eval_str=True)
    each = [
        one.replace(default="a function" if inspect.isfunction(one.default) else one.default)
        for one in found.parameters.values()
    ]
    return each, found.return_annotation


@pytest.mark.parametrize("kind", [Engine, Replicas])
def test_methods_have_the_signatures_of_the_protocol(kind):
    assert lacks(kind) == []


def test_another_signature_is_noticed():
    class Other(Engine):
        def step(self, max_steps: int = 1) -> list:
            return []

        def finish(self, sequence, reason):
            pass

        snapshot = None

    assert lacks(Other) == ["step", "finish", "snapshot"]


@pytest.mark.parametrize("options", [{}, {"mesh": "data=2"}], ids=["engine", "replicas"])
def test_attributes_are_there(tiny, options):
    with LLM(tiny, **OPTIONS, **options) as llm:
        for name in MEMBERS:
            assert hasattr(llm.engine, name), name
        assert len(llm.engine.engines) == (2 if options else 1)
        assert all(type(one) is Engine for one in llm.engine.engines)
        assert all(one.weights is llm.engine.weights for one in llm.engine.engines)


def test_no_other_attribute_is_used():
    used = {}
    for place, owner in USES.items():
        files = [ROOT / place] if place else sorted(ROOT.rglob("*.py"))
        for path in files:
            text = path.read_text(encoding="utf-8")
            used |= dict.fromkeys(re.findall(rf"\b{re.escape(owner)}\.(\w+)", text), path.name)
    assert {name: path for name, path in used.items() if name not in MEMBERS} == {}
    assert {"add", "step", "engines", "snapshot", "compile_ahead", "has_work"} <= set(used)  # the search finds some
