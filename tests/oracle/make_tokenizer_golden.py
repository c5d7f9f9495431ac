"""Writes tests/oracle/golden/tokenizers.json: ids, texts and renderings of published tokenizers, by Transformers.

Needs transformers, tiktoken, and the tokenizers of `make tokenizers`; jaxinfer's encoding is not used. The ids of
Qwen3.5 are those of Transformers' own conversion of its ranks.
"""

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import transformers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.utils.chat_template_utils import _compile_jinja_template

from benchmarks.real.tokenizers import QWEN_PATTERN, QWEN_SPECIAL, TOKENIZERS, folder_of, unpacked
from tests.oracle.tokenizer_texts import CONTROL
from tests.real.chats import TAKES_TEXT, chats_of, undated, wanted_form
from tests.real.texts import TEXTS

PATH = Path(__file__).parent / "golden" / "tokenizers.json"


def converted(packages: Path) -> Any:
    """Qwen3.5's tokenizer by Transformers' conversion of tiktoken's ranks, with NFC as the package has it."""
    ranks = TOKENIZERS["qwen3.5"].ranks
    assert ranks is not None
    path = packages / "ranks.tiktoken"
    path.write_bytes(unpacked(ranks, packages / "packages"))
    made = TikTokenConverter(str(path), pattern=QWEN_PATTERN, extra_special_tokens=list(QWEN_SPECIAL)).converted()
    made.normalizer = transformers.convert_slow_tokenizer.normalizers.NFC()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def golden_of(name: str, packages: Path) -> dict[str, Any]:
    own = transformers.AutoTokenizer.from_pretrained(folder_of(name))
    tokenizer = converted(packages) if name == "qwen3.5" else own
    texts = [*TEXTS, *CONTROL]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    decoded = [own.decode(one, skip_special_tokens=True, clean_up_tokenization_spaces=False) for one in ids]
    renderings, digests = {}, {}
    for chat in chats_of(name):
        messages, tools, arguments = wanted_form(name, chat)
        if name in TAKES_TEXT:  # Transformers 5.24 leaves out what is None, and these templates ask for it
            template = _compile_jinja_template(own.chat_template)
            text = template.render(messages=messages, **own.special_tokens_map, **arguments)
        else:
            text = own.apply_chat_template(messages, tools=tools, tokenize=False, **arguments)
        renderings[chat] = undated(text)
        if renderings[chat] == text:
            found = own(text, add_special_tokens=False)["input_ids"]
            digests[chat] = hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]
    return {
        "ids": ids,
        "changed": {str(at): text for at, text in enumerate(decoded) if text != texts[at]},
        "renderings": renderings,
        "chat_ids": digests,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        golden = {name: golden_of(name, Path(folder)) for name in TOKENIZERS}
    text = json.dumps({"transformers": transformers.__version__, **golden}, indent=1, ensure_ascii=False)
    text = re.sub(r"\[[\d,\s]*\]", lambda match: re.sub(r"\s+", "", match[0]), text)  # a line for each text
    PATH.write_text(f"{text}\n", encoding="utf-8")
    print(f"{len(golden)} tokenizers, {PATH.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
