"""Folders of `LLM.save`, opened by Transformers as a model and a tokenizer: `make test-oracle`."""

import json
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer import LLM, SamplingParams
from tests.oracle import parity
from tests.oracle.cases import CASES, prompt_tokens

pytestmark = [pytest.mark.oracle, pytest.mark.optimized]
FAMILIES = ["llama", "qwen2", "qwen3", "gemma3", "phi3", "mixtral", "qwen3_moe", "gpt_neox"]
SEED = 2000
OPTIONS: Any = {"max_seqs": 1, "max_model_len": 64}


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_opens_it(reference, name, tmp_path):
    """Logits of the model that was saved, and texts and conversations as the same tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    case = CASES[name]
    model = reference.build(case, case.ties[0], SEED)
    model.save_pretrained(tmp_path / "source")
    tokens = prompt_tokens(SEED)[:32]
    with LLM(str(tmp_path / "source"), tokenizer=str(bytes_tokenizer(tmp_path / "tokenizer")), **OPTIONS) as llm:
        ours = llm.generate([tokens.tolist()], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        llm.save(tmp_path / "out")
        text = "def f(x):\n    return 'é'"
        ids, chat = llm.get_tokenizer().encode(text), llm.chat_prompt([{"role": "user", "content": text}])
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    wanted, _ = reference.states(model, tokens)
    found, _ = reference.states(opened, tokens)
    assert parity.max_error(found, wanted) <= parity.TOLERANCE
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(text).input_ids == ids
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    assert list(rendered["input_ids"]) == chat
    with LLM(str(tmp_path / "out"), **OPTIONS) as llm:
        again = llm.generate([tokens.tolist()], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert again[0].outputs[0].token_ids == ours[0].outputs[0].token_ids


def test_transformers_generates_with_the_saved_generation_config(reference, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    with LLM("demo", **OPTIONS) as llm:
        ids = llm.get_tokenizer().encode("def read_lines(path):")
        wanted = (
            llm.generate([ids], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)[0].outputs[0].token_ids
        )
        llm.save(tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id is not None
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    greedy = {"do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": 16}
    found = model.generate(torch.tensor([ids]), **greedy)[0, len(ids) :].tolist()
    np.testing.assert_array_equal(found, wanted)


def bytes_tokenizer(folder):
    """A token for each byte, as many as the tiny models have, and a chat template."""
    folder.mkdir()
    backend = tokenizers.Tokenizer(
        models.BPE({char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "chat_template.jinja").write_text(
        "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
    )
    return folder
