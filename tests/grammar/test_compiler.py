"""What is asked for becomes a grammar and perhaps a table, or an error that tells the place in what was asked for."""

import pytest

from jaxinfer.grammar.structured import GrammarError, StructuredOutputs
from jaxinfer.openai.reader import structured_of
from tests.engine.grammars import make_compiler


@pytest.fixture(scope="module")
def compiler():
    return make_compiler()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"grammar": "start: foo bar\nfoo: 'a'\n"}, "line 2, column 6: lexer error"),
        ({"grammar": "start: /a/ foo\nfoo: /b(/\n"}, "line 2, column 6: invalid regex"),
        ({"regex": "(a"}, "a group is not closed, at character 0"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"json": {"not": {}}}, 'failed to compile JSON schema: Unimplemented keys: ["not"]'),
        ({"json": {"$ref": "http://x"}}, "nothing is fetched"),
        ({"json": "{"}, "not JSON"),
    ],
)
def test_errors_tell_the_place(compiler, wanted, message):
    with pytest.raises(GrammarError) as caught:
        compiler.compile(StructuredOutputs.of(wanted))
    assert message in str(caught.value)
    assert "no_forcing" not in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({}, "got none of them"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"type": "object"}, "a schema goes under 'json'"),
        ({"choice": []}, "0 texts"),
        ({"choice": "ab"}, "must be a list of texts"),
        ({"regex": ""}, "not empty"),
        ({"regex": "a", "whitespace_pattern": " ?"}, "belongs to json"),
        ({"regex": "a", "reasoning": "thought"}, "must be one of"),
        ({"json_object": 1}, "True or False"),
        ({"type": "json_schema", "json_schema": {}}, "needs an object with a schema"),
        ({"type": "json_object", "schema": {"type": "string"}}, "must be that of an object"),
        ({"type": "json_object", "schema": 7}, "must be that of an object"),
        ({"type": "json_object", "strict": True}, "not 'strict'"),
        (7, "must be StructuredOutputs"),
    ],
)
def test_what_is_no_request_is_refused(wanted, message):
    with pytest.raises(GrammarError, match=message):
        StructuredOutputs.of(wanted)


def test_the_schema_of_an_object_is_applied():
    asked = StructuredOutputs.of({"type": "json_object", "schema": {"const": {"a": 1}}})
    assert asked == StructuredOutputs(json={"type": "object", "const": {"a": 1}})
    assert StructuredOutputs.of({"type": "json_object", "schema": None}).json_object
    from_batch = structured_of({"response_format": {"type": "json_object", "schema": {"const": {"a": 1}}}})
    assert from_batch == {"structured": asked}


def test_equal_requests_share_a_grammar_and_its_table(compiler):
    one, two = (compiler.compile(StructuredOutputs.of({"choice": ("a", "b")})) for _ in range(2))
    assert one is two
    assert one.wait() is one.table is not None
    other = compiler.compile(StructuredOutputs.of({"json": {"type": "object"}}))
    assert other.wait() is None


def test_a_table_that_cannot_be_built_is_told_and_left_out(caplog):
    compiler = make_compiler()
    compiler._build = lambda language: 1 // 0
    grammar = compiler.compile(StructuredOutputs.of({"regex": "ab?"}))
    assert grammar.wait() is None
    assert grammar.table is None
    assert "a table could not be built" in caplog.text
