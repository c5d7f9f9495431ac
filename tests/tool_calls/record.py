"""Makes the recorded answers of `recorded/`: `python -m tests.tool_calls.record TEMPLATES`, with Transformers.

TEMPLATES is a folder with the published chat templates that `SOURCES` names, one file each, as llama.cpp
(models/templates) and TRL (trl/chat_templates) keep them. A conversation that ends
with an assistant message with calls is rendered by Transformers' `apply_chat_template`; what the template writes behind
the generation prompt, up to the token that ends the turn, is the answer. Where a family has no template that writes
calls, `WRITERS` has its published form.
"""

import json
import random
import sys
from pathlib import Path

RECORDED = Path(__file__).parent / "recorded"
NUM_ANSWERS = 60

# The form: its templates, the text at which the answer begins, and the texts that end it.
SOURCES = {
    "openai": (["gptoss.jinja"], "<|start|>assistant", []),
    "kimi_k2": (["moonshotai-Kimi-K2.jinja"], "<|im_middle|>", ["<|im_end|>"]),
    "deepseek_v3": (["deepseekv3.jinja"], "<｜Assistant｜>", ["<｜end▁of▁sentence｜>"]),
    "deepseek_v31": (["deepseek-ai-DeepSeek-V3.1.jinja"], "</think>", ["<｜end▁of▁sentence｜>"]),
    "glm45": (["glm4moe.jinja"], "</think>", []),
    "glm47": (["GLM-4.7-Flash.jinja"], "</think>", []),
    "seed_oss": (["ByteDance-Seed-OSS.jinja"], "<seed:bos>assistant\n", ["<seed:eos>"]),
    "qwen3_coder": (["Qwen3-Coder.jinja", "qwen3_5_nothink.jinja"], "<|im_start|>assistant\n", ["<|im_end|>"]),
    "gemma4": (["google-gemma-4-31B-it.jinja"], "<|turn>model\n", ["<turn|>", "<|tool_response>"]),
    "mistral": (
        [
            "mistralai-Mistral-Nemo-Instruct-2407.jinja",
            "Mistral-Small-3.2-24B-Instruct-2506.jinja",
            "mistralai-Ministral-3-14B-Reasoning-2512.jinja",
        ],
        "[/INST]",
        ["</s>"],
    ),
    "hermes": (
        ["Qwen-Qwen2.5-7B-Instruct.jinja", "qwen3_instruct_2507.jinja", "ibm-granite-granite-4.0.jinja"],
        "assistant",
        ["<|im_end|>", "<|end_of_text|>"],
    ),
    "lfm2": (["lfm2_v2.jinja", "lfm2_2_5_v2.jinja"], "<|im_start|>assistant\n", ["<|im_end|>"]),
    "llama3_json": (["llama3_1.jinja", "llama3_2.jinja"], "assistant<|end_header_id|>\n\n", ["<|eot_id|>"]),
}
USER = "Hi there, Marvin"

TOOLS = [
    {
        "name": "get_weather",
        "description": "Weather of a place",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city"],
        },
    },
    {
        "name": "search-notes",
        "description": "Search",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "limits": {
                    "type": "object",
                    "properties": {"max": {"type": "integer"}, "ratio": {"type": "number"}, "deep": {"type": "array"}},
                },
                "exact": {"type": "boolean"},
            },
            "required": ["query"],
        },
    },
    {
        "name": "write_file",
        "description": "Write a file",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "text": {"type": "string"},
                "mode": {"type": ["integer", "null"]},
            },
            "required": ["path", "text"],
        },
    },
    {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}},
]

TEXTS = [
    *(
        "Paris",
        "São Paulo",
        "東京 🗼",
        "",
        " two  spaces ",
        'He said "no", twice',
        "it's",
        "a\\b\\n c:\\dir",
        "5",
        "true",
        "null",
    ),
    *("line one\nline two\n\nline four", "\ttab", "{not json}", "[1, 2", "a, b: c", "<b>bold</b> & more", "x < y > z"),
    *(
        "<tool_call>",
        "</tool_cal",
        "}}]]",
        "def f(x):\n    return {'a': [x]}\n",
        "50% #1 $2 @x `code`",
        "zażółć 👩‍👩‍👧 ∑",
    ),
    *('{"name": "now", "arguments": {}}', "[now()]", "functions.now:0", "```json\n{}\n```", "e\u0301\u200b\u2028end"),
]
CONTENTS = [
    "Let me look.",
    "I'll check two things:\n1. the weather {now}\n2. <notes>",
    'Naïve "text"… 好的',
    "See [1] and (2)",
]


def make_cases() -> list[dict]:
    """Contents and calls of answers: single calls, some with text before, and several calls."""
    rng = random.Random(20)
    cases = []
    for index in range(160):
        num_calls = 1 if index % 3 else rng.choice([1, 2, 2, 3])
        calls = [make_call(rng, index * 3 + number) for number in range(num_calls)]
        cases.append({"content": rng.choice(CONTENTS) if index % 4 == 1 else "", "calls": calls})
    return cases


def make_call(rng: random.Random, index: int) -> dict:
    text = TEXTS[index % len(TEXTS)]
    name = ["get_weather", "search-notes", "write_file", "now"][rng.choices(range(4), [3, 3, 3, 1])[0]]
    if name == "get_weather":
        arguments = {"city": text, "days": rng.randint(-3, 10**12), "unit": "celsius"}
    elif name == "search-notes":
        limits = {
            "max": rng.randint(0, 9),
            "ratio": rng.choice([0.5, -1.25, 1e-7, 2e20, 3.0]),
            "deep": [[], [1, [2, text]]],
        }
        arguments = {
            "query": text,
            "tags": rng.sample(TEXTS, rng.randint(0, 3)),
            "limits": limits,
            "exact": rng.random() < 0.5,
        }
    elif name == "write_file":
        arguments = {"path": f"/tmp/{index}.txt", "text": text + rng.choice(TEXTS), "mode": rng.choice([None, 420])}
    else:
        arguments = {}
    dropped = rng.choice([*arguments, None, None]) if arguments else None
    required = {"city", "query", "path", "text"}
    return {"name": name, "arguments": {key: arguments[key] for key in arguments if key != dropped or key in required}}


