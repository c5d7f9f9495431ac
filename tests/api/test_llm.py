"""The door: prompts in, answers out, and what is refused."""

import contextlib
import io
import subprocess
import sys
import textwrap
from dataclasses import replace

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxinfer import LLM, ModelConfig, RopeConfig, SamplingParams, Tokenizer, progress
from jaxinfer.engine.request import Logprob
from jaxinfer.models import init_params
from jaxinfer.openai.writer import token_entry

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps. " * 4


def train_tokenizer(folder, vocab_size=300) -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<eos>", "<user>", "<bot>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<user>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_dir(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model(tokenizer):
    import jax

    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48,
        num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, rope=RopeConfig(rotary_dim=16),
        max_position_embeddings=128,
    )  # fmt: skip
    params = init_params(config, jax.random.key(1))
    return config, jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, params), tokenizer


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, max_seqs=4, prefill_chunk=28) as llm:
        yield llm


@pytest.mark.slow
def test_text_is_the_decoded_tokens(llm, tokenizer):
    output = llm.generate("the quick", SamplingParams(max_tokens=30, seed=1))[0]
    assert output.prompt == "the quick"
    assert output.prompt_token_ids == tokenizer.encode("the quick")
    assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids)
    assert output.timings.total_time >= output.timings.time_to_first_token > 0


def test_a_script_shows_nothing_in_a_file(model, llm, monkeypatch):
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.001)
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.001)
    monkeypatch.delenv("JAXINFER_PROGRESS", raising=False)

    def shown(**options):
        with contextlib.redirect_stderr(io.StringIO()) as log, LLM(model, max_seqs=4, prefill_chunk=28) as own:
            llm.generate(["a", "b", "c"], SamplingParams(max_tokens=20), **options)
            own.explain()
        return log.getvalue()

    assert shown() == ""
    assert "generating: " in shown(use_tqdm=True)


def test_streamed_text_is_the_generated_text(llm):
    params = SamplingParams(max_tokens=40, seed=2, stop=["e"], min_tokens=5)
    whole = llm.generate("lazy", params)[0].outputs[0]
    deltas = list(llm.stream("lazy", params))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert (deltas[-1].finish_reason, deltas[-1].output.outputs[0].text) == (whole.finish_reason, whole.text)


