"""All forms, by name and by chat template."""

from typing import Any

from jaxinfer.checks import did_you_mean
from jaxinfer.tool_calls.form import ToolForm
from jaxinfer.tool_calls.json_forms import HarmonyForm, JsonForm, KimiForm, MistralForm, NamedForm
from jaxinfer.tool_calls.literal_forms import GemmaForm, PythonicForm
from jaxinfer.tool_calls.tagged_forms import DsmlForm, GlmForm, QwenCoderForm

_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_KIMI = (
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "<|tool_calls_section_end|>",
)
_GLM_TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")


def _sections(texts: tuple[str, ...]) -> dict[str, Any]:
    """The tags of a form with five of them: around all calls, around each, and before its arguments."""
    first, begin, middle, end, last = texts
    parts = {"first": first, "begin": begin, "middle": middle, "end": end, "last": last}
    return {"openings": (first, begin), "special_texts": texts, **parts}


def _dsml(name: str, models: str, tag: str, *template_texts: str) -> DsmlForm:
    first, last = f"<｜DSML｜{tag}>", f"\n</｜DSML｜{tag}>"
    return DsmlForm(name, models, (first,), template_texts=template_texts, first=f"{first}\n", between="\n", last=last)


# In the order in which a template is compared: the tags of some are also those of later ones.
_FORMS: tuple[ToolForm, ...] = (
    HarmonyForm(
        "openai",
        "gpt-oss",
        openings=("<|start|>", "<|channel|>"),
        line_openings="t",
        special_texts=_HARMONY,
        template_texts=("<|channel|>", "<|call|>"),
        is_before_reasoning=True,
    ),
    KimiForm("kimi_k2", "Kimi K2", prefix="functions.", **_sections(_KIMI)),
    NamedForm(
        "deepseek_v3",
        "DeepSeek V3 and R1",
        template_texts=(_DEEPSEEK[0], "```json"),
        prefix="function<｜tool▁sep｜>",
        tail="\n```",
        between="\n",
        **{**_sections(_DEEPSEEK), "middle": "\n```json\n"},
    ),
    NamedForm("deepseek_v31", "DeepSeek V3.1", **_sections(_DEEPSEEK)),
    _dsml("deepseek_v32", "DeepSeek V3.2", "function_calls", "｜DSML｜", "function_calls"),
    _dsml("deepseek_v4", "DeepSeek V4", "tool_calls", "｜DSML｜"),
    GlmForm(
        "glm45",
        "GLM-4.5 and GLM-4.6",
        openings=("<tool_call>",),
        special_texts=_GLM_TAGS,
        template_texts=("<arg_key>", "{function-name}\n"),
        first="<tool_call>",
        is_first_repeated=True,
        between="\n",
    ),
    GlmForm(
        "glm47",
        "GLM-4.7 and later",
        openings=("<tool_call>",),
        special_texts=_GLM_TAGS,
        template_texts=("<arg_key>",),
        first="<tool_call>",
        is_first_repeated=True,
        line_break="",
    ),
    QwenCoderForm(
        "seed_oss",
        "Seed-OSS",
        openings=("<seed:tool_call>", "<function="),
        special_texts=("<seed:tool_call>", "</seed:tool_call>"),
        template_texts=("<seed:tool_call>", "<parameter="),
        first="<seed:tool_call>\n",
        is_first_repeated=True,
        between="\n",
        begin="<seed:tool_call>",
        end="</seed:tool_call>",
        line_break="",
    ),
    QwenCoderForm(
        "qwen3_coder",
        "Qwen3-Coder, Qwen3.5, Nemotron 3",
        openings=("<tool_call>", "<function="),
        special_texts=("<tool_call>", "</tool_call>"),
        template_texts=("<function=", "<parameter="),
        first="<tool_call>\n",
        is_first_repeated=True,
        between="\n",
    ),
    GemmaForm(
        "gemma4",
        "Gemma 4",
        openings=("<|tool_call>",),
        special_texts=("<|tool_call>", "<tool_call|>", '<|"|>'),
        first="<|tool_call>",
        is_first_repeated=True,
        string_mark='<|"|>',
        closing="<tool_call|>",
    ),
    GemmaForm(
        "functiongemma",
        "FunctionGemma",
        openings=("<start_function_call>",),
        special_texts=("<start_function_call>", "<end_function_call>", "<escape>"),
        first="<start_function_call>",
        is_first_repeated=True,
        string_mark="<escape>",
        closing="<end_function_call>",
    ),
    MistralForm(
        "mistral",
        "Mistral, Ministral, Devstral, Magistral",
        openings=("[TOOL_CALLS]",),
        special_texts=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        first="[TOOL_CALLS]",
        is_first_repeated=True,
    ),
    JsonForm(
        "granite",
        "Granite 3, Phi-4 mini",
        openings=("<|tool_call|>",),
        special_texts=("<|tool_call|>", "<|/tool_call|>"),
        first="<|tool_call|>[",
        between=", ",
        last="]",
        closing="<|/tool_call|>",
    ),
    JsonForm(
        "hermes",
        "Qwen2.5, Qwen3, Hermes, Granite 4, SmolLM3",
        openings=("<tool_call>",),
        special_texts=("<tool_call>", "</tool_call>"),
        first="<tool_call>\n",
        is_first_repeated=True,
        between="\n",
        closing="\n</tool_call>",
    ),
    PythonicForm(
        "lfm2",
        "LFM2 and LFM2.5",
        openings=("<|tool_call_start|>",),
        special_texts=("<|tool_call_start|>", "<|tool_call_end|>"),
        template_texts=("List of tools: ", "<|tool_"),  # the first template writes no calls
        first="<|tool_call_start|>[",
        between=", ",
        last="]<|tool_call_end|>",
        closing="<|tool_call_end|>",
    ),
    PythonicForm(
        "llama4_pythonic",
        "Llama 4",
        openings=("<|python_start|>",),
        line_openings="[",
        special_texts=("<|python_start|>", "<|python_end|>"),
        first="[",
        between=", ",
        last="]",
        closing="<|python_end|>",
        optional_end="<|python_end|>",
    ),
    JsonForm(
        "llama3_json",
        "Llama 3.1, 3.2 and 3.3",
        openings=("<|python_tag|>",),
        line_openings="{",
        special_texts=("<|python_tag|>",),
        template_texts=('"parameters": dictionary of argument name and its value',),
        between="; ",
        arguments_key="parameters",
        separators=";,",
    ),
    PythonicForm(
        "pythonic",
        "Gemma 3, Llama 3.2 and others told to write Python calls",
        openings=("```tool_code",),
        line_openings="[",
        template_texts=("[func_name",),
        first="[",
        between=", ",
        last="]",
        closing="```",
    ),
)

TOOL_FORMS: dict[str, str] = {form.name: form.models for form in _FORMS}
"""Names of the forms, and the models that write them."""


def tool_form(name: str) -> ToolForm:
    """The form with this name. Raises ValueError where there is none."""
    for form in _FORMS:
        if form.name == name:
            return form
    raise ValueError(f"unknown form of tool calls {name!r:.80}{did_you_mean(name, TOOL_FORMS)}")


def form_of(template: str) -> ToolForm | None:
    """The form that a chat template writes calls in; None where it writes none that is known."""
    for form in _FORMS:
        if all(text in template for text in form.template_texts or form.openings[:1]):
            return form
    return None
