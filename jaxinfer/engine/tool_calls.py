"""Reasoning, content and calls of tools in whole outputs."""

from dataclasses import replace

from jaxinfer.engine.request import RequestOutput
from jaxinfer.sampling import SamplingParams
from jaxinfer.tool_calls import AnswerFormat, ToolOffer


def read_answers(
    output: RequestOutput, params: SamplingParams, answers: AnswerFormat, offer: ToolOffer | None
) -> RequestOutput:
    """The output of a chat with reasoning and calls apart from the text of its answers.

    Args:
      params: of the request, before `AnswerFormat.params` changed them. offer: None for a request without tools.
    """
    if not answers.is_read(params, offer):
        return output
    read = []
    for one in output.outputs:
        reasoning, text, calls = answers.read(
            one.text, output.prompt_token_ids, one.seed, offer, params.skip_special_tokens
        )
        called = one.tool_calls if offer is None or not offer.is_read else calls
        read.append(replace(one, text=text, reasoning=reasoning or None, tool_calls=called))
    return replace(output, outputs=read)