def test_nothing_after_a_stop_string_is_emitted(llm):
    free = llm.generate("dog", SamplingParams(max_tokens=60, seed=3))[0].outputs[0]
    stop = free.text[len(free.text) // 2 :][:3]
    end = free.text.index(stop)
    cut = llm.generate("dog", SamplingParams(max_tokens=60, seed=3, stop=[stop]))[0].outputs[0]
    kept = llm.generate("dog", SamplingParams(max_tokens=60, seed=3, stop=stop, include_stop_str_in_output=True))
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (free.text[:end], "stop", stop)
    assert kept[0].outputs[0].text == free.text[: end + len(stop)]
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < len(free.token_ids)


def test_end_of_sequence_ends_unless_ignored(model):
    tokenizer = model[2]
    free = SamplingParams(max_tokens=30, seed=4)
    with LLM(model, max_seqs=4, prefill_chunk=28) as llm:
        tokens = llm.generate([5, 6], free)[0].outputs[0].token_ids
        llm.client.eos_token_ids = (tokens[10],)
        first = tokens.index(tokens[10])
        stopped = llm.generate([5, 6], free)[0].outputs[0]
        ignored = llm.generate([5, 6], SamplingParams(max_tokens=30, seed=4, ignore_eos=True))[0].outputs[0]
    assert (stopped.token_ids, stopped.finish_reason) == (tokens[: first + 1], "stop")
    assert stopped.stop_reason == tokens[10]
    assert stopped.text == tokenizer.decode(tokens[:first])
    assert ignored.token_ids == tokens


def test_names_of_other_engines_give_the_same_answers(model, llm):
    params = SamplingParams(max_tokens=6, temperature=0)
    expected = llm.generate("the dog", params)
    same = llm.generate(prompt="the dog", sampling_params=SamplingParams(max_new_tokens=6, temp=0))
    assert same[0].outputs == expected[0].outputs
    deltas = list(llm.stream("the dog", sampling_params=params))
    assert deltas[-1].output.outputs == expected[0].outputs
    options = {"max_num_seqs": 4, "prefill_step_size": 28, "gpu_memory_utilization": 0.5, "enforce_eager": False}
    with LLM(model, kv_cache_dtype="fp8", dtype="auto", **options) as other:
        spec = other.engine.spec
        assert (spec.max_seqs, spec.prefill_chunk, spec.options.memory_fraction) == (4, 28, 0.5)
        assert spec.options.kv_dtype == "fp8_e4m3"


def test_a_model_shows_what_it_is(model):
    llm = LLM(model, max_seqs=4, prefill_chunk=28)
    for words in ("LlamaForCausalLM", "dtype=float32", "max_model_len=128", "max_seqs=4", "cache of 512 tokens", "cpu"):
        assert words in repr(llm)
    assert llm.get_tokenizer() is llm.tokenizer
    llm.close()
    assert "closed" in repr(llm)
    with LLM(model[:2], max_seqs=4, prefill_chunk=28) as bare, pytest.raises(ValueError, match="needs a tokenizer"):
        bare.get_tokenizer()


def test_a_request_may_have_256_answers(llm):
    """Those of the same number are the same for any n."""
    few = llm.generate("the dog", SamplingParams(n=3, max_tokens=2, seed=5))[0].outputs
    many = llm.generate("the dog", SamplingParams(n=256, max_tokens=2, seed=5))[0].outputs
    assert [one.index for one in many] == list(range(256))
    assert [one.token_ids for one in many[:3]] == [one.token_ids for one in few]
    assert len({one.seed for one in many}) == 256


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda llm: llm.generate(None), TypeError, "prompts must be a text or a list of token ids"),
        (lambda llm: llm.generate("a", {"n": 2}), TypeError, "params must be SamplingParams, got dict"),
        (lambda llm: llm.generate("a", max_tokens=4), TypeError, "it belongs to SamplingParams"),
        (lambda llm: llm.generate("a", taps="layers.0.residual"), TypeError, "taps must be a list of names"),
        (lambda llm: llm.chat("hi"), TypeError, "chat takes messages"),
        (lambda llm: llm.stream(["a", "b"]), TypeError, "the prompt must be a text or a list of token ids, got list"),
        (lambda llm: llm.stream("a", "b"), TypeError, "the prompt: params must be SamplingParams, got str 'b'"),
        (lambda llm: next(llm.generate_each(["ab"])), TypeError, "request 0 must be"),
        (lambda llm: llm.generate_each([], max_queued="4"), TypeError, "max_queued must be a positive integer"),
        (lambda llm: llm.score(["a", "b"], ["c"]), ValueError, "2 prompts and 1 continuations do not pair up"),
        (lambda llm: llm.score("a", "b", 5), TypeError, "params must be SamplingParams, got int 5"),
        (lambda llm: LLM(), TypeError, "LLM takes one model"),
    ],
)
def test_wrong_calls_raise_sentences(llm, call, error, message):
    with pytest.raises(error, match=message):
        call(llm)


