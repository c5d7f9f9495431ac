"""`jaxinfer pull`: a repository of the hub into its cache; and what `run` says before it pulls."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxinfer.checks import format_bytes
from jaxinfer.cli.options import as_json
from jaxinfer.cli.output import write_json, write_text
from jaxinfer.options import MISSING, argument, option
from jaxinfer.progress import Stage

if TYPE_CHECKING:
    from jaxinfer.store import Download

RECIPES = ("int8", "int4-g128")


@dataclass(frozen=True, kw_only=True)
class PullOptions:
    name: str = argument(
        MISSING,
        "user/model, with @revision if not the newest, and with :Q4_K_M for its GGUF file; a short name such as "
        "qwen3:0.6b; or an alias.",
        "NAME",
    )
    revision: str | None = option(None, "Branch, tag or commit.", "NAME")
    dry_run: bool = option(False, "Say what would be downloaded, and whether it fits here; download no weights.")
    as_json: bool = as_json("One JSON object.")


def pull(options: PullOptions) -> None:
    """Download a model.

    Its files are kept in the cache of Hugging Face's hub, which other tools share, and compared with the hub's
    checksums. An interrupted download continues when it is repeated. Only safetensors, GGUF, JSON and tokenizer files
    are downloaded: never pickles, never code. A model is then used as it was pulled, without asking the hub; pulling it
    again brings what has changed. HF_TOKEN, HF_HOME and HF_ENDPOINT have the meaning of huggingface_hub.
    """
    from jaxinfer.store import alias_options, prepare

    download = prepare(options.name, options.revision)
    fit = fits_here(download, alias_options(options.name).get("quantize"))
    if not options.as_json:
        write_text(sentence_of(download) + "\n" + (f"{fit['text']}\n" if fit is not None else ""))
    pulled = None if options.dry_run else download.fetch()
    if options.as_json:
        write_json(
            {
                "name": str(download.name),
                "commit": download.commit,
                "bytes": download.num_bytes,
                "downloaded_bytes": download.num_missing_bytes,
                "files": [vars(file) for file in download.files],
                "license": download.license,
                "fits": fit,
                "path": None if pulled is None else pulled.path,
            }
        )
    elif pulled is not None:
        write_text(f"pulled {pulled.name}, commit {pulled.commit[:12]}: {format_bytes(pulled.num_bytes)}, checked\n")


def sentence_of(download: "Download") -> str:
    """How many files a model has, and how much of them is to be downloaded."""
    license = f", license {download.license}" if download.license else ""
    missing = download.num_missing_bytes
    left = f"{format_bytes(missing)} to download" if missing else "all of them here"
    num_files = len(download.files)
    files = f"{num_files} {'file' if num_files == 1 else 'files'}"
    return f"{download.name}: {files}, {format_bytes(download.num_bytes)}, {left}{license}"


def fits_here(download: "Download", quantize: str | None = None) -> dict[str, Any] | None:
    """Counts if the model, with `quantize`, fits this machine, and which quantization makes it fit: a sentence as
    "text".

    None where it cannot be told: for GGUF files, whose headers are not here, for adapters, and where no device can be
    opened.
    """
    if download.name.variant is not None or download.is_adapter:
        return None
    with Stage("counting what it needs"):
        try:
            import jax

            from jaxinfer.loading import load_shapes
            from jaxinfer.planning import plan_here
            from jaxinfer.quantization.tree import describe

            # A CPU computes in float32.
            model = str(download.name.at(download.commit))
            dtype = "float32" if jax.default_backend() == "cpu" else "auto"
            config, params = load_shapes(model, dtype=dtype, quantize=quantize)
            plan = plan_here(model, config, params)
            if plan is None:
                return None
            needed, available = plan.memory.total, plan.memory.budget
            facts = {"needed_bytes": needed, "available_bytes": available, "fits": plan.fits, "quantize": None}
            with_cache = f"with the cache of 8 answers of {plan.request.options.max_model_len:,} tokens"
            text = f"needs {format_bytes(needed)} {with_cache}, and {format_bytes(available)} may be used here"
            if plan.fits:
                return {**facts, "text": f"fits: {text}"}
            for recipe in () if describe(params) else RECIPES:
                smaller = plan_here(model, *load_shapes(model, dtype=dtype, quantize=recipe))
                if smaller is not None and smaller.fits:
                    would = f"--quantize {recipe} would fit, with {format_bytes(smaller.memory.total)}"
                    return {**facts, "quantize": recipe, "text": f"does not fit: {text}; {would}"}
            return {**facts, "text": f"does not fit: {text}; nor would it with {' or '.join(RECIPES)}"}
        except (ValueError, OSError, RuntimeError, NotImplementedError) as error:
            return {"fits": None, "text": f"whether it fits is not known: {str(error).partition(chr(10))[0]}"}
