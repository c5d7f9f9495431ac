"""Faults in how tokenizers, configurations and defaults are read from files."""

from tests.faults.fault import Fault

_VOCABULARIES = "tests/checkpoints_convert/gguf/test_vocabularies.py"
_ROPE = "tests/checkpoints_convert/huggingface/test_rope.py"

FAULTS = (
    Fault(
        "checkpoints/user-defined-pieces-are-not-merged",
        "checkpoints_convert/gguf/tokenizer.py",
        "and _SPACE not in token)",
        ")",
        (f"{_VOCABULARIES}::test_ids_are_those_of_llama_cpp[llama]",),
        "texts with two spaces have other tokens than the model was trained with",
    ),
    Fault(
        "checkpoints/a-missing-bos-is-none",
        "checkpoints_convert/gguf/tokenizer.py",
        '"llama": {"bos_token_id": 1, ',
        '"llama": {',
        (f"{_VOCABULARIES}::test_ids_are_those_of_llama_cpp[llama without ids]",),
        "a GGUF file without tokenizer.ggml.bos_token_id loses BOS",
    ),
    Fault(
        "checkpoints/an-id-of-no-token-is-refused",
        "checkpoints_convert/gguf/tokenizer.py",
        "        if value >= 0 and (count is None or value < count):\n            return value",
        "        return value",
        ("tests/checkpoints_convert/gguf/test_tokenizer.py::test_an_id_of_no_token_is_as_a_missing_one",),
        "a GGUF file whose padding token is -1, or the number of tokens, does not open",
    ),
    Fault(
        "checkpoints/zero-of-another-rope-type-is-refused",
        "checkpoints_convert/huggingface/rope.py",
        "        if has_effect and key not in",
        "        if value is not None and key not in",
        (f"{_ROPE}::test_zero_is_as_a_field_that_is_missing",),
        "a checkpoint whose file says mscale 0 beside linear scaling does not open",
    ),
    Fault(
        "checkpoints/seed-coder-splits-as-qwen2",
        "checkpoints_convert/gguf/pre_tokenizers.py",
        '"seed-coder": PreTokenizer(_by_regexes(_SEED))',
        '"seed-coder": PreTokenizer(_QWEN.steps)',
        (f"{_VOCABULARIES}::test_ids_are_those_of_llama_cpp[gpt2 seed-coder]",),
        "texts have other tokens than the model was trained with",
    ),
    Fault(
        "text/flags-of-the-configuration-add-bos",
        "jaxinfer/text/tokenizer.py",
        '{"CodeLlamaTokenizer": ("bos_token",), ',
        '{"CodeLlamaTokenizer": ("bos_token",), "LlamaTokenizer": ("bos_token",), ',
        ("tests/text/test_tokenizer.py::test_bos_and_eos_are_added_once",),
        "DeepSeek-V3's raw prompts begin with a token that Transformers does not make",
    ),
    Fault(
        "checkpoints/zero-is-no-mscale",
        "checkpoints_convert/huggingface/rope.py",
        'fields.optional("mscale_all_dim")',
        'fields.number("mscale_all_dim", None)',
        (f"{_ROPE}::test_frequencies_are_those_of_transformers[yarn mscale_all_dim 0]",),
        "a checkpoint whose file says mscale_all_dim 0 does not open",
    ),
    Fault(
        "checkpoints/whole-numbers-stay-floats",
        "checkpoints_convert/huggingface/config.py",
        "text_part(whole_numbers(data))",
        "text_part(data)",
        ("tests/checkpoints_convert/huggingface/test_published.py",),
        "a checkpoint whose file says 32.0 layers does not open",
    ),
    Fault(
        "sampling/an-invalid-default-closes-the-model",
        "jaxinfer/sampling/generation_config.py",
        "        return None\n    return {_APPLIED[name]: value}",
        "        pass\n    return {_APPLIED[name]: value}",
        ("tests/sampling/test_generation_config.py",),
        "a checkpoint with a temperature that is out of range does not open",
    ),
    Fault(
        "engine/a-request-that-cannot-be-added-waits-for-ever",
        "jaxinfer/api/async_engine.py",
        "        except Exception as error:  # this request's own, of whatever type: the others go on",
        "        except (ValueError, RuntimeError) as error:",
        ("tests/api/test_async_engine.py::test_a_request_that_cannot_be_added_fails_alone_whatever_the_error",),
        "one request ends the engine, and never gets an answer itself",
    ),
    Fault(
        "engine/a-death-without-its-cause",
        "jaxinfer/api/async_engine.py",
        '_LOG.critical("the engine has failed", exc_info=error)',
        "pass",
        ("tests/api/test_async_engine.py::test_an_engine_that_fails_tells_every_reader_and_those_who_come_later",),
        "the server ends, and its log does not say why",
    ),
    Fault(
        "kernels/threads-register-a-kernel-twice",
        "cpu_kernels/kernels.py",
        "_lock = threading.RLock()",
        "import contextlib\n\n_lock = contextlib.nullcontext()",
        ("tests/cpu_kernels/test_kernels.py::test_threads_that_need_a_kernel_at_once_share_it",),
        "the engine dies with: Duplicate FFI handler registration",
    ),
)