# For every field a value that must change the result, and how the result shows it.
BASE = {"max_tokens": 24, "seed": 6}
EFFECTS = {
    "n": {"n": 2},
    "temperature": {"temperature": 0},
    "top_p": {"top_p": 0.2},
    "top_k": {"top_k": 2},
    "min_p": {"min_p": 0.6},
    "seed": {"seed": 7},
    "stop": {"stop": ["a", "e", "o", " ", "t"]},
    "stop_token_ids": {"stop_token_ids": "second token"},
    "ignore_eos": {"ignore_eos": True},
    "max_tokens": {"max_tokens": 3},
    "min_tokens": {"min_tokens": 20},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 8.0},
    "logit_bias": {"logit_bias": {9: 100.0}},
    "allowed_token_ids": {"allowed_token_ids": [10, 11]},
    "bad_words": {"bad_words": "first word"},
    "skip_special_tokens": {"skip_special_tokens": False, "logit_bias": {1: 100.0}},
    "include_stop_str_in_output": {"include_stop_str_in_output": True, "stop": ["a", "e", "o", " ", "t"]},
    "structured": {"structured": {"regex": "[a-z]{3}"}},
}
BESIDE = {
    "repetition_penalty": {"temperature": 0, "max_tokens": 60},
    "ignore_eos": {"max_tokens": 60},
    "min_tokens": {"stop_token_ids": "second token"},
    "skip_special_tokens": {"logit_bias": {1: 100.0}},
    "include_stop_str_in_output": {"stop": ["a", "e", "o", " ", "t"]},
}


@pytest.mark.matrix
@pytest.mark.parametrize("field", SamplingParams.__dataclass_fields__)
def test_every_field_changes_the_result(model, tokenizer, field):
    """A field without an entry in EFFECTS fails here: it would be a parameter that nobody applies."""
    with LLM(model, max_seqs=4, prefill_chunk=28) as llm:
        free = llm.generate("the dog", SamplingParams(**BASE))[0].outputs[0]
        if field == "ignore_eos":
            llm.client.eos_token_ids = (free.token_ids[5],)
        if field == "structured":
            llm.client.eos_token_ids = (1,)

        def resolve(values):
            values = dict(values)
            if values.get("stop_token_ids") == "second token":
                values["stop_token_ids"] = [free.token_ids[1]]
            if values.get("bad_words") == "first word":
                values["bad_words"] = [tokenizer.decode([free.token_ids[0]])]
            return values

        def show(values):
            output = llm.generate("the dog", SamplingParams(**{**BASE, **resolve(values)}))[0]
            answers = [(one.text, one.token_ids, one.finish_reason, one.logprobs) for one in output.outputs]
            return answers, output.prompt_logprobs

        before = show(BESIDE.get(field, {}))
        assert before == show(BESIDE.get(field, {}))
        assert before != show({**BESIDE.get(field, {}), **EFFECTS[field]})


def test_logprobs_are_the_scores_of_the_same_tokens(llm):
    params = SamplingParams(max_tokens=12, seed=8, logprobs=3, prompt_logprobs=2, temperature=0.7, top_k=20)
    output = llm.generate("brown fox", params)[0]
    answer = output.outputs[0]
    raw = [entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    score = llm.score([output.prompt_token_ids], [answer.token_ids], params)[0]
    np.testing.assert_allclose(score.raw, raw, atol=1e-4)
    np.testing.assert_allclose(sum(raw), answer.cumulative_logprob, rtol=1e-6)
    assert all(np.isfinite(score.processed))  # what was sampled was possible
    assert score.processed != score.raw
    assert all(len(entry) in (3, 4) for entry in answer.logprobs)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert next(iter(answer.logprobs[0].values())).decoded_token is not None


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("options", [{}, {"cache": "contiguous"}, {"draft": "ngram"}], ids=repr)
def test_a_score_needs_no_room_for_a_token(model, options):
    """Nothing is made after the last token, so that a pair may be as long as the model takes."""
    ids = [5 + number % 90 for number in range(65)]
    with LLM(model, max_seqs=1, max_model_len=64, **options) as short, LLM(model, max_seqs=1, max_model_len=96) as llm:
        expected = llm.score([ids[:32]], [ids[32:64]])[0]
        np.testing.assert_allclose(short.score([ids[:32]], [ids[32:64]])[0].raw, expected.raw, atol=1e-4)
        for call, message in (
            (lambda: short.score([ids[:32]], [ids[32:]]), "pair 0: 65 tokens are too many: max_model_len=64"),
            (
                lambda: short.generate([ids[:64]], SamplingParams(max_tokens=None)),
                "prompt 0: 64 tokens are too many and leave no room for an answer: max_model_len=64",
            ),
        ):
            with pytest.raises(ValueError, match=message) as error:
                call()
            assert "max_tokens" not in str(error.value)


def test_bytes_of_tokens_join_to_those_of_the_text(llm, tokenizer):
    output = llm.generate("a 😀 é\n", SamplingParams(max_tokens=1, prompt_logprobs=1))[0]
    own = [entry[token] for entry, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)]
    first = tokenizer.token_bytes(output.prompt_token_ids[0]) or b""
    assert (first + b"".join(one.token_bytes or b"" for one in own)).decode() == "a 😀 é\n"
    assert any("�" in one.decoded_token for one in own)  # a part of a character
    special = next(iter(tokenizer.special_ids))
    assert tokenizer.token_bytes(special) is None
    assert tokenizer.token_bytes(special, skip_special_tokens=False) == tokenizer.id_to_token(special).encode()
    entry = token_entry({7: Logprob(-1.0, 1, "�", b"\xf0\x9f")}, 1)
    assert (entry.bytes, entry.top_logprobs[0].bytes) == ([240, 159], [240, 159])


