"""The openai package against a server at sys.argv[1] whose model "tiny" has an adapter: its name is a model."""

import json
import sys

from openai import NotFoundError, OpenAI

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key=sys.argv[2], max_retries=0)
adapter = sys.argv[3]
models = {model.id: model for model in client.models.list()}
assert models[adapter].model_extra["parent"] == "tiny"
assert client.models.retrieve(adapter).id == adapter
asked = {"max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
found = {}
for name in ("tiny", adapter):
    answer = client.completions.create(model=name, prompt="def read_lines(path):", **asked)
    assert answer.model == name
    chunks = client.completions.create(model=name, prompt="def read_lines(path):", stream=True, **asked)
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    chat = client.chat.completions.create(model=name, messages=[{"role": "user", "content": "read a file"}], **asked)
    assert chat.model == name
    response = client.responses.create(model=name, input="read a file", temperature=0, max_output_tokens=8)
    assert response.model == name
    found[name] = [answer.choices[0].text, chat.choices[0].message.content, response.output_text]
code = None
try:
    client.completions.create(model=f"{adapter}-2", prompt="a")
except NotFoundError as error:
    code = error.code
assert code == "model_not_found"
print(json.dumps(found))
