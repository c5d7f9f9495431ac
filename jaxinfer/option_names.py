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

LLAMA, HF, MLX, OLLAMA = "llama.cpp", "Transformers", "mlx-lm", "Ollama"
OPENAI, SGLANG, VLLM = "OpenAI", "SGLang", "vLLM"


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
        if any(value is known or (type(value) is type(known) and value == known) for known in (None, *self.harmless)):
            return {}
        given = f"{self.name}={value!r:.60} ({self.engines})"
        if self.read is None:
            raise OptionNameError(self.name, f"{given}: no option here means the same; {self.ours}")
        try:
            return self.read(value)
        except ValueError as error:
            raise OptionNameError(self.name, f"{given}: {error}") from None


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
        raise ValueError(f"method {method!r} is not supported; draft= takes a model or head, ngram, layers:N or mtp")
    ours = {"draft": "ngram" if method == "ngram" else value.get("model")}
    if value.get("num_speculative_tokens") is not None:
        ours["num_draft_tokens"] = value["num_speculative_tokens"]
    return {name: option for name, option in ours.items() if option is not None}


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


# Names without a counterpart, by what to do instead.
_REFUSED: Mapping[Scope, Mapping[str, str]] = {
    "LLM": {
        "see processors=, functions of other arguments": "logits_processors",
        "leave it out": "disable_log_stats load_format use_safetensors tokenizer_mode attn_implementation flash_attn",
        "a checkpoint's own format is found from its files; quantize= rounds plain weights, `jaxinfer quantize "
        "--method awq` calibrates": "load_in_8bit load_in_4bit quantization_config",
        "every step is a compiled program; `jaxinfer warm MODEL` compiles beforehand": "enforce_eager "
        "disable_cuda_graph compilation_config max_seq_len_to_capture",
        "code of a checkpoint is never run; `jaxinfer models` lists the families": "trust_remote_code",
        "see host_cache_gib=": "swap_space",
        "see offload=": "cpu_offload_gb num_gpu n_gpu_layers gpu_layers",
        "see num_pages=": "num_gpu_blocks_override",
        "see prefill_chunk=": "max_num_batched_tokens max_prefill_tokens num_batch batch_size n_batch "
        "enable_chunked_prefill",
        "see memory_fraction=": "mem_fraction_static",
        "see tokenizer=": "tokenizer_config",
        "see revision=": "tokenizer_revision",
        "prompts may be token ids in any case": "skip_tokenizer_init",
        "see mesh=": "pipeline_parallel_size enable_expert_parallel decode_context_parallel_size device_map",
        "see jaxinfer.initialize_hosts()": "distributed_executor_backend",
        "the environment variable JAX_PLATFORMS chooses the platform": "device",
        "XLA takes all cores: taskset limits them": "num_thread n_threads threads",
        "the environment variable HF_HOME says where downloads are kept": "download_dir cache_dir",
        "the environment variable HF_TOKEN holds the token": "hf_token token",
        "see logprobs= of SamplingParams, at most 20": "max_logprobs",
        "see `jaxinfer serve MODEL`": "host port api_key served_model_name",
        "see max_model_len=": "hf_overrides rope_scaling max_kv_size num_keep",
        "see priority= of generate": "scheduling_policy",
        "see kv_dtype=": "kv_bits cache_type_k f16_kv",
        "a model stays until llm.close()": "keep_alive",
        "see adapters (--adapter NAME=DIR) and max_adapters=": "enable_lora lora_paths lora adapter_path "
        "max_loras_per_batch",
        "see max_loaded_adapters=, beyond which loading one is refused and none makes room": "max_cpu_loras",
        "see num_draft_tokens=": "draft_max",
        'see draft="ngram"': "ngram_prompt_lookup_max",
    },
    "SamplingParams": {
        "leave it out": "detokenize use_cache",
        "see repetition_penalty=, presence_penalty= and frequency_penalty=": "repeat_penalty repeat_last_n "
        "repetition_context_size penalize_newline no_repeat_ngram_size",
        "see max_tokens=, and max_model_len= of LLM": "max_length",
        "see min_tokens=": "min_length",
        "see stop= and stop_token_ids=": "eos_token_id extra_eos_token",
        "see temperature=, top_k=, top_p= and min_p=": "typical_p tfs_z mirostat mirostat_tau mirostat_eta "
        "xtc_probability xtc_threshold top_n_sigma min_tokens_to_keep",
        "see n= and logprobs=": "num_beams use_beam_search beam_width length_penalty early_stopping best_of",
        "see logprobs=": "top_logprobs output_scores",
        "see prompt_logprobs=": "echo",
        "see seed=": "generator",
        "see bad_words=, allowed_token_ids= and logit_bias=": "bad_words_ids suppress_tokens",
        "see bad_words=, allowed_token_ids= and logit_bias=, and LLM(processors=) for functions": "logits_processor "
        "logits_processors",
        "see structured=": "force_words_ids format grammar",
        "pass the token ids to keep": "truncate_prompt_tokens",
    },
    "call": {
        "prompts= takes texts or lists of token ids": "prompt_token_ids",
        "see adapter=, the name of one of adapters=": "lora_request lora_path",
        "see llm.stream(prompt, params)": "stream streamer verbose",
        "see `jaxinfer chat MODEL`": "interactive conversation",
        "params= takes SamplingParams": "generation_config options",
        "see tokenizer= of LLM": "chat_template",
    },
    "server": {
        "see --api-keys FILE": "api_key",
        "see --reasoning": "reasoning_parser",
        "see --adapter NAME=DIR": "lora_modules",
        "see --admin-keys FILE": "admin_api_key",
        "calls are always read": "enable_auto_tool_choice",
        "see --tokenizer": "chat_template",
        "put a proxy such as nginx in front (docs/serving.md)": "ssl_keyfile ssl_certfile root_path",
        "see --log-prompts": "log_requests enable_log_requests disable_log_requests",
    },
}
# Values of these names that ask for what happens anyway.
_HARMLESS: tuple[tuple[Any, str], ...] = (
    (
        False,
        "load_in_8bit load_in_4bit enforce_eager disable_cuda_graph trust_remote_code skip_tokenizer_init "
        "enable_expert_parallel enable_lora use_beam_search early_stopping output_scores echo stream verbose "
        "interactive conversation",
    ),
    (True, "enable_chunked_prefill use_safetensors disable_log_stats detokenize use_cache enable_auto_tool_choice"),
    (0, "swap_space cpu_offload_gb no_repeat_ngram_size mirostat xtc_probability"),
    (
        1,
        "pipeline_parallel_size decode_context_parallel_size repeat_penalty typical_p tfs_z min_tokens_to_keep "
        "num_beams length_penalty best_of",
    ),
    (-1, "n_gpu_layers gpu_layers"),
    (20, "max_logprobs"),
    ("auto", "tokenizer_mode device device_map load_format attn_implementation flash_attn"),
    ("safetensors", "load_format"),
    ("priority", "scheduling_policy"),
)


