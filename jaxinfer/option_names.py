"""Names that vLLM, SGLang, mlx-lm, Ollama, llama.cpp and Transformers give options: one table, for the Python API and
the command line.

A name is applied where it means exactly what one of ours does; any other is refused with the name of ours. Imports
neither JAX nor NumPy, so that a command line can read it at once.
"""

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxinfer.checks import did_you_mean

# What takes the option: the model, a request, a method of LLM, or the HTTP server.
Scope = Literal["LLM", "SamplingParams", "call", "server"]
Values = Mapping[str, Any]

LLAMA, HF, MLX, OLLAMA, OPENAI, SGLANG, VLLM = (
    *("llama.cpp", "Transformers", "mlx-lm", "Ollama", "OpenAI", "SGLang", "vLLM"),
)


class OptionNameError(TypeError):
    """An option that does not exist under this name. `name` is what was given."""

    def __init__(self, name: str, message: str):
        super().__init__(message)
        self.name = name


@dataclass(frozen=True)
class OtherName:
    """A name that other engines use.

    Attributes:
      scope, name, engines: what takes it, its name in Python (a flag has dashes), and who uses it.
      ours: what to write here, for tables and messages.
      read: our options for a value; None where there is no option of the same meaning. Raises ValueError for a value
        without a counterpart.
      harmless: values that ask for what happens anyway.
      is_switch: whether its flag takes no value.
    """

    scope: Scope
    name: str
    engines: str
    ours: str
    read: Callable[[Any], Values] | None = None
    harmless: tuple[Any, ...] = ()
    is_switch: bool = False
    is_renamed: bool = False

    def apply(self, value: Any) -> Values:
        """Our options for a value. Raises OptionNameError, which says what to write instead."""
        if any(value is one or (type(value) is type(one) and value == one) for one in (None, *self.harmless)):
            return {}
        if self.read is None:
            raise OptionNameError(self.name, f"{self.name}={value!r:.60} ({self.engines}): {self.ours}")
        try:
            return self.read(value)
        except ValueError as error:
            raise OptionNameError(self.name, f"{self.name}={value!r:.60} ({self.engines}): {error}") from None


def _same(scope: Scope, name: str, engines: str, ours: str, **more: Any) -> OtherName:
    """Another name of our option, with the same values."""
    return OtherName(scope, name, engines, ours, lambda value: {ours: value}, is_renamed=True, **more)


def _axis(axis: str) -> Callable[[Any], Values]:
    def read(value: Any) -> Values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError("it must be a positive integer")
        return {} if value == 1 else {"mesh": f"{axis}={value}"}

    return read


def _opposite(ours: str) -> Callable[[Any], Values]:
    def read(value: Any) -> Values:
        if not isinstance(value, bool):
            raise ValueError("it must be True or False")
        return {ours: not value}

    return read


def _structured(name: str, engines: str, kind: str) -> OtherName:
    ours = f'structured={{"{kind}": ...}}'
    return OtherName(
        "SamplingParams", name, engines, ours, lambda value: {"structured": {kind: value}}, is_renamed=True
    )


def _limit(value: Any) -> Values:
    """Ollama's and llama.cpp's number of tokens, where -1 and -2 mean as many as fit."""
    return {"max_tokens": None if value in (-1, -2) and not isinstance(value, bool) else value}


def _draft(value: Any) -> Values:
    return {"draft": "ngram" if value == "[ngram]" else value}


def _speculative_config(value: Any) -> Values:
    """vLLM's dictionary, as far as ours means the same."""
    known = ("model", "method", "num_speculative_tokens")
    if not isinstance(value, Mapping):
        raise ValueError("it must be a dictionary; ours are draft= and num_draft_tokens=")
    for key in value:
        if key not in known:
            raise ValueError(f"{key!r} has no counterpart; ours are draft=, num_draft_tokens= and draft_tree=")
    method = value.get("method")
    if method not in (None, "ngram", "draft_model"):
        raise ValueError(f"method {method!r} is not supported; draft= takes a model, ngram or layers:N")
    found = {"draft": "ngram" if method == "ngram" else value.get("model")}
    if value.get("num_speculative_tokens") is not None:
        found["num_draft_tokens"] = value["num_speculative_tokens"]
    return {name: one for name, one in found.items() if one is not None}


