"""Patterns of names: as Python's `re` reads them, and in a bounded time whatever they are."""

import re
import time

import pytest

from checkpoints_convert.adapters.patterns import NameSet, end_of_name, whole_name

NAMES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.11.mlp.gate_proj",
    "model.layers.1.mlp.experts.3.gate_proj",
    "model.language_model.layers.2.self_attn.k_proj",
    "model.layers.1.mlp.experts.gate_up_proj",
    "lm_head",
    "q_proj",
)
PATTERNS = (
    "q_proj",
    r".*q_proj",
    r".*\.(q|k)_proj",
    r"model\.layers\.(0|1|11)\..*",
    r"^model\.layers\.\d+\.self_attn\.[qk]_proj$",
    "layers.1.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
    r".*\.layers\.1\..*experts\.\d+\.gate_proj",
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|k_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn)\.(?:q_proj))",
    "lm.head",
    "proj",
    "^q_proj",
)  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_names_match_as_python_matches_them(pattern):
    whole, end = whole_name(pattern), end_of_name(pattern)
    for name in NAMES:
        assert whole(name) == (re.fullmatch(pattern, name) is not None), name
        assert end(name) == (re.match(rf"(.*\.)?({pattern})$", name) is not None), name


def test_patterns_match_some_names_and_not_others():
    assert {pattern for pattern in PATTERNS if not any(map(end_of_name(pattern), NAMES))} == {"proj"}
    assert not any(all(map(end_of_name(pattern), NAMES)) for pattern in PATTERNS)


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*b", "(.*)*(.*)*(.*)*x", "(m|m)(o|o)(d|d)(e|e)(l|l)(.*.*.*)*z", ".*" * 30]
)
def test_no_pattern_takes_long(pattern):
    start = time.perf_counter()
    for name in (*NAMES, "a" * 200, "model." * 50):
        whole_name(pattern)(name)
    assert time.perf_counter() - start < 5  # Python's `re` does not end


@pytest.mark.parametrize(
    "pattern", ["(", "*", "[a", r"(?!vision).*", r"(q)\1", r".*\bq_proj", "a{2,1}", "x" * 20_000 + ".*"]
)
def test_a_pattern_that_cannot_be_matched_is_refused(pattern):
    with pytest.raises(ValueError):
        whole_name(pattern)


def test_a_name_matches_itself_and_longer_names_after_a_dot():
    names = NameSet(frozenset(("q_proj", "self_attn.q_proj", "model.layers.0.mlp")))
    assert names.matching("model.layers.0.self_attn.q_proj") == "self_attn.q_proj"
    assert names.matching("q_proj") == "q_proj"
    assert names.matching("model.layers.0.mlp") == "model.layers.0.mlp"
    assert names.matching("model.layers.0.mlp.up_proj") is None
    assert names.matching("xq_proj") is None


def test_alternatives_begin_anywhere_and_those_after_a_hat_at_the_start():
    """In PEFT's `(.*\\.)?(^a|b)$` only the first one is bound to the start; that has no automaton here."""
    with pytest.raises(ValueError, match=r"'\^' with an alternative"):
        end_of_name("^q_proj|k_proj")
    for pattern in ("^(q_proj|k_proj)", r"^[|(]?q_proj", r"^q\|?_proj"):
        for name in NAMES:
            assert end_of_name(pattern)(name) == (re.match(rf"(.*\.)?({pattern})$", name) is not None), (pattern, name)