def renderings(folder: Path, name: str, cases: list[dict]) -> list[dict]:
    """Answers that the templates write for the cases that they can write."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    templates, begin, ends = SOURCES[name]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")), bos_token="<s>", eos_token="</s>"
    )
    found = []
    for index, case in enumerate(cases):
        file, values = templates[index % len(templates)], json.dumps(case["calls"])
        for as_text in (False, True):
            messages = [{"role": "user", "content": USER}, assistant_message(case, as_text, name)]
            tools = [{"type": "function", "function": tool} for tool in TOOLS]
            template = (folder / file).read_text(encoding="utf-8")
            try:
                text = tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False)
            except Exception:  # templates refuse what they cannot write, each in its own way
                continue
            text = str(text).partition(USER + "<|end|>" if name == "openai" else USER)[2]
            text = text.partition(begin)[2].removeprefix("<|end_of_role|>").removeprefix("<think>\n\n</think>\n\n")
            for end in ends:
                text = text.partition(end)[0]
            # LFM2's template writes quotes and backslashes as they are.
            is_lost = name == "lfm2" and ("'" in values or "\\\\" in values)
            if is_complete(text, case) and not is_lost:
                content = (
                    f"<|channel|>analysis<|message|>{case['content']}<|end|>" if name == "openai" else case["content"]
                )
                found.append({"source": file, "text": text, **case, "content": content if case["content"] else ""})
                break
    return found


def is_complete(text: str, case: dict) -> bool:
    """Whether a template has written the content and all calls, and the arguments as an object."""
    is_object = '"arguments": "{' not in text and '<｜tool▁sep｜>"' not in text and '<|message|>"' not in text
    names = [call["name"] for call in case["calls"]]
    return is_object and case["content"] in text and all(text.count(name) >= names.count(name) for name in names)


def assistant_message(case: dict, as_text: bool, name: str) -> dict:
    calls = []
    for index, call in enumerate(case["calls"]):
        arguments = json.dumps(call["arguments"], ensure_ascii=False) if as_text else call["arguments"]
        call_id = f"functions.{call['name']}:{index}" if name == "kimi_k2" else f"abcdefgh{index}"
        calls.append({"id": call_id, "type": "function", "function": {"name": call["name"], "arguments": arguments}})
    return {"role": "assistant", "content": case["content"], "tool_calls": calls}


def _python(call: dict) -> str:
    return f"{call['name']}({', '.join(f'{key}={value!r}' for key, value in call['arguments'].items())})"


def _json(call: object) -> str:
    return json.dumps(call, ensure_ascii=False)


def _gemma(value: object) -> str:
    if isinstance(value, str):
        return f"<escape>{value}<escape>"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(item)}" for key, item in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return json.dumps(value)


def _dsml(block: str, calls: list[dict]) -> str:
    lines = [f"<｜DSML｜{block}>"]
    for call in calls:
        lines.append(f'<｜DSML｜invoke name="{call["name"]}">')
        for key, value in call["arguments"].items():
            text, is_text = (value, "true") if isinstance(value, str) else (_json(value), "false")
            lines.append(f'<｜DSML｜parameter name="{key}" string="{is_text}">{text}</｜DSML｜parameter>')
        lines.append("</｜DSML｜invoke>")
    return "\n".join([*lines, f"</｜DSML｜{block}>"])


WRITERS = {
    # The models' own encoding, a program beside the checkpoint in place of a template
    "deepseek_v32": lambda case: "\n" * bool(case["content"]) + _dsml("function_calls", case["calls"]),
    "deepseek_v4": lambda case: "\n" * bool(case["content"]) + _dsml("tool_calls", case["calls"]),
    # ai.google.dev: FunctionGemma, formatting and best practices
    "functiongemma": lambda case: "".join(
        f"<start_function_call>call:{call['name']}{_gemma(call['arguments'])}<end_function_call>"
        for call in case["calls"]
    ),
    # Granite 3.3's template tells the model to write the tag and a list
    "granite": lambda case: f"<|tool_call|>[{', '.join(map(_json, case['calls']))}]",
    # Llama 4's model card; Gemma 3's page on function calling has the same list without tags
    "llama4_pythonic": lambda case: f"<|python_start|>[{', '.join(map(_python, case['calls']))}]<|python_end|>",
    "pythonic": lambda case: f"[{', '.join(map(_python, case['calls']))}]",
}


def main(folder: Path) -> None:
    """Writes one file for each form, and their tools."""
    cases = make_cases()
    RECORDED.mkdir(exist_ok=True)
    for name in (*SOURCES, *WRITERS):
        if name in SOURCES:
            found = renderings(folder, name, cases)
        else:
            found = [
                {"source": "form", "text": f"{case['content']}\n{WRITERS[name](case)}".lstrip("\n"), **case}
                for case in cases
            ]
        found = list({one["text"]: one for one in found}.values())
        found = [found[index * len(found) // NUM_ANSWERS] for index in range(NUM_ANSWERS)]
        print(name, len({one["text"] for one in found}), sum(len(one["calls"]) > 1 for one in found))
        lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in found)
        (RECORDED / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