def _refused(scope: Scope) -> list[OtherName]:
    """The names of `_REFUSED`; those with a harmless value of True or False are switches."""
    refused = []
    for hint, names in _REFUSED[scope].items():
        for name in names.split():
            harmless = tuple(value for value, others in _HARMLESS if name in others.split())
            harmless += tuple(float(value) for value in harmless if type(value) is int)
            is_switch = any(isinstance(value, bool) for value in harmless) or name.endswith("log_requests")
            refused.append(OtherName(scope, name, "other engines", hint, None, harmless, is_switch))
    return refused


_LLM = (
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
    _same("LLM", "max_loras", VLLM, "max_adapters"),
    _same("LLM", "max_loaded_loras", SGLANG, "max_loaded_adapters"),
    _same("LLM", "max_lora_rank", f"{VLLM}, {SGLANG}", "max_adapter_rank"),
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
    *_refused("LLM"),
)

_SAMPLING = (
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
    OtherName("SamplingParams", "do_sample", HF, "temperature", _do_sample, is_switch=True),
    *(_same("SamplingParams", name, VLLM, "structured") for name in ("structured_outputs", "guided_decoding")),
    _same("SamplingParams", "response_format", OPENAI, "structured", harmless=({"type": "text"},)),
    *(_structured(f"guided_{kind}", VLLM, kind) for kind in ("json", "regex", "choice", "grammar")),
    _structured("json_schema", SGLANG, "json"),
    _structured("regex", SGLANG, "regex"),
    *_refused("SamplingParams"),
)

