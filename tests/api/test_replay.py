"""Answers made again from their coordinates, by engines of other shapes; and each token of a claim checked."""

import json
import random
from dataclasses import replace
from typing import Any

import jax
import pytest

from jaxinfer import LLM, ModelConfig, RopeConfig, SamplingParams, Tokenizer
from jaxinfer.api.coordinate import Coordinate, CoordinateError, Fingerprints, read_coordinates
from jaxinfer.api.replay import program_differences
from jaxinfer.engine.lockstep import CLASSES
from jaxinfer.engine.request import CompletionOutput, RequestOutput
from jaxinfer.models import init_params
from jaxinfer.parallel.wire import Codec
from tests.api.test_llm import train_tokenizer
from tests.engine.test_adapter_stress import RANK, make_adapter, shapes

OPTIONS = {"max_model_len": 128, "max_adapters": 2, "max_adapter_rank": RANK}
# Of answers, of an engine that repeats them, and of one that checks claims, and repeats answers too.
MADE: dict[str, Any] = {"max_seqs": 3, "page_size": 8, "prefill_chunk": 16, "draft": "ngram", "draft_lengths": (3,)}
AGAIN: dict[str, Any] = {"max_seqs": 5, "page_size": 16, "prefill_chunk": 48}
CHECKED: dict[str, Any] = {"max_seqs": 4, "page_size": 16, "draft": "claimed", "num_draft_tokens": 7}
PARAMS = [
    {"temperature": 0, "max_tokens": 20},
    {"temperature": 1.0, "seed": 5, "n": 2, "max_tokens": 12},
    {"temperature": 0.9, "top_p": 0.8, "max_tokens": 16},
    {"temperature": 1.2, "top_k": 7, "logprobs": 2, "max_tokens": 10},
    {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": 1.0, "presence_penalty": 0.5, "max_tokens": 20},
    {"temperature": 0, "repetition_penalty": 1.6, "max_tokens": 24},
    {"temperature": 1.0, "structured": {"regex": "[a-z]{3}( [a-z]{2,5}){1,6}"}, "max_tokens": 24},
    {"temperature": 0, "structured": {"json": {"type": "object", "properties": {"dog": {"type": "boolean"}}}}},
    {"temperature": 1.0, "logit_bias": {10: 4.0, 20: -50.0}, "bad_words": ["dog"], "max_tokens": 16},
    {"temperature": 1.0, "stop": ["o"], "min_tokens": 2, "max_tokens": 30},
    {"temperature": 0.8, "allowed_token_ids": [40, 41, 42, 43, 44, 0], "ignore_eos": True, "max_tokens": 12},
    {"temperature": 0, "max_tokens": None, "stop_token_ids": [7]},
    {"temperature": 1.0, "structured": {"grammar": 'start: "(" start ")" | /[a-z]{1,3}/'}, "max_tokens": 24},
]
PROMPTS = ["the quick brown fox", "the lazy dog, and", "jumps over", [5, 6, 7, 8, 9, 10]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    tokenizer = Tokenizer.from_dir(folder)
    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48,
        num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, rope=RopeConfig(rotary_dim=16),
        max_position_embeddings=128,
    )  # fmt: skip
    params = init_params(config, jax.random.key(1))
    return config, jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, params), tokenizer


def open_model(model, *, with_adapter: bool = True, **options: Any) -> LLM:
    llm = LLM(model, **OPTIONS, **options)
    if with_adapter:
        llm.load_adapter("one", make_adapter(1, shapes(llm)))
    return llm


def answers_of(llm: LLM, count: int, seed: int = 0) -> list[Coordinate]:
    """The coordinates of the answers to mixed requests, one after the other, through JSON."""
    rng = random.Random(seed)
    params = [SamplingParams.from_dict(PARAMS[number % len(PARAMS)]) for number in range(count)]
    prompts = [PROMPTS[number % len(PROMPTS)] if number < 12 else rng.choice(PROMPTS) for number in range(count)]
    adapters = ["one" if number % 3 == 1 else None for number in range(count)]
    outputs = llm.generate(prompts, params, adapter=adapters)
    made = [llm.coordinate(output, answer.index) for output in outputs for answer in output.outputs]
    return [Coordinate.from_dict(json.loads(json.dumps(coordinate.to_dict()))) for coordinate in made]