def check_do_sample(given: Values, temperature: Any) -> None:
    """Raises OptionNameError where do_sample=True stands beside a temperature of 0."""
    if given.get("do_sample") is True and temperature == 0:
        raise OptionNameError(
            "do_sample", "do_sample=True (Transformers): temperature=0 is greedy, so leave one of them out"
        )


def _do_sample(value: Any) -> Values:
    if not isinstance(value, bool):
        raise ValueError("it must be True or False; temperature=0 is greedy")
    return {} if value else {"temperature": 0.0}


_MESH = 'mesh="model=4" places a model on devices, and by default it is on one'
_OFFLOAD = 'offload=8 keeps 8 layers in the host\'s memory, offload="auto" as many as must be'
_FILES = "the environment variable HF_HOME says where downloads are kept"
_QUANTIZED = (
    "a checkpoint's own format is read from its config.json, so leave it out; to round plain weights as they are "
    'loaded: quantize="int8", "int4-g128", "fp8" or "nf4"; to calibrate: `jaxinfer quantize --method awq` or gptq'
)
_COMPILED = "every step is a compiled program: leave it out; `jaxinfer warm MODEL` or llm.warm_up() compiles beforehand"
_CHUNK = "prefill_chunk= is the number of prompt tokens that a step computes beside the decoding answers"
_KV = 'kv_dtype="int8", "fp8_e4m3" or "int4" says how keys and values are stored'
_ADAPTERS = "adapters are not supported: merge them into the weights"
_ATTENTION = "chosen by device and shape: `jaxinfer doctor` and llm.explain() show it"
_EVICTION = "nothing is ever dropped from the cache; max_model_len= limits a prompt with its answer"
_LOADING = "the format is found from the files, so leave it out"
_LENGTH = "counts the prompt too; max_tokens= is the number of new tokens, max_model_len= of LLM the length of both"
_TRUNCATION = "not available: temperature=, top_k=, top_p= and min_p= choose among tokens"
_PENALTY = (
    "looks at the last tokens only; repetition_penalty= looks at all tokens of prompt and answer, presence_penalty= "
    "and frequency_penalty= at those of the answer"
)
_BEAMS = "beam search is not supported: n= samples several answers, logprobs= ranks them"
_CHAT = "`jaxinfer chat MODEL` talks with a model"
_SERVER = "`jaxinfer serve MODEL` is the HTTP server, with --host, --port, --api-keys FILE and --served-model-name"
_GRAMMAR = 'structured={"json": schema} and the like say what the answer must match'
_PROCESSORS = "functions on logits are not supported; logit_bias=, allowed_token_ids= and bad_words= act on tokens"
_FORMER, _STOP = "a former flag", "include_stop_str_in_output"
_STREAM = "llm.stream(prompt, params) yields text as it comes"

