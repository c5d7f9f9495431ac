"""Calls of tools in whole outputs."""

from dataclasses import replace

from jaxinfer.engine.request import RequestOutput
from jaxinfer.sampling import SamplingParams
from jaxinfer.tool_calls import ToolOffer


def read_calls(output: RequestOutput, params: SamplingParams, offer: ToolOffer | None) -> RequestOutput:
    """The output with calls apart from the text of its answers.

    Args:
      params: of the request, before `AnswerFormat.params` changed them. offer: None for a request without tools.
    """
    if offer is None or not offer.is_read:
        return output
    answers = []
    for one in output.outputs:
        text, calls = offer.read(one.text, output.prompt_token_ids, one.seed, params.skip_special_tokens)
        answers.append(replace(one, text=text, tool_calls=calls))
    return replace(output, outputs=answers)
