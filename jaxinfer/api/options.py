"""Options of `LLM`. Imports neither JAX nor NumPy, so that a command line can describe them at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxinfer.engine.options import ADAPTERS, SPECULATION, EngineOptions
from jaxinfer.options import describe, option

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxinfer.cache import KVScales
    from jaxinfer.models import ModelConfig, Params
    from jaxinfer.models.adapter import Adapter
    from jaxinfer.text import Tokenizer

    LiveModel = tuple[ModelConfig, Params] | tuple[ModelConfig, Params, Tokenizer | None]

MODEL = "Model"
ACTIVATIONS = ("float32", "int8")


# Arguments of `load_model`; the others are the engine's.
ON_LOADING = ("tokenizer", "dtype", "quantize", "requantize", "quantization", "verify", "revision", "activations")


def parse_offload(text: str) -> int | Literal["auto", "disk"]:
    """ "auto", "disk" or a number, from a command line. Raises ValueError for anything else."""
    if text in ("auto", "disk"):
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"offload must be auto, disk or a number of layers, got {text!r}") from None


def parse_adapters(texts: Sequence[str]) -> dict[str, str]:
    """Folders of adapters by name, from texts such as "name=folder" of a command line, or a folder alone, which has its
    own name. Raises ValueError for two of one name, and for a text without one."""
    folders: dict[str, str] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not equals or Path(text).exists():
            name, folder = Path(text).resolve().name, text
        if not (name and folder):
            raise ValueError(f"{text!r:.300} is no [NAME=]DIR")
        if name in folders:
            raise ValueError(f"{folders[name]} and {folder} are both named {name!r}: name one, as in OTHER={folder}")
        folders[name] = folder
    return folders


@dataclass(frozen=True, kw_only=True)
class LLMOptions(EngineOptions):
    """Options of `LLM` beside the model: how to load it, and the options of its engine."""

    tokenizer: "Tokenizer | str | Path | None" = option(
        None,
        "Folder with tokenizer files, or in Python a Tokenizer; by default the checkpoint's own. A model without one "
        "works on token ids.",
        "DIR",
        group=MODEL,
    )
    dtype: str = option(
        "auto",
        "auto keeps the checkpoint's dtype, but computes in float32 on CPUs, where bfloat16 is far slower; or a name "
        "such as bfloat16.",
        "DTYPE",
        group=MODEL,
    )
    activations: str = option(
        "float32",
        "What a CPU multiplies with integer weights of 4 to 8 bits: float32, or int8: activations rounded to 8 bits in "
        "groups of 32, as llama.cpp rounds them, which is faster and less exact. Of the model, not of its draft; for a "
        "CPU with Numba, without a mesh and offload.",
        "KIND",
        group=MODEL,
    )
    quantize: str | None = option(
        None,
        "Rounds the weights of linear layers to the nearest values of a format as they are loaded: int8, w8a8, "
        "int4-g128, nf4, fp8 and others (docs/quantization.md).",
        "FORMAT",
        group=MODEL,
    )
    requantize: str | None = option(
        None,
        "What becomes of weights that a GGUF file quantized: by default they are kept exactly; dense makes them "
        "floating point; a format as of quantize rounds those of linear layers to it, but for Q8_0 and Q4_0.",
        "FORMAT",
        group=MODEL,
    )
    quantization: str | None = option(
        None,
        "The quantized format that the checkpoint must have, such as awq or gptq; another one is an error. It need not "
        "be given, since the files declare it.",
        "FORMAT",
        group=MODEL,
    )
    verify: bool | None = option(
        None,
        "Whether checksums are compared. By default those of a checkpoint that jaxinfer convert wrote, while it is "
        "read; --verify compares the SHA-256 of every file first, also of Hugging Face and GGUF files, for which the "
        "hub's cache or a *.sha256 file has to know it; --no-verify compares none.",
        flag="--verify/--no-verify",
        group=MODEL,
    )
    revision: str | None = option(None, "Branch, tag or commit of a hub id.", "NAME", group=MODEL)
    tool_parser: str = option(
        "auto",
        "Form in which the model writes calls of tools: auto takes that of the chat template, none leaves calls in the "
        "text, or a name such as hermes, llama3_json or mistral (docs/tools.md).",
        "NAME",
        group=MODEL,
    )
    adapters: "Mapping[str, str | Path | Adapter] | None" = option(
        None,
        "LoRA adapters by name: folders as PEFT writes them, or in Python also Adapters. A request names the one that "
        "answers it (docs/adapters.md). On the command line DIR alone has its folder's name.",
        "[NAME=]DIR",
        flag="--adapter",
        is_repeated=True,
        parse=parse_adapters,
        group=ADAPTERS,
    )
    base_model: str | None = option(
        None,
        "The model's name in the configurations of its adapters, where that is not what it is opened by.",
        "NAME",
        group=ADAPTERS,
    )
    seed: int = option(
        0,
        "Requests without a seed of their own derive theirs from this one and their number since the start.",
        "N",
    )
    mesh: "str | Mapping[str, int] | Mesh | None" = option(
        None,
        "Devices to run on: model=4 (each holds a part of every layer), expert=8 (each holds some experts), "
        "sequence=4 (each computes a part of a prompt and holds a part of the cache), data=2,model=4 (two replicas of "
        "four devices); in Python also a jax.sharding.Mesh. By default one device. "
        "max_seqs and num_pages are those of each replica. On several hosts it names devices of all of them, and every "
        "host makes the same calls.",
        "AXES",
        group=MODEL,
    )
    offload: int | Literal["auto", "disk"] = option(
        0,
        "Layers whose weights stay in the host's memory and are copied to the device in each step while earlier layers "
        "compute, for models larger than the device's memory: a number, or auto for as few as make room for the "
        "weights and the cache. disk, on a CPU: all layers stay in the files, and each step reads them one by one, for "
        "models larger than the machine's memory. Not with a mesh; disk not with quantize, requantize and "
        "prefix_store.",
        "N",
        parse=parse_offload,
        group=MODEL,
    )
    steering: "Mapping[int, Any] | None" = option(
        None,
        "Vectors that are added to the hidden states of all requests, by the number of the layer after which they are "
        "added (docs/guides/own_code.md). A request may add its own too.",
    )
    kv_scales: "KVScales | None" = option(
        None, "Static scales of an fp8 cache; by default the checkpoint's, if it has some."
    )
    draft: "str | Path | LiveModel | None" = option(
        None,
        "What drafts tokens that the model then checks several at a time: a smaller model, of any tokenizer, ngram "
        "(finds them in the prompt and the answer), layers:4 (the model's own first 4 layers), a head that was trained "
        "for the model (EAGLE-3, DFlash, DSpark), or mtp (the head in the model's own files).",
        "MODEL",
        group=SPECULATION,
    )

    def __post_init__(self) -> None:
        self._check_types()
        super().__post_init__()
        if self.kv_scales is not None and not self.kv_dtype.startswith("fp8"):
            raise ValueError(f"kv_scales are for kv_dtype='fp8_e4m3' or 'fp8_e5m2', not {self.kv_dtype!r}")
        self.check_needs_draft(self.draft is not None)
        if self.activations not in ACTIVATIONS:
            raise ValueError(f"activations must be {' or '.join(ACTIVATIONS)}, got {self.activations!r}")
        if self.adapters is not None:
            if not isinstance(self.adapters, Mapping) or not all(isinstance(name, str) for name in self.adapters):
                raise TypeError(f'adapters must be a mapping such as {{"name": folder}}, got {self.adapters!r:.60}')
            if self.max_adapters == 0 and self.adapters:
                raise ValueError(f"max_adapters=0 leaves no room for adapters={list(self.adapters)}")
            if self.max_loaded_adapters is not None and len(self.adapters) > self.max_loaded_adapters:
                given, most = len(self.adapters), self.max_loaded_adapters
                raise ValueError(f"{given} adapters are given, and max_loaded_adapters={most}: raise it, or give fewer")
        if not self.adapters and self.max_adapters is None:
            for name in (
                *("max_loaded_adapters", "max_adapter_rank", "max_adapter_tokens"),
                *("adapter_modules", "adapter_parts"),
            ):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(f"{name}={value!r} is for adapters: give some, or max_adapters=8")
        if (self.adapters or self.max_adapters) and self.offload:
            raise ValueError(f"adapters are for layers on the device, and offload={self.offload!r} is given")
        if self.offload and self.activations != "float32":
            raise ValueError(
                f"activations={self.activations!r} excludes offload={self.offload!r}: those are not packed"
            )
        if self.offload and self.mesh is not None:
            raise ValueError(f"offload={self.offload!r} is for one device, and mesh={self.mesh!r} is given")
        if self.offload == "disk":
            for name in ("quantize", "requantize", "prefix_store"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(f"offload='disk' reads weights in each step: it excludes {name}={value!r}")
        if self.tool_parser not in ("auto", "none"):
            from jaxinfer.tool_calls import tool_form

            tool_form(self.tool_parser)

    def _check_types(self) -> None:
        for name in ("dtype", "quantize", "requantize", "quantization", "revision", "tool_parser", "base_model"):
            value = getattr(self, name)
            if not (isinstance(value, str) or (value is None and name not in ("dtype", "tool_parser"))):
                raise TypeError(f"{name} must be a text, got {type(value).__name__} {value!r:.60}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed must be an integer, got {type(self.seed).__name__} {self.seed!r:.60}")
        if self.offload not in ("auto", "disk"):
            if isinstance(self.offload, bool) or not isinstance(self.offload, int):
                shown = f"{type(self.offload).__name__} {self.offload!r:.60}"
                raise TypeError(f"offload must be auto, disk or a number, got {shown}")
            if self.offload < 0:
                raise ValueError(f"offload must be auto, disk or at least 0, got {self.offload}")
        if not (isinstance(self.tokenizer, (str, Path)) or self.tokenizer is None or hasattr(self.tokenizer, "encode")):
            shown = f"{type(self.tokenizer).__name__} {self.tokenizer!r:.60}"
            raise TypeError(f"tokenizer must be a folder or a jaxinfer.Tokenizer, got {shown}")
        if not (isinstance(self.draft, (str, Path, tuple)) or self.draft is None):
            shown = f"{type(self.draft).__name__} {self.draft!r:.60}"
            raise TypeError(f"draft must be a model or head, ngram, layers:N or mtp, got {shown}")


def documented(docstring: str | None) -> str:
    """The docstring of `LLM` with the options that `LLMOptions` describes."""
    lines = [f"  {name}: {field.help}" for name, field in describe(LLMOptions).items()]
    return "\n".join([docstring or "", "Options:", *lines])