_LLM = (
    # The same meaning.
    OtherName("LLM", "tensor_parallel_size", VLLM, "mesh", _axis("model")),
    OtherName("LLM", "tp_size", SGLANG, "mesh", _axis("model")),
    OtherName("LLM", "data_parallel_size", VLLM, "mesh", _axis("data")),
    OtherName("LLM", "dp_size", SGLANG, "mesh", _axis("data")),
    _same("LLM", "gpu_memory_utilization", VLLM, "memory_fraction"),
    _same("LLM", "max_num_seqs", VLLM, "max_seqs"),
    _same("LLM", "max_running_requests", SGLANG, "max_seqs"),
    _same("LLM", "kv_cache_dtype", f"{VLLM}, {SGLANG}", "kv_dtype"),
    _same("LLM", "torch_dtype", HF, "dtype"),
    _same("LLM", "block_size", VLLM, "page_size"),
    _same("LLM", "tool_call_parser", f"{VLLM}, {SGLANG}", "tool_parser"),
    _same("LLM", "context_length", SGLANG, "max_model_len"),
    _same("LLM", "num_ctx", OLLAMA, "max_model_len"),
    _same("LLM", "n_ctx", LLAMA, "max_model_len"),
    _same("LLM", "ctx_size", LLAMA, "max_model_len"),
    _same("LLM", "enable_prefix_caching", VLLM, "prefix_cache", is_switch=True),
    OtherName("LLM", "disable_radix_cache", SGLANG, "prefix_cache", _opposite("prefix_cache"), is_switch=True),
    _same("LLM", "chunked_prefill_size", SGLANG, "prefill_chunk"),
    _same("LLM", "prefill_step_size", MLX, "prefill_chunk"),
    OtherName("LLM", "speculative_model", VLLM, "draft", _draft),
    _same("LLM", "speculative_draft_model_path", SGLANG, "draft"),
    _same("LLM", "draft_model", MLX, "draft"),
    _same("LLM", "model_draft", LLAMA, "draft"),
    _same("LLM", "num_speculative_tokens", VLLM, "num_draft_tokens"),
    OtherName("LLM", "speculative_config", VLLM, "draft, num_draft_tokens", _speculative_config),
    _same("LLM", "tokenizer_path", SGLANG, "tokenizer"),
    _same("LLM", "model_path", SGLANG, "model"),
    _same("LLM", "pretrained_model_name_or_path", HF, "model"),
    _same("LLM", "hf_repo", LLAMA, "model"),
    # Another meaning, or none here.
    OtherName("LLM", "load_in_8bit", HF, 'quantize="int8" rounds weights to 8 bits', None, (False,), True),
    OtherName("LLM", "load_in_4bit", HF, 'quantize="nf4" rounds weights to 4 bits', None, (False,), True),
    OtherName("LLM", "quantization_config", HF, _QUANTIZED),
    OtherName("LLM", "enforce_eager", VLLM, _COMPILED, None, (False,), True),
    OtherName("LLM", "disable_cuda_graph", SGLANG, _COMPILED, None, (False,), True),
    OtherName("LLM", "compilation_config", VLLM, _COMPILED),
    OtherName("LLM", "max_seq_len_to_capture", VLLM, _COMPILED),
    OtherName(
        *("LLM", "trust_remote_code", f"{VLLM}, {HF}"),
        "code of a checkpoint is never run, so leave it out; `jaxinfer models` lists the families",
        *(None, (False,), True),
    ),
    OtherName(
        *("LLM", "swap_space", VLLM),
        "host_cache_gib= is host memory for pages that leave the device; num_pages= gives the cache more room there",
        *(None, (0, 0.0)),
    ),
    OtherName(
        *("LLM", "cpu_offload_gb", VLLM),
        'offload="auto" keeps as many layers in the host\'s memory as must be, and offload=8 eight of them',
        *(None, (0, 0.0)),
    ),
    OtherName("LLM", "num_gpu_blocks_override", VLLM, "num_pages= is the number of pages, the unused page 0 included"),
    OtherName("LLM", "max_num_batched_tokens", VLLM, f"it counts decoding answers too; {_CHUNK}"),
    OtherName("LLM", "max_prefill_tokens", SGLANG, _CHUNK),
    OtherName("LLM", "num_batch", OLLAMA, _CHUNK),
    OtherName("LLM", "batch_size", LLAMA, _CHUNK),
    OtherName("LLM", "n_batch", LLAMA, _CHUNK),
    OtherName(
        *("LLM", "enable_chunked_prefill", VLLM),
        f"prompts are always computed in chunks; {_CHUNK}",
        *(None, (True,), True),
    ),
    OtherName("LLM", "mem_fraction_static", SGLANG, "memory_fraction= is for weights, cache and temporary arrays"),
    OtherName("LLM", "tokenizer_mode", VLLM, "tokenizer= is a folder or a Tokenizer", None, ("auto",)),
    OtherName("LLM", "tokenizer_config", MLX, "tokenizer= is a folder or a Tokenizer"),
    OtherName("LLM", "tokenizer_revision", VLLM, "revision= is that of model and tokenizer"),
    OtherName(
        *("LLM", "skip_tokenizer_init", VLLM),
        "prompts may be token ids in any case, and the tokens are in token_ids",
        *(None, (False,), True),
    ),
    OtherName("LLM", "pipeline_parallel_size", VLLM, _MESH, None, (1,)),
    OtherName("LLM", "enable_expert_parallel", VLLM, 'mesh="expert=8" gives each device some experts', None, (False,)),
    OtherName("LLM", "decode_context_parallel_size", VLLM, 'mesh="sequence=4" divides prompts and cache', None, (1,)),
    OtherName("LLM", "distributed_executor_backend", VLLM, "jaxinfer.initialize_hosts() joins several hosts"),
    OtherName("LLM", "device", f"{VLLM}, {HF}", f"JAX_PLATFORMS=cpu chooses the platform; {_MESH}", None, ("auto",)),
    OtherName("LLM", "device_map", HF, _MESH, None, ("auto",)),
    OtherName("LLM", "num_gpu", OLLAMA, _OFFLOAD),
    *(OtherName("LLM", name, LLAMA, _OFFLOAD, None, (-1,)) for name in ("n_gpu_layers", "gpu_layers")),
    OtherName("LLM", "num_thread", OLLAMA, "XLA takes all cores: taskset limits them"),
    *(OtherName("LLM", name, LLAMA, "XLA takes all cores: taskset limits them") for name in ("n_threads", "threads")),
    OtherName("LLM", "download_dir", VLLM, _FILES),
    OtherName("LLM", "cache_dir", HF, _FILES),
    OtherName("LLM", "hf_token", VLLM, "the environment variable HF_TOKEN holds the token"),
    OtherName("LLM", "token", HF, "the environment variable HF_TOKEN holds the token"),
    OtherName("LLM", "load_format", VLLM, _LOADING, None, ("auto", "safetensors")),
    OtherName("LLM", "use_safetensors", HF, _LOADING, None, (True,)),
    OtherName("LLM", "max_logprobs", VLLM, "logprobs= of SamplingParams is at most 20", None, (20,)),
    OtherName("LLM", "disable_log_stats", VLLM, "nothing is logged, so leave it out", None, (True,), True),
    OtherName("LLM", "attn_implementation", HF, _ATTENTION, None, ("auto",)),
    OtherName("LLM", "flash_attn", LLAMA, _ATTENTION, None, ("auto",)),
    OtherName("LLM", "host", VLLM, _SERVER),
    OtherName("LLM", "port", VLLM, _SERVER),
    OtherName("LLM", "api_key", VLLM, _SERVER),
    OtherName("LLM", "served_model_name", VLLM, _SERVER),
    OtherName("LLM", "hf_overrides", VLLM, "max_model_len= stretches positions; other settings are in config.json"),
    OtherName("LLM", "rope_scaling", VLLM, "max_model_len= stretches positions; other settings are in config.json"),
    OtherName("LLM", "scheduling_policy", VLLM, "priority= of generate orders requests", None, ("priority",)),
    OtherName("LLM", "max_kv_size", MLX, _EVICTION),
    OtherName("LLM", "num_keep", OLLAMA, _EVICTION),
    OtherName("LLM", "kv_bits", MLX, _KV),
    OtherName("LLM", "cache_type_k", LLAMA, _KV),
    OtherName("LLM", "f16_kv", OLLAMA, _KV),
    OtherName("LLM", "keep_alive", OLLAMA, "a model stays until llm.close()"),
    OtherName("LLM", "enable_lora", VLLM, _ADAPTERS, None, (False,), True),
    OtherName("LLM", "adapter_path", MLX, _ADAPTERS),
    OtherName("LLM", "draft_max", LLAMA, "num_draft_tokens= is the number drafted before each check"),
    OtherName("LLM", "ngram_prompt_lookup_max", VLLM, 'draft="ngram" finds drafts in prompt and answer'),
)

