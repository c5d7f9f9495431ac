"""litellm against a server at sys.argv[1], by its OpenAI and its Anthropic provider."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it looks for prices on the network

import litellm

MESSAGES = [{"role": "user", "content": "read a file"}]
SAMPLING = {"messages": MESSAGES, "max_tokens": 12, "api_key": "none", "num_retries": 0}

options = {**SAMPLING, "model": "openai/tiny", "api_base": f"{sys.argv[1]}/v1", "seed": 11}
answer = litellm.completion(**options)
assert answer.choices[0].message.content
assert answer.usage.completion_tokens <= 12
again = [*MESSAGES, answer.choices[0].message, *MESSAGES]  # with every field that the package adds
assert litellm.completion(**{**options, "messages": again}).choices[0].message.content
chunks = litellm.completion(**options, stream=True)
assert "".join(one.choices[0].delta.content or "" for one in chunks) == answer.choices[0].message.content

options = {**SAMPLING, "model": "anthropic/tiny", "api_base": sys.argv[1], "temperature": 0}
answer = litellm.completion(**options)
assert answer.choices[0].message.content
again = [*MESSAGES, answer.choices[0].message, *MESSAGES]  # with every field that the package adds
assert litellm.completion(**{**options, "messages": again}).choices[0].message.content
chunks = litellm.completion(**options, stream=True)
assert "".join(one.choices[0].delta.content or "" for one in chunks) == answer.choices[0].message.content

options = {"model": "text-completion-openai/tiny", "api_base": f"{sys.argv[1]}/v1", "api_key": "none"}
answer = litellm.text_completion(**options, prompt="def read(path):", max_tokens=12, seed=11)
assert answer.choices[0].text
assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

options = {"model": "openai/tiny", "api_base": f"{sys.argv[1]}/v1", "api_key": "none"}
try:
    litellm.completion(**options, messages=MESSAGES, max_tokens=-1)
except litellm.BadRequestError as error:
    assert "max_tokens" in str(error)  # noqa: PT017
else:
    raise AssertionError("a wrong limit was taken")
