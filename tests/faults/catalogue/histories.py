"""Faults in what chat templates are given, and in what doors make of conversations."""

from tests.faults.fault import Fault

HISTORIES, DOORS = "tests/text/test_histories.py", "tests/server/test_doors.py"
FAULTS = (
    Fault(
        "histories/arguments-are-encoded-twice",
        "jaxinfer/text/histories.py",
        "    if not isinstance(given, str):\n        return given\n    try:",
        "    if given != {}:\n        return given\n    try:",
        (f"{HISTORIES}::test_a_call_is_printed_whatever_its_form",),
        "OpenAI's messages are printed with a string in a string, which models never saw",
    ),
    Fault(
        "histories/calls-that-are-dropped-are-taken-for-printed",
        "jaxinfer/text/histories.py",
        "all(one in text for one in (_CALLED, _KEY, _VALUE)) and",
        "True and",
        (f"{HISTORIES}::test_a_call_is_printed_whatever_its_form",),
        "a template that asks whether content is null loses the call in silence",
    ),
    Fault(
        "histories/the-mark-of-the-last-content-stays",
        "jaxinfer/text/chat_template.py",
        'text = text[: _end_of_content(text, run.with_messages(_tagged(chat, tag + " ")), tag)]',
        'tagged = run.with_messages(_tagged(chat, tag + " "))\n                    text = tagged[: tagged.rfind(tag)]',
        ("tests/text/test_chat_template.py::test_a_final_message_that_is_printed_twice",),
        "a prompt has a random character where the template prints the last content first",
    ),
    Fault(
        "histories/calls-are-not-checked",
        "jaxinfer/text/messages.py",
        '        _check_calls(calls, f"{path}.tool_calls")',
        "        pass",
        (f"{DOORS}::test_no_door_prints_a_turn_that_is_none",),
        "a call without a name is printed as None, and a call that is no object is status 500",
    ),
    Fault(
        "doors/calls-at-the-end-are-continued",
        "jaxinfer/server/messages.py",
        ' and "tool_calls" not in found[-1]',
        "",
        (f"{DOORS}::test_calls_at_the_end_are_never_lost",),
        "a history that ends with calls loses them",
    ),
    Fault(
        "doors/reasoning-moves-to-the-next-answer",
        "jaxinfer/server/responses.py",
        "        if thoughts and not is_assistants:",
        "        if False:",
        (f"{DOORS}::test_reasoning_of_responses_belongs_to_the_assistants_turn_after_it",),
        "a user's message has the model's reasoning",
    ),
    Fault(
        "doors/tools-that-no-template-shows-are-taken",
        "jaxinfer/tool_calls/answers.py",
        "        self.check_shown()\n        names",
        "        names",
        (f"{DOORS}::test_tools_that_no_template_shows_are_refused",),
        "answers know nothing of the tools, and nobody is told",
    ),
    Fault(
        "doors/offsets-count-placeholders",
        "jaxinfer/batch/responses.py",
        "        self._offset += len(text)",
        "        self._offset += len(own)",
        ("tests/batch/test_offsets.py",),
        "offsets after an emoji point behind their token",
    ),
    Fault(
        "doors/a-finished-answer-cannot-end",
        "jaxinfer/sampling/transforms.py",
        "is_stuck = may_exclude & jnp.all(logits == -jnp.inf, axis=-1)",
        "is_stuck = may_exclude & False",
        ("tests/engine/test_structured.py::test_what_contradicts_the_grammar",),
        "structured output with min_tokens is status 500",
    ),
)