_SAMPLING = (
    # The same meaning.
    _same("SamplingParams", "max_new_tokens", f"{HF}, {SGLANG}", "max_tokens"),
    _same("SamplingParams", "max_completion_tokens", OPENAI, "max_tokens"),
    OtherName("SamplingParams", "num_predict", OLLAMA, "max_tokens", _limit),
    OtherName("SamplingParams", "n_predict", LLAMA, "max_tokens", _limit),
    _same("SamplingParams", "min_new_tokens", f"{HF}, {SGLANG}", "min_tokens"),
    _same("SamplingParams", "temp", f"{MLX}, {LLAMA}", "temperature"),
    _same("SamplingParams", "num_return_sequences", HF, "n"),
    _same("SamplingParams", "stop_strings", HF, "stop"),
    _same("SamplingParams", "stop_sequences", "TGI", "stop"),
    _same("SamplingParams", "random_seed", "Mistral", "seed"),
    _same("SamplingParams", "include_stop_str", _FORMER, _STOP, is_switch=True),
    OtherName("SamplingParams", "cut_stop_str", _FORMER, _STOP, _opposite(_STOP), is_switch=True),
    OtherName("SamplingParams", "do_sample", HF, "temperature", _do_sample, is_switch=True),
    # Another meaning, or none here.
    OtherName("SamplingParams", "repeat_penalty", f"{OLLAMA}, {LLAMA}", _PENALTY, None, (1, 1.0)),
    OtherName("SamplingParams", "repeat_last_n", f"{OLLAMA}, {LLAMA}", _PENALTY),
    OtherName("SamplingParams", "repetition_context_size", MLX, _PENALTY),
    OtherName("SamplingParams", "penalize_newline", OLLAMA, _PENALTY),
    OtherName("SamplingParams", "no_repeat_ngram_size", HF, _PENALTY, None, (0,)),
    OtherName("SamplingParams", "max_length", HF, _LENGTH),
    OtherName("SamplingParams", "min_length", HF, "counts the prompt too; min_tokens= counts new tokens"),
    OtherName("SamplingParams", "eos_token_id", HF, "stop_token_ids= adds to the model's end-of-sequence ids"),
    OtherName("SamplingParams", "extra_eos_token", MLX, "stop= takes texts, stop_token_ids= ids"),
    OtherName("SamplingParams", "typical_p", f"{OLLAMA}, {HF}", _TRUNCATION, None, (1, 1.0)),
    OtherName("SamplingParams", "tfs_z", OLLAMA, _TRUNCATION, None, (1, 1.0)),
    OtherName("SamplingParams", "mirostat", OLLAMA, _TRUNCATION, None, (0,)),
    OtherName("SamplingParams", "mirostat_tau", OLLAMA, _TRUNCATION),
    OtherName("SamplingParams", "mirostat_eta", OLLAMA, _TRUNCATION),
    OtherName("SamplingParams", "xtc_probability", f"{MLX}, {LLAMA}", _TRUNCATION, None, (0, 0.0)),
    OtherName("SamplingParams", "xtc_threshold", f"{MLX}, {LLAMA}", _TRUNCATION),
    OtherName("SamplingParams", "top_n_sigma", LLAMA, _TRUNCATION),
    OtherName("SamplingParams", "min_tokens_to_keep", MLX, _TRUNCATION, None, (1,)),
    OtherName("SamplingParams", "num_beams", HF, _BEAMS, None, (1,)),
    OtherName("SamplingParams", "use_beam_search", VLLM, _BEAMS, None, (False,), True),
    OtherName("SamplingParams", "beam_width", VLLM, _BEAMS),
    OtherName("SamplingParams", "length_penalty", HF, _BEAMS, None, (1, 1.0)),
    OtherName("SamplingParams", "early_stopping", HF, _BEAMS, None, (False,), True),
    OtherName("SamplingParams", "best_of", f"{VLLM}, {OPENAI}", "all n= answers are returned", None, (1,)),
    OtherName("SamplingParams", "top_logprobs", OPENAI, "logprobs= is the number of tokens to report"),
    OtherName("SamplingParams", "output_scores", HF, "logprobs= is the number of tokens to report", None, (False,)),
    OtherName(
        "SamplingParams", "echo", OPENAI, "the output has the prompt, prompt_logprobs= scores it", None, (False,)
    ),
    OtherName("SamplingParams", "generator", HF, "seed= is an integer"),
    OtherName("SamplingParams", "bad_words_ids", HF, "bad_words= takes texts; logit_bias={id: -100} forbids ids"),
    OtherName("SamplingParams", "suppress_tokens", HF, "logit_bias={id: -100} forbids ids"),
    OtherName("SamplingParams", "force_words_ids", HF, _GRAMMAR),
    OtherName("SamplingParams", "logits_processor", HF, _PROCESSORS),
    OtherName("SamplingParams", "logits_processors", f"{VLLM}, {MLX}", _PROCESSORS),
    *(_same("SamplingParams", name, VLLM, "structured") for name in ("structured_outputs", "guided_decoding")),
    _same("SamplingParams", "response_format", OPENAI, "structured", harmless=({"type": "text"},)),
    *(_structured(f"guided_{kind}", VLLM, kind) for kind in ("json", "regex", "choice", "grammar")),
    _structured("json_schema", SGLANG, "json"),
    _structured("regex", SGLANG, "regex"),
    *(OtherName("SamplingParams", *one, _GRAMMAR) for one in (("format", OLLAMA), ("grammar", LLAMA))),
    OtherName("SamplingParams", "detokenize", VLLM, "token_ids of an answer are its tokens", None, (True,), True),
    OtherName("SamplingParams", "truncate_prompt_tokens", VLLM, "prompts are not cut: pass the token ids to keep"),
    OtherName("SamplingParams", "use_cache", HF, "the cache is always used, so leave it out", None, (True,)),
)

