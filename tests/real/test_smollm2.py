"""SmolLM2-135M-Instruct, Q4_1 with a tied head of Q8_0, with default options: loss, answers, streams, chat, JSON."""

import json

import pytest

from jaxinfer import SamplingParams
from tests.real.requests import ANSWER, NEEDLE_ANSWER, NEEDLE_TOKENS, QUESTION, greedy, needle_prompt, opened, texts
from tests.real.texts import HELD_OUT

pytestmark = [pytest.mark.real, pytest.mark.optimized]
END_OF_TURN = 2  # <|im_end|>


@pytest.fixture(scope="module")
def llm(model_path):
    with opened(model_path("smollm2")) as llm:
        yield llm


def test_the_loss_is_that_of_llama_cpp(llm, golden):
    """Within 0.03 nats: llama.cpp rounds activations to 8 bits. One layer less would cost tenths of nats."""
    first, *rest = llm.tokenizer.encode(HELD_OUT)
    score = llm.score([[first]], [rest], use_tqdm=False)[0]
    assert -score.raw_total / len(rest) == pytest.approx(golden["smollm2"]["loss"], abs=0.03)


def test_a_saved_model_chats_alike_and_finds_the_text_as_probable(llm, tmp_path):
    """Q4_1 has minima that the files of quantized weights cannot have: they are written as floating-point ones."""
    llm.save(tmp_path / "saved", dequantize=True)
    (score,) = llm.score(HELD_OUT, use_tqdm=False)
    with opened(tmp_path / "saved") as again:
        assert texts(again, [again.chat_prompt(QUESTION)], greedy(32)) == [ANSWER]
        (found,) = again.score(HELD_OUT, use_tqdm=False)
    assert found.token_ids == score.token_ids
    assert found.loss == pytest.approx(score.loss, abs=1e-3)


def test_a_chat_is_answered_and_ends_at_the_end_of_its_turn(llm):
    (output,) = llm.chat(QUESTION, greedy(32), use_tqdm=False)
    answer = output.outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (ANSWER, "stop", END_OF_TURN)


def test_the_tokens_of_a_chat_are_those_of_its_template(llm):
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{QUESTION[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert llm.chat_prompt(QUESTION) == llm.tokenizer.encode(text)


def test_what_a_user_writes_is_no_control_token(llm):
    prompt = llm.chat_prompt([{"role": "user", "content": "<|im_end|>"}])
    assert prompt.count(END_OF_TURN) == 2  # after the system's message and the user's


def test_a_number_is_found_in_a_long_prompt(llm):
    prompts = [needle_prompt(place) for place in (0, 7, 13)]
    assert texts(llm, prompts, greedy(NEEDLE_TOKENS)) == [NEEDLE_ANSWER] * 3


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 7}])
def test_a_stream_has_the_text_of_an_answer(llm, settings):
    params = SamplingParams(max_tokens=12, **settings)
    prompt = llm.chat_prompt([{"role": "user", "content": "Write a line about the sea 🌊."}])
    deltas = list(llm.stream(prompt, params))
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert len(deltas) > 1
    assert "".join(delta.text for delta in deltas) == output.outputs[0].text
    assert [token for delta in deltas for token in delta.token_ids] == output.outputs[0].token_ids


def test_answers_do_not_depend_on_what_runs_beside(llm):
    prompts = ["Once upon a time", needle_prompt(3), "The sea", "def main():"]
    params = [SamplingParams(temperature=0.9, seed=seed, max_tokens=10) for seed in range(4)]
    together = llm.generate(prompts, params, use_tqdm=False)
    (alone,) = llm.generate(prompts[2:3], params[2:3], use_tqdm=False)
    assert alone.outputs[0].token_ids == together[2].outputs[0].token_ids
    assert alone.outputs[0].token_ids != together[0].outputs[0].token_ids


def test_an_answer_matches_a_schema(llm):
    """Of a model that does not do it by itself."""
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 20}, "is_in_europe": {"type": "boolean"}},
        "required": ["capital", "is_in_europe"],
        "additionalProperties": False,
    }
    (output,) = llm.chat(QUESTION, greedy(48, structured={"json": schema}), use_tqdm=False)
    found = json.loads(output.outputs[0].text)
    assert output.outputs[0].finish_reason == "stop"
    assert list(found) == ["capital", "is_in_europe"]
    assert found["is_in_europe"] in (True, False)
    assert "Paris" in found["capital"]
