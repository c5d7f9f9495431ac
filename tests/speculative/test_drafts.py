"""Kinds of drafts by their names."""

import subprocess
import sys

import pytest

from jaxinfer.speculative import NO_DRAFT, LayersDraft, NgramDraft, draft_by_name, names_kind, register_draft
from jaxinfer.speculative import drafts as kinds
from tests.tiny import TINY


def test_drafts_are_imported_without_jax():
    """In a process of its own, as a command that only parses its options does."""
    code = "import sys; from jaxinfer.speculative import NO_DRAFT, NgramDraft; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names():
    assert draft_by_name(None, TINY, {}) is NO_DRAFT
    assert draft_by_name("ngram", TINY, {}) == NgramDraft()
    assert draft_by_name("layers:1", TINY, {}) == LayersDraft(1)
    for model in ("ngram:3", "layers", "org/model", "", (TINY, {})):
        assert draft_by_name(model, TINY, {}) is None
        assert not names_kind(model)


@pytest.mark.parametrize(("text", "told"), [("2", "has 2 layers"), ("0", "has 2 layers"), ("x", "such as layers:4")])
def test_layers_that_there_are_not(text, told):
    with pytest.raises(ValueError, match=told):
        draft_by_name(f"layers:{text}", TINY, {})


def test_another_kind(monkeypatch):
    monkeypatch.setattr(kinds, "_KINDS", dict(kinds._KINDS))
    register_draft("own:", lambda text, config, params: (text, config, params))
    assert names_kind("own:a:b")
    assert draft_by_name("own:a:b", TINY, {}) == ("a:b", TINY, {})
    with pytest.raises(ValueError, match="'own:' is a kind of draft already"):
        register_draft("own:", lambda *_: NO_DRAFT)