_CALL = (
    _same("call", "sampling_params", f"{VLLM}, {SGLANG}", "params"),
    _same("call", "prompt", f"{MLX}, {SGLANG}", "prompts"),
    _same("call", "inputs", VLLM, "prompts"),
    _same("call", "input_ids", f"{HF}, {SGLANG}", "prompts"),
    OtherName("call", "prompt_token_ids", VLLM, "prompts= takes texts or lists of token ids"),
    OtherName("call", "lora_request", VLLM, _ADAPTERS),
    OtherName("call", "stream", f"{OPENAI}, {OLLAMA}", _STREAM, None, (False,), True),
    OtherName("call", "streamer", HF, _STREAM),
    OtherName("call", "verbose", f"{MLX}, {OLLAMA}", f"use_tqdm= shows progress; {_STREAM}", None, (False,), True),
    OtherName("call", "interactive", LLAMA, _CHAT, None, (False,), True),
    OtherName("call", "conversation", LLAMA, _CHAT, None, (False,), True),
    OtherName("call", "generation_config", HF, "params= takes SamplingParams; the checkpoint's own file is applied"),
    OtherName("call", "chat_template", VLLM, "it is the checkpoint's, or that of the folder tokenizer= of LLM"),
    OtherName("call", "options", OLLAMA, "params= takes SamplingParams"),
)

