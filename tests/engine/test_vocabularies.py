"""A draft model with another tokenizer changes no answer, and what it has right is accepted."""

import json
from dataclasses import replace

import numpy as np
import pytest

import checkpoints_convert
from jaxinfer import LLM, SamplingParams
from jaxinfer.loading import load_draft_shapes, load_shapes
from jaxinfer.models import TokenMapConfig
from jaxinfer.speculative.vocabularies import MAX_PIECES, make_tables
from tests.engine.test_windows import check_idle
from tests.pallas_kernels.quick import quick
from tests.speculative.tiny_vocabularies import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    renumbered,
    tiny_model,
    tokens_of,
)

OPTIONS = {"max_seqs": 6, "max_model_len": 128, "page_size": 8, "prefill_chunk": 32, "steps_per_dispatch": 4}
NUM_DRAFTED = 3
PROMPTS = ["hello world, the quick", "user <think> 你好 fox", "the lazy dog\n\n over 12", "it's café: naïve 🎉 o'clock"]
KINDS = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5, "n": 2},
    {"temperature": 1.3, "top_p": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 1.0, "structured": {"regex": "[a-f]{2,5}( [0-9]{2}){1,6}"}},
    {"temperature": 0.8, "structured": {"choice": ["hello world", "the lazy dog", "o'clock"]}},
    {"temperature": 1.0, "stop": ["e", "the"], "min_tokens": 2},
)
PARAMS = [SamplingParams(max_tokens=6 + number, seed=number, **KINDS[number % len(KINDS)]) for number in range(16)]
PAIRS = {"byte level": "byte fallback", "byte fallback": "byte level"}
TOKENIZERS = {"byte level": byte_level_tokenizer, "byte fallback": byte_fallback_tokenizer}


def answers(llm: LLM) -> list[list[tuple]]:
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(PARAMS))]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    return [[(one.token_ids, one.finish_reason) for one in output.outputs] for output in outputs]


class Case:
    """A target, and a draft that has the target's weights under the tokens of another tokenizer."""

    def __init__(self, name: str):
        self.target, self.draft = (tokens_of(one, TOKENIZERS[one]()) for one in (name, PAIRS[name]))
        self.tables = make_tables(self.target, self.draft)
        self.model = tiny_model(self.target)
        self.drafting = {
            "draft": renumbered(self.model, self.tables, self.draft.tokenizer),
            "num_draft_tokens": NUM_DRAFTED,
        }

        self.described = f"drafts {self.tables.num_predicted} of {self.target.size} tokens of the model, through tables"

    def opened(self, **options) -> LLM:
        return LLM(self.model, **{**OPTIONS, **options})


@pytest.fixture(scope="module", params=quick(PAIRS, "byte level"))
def case(request) -> Case:
    return Case(request.param)


@pytest.fixture(scope="module")
def expected(case):
    with case.opened() as llm:
        return answers(llm)


def test_answers_are_those_of_plain_decoding(case, expected):
    """And with tokens that both have, of which the draft knows as much as the target, all drafts are accepted."""
    with case.opened(**case.drafting) as llm:
        assert answers(llm) == expected
        before = llm.speculation_stats()
        assert before.proposed > before.accepted > 30
        check_idle(llm)
        assert case.described in str(llm.explain())
        drafted = np.flatnonzero(case.tables.index < case.draft.size).tolist()
        common = [token for token in drafted if token not in case.target.tokenizer.special_ids]
        prompts = [common[number :: 7 + number][:20] for number in range(4)]
        params = [
            SamplingParams(
                temperature=number / 2, seed=number, max_tokens=17, allowed_token_ids=common, ignore_eos=True
            )
            for number in range(4)
        ]
        llm.generate(prompts, params, use_tqdm=False)
        stats = llm.speculation_stats()
        assert stats.accepted - before.accepted == stats.proposed - before.proposed > 0


@pytest.fixture
def folders(case, tmp_path) -> list[str]:
    """The target and the draft in files."""
    paths = []
    for name, model in {"target": case.model, "draft": case.drafting["draft"]}.items():
        config, params, tokenizer = model
        special = json.dumps(tokenizer._files.special_tokens)
        files = {"tokenizer.json": tokenizer._files.tokenizer_json, "tokenizer_config.json": special}
        checkpoints_convert.save_huggingface(config, params, tmp_path / name, "float32", extra_files=files)
        paths.append(str(tmp_path / name))
    return paths


def test_shapes_of_a_draft_in_files(case, folders):
    """A plan counts the tables; not where the tokens are the same, though one model has more rows."""
    target, draft = folders
    config, params = load_shapes(target)
    found = load_draft_shapes(draft, target, config, params, 128, "float32")
    ((own, shapes),) = found.own
    assert own.token_map == TokenMapConfig(case.target.size, MAX_PIECES, case.tables.first_token)
    assert found.describe_own()["tokens"] == case.described
    assert {name: shapes[name].shape for name in case.tables.arrays} == {
        name: table.shape for name, table in case.tables.arrays.items()
    }
    longer = replace(config, vocab_size=config.vocab_size + 1)
    ((own, _),) = load_draft_shapes(target, target, longer, params, 128, "float32").own
    assert own.token_map is None


VARIANTS = {
    "adaptive": {"num_draft_tokens": "auto"},
    "a tree": {"num_draft_tokens": "auto", "draft_tree": (2, 2)},
    "int8 pages": {"draft_kv_dtype": "int8", "prefill_chunk": 5},
    "deterministic": {"deterministic": True},
    "two devices": {"mesh": "model=2"},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(case, expected, variant):
    with case.opened(**{**case.drafting, **VARIANTS[variant]}) as llm:
        assert answers(llm) == expected
        # A draft as large as the model gains nothing: an adaptive engine may never try it.
        assert llm.speculation_stats().proposed > 0 or variant == "adaptive"
        check_idle(llm)


@pytest.mark.slow
def test_maximal(case, expected):
    """Greedy answers are those of plain decoding, the others differ."""
    with case.opened(**case.drafting, acceptance="maximal") as llm:
        found = answers(llm)
        assert llm.speculation_stats().accepted > 0
    is_greedy = [params.temperature == 0 for params in PARAMS]
    assert [one for one, greedy in zip(found, is_greedy, strict=True) if greedy] == [
        one for one, greedy in zip(expected, is_greedy, strict=True) if greedy
    ]
    assert found != expected
