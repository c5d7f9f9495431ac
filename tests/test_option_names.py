"""Names of other engines: each is applied as ours or refused with what to write instead."""

import types
from dataclasses import fields

import pytest

from jaxinfer.api.options import LLMOptions
from jaxinfer.option_names import NAMES, OptionNameError, check_format, our_value, translated
from jaxinfer.sampling import SamplingParams, SamplingParamsError
from jaxinfer.server.options import ServerOptions

KNOWN = {
    "LLM": [*(field.name for field in fields(LLMOptions)), "model"],
    "SamplingParams": [field.name for field in fields(SamplingParams)],
    "call": ["prompts", "params", "use_tqdm"],
    "server": [field.name for field in fields(ServerOptions)],
}
APPLIED = [
    ("LLM", {"tensor_parallel_size": 4}, {"mesh": "model=4"}),
    ("LLM", {"tensor_parallel_size": 1}, {}),
    ("LLM", {"tensor_parallel_size": 4, "data_parallel_size": 2}, {"mesh": "data=2,model=4"}),
    ("LLM", {"gpu_memory_utilization": 0.5}, {"memory_fraction": 0.5}),
    ("LLM", {"max_num_seqs": 8}, {"max_seqs": 8}),
    ("LLM", {"kv_cache_dtype": "fp8"}, {"kv_dtype": "fp8_e4m3"}),
    ("LLM", {"kv_cache_dtype": "auto"}, {"kv_dtype": "auto"}),
    ("LLM", {"dtype": "half"}, {"dtype": "float16"}),
    ("LLM", {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    ("LLM", {"block_size": 32}, {"page_size": 32}),
    ("LLM", {"num_ctx": 2048}, {"max_model_len": 2048}),
    ("LLM", {"enable_prefix_caching": False}, {"prefix_cache": False}),
    ("LLM", {"disable_radix_cache": True}, {"prefix_cache": False}),
    ("LLM", {"prefill_step_size": 64}, {"prefill_chunk": 64}),
    ("LLM", {"speculative_model": "[ngram]", "num_speculative_tokens": 3}, {"draft": "ngram", "num_draft_tokens": 3}),
    ("LLM", {"speculative_config": {"model": "d", "num_speculative_tokens": 2}}, {"draft": "d", "num_draft_tokens": 2}),
    ("LLM", {"enforce_eager": False, "trust_remote_code": False, "swap_space": 0, "cpu_offload_gb": 0.0}, {}),
    (
        "LLM",
        {"tokenizer_mode": "auto", "enable_chunked_prefill": True, "load_format": "auto"},
        {},
    ),
    ("SamplingParams", {"max_new_tokens": 5, "min_new_tokens": 2}, {"max_tokens": 5, "min_tokens": 2}),
    ("SamplingParams", {"num_predict": 7}, {"max_tokens": 7}),
    ("SamplingParams", {"num_predict": -1}, {"max_tokens": None}),
    ("SamplingParams", {"temp": 0.3}, {"temperature": 0.3}),
    ("SamplingParams", {"do_sample": False}, {"temperature": 0.0}),
    ("SamplingParams", {"num_return_sequences": 3}, {"n": 3}),
    ("SamplingParams", {"stop_strings": ["a"]}, {"stop": ["a"]}),
    ("SamplingParams", {"repeat_penalty": 1.0, "typical_p": 1, "mirostat": 0, "num_beams": 1, "best_of": 1}, {}),
    ("call", {"sampling_params": None, "prompt": "x"}, {"prompts": "x"}),
    ("server", {"max_num_queued_reqs": 5, "shutdown_timeout": 9}, {"max_queued": 5, "drain_timeout": 9}),
]
REFUSED = [
    ("server", {"api_key": "x"}, "--api-keys FILE"),
    ("server", {"ssl_keyfile": "x"}, "proxy"),
    ("LLM", {"quantization_config": {}}, "quantize= rounds.*jaxinfer quantize --method awq"),
    ("LLM", {"enforce_eager": True}, "jaxinfer warm"),
    ("LLM", {"trust_remote_code": True}, "jaxinfer models"),
    ("LLM", {"swap_space": 4}, "host_cache_gib"),
    ("LLM", {"max_num_batched_tokens": 4096}, "prefill_chunk"),
    ("LLM", {"enable_chunked_prefill": False}, "prefill_chunk"),
    ("LLM", {"max_kv_size": 512}, "max_model_len"),
    ("LLM", {"tensor_parallel_size": 0}, "positive integer"),
    ("LLM", {"tensor_parallel_size": True}, "positive integer"),
    ("LLM", {"speculative_config": {"method": "eagle"}}, "'eagle' is not supported"),
    ("LLM", {"speculative_config": {"disable_by_batch_size": 4}}, "no counterpart"),
    ("LLM", {"tensor_parallel_size": 2, "mesh": "model=2"}, "the same option, mesh: give one"),
    ("LLM", {"max_num_seqs": 2, "max_seqs": 2}, "the same option, max_seqs: give one"),
    (
        "LLM",
        {"max_new_tokens": 2},
        r"no argument 'max_new_tokens' \(Transformers, SGLang\): SamplingParams takes it",
    ),
    ("LLM", {"memory_fractoin": 2}, "did you mean 'memory_fraction'"),
    ("SamplingParams", {"repeat_penalty": 1.1}, "repetition_penalty"),
    ("SamplingParams", {"num_ctx": 5}, "LLM takes it as max_model_len"),
    ("SamplingParams", {"num_beams": 4}, "no option here means the same; see n= and logprobs="),
    ("SamplingParams", {"force_words_ids": [[1]]}, "see structured="),
    ("SamplingParams", {"temp": 1, "temperature": 1}, "the same option, temperature"),
    ("call", {"stream": True}, r"llm\.stream"),
    ("call", {"prompt_token_ids": [1]}, "prompts= takes"),
]


@pytest.mark.parametrize(("scope", "given", "ours"), APPLIED, ids=lambda value: str(value)[:40])
def test_a_name_of_the_same_meaning_is_applied(scope, given, ours):
    assert translated(scope, given, KNOWN[scope], "no argument {}") == ours


@pytest.mark.parametrize(("scope", "given", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_any_other_name_is_refused_with_ours(scope, given, message):
    with pytest.raises(OptionNameError, match=message):
        translated(scope, given, KNOWN[scope], "no argument {}")


@pytest.mark.parametrize(
    ("wanted", "found"),
    [(None, "awq"), (None, None), ("awq", "awq"), ("AWQ_Marlin", "awq"), ("autoround", "intel/auto-round")],
)
def test_the_format_that_a_checkpoint_has_may_be_named(wanted, found):
    check_format(wanted, found, "m")


@pytest.mark.parametrize(
    ("wanted", "found", "message"),
    [
        ("awq", None, "its files declare no quantized format; `jaxinfer quantize SRC DST --method awq`"),
        ("gptq_marlin", None, "jaxinfer quantize SRC DST --method gptq"),
        ("fp8", None, 'quantize="fp8" rounds its weights as they are loaded'),
        ("bitsandbytes", None, 'quantize="nf4"'),
        ("awq", "gptq", "its files are in the format gptq; leave it out"),
        ("other", None, "no quantized format; leave it out"),
    ],
)
def test_another_format_is_an_error_with_what_to_do(wanted, found, message):
    with pytest.raises(ValueError, match=message):
        check_format(wanted, found, "m")


def test_the_table_is_sound():
    """No name is there twice or is one of ours, and what is applied gives options that exist."""
    places = [(one.scope, one.name) for one in NAMES]
    assert len(places) == len(set(places)) >= 100
    assert [one.name for one in NAMES if one.name in KNOWN[one.scope] and one.name != one.ours] == []
    samples = (4, "x", True, False, {"model": "d"})
    for one in NAMES:
        assert one.ours
        if one.read is None:
            continue
        found = {}
        for sample in samples:
            try:
                found |= one.apply(sample)
            except OptionNameError:
                continue
        assert found, one.name
        assert set(found) <= set(KNOWN[one.scope]), one.name


def test_other_spellings_of_values():
    jax_like = types.SimpleNamespace(name="float16")
    assert [our_value("dtype", value) for value in ("half", "bf16", "float32", "auto")] == [
        *("float16", "bfloat16", "float32", "auto"),
    ]
    assert our_value("dtype", jax_like) == "float16"
    assert our_value("kv_dtype", "fp8_e4m3fn") == "fp8_e4m3"
    assert our_value("stop", "half") == "half"


def test_sampling_params_take_the_names():
    assert SamplingParams(max_new_tokens=4, temp=0.5) == SamplingParams(max_tokens=4, temperature=0.5)  # type: ignore[call-arg]
    assert SamplingParams.from_dict({"num_predict": -1}).max_tokens is None
    with pytest.raises(TypeError, match="'foo' is not a sampling parameter"):
        SamplingParams(foo=1)  # type: ignore[call-arg]
    with pytest.raises(SamplingParamsError, match=r"repeat_penalty=1\.5"):
        SamplingParams.from_dict({"repeat_penalty": 1.5})
    with pytest.raises(TypeError, match="temperature=0 is greedy"):
        SamplingParams(do_sample=True, temperature=0)  # type: ignore[call-arg]