_TLS = "there is no TLS: put a proxy such as nginx in front (docs/serving.md)"
_LOG = "each request is one line of the log; --log-prompts adds the prompt's text"
_BOTH = f"{VLLM}, {SGLANG}"

_HTTP = (
    _same("server", "max_num_queued_reqs", VLLM, "max_queued"),
    _same("server", "max_num_queued_tokens", VLLM, "max_queued_tokens"),
    _same("server", "max_queued_requests", SGLANG, "max_queued"),
    _same("server", "shutdown_timeout", VLLM, "drain_timeout"),
    _same("server", "otlp_traces_endpoint", _BOTH, "otlp_endpoint"),
    OtherName("server", "api_key", _BOTH, "--api-keys FILE names a file with a key in each line"),
    OtherName("server", "reasoning_parser", _BOTH, "--reasoning names the tags, by default the template's"),
    OtherName("server", "enable_auto_tool_choice", VLLM, "calls are always read", None, (True,), is_switch=True),
    OtherName("server", "chat_template", _BOTH, "it is the checkpoint's, or that of the folder that --tokenizer names"),
    OtherName("server", "ssl_keyfile", VLLM, _TLS),
    OtherName("server", "ssl_certfile", VLLM, _TLS),
    OtherName("server", "root_path", VLLM, "let the proxy in front remove the prefix from the path"),
    OtherName("server", "log_requests", SGLANG, _LOG, is_switch=True),
    OtherName("server", "enable_log_requests", VLLM, _LOG, is_switch=True),
    OtherName("server", "disable_log_requests", VLLM, _LOG, is_switch=True),
)

