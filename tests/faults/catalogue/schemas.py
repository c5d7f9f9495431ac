"""Faults in what JSON schemas become."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "schemas/an-object-cannot-begin-with-a-later-property",
        "jaxinfer/grammar/schema_language.py",
        "_some(members[half:])])",
        "_some(members[:half])])",
        ("tests/grammar/test_schema_language.py::test_optional_properties_come_in_order_in_any_combination",),
        "a model must write a property that it wants to leave out",
    ),
    Fault(
        "schemas/a-lone-surrogate-is-a-character",
        "jaxinfer/grammar/schema_strings.py",
        "Chars(((0x30, 0x37),)), _HEX, _HEX)",
        "_HEX, _HEX, _HEX)",
        ("tests/grammar/test_schema_language.py::test_examples",),
        "answers have strings that cannot be written as UTF-8",
    ),
    Fault(
        "schemas/further-names-may-be-declared-ones",
        "jaxinfer/grammar/schema_strings.py",
        "        if prefix not in complete:\n            options",
        "        if True:\n            options",
        ("tests/grammar/test_schema_language.py::test_examples",),
        "a property comes twice, the second time without its schema",
    ),
    Fault(
        "schemas/circles-of-references-are-not-found",
        "jaxinfer/grammar/schema.py",
        "    _check_circles(graph)\n",
        "",
        ("tests/grammar/test_schema.py",),
        "an answer never ends, as every value needs another one within it",
    ),
    Fault(
        "schemas/nesting-through-references-has-no-limit",
        "jaxinfer/grammar/schema.py",
        "    _check_depth(graph)\n",
        "",
        ("tests/grammar/test_schema.py",),
        "a request ends the server: llguidance overflows the stack",
    ),
    Fault(
        "schemas/unknown-keywords-are-left-out",
        "jaxinfer/grammar/schema_grammar.py",
        '"lenient": False',
        '"lenient": True',
        ("tests/grammar/test_schema_grammar.py::test_texts_are_compact_whatever_the_schema_says",),
        "answers do not match a schema that was accepted",
    ),
    Fault(
        "schemas/a-oneof-is-always-an-anyof",
        "jaxinfer/grammar/schema_parts.py",
        "        except NotServedError:\n            return False",
        "        except NotServedError:\n            return True",
        ("tests/grammar/test_schema_grammar.py::test_texts_are_compact_whatever_the_schema_says",),
        "answers match two branches of a oneOf",
    ),
)