@pytest.fixture(scope="module")
def made(model) -> list[Coordinate]:
    with open_model(model, **MADE) as llm:
        return answers_of(llm, len(PARAMS))


@pytest.fixture(scope="module")
def checking(model):
    with open_model(model, **CHECKED) as llm:
        yield llm


def corrupted(coordinate: Coordinate, rng: random.Random, vocab_size: int) -> tuple[Coordinate, int]:
    """One bit of a token is another one; and its place."""
    tokens = list(coordinate.token_ids)
    position = rng.randrange(len(tokens))
    flipped = [tokens[position] ^ 1 << bit for bit in range(9)]
    tokens[position] = rng.choice([token for token in flipped if token < vocab_size])
    return replace(coordinate, token_ids=tuple(tokens)), position


def test_answers_are_made_again_by_another_engine(checking, made):
    checking.generate(["other pages first"] * 3)
    checks = checking.replay(list(reversed(made)))
    assert [check.is_equal for check in checks] == [True] * len(made)
    assert sum(check.num_checked for check in checks) == sum(len(coordinate.token_ids) for coordinate in made)
    assert {coordinate.finish_reason for coordinate in made} == {"stop", "length"}
    wrong, position = corrupted(made[0], random.Random(1), checking.config.vocab_size)
    difference = checking.replay([wrong])[0].difference
    assert difference is not None
    assert (difference.position, difference.claimed, difference.made) == (
        *(position, wrong.token_ids[position], made[0].token_ids[position]),
    )
    facts = program_differences(made[0].program, checking.coordinate(checking.generate("a")[0]).program)
    assert facts.keys() == {"page_size"}


@pytest.mark.slow
def test_any_range_of_a_claim_is_checked_in_few_passes(checking, made):
    rng = random.Random(2)
    before = checking.speculation_stats().accepted
    assert all(checking.verify_answer(coordinate).is_equal for coordinate in made)
    num_tokens = sum(len(coordinate.token_ids) for coordinate in made)
    assert checking.speculation_stats().accepted - before > num_tokens / 2
    for coordinate in made:
        start = rng.randrange(len(coordinate.token_ids))
        assert checking.verify_answer(coordinate, start).is_equal
        end = rng.randrange(start, len(coordinate.token_ids))
        assert checking.verify_answer(coordinate, start, end).num_checked == end - start
        wrong, position = corrupted(coordinate, rng, checking.config.vocab_size)
        check = checking.verify_answer(wrong)
        assert check.difference is not None
        assert check.difference.position == position
        assert checking.verify_answer(wrong, 0, position).is_equal


def test_tokens_before_a_range_are_taken_as_they_are(checking, made):
    plain, position = made[0], 5
    begun = [*plain.token_ids[:position], plain.token_ids[position] ^ 1]
    prompt, asked = [*plain.prompt_token_ids, *begun], SamplingParams(temperature=0, max_tokens=6)
    following = checking.generate(prompt, asked)[0].outputs[0].token_ids
    assert following != list(plain.token_ids[len(begun) :][:6])
    claim = replace(plain, token_ids=(*begun, *following), finish_reason=None)
    assert checking.verify_answer(claim, position + 1).num_checked == 6
    assert checking.verify_answer(claim).difference.position == position
    for kind in ("regex", "grammar"):
        coordinate = next(answer for answer in made if getattr(answer.params.structured, kind, None))
        refused = checking.tokenizer.encode("#", False)[0]
        claim = replace(coordinate, token_ids=(refused, *coordinate.token_ids[1:]))
        difference = checking.verify_answer(claim, 2).difference
        assert difference.position == 0
        assert difference.reason == f"the grammar refuses token {refused} at position 0 of the answer"