NAMES: tuple[OtherName, ...] = (*_LLM, *_SAMPLING, *_CALL, *_HTTP)
_BY_NAME = {(one.scope, one.name): one for one in NAMES}

# Other spellings of values, by our option.
_DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": _DTYPES,
    "kv_dtype": {**_DTYPES, "fp8": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3"},
    "draft_kv_dtype": {**_DTYPES, "fp8": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3"},
}


_TO_CALIBRATE = "`jaxinfer quantize SRC DST --method {}` calibrates on texts and writes a checkpoint"
# What others call ways to round weights: our recipe, or what to do.
RECIPE_NAMES: Mapping[str, str] = {
    **{name: _TO_CALIBRATE.format(name) for name in ("awq", "gptq", "smoothquant")},
    **{f"{name}_marlin": _TO_CALIBRATE.format(name) for name in ("awq", "gptq")},
    **dict.fromkeys(("autoround", "auto-round"), _TO_CALIBRATE.format("auto")),
    **dict.fromkeys(("4bit", "4-bit", "q4", "w4a16", "load_in_4bit"), "did you mean 'int4-g128'?"),
    **dict.fromkeys(("8bit", "8-bit", "q8", "w8a16", "int8_weight_only", "load_in_8bit"), "did you mean 'int8'?"),
    **dict.fromkeys(("bitsandbytes", "bnb", "qlora"), "did you mean 'nf4'?"),
    **dict.fromkeys(("float8", "e4m3", "fp8_e4m3", "fp8_e4m3fn", "float8_e4m3fn"), "did you mean 'fp8'?"),
    **dict.fromkeys(("fp8_dynamic", "fp8-dynamic", "w8a8_fp8"), "did you mean 'w8a8-fp8'?"),
    **dict.fromkeys(("w8a8_int8", "int8_dynamic"), "did you mean 'w8a8'?"),
    **dict.fromkeys(
        ("gguf", *(f"q{bits}_{kind}" for bits in range(2, 9) for kind in ("0", "1", "k", "k_s", "k_m", "k_l"))),
        "the types of a GGUF file are kept as they are, so leave it out; for other weights 'int4-g32' is the nearest",
    ),
}

# What vLLM and SGLang call formats of checkpoints, by the name in config.json.
FORMAT_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("awq_marlin", "auto_awq", "autoawq"), "awq"),
    **dict.fromkeys(("gptq_marlin", "auto_gptq", "autogptq", "gptqmodel"), "gptq"),
    **dict.fromkeys(("autoround", "auto_round", "intel/auto-round", "inc"), "auto-round"),
    **dict.fromkeys(("bnb", "qlora"), "bitsandbytes"),
    "compressed_tensors": "compressed-tensors",
}


