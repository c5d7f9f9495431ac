"""Chats in OpenAI's form for the templates of published models, and what each template reads of it."""

import copy
import json
import re
from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
_USER = {"role": "user", "content": "How is the weather in Zürich?"}


def _call(id: str, city: str) -> dict[str, Any]:
    arguments = json.dumps({"city": city, "days": 2}, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def _calls(*cities: str) -> dict[str, Any]:
    calls = [_call(f"call_{number}", city) for number, city in enumerate(cities)]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


# Messages, tools, further arguments.
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]] = {
    "user": ([_USER], None, {}),
    "user without generation prompt": ([_USER], None, {"add_generation_prompt": False}),
    "system": ([{"role": "system", "content": "Be brief.\n"}, _USER], None, {}),
    "turns": (
        [_USER, {"role": "assistant", "content": "Sunny.  "}, {"role": "user", "content": " And in\nBern?"}],
        None,
        {},
    ),
    "tools": ([_USER], [WEATHER], {}),
    "call": ([_USER, _calls("Zürich")], [WEATHER], {"add_generation_prompt": False}),
    "result": ([_USER, _calls("Zürich"), _result(0, '{"sky": "blue"}')], [WEATHER], {}),
    "answer": (
        [_USER, _calls("Zürich"), _result(0, "sunny"), {"role": "assistant", "content": "Sunny."}, _USER],
        [WEATHER],
        {},
    ),
    "two calls": ([_USER, _calls("Zürich", "Bern"), _result(0, "sunny"), _result(1, "rain")], [WEATHER], {}),
}
_WITHOUT_CALLS = ("user", "user without generation prompt", "system", "turns")
TAKES_TEXT = ("deepseek-v3", "deepseek-r1")  # arguments, which others read as an object; and they show no tools
ONE_CALL = ("llama-3.1", "gpt-oss")


def chats_of(name: str) -> list[str]:
    """The chats that a tokenizer's template takes."""
    if name == "gemma-3":
        return list(_WITHOUT_CALLS)
    left_out = {"tools"} if name in TAKES_TEXT else {"two calls"} if name in ONE_CALL else set()
    return [chat for chat in CHATS if chat not in left_out]


def wanted_form(name: str, chat: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]:
    """Messages as the template of a tokenizer wants them, tools, and other arguments of `apply_chat_template`."""
    messages, tools, arguments = copy.deepcopy(CHATS[chat])
    for message in messages:
        for call in message.get("tool_calls", ()):
            if name not in TAKES_TEXT:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
                message["content"] = ""  # DeepSeek's templates ask whether it is none
    return messages, None if name in TAKES_TEXT else tools, {"add_generation_prompt": True, **arguments}


def undated(text: str) -> str:
    """A rendering without the day on which it was made, which templates show."""
    return re.sub(r"\d{4}-\d\d-\d\d|\d\d [A-Z][a-z]{2} \d{4}", "DATE", text)
