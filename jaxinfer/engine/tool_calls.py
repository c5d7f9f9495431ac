"""Calls of tools in whole outputs."""

from dataclasses import replace

from jaxinfer.engine.request import RequestOutput
from jaxinfer.sampling import SamplingParams
from jaxinfer.text import Tokenizer
from jaxinfer.text.reasoning import family_of
from jaxinfer.tool_calls import AnswerFormat, ToolOffer


def make_answer_format(tokenizer: Tokenizer | None, parser: str) -> AnswerFormat:
    """How a model writes answers, by its chat template and the option `tool_parser`."""
    template = None if tokenizer is None else tokenizer.chat_template
    return AnswerFormat(tokenizer, parser, family_of("auto", template))


def read_calls(output: RequestOutput, params: SamplingParams, offer: ToolOffer | None) -> RequestOutput:
    """The output with calls apart from the text of its answers.

    Args:
      params: of the request, before `offer.params` changed them. offer: None for a request without tools.
    """
    if offer is None or not offer.is_read:
        return output
    answers = []
    for one in output.outputs:
        text, calls = offer.read(one.text, output.prompt_token_ids, one.seed, params.skip_special_tokens)
        answers.append(replace(one, text=text, tool_calls=calls))
    return replace(output, outputs=answers)
