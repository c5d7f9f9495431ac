"""One conversation through every door: the prompt is the same, and what cannot be rendered is refused by all."""

import asyncio
import json

import pytest

from jaxinfer.batch import open_job
from jaxinfer.engine.request import CompletionOutput, RequestOutput
from tests.batch.conftest import FakeLLM, read_records
from tests.server.templates import client_of_template

CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
# Tools, reasoning, calls as a template of Qwen prints them; a message with calls is told by its key.
TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | map(attribute='function') | map(attribute='name') | join }};{% endif %}"
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% if 'tool_calls' in m %}{{ m.content.strip() }}{% for c in m.tool_calls %}<{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}>{% endfor %}{% else %}{{ m.content }}{% endif %};{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def responses_items(messages):
    """OpenAI's messages as items of /v1/responses."""
    items = []
    for one in messages:
        if one.get("reasoning_content"):
            thought = [{"type": "reasoning_text", "text": one["reasoning_content"]}]
            items.append({"type": "reasoning", "summary": [], "content": thought})
        if one["role"] == "tool":
            item = {"type": "function_call_output", "call_id": one["tool_call_id"], "output": one["content"]}
            items.append(item)
        elif one.get("content") is not None:
            items.append({"type": "message", "role": one["role"], "content": one["content"]})
        for call in one.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return items


def anthropic_messages(messages):
    """OpenAI's messages as Anthropic has them; None where it cannot have them."""
    found = []
    for one in messages:
        if one["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": one["tool_call_id"], "content": one["content"]}
            found.append({"role": "user", "content": [block]})
            continue
        blocks = []
        if one.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": one["reasoning_content"], "signature": ""})
        if one.get("content"):
            blocks.append({"type": "text", "text": one["content"]})
        for call in one.get("tool_calls", ()):
            given = json.loads(call["function"]["arguments"] or "{}")
            blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
        if one["role"] not in ("user", "assistant", "system"):
            return None
        found.append({"role": one["role"], "content": blocks})
    return found


def anthropic_tool(tool):
    function = tool["function"]
    about = {"description": function["description"]} if "description" in function else {}
    return {"name": function["name"], "input_schema": function["parameters"], **about}


def ollama_messages(messages):
    """OpenAI's messages as Ollama has them."""
    return [
        {("thinking" if name == "reasoning_content" else name): value for name, value in one.items()}
        for one in messages
    ]


class Doors:
    """Every door to one engine, as if it had this tokenizer."""

    def __init__(self, engine, make_service, monkeypatch, tmp_path, template):
        self.llm, self._folder, self.prompts = engine.llm, tmp_path, []
        self.client = client_of_template(
            monkeypatch, engine, make_service, template, lambda request: self.prompts.append(request.token_ids)
        )
        monkeypatch.setattr(self.llm, "generate", self._generate)

    def _generate(self, prompts, params, *, use_tqdm=None, **options):
        self.prompts += prompts
        return [
            RequestOutput("0", None, list(one), [CompletionOutput(0, "yes", [5], 3, "stop")], True) for one in prompts
        ]

    def ask(self, messages, **fields):
        """The messages through each door: the text of the prompt, or the sentence of its refusal, with the name
        of the field."""
        bodies = {
            CHAT: {"messages": messages, **fields},
            RESPONSES: {"input": responses_items(messages), **fields},
            OLLAMA: {"model": "tiny", "messages": ollama_messages(messages), "stream": False, **fields},
        }
        if "tools" in fields:
            bodies[RESPONSES]["tools"] = [{"type": "function", **one["function"]} for one in fields["tools"]]
        if (theirs := anthropic_messages(messages)) is not None:
            bodies[MESSAGES] = {"messages": theirs, "max_tokens": 9}
            if "tools" in fields:
                bodies[MESSAGES]["tools"] = list(map(anthropic_tool, fields["tools"]))
        found = {
            path: self._taken(lambda path=path, body=body: self._post(path, body)) for path, body in bodies.items()
        }
        found["LLM.chat"] = self._taken(lambda: self.llm.chat(messages, **fields) and None)
        for name, row in (
            ("plain row", {"messages": messages, **fields}),
            ("row", {"custom_id": "a", "url": CHAT, "body": {"messages": messages, **fields}}),
        ):
            found[name] = self._taken(lambda row=row: self._batch(row))
        return found

    def _taken(self, call):
        self.prompts.clear()
        try:
            error = call()
        except ValueError as found:
            error = (str(found), getattr(found, "parameter", None))
        return error or self.llm.tokenizer.decode(self.prompts.pop(), False)

    def _post(self, path, body):
        answer = asyncio.run(self.client.post(path, body))
        if answer.status == 200:
            return None
        error = answer.json["error"]
        assert answer.status == 400, answer.body
        return (error, None) if isinstance(error, str) else (error["message"], error.get("param"))

    def _batch(self, row):
        model = FakeLLM()
        model.answer_format, model.tokenizer = self.llm.answer_format, self.llm.tokenizer
        model.tokenize_chat, model.max_model_len = self.llm.client.tokenize_chat, self.llm.max_model_len
        answer = model._answer
        model._answer = lambda prompt, params: (self.prompts.append(prompt), answer(prompt[:9], params))[1]
        path = self._folder / "in.jsonl"
        path.write_text(json.dumps({**row, **({} if "url" in row else {"max_tokens": 3})}))
        with open_job(path, self._folder / "out.jsonl", overwrite=True) as job:
            summary = job.run(model, {"max_tokens": 3}, use_tqdm=False)
        if summary.ok:
            return None
        (record,) = read_records(self._folder / "out.errors.jsonl")
        error = record["error"] if "url" not in row else record["response"]["body"]["error"]
        return error["message"], error["param"]


@pytest.fixture
def make_doors(engine, make_service, monkeypatch, tmp_path):
    """Every door to an engine whose tokenizer has a chat template."""

    def make(template=TEMPLATE):
        return Doors(engine, make_service, monkeypatch, tmp_path, template)

    return make


def turn(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(arguments='{"a":1}', number=1):
    return {"id": f"call_{number}", "type": "function", "function": {"name": "look", "arguments": arguments}}


ASK, RESULT = {"role": "user", "content": "Q"}, {"role": "tool", "tool_call_id": "call_1", "content": "R"}
HISTORIES = {
    "reasoning before a call": (
        [ASK, turn(None, reasoning_content="why", tool_calls=[call()]), RESULT, turn("Yes.")],
        'user:Q;assistant:(why)<look {"a": 1}>;tool:R;assistant:Yes.;',
    ),
    "reasoning before text and a call": (
        [ASK, turn("Look.", reasoning_content="why", tool_calls=[call()]), RESULT, ASK],
        'user:Q;assistant:(why)Look.<look {"a": 1}>;tool:R;user:Q;',
    ),
    "only reasoning": ([ASK, turn(None, reasoning_content="why"), ASK], "user:Q;assistant:(why);user:Q;"),
    "null as arguments": (
        [ASK, turn("A", tool_calls=[call("null")]), RESULT],
        "user:Q;assistant:A<look {}>;tool:R;",
    ),
    "no arguments": ([ASK, turn(None, tool_calls=[call("")]), RESULT], "user:Q;assistant:<look {}>;tool:R;"),
    "no calls": ([ASK, turn("ANSWER", tool_calls=[]), ASK], "user:Q;assistant:ANSWER;user:Q;"),
    "a developer": ([{"role": "developer", "content": "Be."}, ASK], "system:Be.;user:Q;"),
    "a system and a developer": (
        [{"role": "system", "content": "A"}, {"role": "developer", "content": "B"}, ASK],
        "system:A;system:B;user:Q;",
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", HISTORIES)
def test_every_door_makes_the_same_prompt(make_doors, name):
    messages, expected = HISTORIES[name]
    if messages[-1]["role"] == "assistant":  # Ollama's and Anthropic's clients continue it
        messages = [*messages, ASK]
        expected += "user:Q;"
    found = make_doors().ask(messages)
    assert found == dict.fromkeys(found, expected)
    assert len(found) >= 6


def test_reasoning_of_responses_belongs_to_the_assistants_turn_after_it(make_doors):
    def thought(text):
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    doors = make_doors()
    said = {"type": "message", "role": "assistant", "content": "A"}
    made = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"a":1}'}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "R"}
    asked = {"type": "message", "role": "user", "content": "Q"}
    for items, expected in (
        ([thought("1"), made, result, said], '(1)<look {"a": 1}>;tool:R;assistant:A;'),
        ([thought("1"), thought("2"), said], "(1\n2)A;"),
        ([said, thought("1"), made, result], '(1)A<look {"a": 1}>;tool:R;'),
        (
            [thought("1"), made, thought("2"), {**made, "call_id": "b"}, result],
            '(1\n2)<look {"a": 1}><look {"a": 1}>;tool:R;',
        ),
        ([thought("1"), asked, said], "(1);user:Q;assistant:A;"),
        ([made, result, thought("1"), said], '<look {"a": 1}>;tool:R;assistant:(1)A;'),
        ([thought("1")], "(1);"),
    ):
        doors.prompts.clear()
        assert doors._post(RESPONSES, {"input": [asked, *items]}) is None
        assert doors.llm.tokenizer.decode(doors.prompts.pop(), False) == f"user:Q;assistant:{expected}"


def test_tools_that_no_template_shows_are_refused(make_doors):
    shows = make_doors().ask([ASK], tools=[TOOL])
    assert shows == dict.fromkeys(shows, "TOOLS look;user:Q;")
    doors = make_doors("{% for m in messages %}{{ m.content }}{% endfor %}")
    found = doors.ask([ASK], tools=[TOOL])
    assert all("shows no tools" in sentence for sentence, _ in found.values()), found
    assert {found[path][1] for path in (CHAT, RESPONSES)} == {"tools"}
    answer = asyncio.run(doors.client.post("/tokenize", {"messages": [ASK], "tools": [TOOL]}))
    assert (answer.status, "shows no tools" in answer.error["message"]) == (400, True)
    none = doors.ask([ASK], tools=[])
    assert none == dict.fromkeys(none, "Q")


WRONG = [
    ({"role": "user", "content": 5}, "content"),
    ({"role": "user", "content": {"text": "a"}}, "content"),
    ({"role": "user"}, "content"),
    ({"role": "a b", "content": "a"}, "role"),
    ({"role": "user", "content": [{"type": "image_url"}]}, "content[0]"),
]


@pytest.mark.parametrize(("message", "field"), WRONG)
def test_a_wrong_message_is_refused_by_its_place(make_doors, message, field):
    doors = make_doors()
    places = {CHAT: "messages[1]", RESPONSES: "input[1]"}
    for path, body in (
        (CHAT, {"messages": [ASK, message]}),
        (RESPONSES, {"input": [ASK, message], "instructions": "I"}),
    ):
        sentence, name = doors._post(path, body)
        assert name == f"{places[path]}.{field}"
        assert name in sentence
    with pytest.raises(ValueError, match="messages") as error:
        doors.llm.chat([ASK, message])
    assert error.value.parameter == f"messages[1].{field}"
    sentence, name = doors._batch({"custom_id": "a", "url": CHAT, "body": {"messages": [ASK, message]}})
    assert name == f"messages[1].{field}"


def named(arguments: object = "{}", **fields):
    return {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments, **fields}}


WRONG_TURNS = [
    (turn("A", tool_calls=[named(name=None)]), "tool_calls[0].function.name"),
    (turn("A", tool_calls=[named(), named([1])]), "tool_calls[1].function.arguments"),
    (turn("A", tool_calls=[{"id": "a", "function": "look"}]), "tool_calls[0].function"),
    (turn("A", tool_calls=[{"id": "a", "function": None}]), "tool_calls[0].function"),
    (turn("A", tool_calls=[{"name": 5, "arguments": {}}]), "tool_calls[0].name"),
    (turn("A", tool_calls=[{"type": "custom", "custom": {"name": "look", "input": "x"}}]), "tool_calls[0].type"),
    (turn("A", function_call={"name": "look", "arguments": "{}"}), "function_call"),
    (turn("A", reasoning_content=5), "reasoning_content"),
    (turn("A", thinking=["why"]), "thinking"),
    (turn([{"type": "text", "text": None}]), "content[0].text"),
]


@pytest.mark.parametrize(("message", "field"), WRONG_TURNS)
def test_no_door_prints_a_turn_that_is_none(make_doors, message, field):
    doors, name = make_doors(), f"messages[1].{field}"
    sentence, found = doors._post(CHAT, {"messages": [ASK, message, ASK]})
    assert found.startswith(name)
    assert found in sentence
    assert doors._taken(lambda: doors.llm.chat([ASK, message, ASK]))[1] == name
    assert doors._batch({"messages": [ASK, message, ASK]})[1] == name


def test_other_doors_name_a_wrong_call_by_its_place(make_doors):
    doors = make_doors()
    for call, field in (({"function": None}, ".function"), ({"function": {"name": 5}}, ".function.name")):
        turns = [ASK, turn("", tool_calls=[call]), ASK]
        sentence, _ = doors._post(OLLAMA, {"model": "tiny", "messages": turns, "stream": False})
        assert sentence.startswith(f"messages[1].tool_calls[0]{field} must be")
    for fields, field in (({"name": None}, "name"), ({"input": [1]}, "input")):
        block = {"type": "tool_use", "id": "a", "name": "look", "input": {}, **fields}
        body = {"messages": [ASK, turn([block]), ASK], "max_tokens": 3}
        assert doors._post(MESSAGES, body)[0].startswith(f"messages[1].content[0].{field} must be")
    made = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": "R"}
    for items, field in (
        ([made | {"name": None}, result], "input[0].name"),
        ([made | {"arguments": 5}, result], "input[0].arguments"),
        ([made, {**result, "output": None}], "input[1].output"),
        ([{"type": "reasoning", "summary": "why"}], "input[0].summary"),
        ([{"type": "reasoning", "summary": [], "content": ["why"]}], "input[0].content[0]"),
        ([{"type": "reasoning", "content": [{"type": "reasoning_text"}]}], "input[0].content[0]"),
    ):
        sentence, name = doors._post(RESPONSES, {"input": items})
        assert name == field
        assert field in sentence


def test_an_item_without_a_type_is_a_message(make_doors):
    doors = make_doors()
    for given in (None, ""):
        assert doors._post(RESPONSES, {"input": [{**ASK, "type": given}]}) is None
        assert doors.llm.tokenizer.decode(doors.prompts.pop(), False) == "user:Q;"


def test_calls_at_the_end_are_never_lost(make_doors):
    doors, turns = make_doors(), [ASK, turn("A", tool_calls=[named()])]
    found = doors.ask(turns)
    assert found == dict.fromkeys(found, "user:Q;assistant:A<look {}>;")
    sentence, _ = doors._post(CHAT, {"messages": turns, "continue_final_message": True})
    assert "a message with tool_calls cannot be continued" in sentence
    begun = doors.ask([ASK, turn("A")])
    assert {begun[path] for path in (OLLAMA, MESSAGES)} == {"user:Q;assistant:A"}


def test_a_form_is_refused_by_the_name_under_which_it_was_given(make_doors):
    doors, schema = make_doors(), {"$ref": "#/none"}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for path, body, name in (
        (CHAT, {"messages": [ASK], "response_format": form}, "response_format"),
        (CHAT, {"messages": [ASK], "guided_regex": "("}, "guided_regex"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "("}}, "structured_outputs"),
        (RESPONSES, {"input": "Q", "text": {"format": {"type": "json_schema", "schema": schema}}}, "text.format"),
        (RESPONSES, {"input": "Q", "text": {"format": {"type": "yaml"}}}, "text.format"),
        (OLLAMA, {"model": "tiny", "messages": [ASK], "stream": False, "format": schema}, None),
    ):
        sentence, found = doors._post(path, body)
        assert found == name
        assert sentence.startswith(f"{name or 'format'}: ")


def test_no_error_names_what_was_not_given(make_doors):
    doors, path = make_doors(), "/v1/completions"
    sentence, _ = doors._post(path, {"prompt": [5] * 256})
    assert "256 tokens are too many and leave no room for an answer" in sentence
    sentence, name = doors._post(path, {"prompt": "a", "allowed_token_ids": [66], "bad_words": ["a"]})
    assert (sentence, name) == (
        "no token can be generated: bad_words forbid all allowed_token_ids",
        "allowed_token_ids",
    )
    sentence, _ = doors._post(path, {"prompt": "a", "allowed_token_ids": [0], "min_tokens": 3})
    assert "bad_words" not in sentence
    assert "before min_tokens=3" in sentence


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("background", True, "or send False"),
        ("truncation", "auto", "or send 'disabled'"),
        ("conversation", "c", "send the whole conversation"),
        ("include", ["message.output_text.logprobs"], "leave it out"),
        ("text", {"verbosity": "low"}, "or send 'medium'"),
    ],
)
def test_responses_say_the_value_to_use(make_doors, field, value, told):
    sentence, name = make_doors()._post(RESPONSES, {"input": "Q", field: value})
    assert told in sentence
    assert name is not None
    assert name.startswith(field)
