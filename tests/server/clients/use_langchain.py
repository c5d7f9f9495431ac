"""langchain-openai against a server at sys.argv[1]: invoke, stream, batch, log-probabilities, the responses API."""

import asyncio
import sys

from langchain_openai import ChatOpenAI, OpenAI

URL = f"{sys.argv[1]}/v1"
MESSAGES = [("system", "Be short."), ("user", "read a file")]
options = {"base_url": URL, "api_key": "none", "model": "tiny", "max_retries": 0, "seed": 11, "max_tokens": 12}
chat, plain = ChatOpenAI(**options, stream_usage=True), OpenAI(**options)

answer = chat.invoke(MESSAGES)
assert answer.content
assert answer.usage_metadata["output_tokens"] <= 12
assert chat.invoke([*MESSAGES, answer, MESSAGES[1]]).content  # the second turn
chunks = list(chat.stream(MESSAGES))
assert "".join(one.content for one in chunks) == answer.content
assert (
    sum((one.usage_metadata or {}).get("output_tokens", 0) for one in chunks) == answer.usage_metadata["output_tokens"]
)
assert [one.content for one in chat.batch([MESSAGES, MESSAGES])] == [answer.content] * 2

text = plain.invoke("def read(path):")
assert text
assert "".join(plain.stream("def read(path):")) == text

scored = chat.bind(logprobs=True, top_logprobs=2).invoke(MESSAGES)
entries = scored.response_metadata["logprobs"]["content"]
assert len(entries) == scored.usage_metadata["output_tokens"]
assert all(len(entry["top_logprobs"]) == 2 for entry in entries)

ended = chat.bind(stop=[answer.content[3:6]]).invoke(MESSAGES)
assert (ended.response_metadata["finish_reason"], answer.content.startswith(ended.content)) == ("stop", True)

options.pop("seed")  # a model of the responses API takes it apart
new = ChatOpenAI(**options, use_responses_api=True, extra_body={"seed": 11})
assert new.invoke(MESSAGES).text == answer.content
assert "".join(one.text for one in new.stream(MESSAGES)) == answer.content
assert new.invoke([*MESSAGES, new.invoke(MESSAGES), MESSAGES[1]]).text
assert asyncio.run(chat.ainvoke(MESSAGES)).content == answer.content
