"""The small engine as if its tokenizer had another chat template."""

import dataclasses
from importlib import resources

from jaxinfer.server.app import make_app
from jaxinfer.text import Tokenizer, read_tokenizer_files
from jaxinfer.tool_calls import AnswerFormat
from tests.server.asgi import Client
from tests.server.test_tools import Scripted


def tokenizer_of(template, **more):
    files = read_tokenizer_files(resources.files("jaxinfer") / "data" / "demo")
    return Tokenizer(dataclasses.replace(files, chat_templates={"default": template, **more}))


def use_template(monkeypatch, llm, template, **more):
    """`template`: a text, or a tokenizer that has its own."""
    tokenizer = template if isinstance(template, Tokenizer) else tokenizer_of(template, **more)
    for owner in (llm, llm.client):
        monkeypatch.setattr(owner, "tokenizer", tokenizer)
    monkeypatch.setattr(llm, "answer_format", AnswerFormat(tokenizer))


def client_of_template(monkeypatch, engine, make_service, template, take):
    """A client of a server of that template, which answers "yes" and gives each request to `take`."""
    use_template(monkeypatch, engine.llm, template)
    service = make_service()
    service.default._engine = scripted = Scripted(engine, "yes")
    submit = scripted.submit

    async def taking(request):
        take(request)
        return await submit(request)

    scripted.submit = taking
    return Client(make_app(service))
