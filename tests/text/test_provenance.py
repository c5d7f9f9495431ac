"""Marks: which literals get them, and what they are worth when a template cuts through them."""

import jinja2
import pytest

from jaxinfer.text.provenance import ControlStrings, extract_literals, split_marks

CONTROL = ControlStrings(["<|im_start|>", "<|im_end|>", "<think>", "<thinking>", "[|user|]"])


@pytest.mark.parametrize(
    ("literal", "pieces"),
    [
        ("no token", []),
        ("<|im_start|>user\n<think>\n", ["<|im_start|>", "<think>"]),
        ("<thinking><think>", ["<thinking>", "<think>"]),
        ("see [|", ["[|"]),
        ("|]\n[|", ["|]", "[|"]),
        ("<|im_end|>[", ["<|im_end|>", "["]),
        ("a <|im_sta", ["<|im_sta"]),
        ("", []),
    ],
)
def test_pieces_of_a_literal(literal, pieces):
    assert [literal[start:end] for start, end in CONTROL.pieces(literal)] == pieces


@pytest.mark.parametrize(
    ("marked", "result"),
    [
        ("a(<x>)b", ("a<x>b", [(1, 4)])),
        ("(<x>)(<x>)", ("<x><x>", [(0, 3), (3, 6)])),
        ("(evil)(<x>)", ("evil<x>", [(4, 7)])),  # between marks, but no text of the template
        ("()", ("", [])),
        ("(<x>", None),
        ("<x>)", None),
        ("((<x>))", None),
        ("(a(<x>)", None),
    ],
)
def test_split_marks(marked, result):
    assert split_marks(marked, "(", ")", {"<x>"}) == result


LITERAL_CASES = [
    ("a<think>{{ '<|im_end|>' + x }}", 2),
    ("{{ x.split('<think>')[0] }}{{ x.startswith('<think>') }}{% if '<think>' in x %}{% endif %}", 0),
    ("{{ x is eq('<think>') }}{{ x['<think>'] }}{{ x|selectattr('<think>') }}{{ {'<think>': 1}[x] }}", 0),
    ("{{ x.replace('<think>', '<|im_end|>') }}{{ x|replace('<think>', '<|im_end|>') }}", 2),
    ("{{ x.get('<think>', '<think>') }}{{ x|default('<think>') }}{{ '<think>'.join(x) }}{{ x|join('<think>') }}", 4),
    ("{{ '<think>' if x == '<think>' else '<think>' }}{{ x or '<think>' }}{{ {'a': '<think>'}['a'] }}", 4),
    ("{% set a = '<think>' %}{% set b %}<think>{% endset %}{% for c in ['<think>', x] %}<think>{% else %}<think>", 5),
    ("{% macro m(a='<think>') %}<think>{% endmacro %}{% call m('<think>') %}<think>{% endcall %}", 4),
    ("{{ namespace(a='<think>').a }}{{ m('<think>') }}{{ ('<think>',) }}{{ '%s<think>' % x }}", 4),
    ("{% filter upper %}<think>{% endfilter %}{% with a = '<think>' %}<think>{% endwith %}{{ dict(a='<think>') }}", 4),
    ("{% if x %}<think>{% elif y %}<think>{% else %}<think>{% endif %}{{ ('<think>' ~ x)|trim|length }}", 4),
    ("{{ bos }}{{ bos + x }}{% if bos == x %}{% endif %}", 2),
    ("{% set bos = 1 %}{{ bos }}", 0),
]


@pytest.mark.parametrize(("source", "count"), LITERAL_CASES, ids=range(len(LITERAL_CASES)))
def test_literals_that_are_printed_are_found(source, count):
    if "{% for" in source:
        source += "{% endfor %}"
    tree = jinja2.Environment().parse(source)
    literals = extract_literals(tree, CONTROL, {"bos": "<|im_start|>"})
    assert len(literals) == count
    assert len({literal.name for literal in literals}) == count


def test_roles_are_trusted_only_next_to_half_a_token():
    sources = {
        "[|{{ m.role }}|]": 1,
        "{{ '[|' + m['role'] + '|]' }}{{ '[|' ~ role ~ '|]' }}": 2,
        "{{ '<|im_start|>' + m.role }}{{ m.role }}{{ '[|' + m.content + '|]' }}": 0,
    }
    for source, count in sources.items():
        tree = jinja2.Environment().parse(source)
        extract_literals(tree, CONTROL, {})
        names = [node.name for node in tree.find_all(jinja2.nodes.Name)]
        assert names.count("_trusted_role") == count