def test_an_end_is_checked_too(checking, made):
    ended = next(coordinate for coordinate in made if coordinate.params.stop)
    cut = replace(ended, token_ids=ended.token_ids[:-1])
    assert checking.verify_answer(cut).difference.reason == "the answer goes on"
    longer = replace(ended, token_ids=(*ended.token_ids, 5))
    assert checking.verify_answer(longer).difference.reason.startswith("the answer ends by stop 'o'")
    other = replace(ended, stop_reason="x")
    assert "is claimed to end by stop 'x'" in checking.verify_answer(other).difference.reason
    assert checking.verify_answer(replace(cut, finish_reason="abort")).is_equal
    assert checking.replay([replace(ended, token_ids=())])[0].difference.reason == "the answer goes on"


@pytest.mark.slow
def test_stop_strings_are_those_of_the_tokenizer_of_an_adapter(model, tmp_path):
    """Ids of its tokenizer have the texts of others."""
    train_tokenizer(tmp_path)
    own = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = own["model"]["vocab"]
    own["model"]["vocab"] = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    (tmp_path / "tokenizer.json").write_text(json.dumps(own))
    asked = SamplingParams(temperature=1.0, stop=["o"], max_tokens=40, ignore_eos=True)
    with open_model(model, **AGAIN) as llm:
        llm.adapters["one"].tokenizer = Tokenizer.from_dir(tmp_path)
        outputs = llm.generate([[5, 6, 7]] * 6, [replace(asked, seed=seed) for seed in range(6)], adapter="one")
        assert "stop" in {output.outputs[0].finish_reason for output in outputs}
        assert all(check.is_equal for check in llm.replay([llm.coordinate(output) for output in outputs]))


def test_what_cannot_be_made_again_is_refused_by_name(model, made):
    plain, adapted = made[0], next(coordinate for coordinate in made if coordinate.adapter)
    config, params, tokenizer = model
    other = (config, {**params, "final_norm": jax.tree.map(lambda leaf: leaf * 2, params["final_norm"])}, tokenizer)
    with open_model(other, with_adapter=False, **CHECKED) as llm:
        [weights, adapter] = llm.replay([plain, adapted])
        assert "weights '0' (" in weights.refused[0]
        assert f"adapter 'one' ({adapted.adapter.fingerprint[:12]}) is not loaded: none is" in adapter.refused[0]
        [forced] = llm.replay([plain], force=True)
        assert not forced.refused
        outside = replace(plain, token_ids=(10**6,))
        assert "token 1000000 of the answer is none" in llm.replay([outside])[0].refused[0]
        maximal = replace(plain, program={"acceptance": "maximal"}, params=replace(plain.params, temperature=1.0))
        assert "acceptance='maximal'" in llm.replay([maximal])[0].refused[0]
        with pytest.raises(ValueError, match="tokens 3 to 200 of an answer of"):
            llm.verify_answer(plain, 3, 200)


def test_spans_of_several_weights(model):
    """Tokens after an update are checked with those before as they are; on keys of weights before they are refused."""
    config, params, _ = model
    asked = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
    new = {**params, "final_norm": jax.tree.map(lambda leaf: leaf * 2, params["final_norm"])}
    made = []
    with open_model(model, with_adapter=False, **CHECKED) as llm:
        llm.fingerprint_of("0")
        for kv in ("recompute", "retain"):
            answers = llm.submit(llm.prepare("the quick brown fox", asked))
            while answers[0].num_output < 8:
                llm.step(2)
            llm.update_params(new if kv == "recompute" else params, version=kv, mode="keep", kv=kv)
            while not answers[0].is_finished:
                llm.step(2)
                llm.advance(answers[0])
            made.append(llm.coordinate(llm.collect(answers)))
    for coordinate in made:
        assert all(span.fingerprint for span in coordinate.weights)
    with open_model((config, new, model[2]), with_adapter=False, **CHECKED) as llm:
        [recomputed, retained] = llm.replay(made)
        start = made[0].weights[1].start
        assert recomputed.difference is None
        assert recomputed.num_checked == 24 - start
        assert recomputed.refused[0].startswith(f"tokens 0 to {start}: weights '0' (")
        assert llm.verify_answer(made[0], start).is_equal
        wrong = replace(made[0], token_ids=(*made[0].token_ids[:-1], made[0].token_ids[-1] ^ 1))
        assert (difference := llm.replay([wrong])[0].difference) is not None
        assert difference.position == 23
        assert "kv='retain'" in retained.refused[-1]


