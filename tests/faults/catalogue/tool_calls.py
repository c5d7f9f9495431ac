"""Faults in what reads calls of tools and in their grammars."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "tool-calls/a-tool-that-was-not-offered-is-called",
        "jaxinfer/tool_calls/parser.py",
        "if name not in self.tools:",
        "if not name:",
        ("tests/tool_calls/test_parser.py::test_only_complete_calls_of_known_tools_are_calls",),
        "a client is told to run a function that it never named",
    ),
    Fault(
        "tool-calls/the-beginning-of-a-tag-is-sent-as-content",
        "jaxinfer/tool_calls/parser.py",
        "num_held = 0 if cursor.is_end else self._num_begun()",
        "num_held = 0",
        ("tests/tool_calls/test_forms.py::test_a_stream_gives_what_the_whole_text_gives",),
        "a call whose tag comes in two pieces is shown as text and never run",
    ),
    Fault(
        "tool-calls/all-calls-have-one-index",
        "jaxinfer/tool_calls/parser.py",
        "ToolCallDelta(index, call_id, name,",
        "ToolCallDelta(0, call_id, name,",
        ("tests/tool_calls/test_parser.py::test_the_first_delta_of_a_call_names_it_and_the_others_have_its_arguments",),
        "clients join the arguments of parallel calls into one",
    ),
    Fault(
        "tool-calls/the-text-of-a-call-is-content-too",
        "jaxinfer/tool_calls/parser.py",
        "        self._cursor.forget_taken()\n        return True",
        "        return True",
        ("tests/tool_calls/test_parser.py::test_only_complete_calls_of_known_tools_are_calls",),
        "users read the call's JSON in the answer",
    ),
    Fault(
        "tool-calls/a-grammar-leaves-out-required-arguments",
        "jaxinfer/tool_calls/lark.py",
        'skipped = "" if is_required else',
        'skipped = "" if False else',
        ("tests/tool_calls/test_grammar.py::test_arguments_that_do_not_match_are_refused",),
        "calls with strict=true lack arguments, for models that write each argument by itself",
    ),
    Fault(
        "tool-calls/one-call-is-enforced-as-several",
        "jaxinfer/tool_calls/form.py",
        "if is_parallel else",
        "if True else",
        ("tests/tool_calls/test_grammar.py::test_other_answers_are_refused",),
        "parallel_tool_calls=false has no effect",
    ),
)
