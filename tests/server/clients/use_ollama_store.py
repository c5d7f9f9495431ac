"""The ollama package against a server at sys.argv[1] that was started without a model: it pulls from a hub with the
repositories someone/calls and someone/tiny, lists, shows, copies, chats with tools, and deletes."""

import sys

from ollama import Client, ResponseError

MODEL, OTHER = "someone/calls", "someone/tiny"
ASK = [{"role": "user", "content": "What is 1 + 2?"}]
client = Client(host=sys.argv[1])


def status_of(call):
    try:
        call()
    except ResponseError as error:
        return error.status_code
    return 200


def names():
    return {entry.model for entry in client.list().models}


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
      a: one number.
      b: the other number.
    """
    return a + b


def pulls():
    assert status_of(lambda: client.chat(MODEL, ASK)) == 404
    assert status_of(lambda: client.pull("someone/nothing")) == 404
    assert status_of(lambda: list(client.pull("someone/nothing", stream=True))) == 404
    states = list(client.pull(MODEL, stream=True))
    assert states[0].status == "pulling manifest"
    assert states[-1].status == "success"
    counted = [state for state in states if state.total]
    assert [one.completed for one in counted] == sorted(one.completed for one in counted)
    assert counted[-1].completed == counted[-1].total > 0
    assert client.pull(OTHER).status == "success"
    assert client.pull("hf.co/" + OTHER).status == "success"  # here already
    assert {MODEL, OTHER} <= names()
    (entry,) = (one for one in client.list().models if one.model == MODEL)
    assert entry.size > 0
    assert entry.digest
    shown = client.show(MODEL)
    assert "tools" in shown.capabilities
    assert shown.modelinfo["LlamaForCausalLM.context_length"] == 512


def tools():
    options = {"temperature": 0, "num_predict": 40}
    first = client.chat(MODEL, ASK, tools=[add], options=options)
    (call,) = first.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", {"a": 1, "b": 2})
    assert (first.message.content or "") == ""
    parts = list(client.chat(MODEL, ASK, tools=[add], options=options, stream=True))
    calls = [one for part in parts for one in part.message.tool_calls or ()]
    assert calls == [call]
    assert parts[-1].done
    result = add(**call.function.arguments)
    turns = [*ASK, first.message, {"role": "tool", "tool_name": "add", "content": str(result)}]
    assert client.chat(MODEL, turns, tools=[add], options=options).message.content == "The sum is 3."


def copies():
    client.copy(MODEL, "adder")
    assert "adder" in names()
    assert status_of(lambda: client.copy("nothing", "b")) == 404
    assert client.chat("adder", ASK, options={"num_predict": 3}).done
    assert {one.model for one in client.ps().models} <= {MODEL, "adder"}
    assert status_of(lambda: client.delete(MODEL)) == 400  # the alias needs its files
    client.delete("adder")
    client.delete(MODEL)
    assert not {MODEL, "adder"} & names()
    assert OTHER in names()
    assert status_of(lambda: client.delete(MODEL)) == 404
    assert status_of(lambda: client.chat(MODEL, ASK)) == 404
    assert MODEL not in {one.model for one in client.ps().models}


pulls()
tools()
copies()