def check_format(wanted: str | None, found: str | None, model: str) -> None:
    """Raises ValueError unless the checkpoint of a model is in the format that `quantization` names, if it names one.

    Args:
      found: the format of its files; None for plain weights.
    """
    if wanted is None:
        return
    name = wanted.lower()
    name, found = FORMAT_NAMES.get(name, name), FORMAT_NAMES.get(found or "", found)
    if name == found:
        return
    what = "its files declare no quantized format" if found is None else f"its files are in the format {found}"
    recipe = {"fp8": "fp8", "bitsandbytes": "nf4", "mxfp4": "mxfp4"}.get(name)
    if found is not None or not (recipe or name in RECIPE_NAMES):
        hint = "leave it out"
    else:
        hint = f'quantize="{recipe}" rounds its weights as they are loaded' if recipe else RECIPE_NAMES[name]
    raise ValueError(f"quantization={wanted!r:.60} is not what {model} has: {what}; {hint}")


def find(scope: Scope, name: str) -> OtherName | None:
    """The entry of a name, None if the table has none."""
    return _BY_NAME.get((scope, name))


def our_value(name: str, value: Any) -> Any:
    """A value of our option `name` in our spelling: "half" is "float16", and so is `jnp.float16` or `torch.float16`."""
    if name not in VALUES or value is None:
        return value
    text: Any = value
    if not isinstance(value, str):
        text = getattr(value, "__name__", None) or getattr(value, "name", None) or str(value)
    return VALUES[name].get(text := str(text).removeprefix("torch."), text)


def translated(
    scope: Scope,
    given: Values,
    known: Sequence[str],
    refusal: str,
    elsewhere: Mapping[str, Collection[str]] | None = None,
) -> dict[str, Any]:
    """`given` under our names and in our spelling.

    Args:
      known: our names. refusal: the beginning of a message, with {} for the name: "LLM has no argument {}".
      elsewhere: names that something else takes, by what that is.

    Raises OptionNameError for a name that is neither known nor in the table, for one of the table that has no
    counterpart, and for an option that is given twice under two names.
    """
    found = {name: our_value(name, value) for name, value in given.items() if name in known}
    source = {name: name for name in found}
    for name, value in given.items():
        if name in known:
            continue
        entry = find(scope, name)
        if entry is None:
            raise OptionNameError(name, refusal.format(repr(name)) + _hint(name, known, elsewhere or {}))
        for ours, one in entry.apply(value).items():
            if ours not in known:
                raise OptionNameError(name, f"{refusal.format(repr(ours))}, which is what {entry.engines} call {name}")
            if ours == "mesh" and source.get(ours, ours) != ours:
                found[ours] = ",".join(sorted((*found[ours].split(","), one)))  # two axes of one mesh
                continue
            if ours in found:
                raise OptionNameError(name, f"{name} and {source[ours]} are the same option, {ours}: give one of them")
            found[ours], source[ours] = our_value(ours, one), name
    return found


def _hint(name: str, known: Sequence[str], elsewhere: Mapping[str, Collection[str]]) -> str:
    """What to do about an unknown name: where it belongs, or the nearest known ones."""
    for place, names in elsewhere.items():
        if name in names:
            return f": it belongs to {place}"
    for place in ("LLM", "SamplingParams"):
        if (entry := find(place, name)) is not None:
            return f" ({entry.engines}): {f'{place} takes it as {entry.ours}' if entry.read else entry.ours}"
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.4)
    similar = f"; the most similar are {', '.join(near)}" if near else f"; known are {', '.join(known)}"
    return did_you_mean(name, known, otherwise=similar)