_CALL = (
    _same("call", "sampling_params", f"{VLLM}, {SGLANG}", "params"),
    _same("call", "prompt", f"{MLX}, {SGLANG}", "prompts"),
    _same("call", "inputs", VLLM, "prompts"),
    _same("call", "input_ids", f"{HF}, {SGLANG}", "prompts"),
    *_refused("call"),
)

_HTTP = (
    _same("server", "max_num_queued_reqs", VLLM, "max_queued"),
    _same("server", "max_num_queued_tokens", VLLM, "max_queued_tokens"),
    _same("server", "max_queued_requests", SGLANG, "max_queued"),
    _same("server", "shutdown_timeout", VLLM, "drain_timeout"),
    _same("server", "otlp_traces_endpoint", f"{VLLM}, {SGLANG}", "otlp_endpoint"),
    *_refused("server"),
)

NAMES: tuple[OtherName, ...] = (*_LLM, *_SAMPLING, *_CALL, *_HTTP)
_BY_NAME = {(entry.scope, entry.name): entry for entry in NAMES}

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


def check_format(wanted: str | None, declared: str | None, model: str) -> None:
    """Raises ValueError unless the checkpoint of a model is in the format that `quantization` names, if it names one.

    Args:
      declared: the format of its files; None for plain weights.
    """
    if wanted is None:
        return
    name = wanted.lower()
    name, declared = FORMAT_NAMES.get(name, name), FORMAT_NAMES.get(declared or "", declared)
    if name == declared:
        return
    what = "its files declare no quantized format" if declared is None else f"its files are in the format {declared}"
    recipe = {"fp8": "fp8", "bitsandbytes": "nf4", "mxfp4": "mxfp4"}.get(name)
    if declared is not None or not (recipe or name in RECIPE_NAMES):
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
    translation = {name: our_value(name, value) for name, value in given.items() if name in known}
    source = {name: name for name in translation}
    for name, value in given.items():
        if name in known:
            continue
        entry = find(scope, name)
        if entry is None:
            raise OptionNameError(name, refusal.format(repr(name)) + _hint(name, known, elsewhere or {}))
        for ours, own_value in entry.apply(value).items():
            if ours not in known:
                raise OptionNameError(name, f"{refusal.format(repr(ours))}, which is what {entry.engines} call {name}")
            if ours == "mesh" and source.get(ours, ours) != ours:
                translation[ours] = ",".join(sorted((*translation[ours].split(","), own_value)))  # two axes of one mesh
                continue
            if ours in translation:
                raise OptionNameError(name, f"{name} and {source[ours]} are the same option, {ours}: give one of them")
            translation[ours], source[ours] = our_value(ours, own_value), name
    return translation


def _hint(name: str, known: Sequence[str], elsewhere: Mapping[str, Collection[str]]) -> str:
    """A hint for an unknown name: where it belongs, or the nearest known ones."""
    for place, names in elsewhere.items():
        if name in names:
            return f": it belongs to {place}"
    for place in ("LLM", "SamplingParams"):
        if (entry := find(place, name)) is not None:
            return f" ({entry.engines}): {f'{place} takes it as {entry.ours}' if entry.read else entry.ours}"
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.4)
    similar = f"; the most similar are {', '.join(near)}" if near else f"; known are {', '.join(known)}"
    return did_you_mean(name, known, otherwise=similar)