def test_a_weights_name_that_is_given_twice_names_none():
    values = iter(["a", "b", "c"])
    known = Fingerprints(lambda: next(values), "0")
    known.keep("0")
    known.keep("0")
    known.named("1")
    known.keep("1")
    assert (known.of("0"), known.of("1")) == ("a", "b")
    known.named("0")
    known.keep("0")
    assert (known.of("0"), known.of("2")) == (None, None)


def test_forms_of_files(made, tmp_path):
    [one, two] = made[:2]
    whole, rows, path = one.to_dict(), tmp_path / "rows.jsonl", tmp_path / "one.json"
    path.write_text(json.dumps(whole, indent=2))
    assert list(read_coordinates(path)) == [(str(path), one)]
    batch = {"custom_id": "a", "response": {"body": {"coordinates": [two.to_dict()]}}}
    lines = [{"coordinates": [whole, two.to_dict()]}, batch, {"outputs": []}, {**whole, "form": 2}]
    rows.write_text("\n".join(map(json.dumps, lines)) + "\n")
    read = dict(read_coordinates(rows))
    assert [read[f"{rows} line {place}"] for place in ("1, answer 1", "1, answer 2", "2", "3")] == [one, two, two, None]
    assert "reads form 1" in str(read[f"{rows} line 4"])
    for change, told in (({"more": 1}, "unknown 'more'"), ({"token_ids": "x"}, "damaged"), ({"params": []}, "damaged")):
        with pytest.raises(CoordinateError, match=told):
            Coordinate.from_dict({**whole, **change})
    with pytest.raises(CoordinateError, match="lacks its 'program'"):
        Coordinate.from_dict({name: value for name, value in whole.items() if name != "program"})
    rows.write_text("{\nx")
    with pytest.raises(CoordinateError, match="line 1 is not JSON"):
        list(read_coordinates(rows))


def test_outputs_that_were_sent_have_the_same_coordinate(checking):
    params = [SamplingParams.from_dict(PARAMS[number]) for number in (6, 8)]
    outputs = checking.generate(PROMPTS[:2], params, adapter="one")
    codec = Codec(CLASSES)
    for output in outputs:
        expected = checking.coordinate(output)
        assert checking.coordinate(codec.decode(codec.encode(output))) == expected


def test_outputs_of_elsewhere_have_no_coordinate(checking):
    output = RequestOutput("0", None, [1], [CompletionOutput(0, "", [5], 3, "stop")], True)
    with pytest.raises(ValueError, match="does not say"):
        checking.coordinate(output)
    with pytest.raises(ValueError, match="index=3"):
        checking.coordinate(output, 3)
    request = checking.prepare("the", SamplingParams(seed=4, n=2, max_tokens=3))
    assert checking.coordinate(request, 1).params.seed == request.row(1).seed


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_answers_and_every_corruption(model, checking):
    with open_model(model, **MADE) as llm:
        made = answers_of(llm, 470, seed=7)
    assert len(made) >= 500
    with open_model(model, **AGAIN) as llm:
        assert all(check.is_equal for check in llm.replay(made))
    rng, found = random.Random(8), 0
    for coordinate in rng.sample(made, 100):
        wrong, position = corrupted(coordinate, rng, checking.config.vocab_size)
        difference = checking.verify_answer(wrong, rng.randrange(position + 1)).difference
        found += difference is not None and difference.position == position
    assert found == 100
