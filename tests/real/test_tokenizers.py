"""Seven published tokenizers: ids, texts and renderings are those of Transformers (make_tokenizer_golden.py)."""

import hashlib
import json
from pathlib import Path

import pytest

from benchmarks.real.tokenizers import TOKENIZERS, folder_of, is_there, missing
from jaxinfer.text import Tokenizer
from tests.oracle.tokenizer_texts import CONTROL
from tests.real.chats import chats_of, undated, wanted_form
from tests.real.texts import TEXTS

pytestmark = pytest.mark.real
GOLDEN = json.loads((Path(__file__).parents[1] / "oracle" / "golden" / "tokenizers.json").read_text(encoding="utf-8"))
ALL_TEXTS = [*TEXTS, *CONTROL]


def opened(name):
    """A tokenizer of `make tokenizers`, which must be there unless it cannot be fetched."""
    if not is_there(name):
        if (reason := missing()) is not None:
            pytest.skip(f"the tokenizer of {name} is not here: {reason}")
        pytest.fail(f"--real needs the tokenizer of {name}: make tokenizers", pytrace=False)
    return Tokenizer.from_dir(folder_of(name))


@pytest.fixture(scope="module", params=TOKENIZERS)
def published(request):
    """The name of a tokenizer, itself, and what Transformers makes with it."""
    return request.param, opened(request.param), GOLDEN[request.param]


def test_ids(published):
    _, tokenizer, golden = published
    assert len(golden["ids"]) == len(ALL_TEXTS)
    wrong = {
        text: (found, ids)
        for text, ids in zip(ALL_TEXTS, golden["ids"], strict=True)
        if (found := tokenizer.encode(text)) != ids
    }
    assert wrong == {}


def test_texts(published):
    _, tokenizer, golden = published
    found = {str(at): text for at, ids in enumerate(golden["ids"]) if (text := tokenizer.decode(ids)) != ALL_TEXTS[at]}
    assert found == golden["changed"]


def test_renderings(published):
    name, tokenizer, golden = published
    assert golden["renderings"].keys() == set(chats_of(name))
    for chat, text in golden["renderings"].items():
        messages, tools, arguments = wanted_form(name, chat)
        assert undated(tokenizer.render_chat(messages, tools=tools, **arguments)) == text, chat


def test_ids_of_chats(published):
    name, tokenizer, golden = published
    for chat, digest in golden["chat_ids"].items():
        messages, tools, arguments = wanted_form(name, chat)
        ids = tokenizer.apply_chat_template(messages, tools=tools, **arguments)
        assert hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16] == digest, chat