def test_score_says_what_the_parameters_forbid(llm):
    score = llm.score([[5, 6, 7]], [[8, 9]], SamplingParams(allowed_token_ids=[8]))[0]
    assert score.processed == [0.0, -np.inf]
    assert len(score.raw) == 2


def test_chat_renders_the_template_and_content_cannot_forge_a_token(llm, tokenizer):
    ids = llm.chat_prompt([{"role": "user", "content": "hi <bot> there"}])
    bot = tokenizer.token_to_id("<bot>")
    assert ids.count(bot) == 1
    assert ids[-1] == bot
    outputs = llm.chat([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]], SamplingParams(seed=0))
    assert len(outputs) == 2


def test_taps_return_hidden_states_of_prompt_and_answer(llm):
    output = llm.generate([3, 4, 5], SamplingParams(max_tokens=6, seed=0), taps=["embed", "layers.1.residual"])[0]
    assert {name: value.shape for name, value in output.taps.items()} == {
        "embed": (9, 32),
        "layers.1.residual": (9, 32),
    }


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda llm: llm.generate(""), ValueError, "prompt 0 is empty"),
        (lambda llm: llm.generate([[1], []]), ValueError, "prompt 1 is empty"),
        (lambda llm: llm.generate([1] * 500), ValueError, r"500 prompt tokens .* 516, but max_model_len=128"),
        (lambda llm: llm.generate([1], SamplingParams(max_tokens=128)), ValueError, "make 129, but max_model_len=128"),
        (lambda llm: llm.generate([99999]), ValueError, r"token id 99999 is outside the vocabulary of \d+"),
        (lambda llm: llm.generate([-1]), ValueError, "token id -1 is outside"),
        (lambda llm: llm.generate([[1], [2, True]]), ValueError, "prompt 1: the prompt has True at position 1"),
        (lambda llm: llm.generate([1.0]), ValueError, "prompt 0: the prompt has 1.0 at position 0, which is no token"),
        (lambda llm: llm.score([[1]], [[np.float32(2)]]), ValueError, r"continuation of pair 0: .*2.0\) at position 0"),
        (lambda llm: list(llm.stream([True])), ValueError, "the prompt: the prompt has True at position 0"),
        (lambda llm: llm.generate("the " * 10**6), ValueError, "prompt 0: 4000000 bytes of text .* max_model_len=128"),
        (lambda llm: llm.score("the", "the " * 10**6), ValueError, "continuation of pair 0: 4000000 bytes of text"),
        (
            lambda llm: llm.chat([{"role": "user", "content": "the " * 10**6}]),
            ValueError,
            r"messages: 40000\d\d bytes of text",
        ),
        (lambda llm: llm.generate([[1], [2]], [SamplingParams()]), ValueError, "1 sampling parameters for 2 prompts"),
        (lambda llm: llm.generate([1], {"temperature": 0}), TypeError, "params must be SamplingParams, got dict"),
        (lambda llm: llm.generate([1], SamplingParams(stop_token_ids=[9999])), ValueError, "token id 9999"),
        (lambda llm: llm.generate([1], taps=["layers.9.residual"]), ValueError, "did you mean 'layers.1.residual'"),
        (lambda llm: llm.score([[1]], [[]]), ValueError, "pair 0: 1 prompt and 0 continuation tokens"),
        (lambda llm: SamplingParams(temperature=-1), ValueError, "temperature"),
        (lambda llm: LLM("no/such/folder/here"), (ValueError, OSError), "no/such/folder/here"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_numbers(llm, call, error, message):
    with pytest.raises(error, match=message):
        call(llm)


def test_a_bad_prompt_among_good_ones_starts_nothing(llm):
    with pytest.raises(ValueError, match="prompt 2"):
        llm.generate([[1], [2], [3] * 300])
    assert not llm.engine.has_work


def test_unknown_arguments_are_refused_with_the_nearest_name(model):
    with pytest.raises(TypeError, match="'max_model_length': did you mean 'max_model_len'"):
        LLM(model, max_model_length=5)
    with pytest.raises(ValueError, match="cache='rings' is neither"):
        LLM(model, cache="rings")
    with pytest.raises(ValueError, match="page_size=64 is for cache='paged' only"):
        LLM(model, cache="contiguous", page_size=64)
    with pytest.raises(ValueError, match="more than the 128 tokens"):
        LLM(model, max_model_len=4096)


def test_live_parameters_that_do_not_fit_are_refused(model):
    config, params, _ = model
    wrong = {**params, "final_norm": {"weight": params["final_norm"]["weight"][:-1]}}
    with pytest.raises(ValueError, match=r"final_norm.*\(31,\).*\(32,\)"):
        LLM((config, wrong))
    with pytest.raises(TypeError, match="ModelConfig"):
        LLM((params, config))


def test_a_model_without_tokenizer_works_on_ids(model):
    with LLM(model[:2], max_seqs=4, prefill_chunk=28) as llm:
        answer = llm.generate([1, 2], SamplingParams(max_tokens=3, temperature=0))[0].outputs[0]
        assert len(answer.token_ids) == 3
        assert answer.text == ""
        with pytest.raises(ValueError, match="needs a tokenizer"):
            llm.generate("text")
        with pytest.raises(ValueError, match="stop strings need a tokenizer"):
            llm.generate([1], SamplingParams(stop=["x"]))


def test_rows_beyond_the_tokenizer_have_no_text(model, tmp_path):
    """Vocabularies are often padded: the model has more rows than the tokenizer has tokens."""
    config, params, _ = model
    tokenizer = train_tokenizer(tmp_path, vocab_size=280)
    beyond = config.vocab_size - 1
    assert not tokenizer.has_id(beyond)
    with LLM((config, params, tokenizer), max_seqs=4) as llm:
        params = SamplingParams(allowed_token_ids=[beyond], max_tokens=3, logprobs=1, prompt_logprobs=1, seed=0)
        output = llm.generate([1, beyond], params)[0]
    assert (output.outputs[0].token_ids, output.outputs[0].text) == ([beyond] * 3, "")
    assert output.prompt_logprobs[1][beyond].decoded_token is None


def test_a_failing_pair_leaves_nothing_behind(model):
    with LLM(model, max_seqs=2, num_pages=4) as llm:
        with pytest.raises(ValueError, match="pair 1: "):
            llm.score([[1], [2]], [[3], [4] * 60])
        assert not llm.engine.has_work


@pytest.mark.slow
def test_a_contiguous_cache_honours_what_a_paged_one_does(model):
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    with LLM(model, max_seqs=1, cache="contiguous", draft="ngram") as llm:
        plain, _ = llm.generate([[1], [2]], params, priority=[1, 0], cache_salt="a")
        late = llm.generate([1], params, timeout=1e-9)[0].outputs[0]
    assert [len(plain.outputs[0].token_ids), late.finish_reason] == [9, "abort"]


def test_a_stream_may_be_closed_after_the_model(model):
    llm = LLM(model, max_seqs=4, prefill_chunk=28)
    stream = llm.stream([1], SamplingParams(max_tokens=9, temperature=0))
    next(stream)
    llm.close()
    stream.close()


def test_explain_says_what_was_allocated(llm):
    facts = llm.explain().to_dict()
    num_pages = 4 * 128 // 16 + 1
    assert facts["cache"]["pages"] == num_pages
    assert facts["cache"]["bytes"] == num_pages * 16 * 2 * 1 * 16 * 2 * 4
    assert facts["model"]["dtype"] == "float32"
    assert "xla" in str(llm.explain())


@pytest.mark.slow
def test_import_is_fast_offline_and_without_torch():
    code = """
        import socket, sys, time
        def refuse(*args, **kwargs): raise AssertionError("network")
        socket.socket.connect = refuse
        socket.getaddrinfo = refuse
        start = time.perf_counter()
        import jaxinfer
        assert time.perf_counter() - start < 1
        assert "jax" not in sys.modules
        jaxinfer.LLM, jaxinfer.SamplingParams, jaxinfer.ModelConfig
        for name in ("torch", "transformers", "tensorflow"):
            assert name not in sys.modules, name
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


class TestDrafts:
    """What may draft, and what is refused with a reason."""

    def test_other_tokens_are_refused(self, model):
        config = model[0]
        other = replace(config, vocab_size=config.vocab_size + 1)
        with pytest.raises(ValueError, match=f"{config.vocab_size} tokens and the draft {other.vocab_size}"):
            LLM(model[:2], draft=(other, init_params(other, jax.random.key(0))))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_draft_tokens": 4}, "num_draft_tokens=4 needs a draft"),
            ({"acceptance": "maximal"}, "acceptance='maximal' needs a draft"),
            ({"draft": "ngram", "num_draft_tokens": 0}, "1 to 31"),
            ({"draft": "ngram", "num_draft_tokens": 32}, "1 to 31"),
            ({"draft": "ngram", "num_draft_tokens": "many"}, "1 to 31"),
            ({"draft": "ngram", "acceptance": "loose"}, "'exact' nor 'maximal'"),
            ({"draft": "ngram", "draft_tree": (2, 2)}, "drafts a chain"),
            ({"draft": "layers:1", "draft_tree": (9, 9)}, "the limit is 32"),
            ({"draft": "layers:1", "draft_tree": (2,), "num_draft_tokens": 2}, "draft_tree"),
            ({"draft": "layers:1", "draft_tree": ()}, "no depth"),
            ({"draft": "layers:9"}, "the target has 2 layers"),
            ({"draft": "layers:x"}, "layers:4"),
        ],
    )
    def test_options_that_do_not_fit(self, model, options, message):
        with pytest.raises(ValueError, match=message):
            LLM(model, max_seqs=2, **options)

    def test_a_batch_refuses_what_it_could_not_resume(self, model, tmp_path):
        (tmp_path / "in.jsonl").write_text('{"prompt": [1, 2]}\n')
        with (
            LLM(model, draft="ngram", acceptance="maximal", max_seqs=2) as llm,
            pytest.raises(ValueError, match="needs acceptance='exact'"),
        ):
            llm.generate_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl")

    @pytest.mark.slow
    def test_it_is_explained_and_counted(self, model):
        with LLM(model, draft=model, num_draft_tokens=2, max_seqs=4, prefill_chunk=28) as llm:
            output = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=10))[0].outputs[0]
            stats = output.speculation
            assert stats is not None
            assert stats.acceptance_rate == 1
            assert stats.num_tokens + stats.num_plain_tokens == 10
            facts = llm.explain().to_dict()["speculation"]
            assert facts["draft"] == "live parameters"
            assert facts["drafted / accepted tokens"] == f"{stats.proposed} / {stats.accepted}"
        with LLM(model, max_seqs=4, prefill_chunk=28) as llm:
            assert llm.speculation_stats() is None
            assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].outputs[0].speculation is None
