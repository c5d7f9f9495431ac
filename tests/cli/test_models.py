"""`jaxinfer models` lists what the loader opens."""

import importlib.util
from pathlib import Path

import pytest

from checkpoints_convert.huggingface.families import FAMILIES, WRAPPERS

ROOT = Path(__file__).parents[2]


def test_every_architecture_is_listed(jaxinfer, json_lines):
    result = jaxinfer("models", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    [data] = json_lines(result.stdout)
    listed = [name for family in data["families"] for name in family["architectures"]]
    assert sorted(listed) == sorted([*FAMILIES, *WRAPPERS])
    gemma = next(family for family in data["families"] if family["title"] == "Gemma 2")
    assert {"norms times 1 + w", "capped scores", "capped logits", "sliding windows in most layers"} <= set(
        gemma["differences"]
    )
    llama = next(family for family in data["families"] if family["model_type"] == "llama")
    assert llama["differences"] == []


def test_for_people(jaxinfer):
    result = jaxinfer("models")
    assert result.exit_code == 0
    words = result.stdout.replace("\n", " ")
    for family in FAMILIES.values():
        assert family.title.split(",")[0] in words
    assert "\x1b" not in result.stdout


@pytest.mark.slow
def test_the_docs_have_the_same_table():
    spec = importlib.util.spec_from_file_location("update_readme", ROOT / "docs" / "update_readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    block = text.partition("<!-- models -->\n")[2].partition("\n<!-- /models -->")[0]
    assert block == module.models()
