"""From what a user names as a model to what an engine runs: configuration, parameters, tokenizer, defaults."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.cache import KVScales
from jaxinfer.embedding_files import EmbeddingConfig, read_embedding_config
from jaxinfer.engine.placement import DevicePlacement
from jaxinfer.engine.weight_forms import Origin, by_path
from jaxinfer.engine.weights import ModelWeights, WeightsView, packing_of
from jaxinfer.loaded_tokenizers import begin_tokenizer, tokenizer_of
from jaxinfer.loaded_weights import (
    OF_ALIAS,
    check_activations,
    check_not_rounded,
    files_key,
    resolved_dtype,
    selection,
    tell_what_is_slower,
)
from jaxinfer.models import MeshFit, ModelConfig, Params, abstract_params, compute_dtype, fit_to_mesh, keeps_float32
from jaxinfer.models.adapter import Adapter, TokenRows
from jaxinfer.models.disk_layers import DISK_LAYERS, DiskLayers, LayerReader
from jaxinfer.models.host_layers import HostStacks, disk_layers, move_layers_to_host, moved_layers
from jaxinfer.option_names import check_format
from jaxinfer.param_dict import plain
from jaxinfer.quantization import Selection, check, quantize_params, side_by_side
from jaxinfer.quantization.on_device import (
    Copies,
    Packing,
    in_layouts,
    in_whole_bytes,
    rounds_activations,
    unpack_params,
    why_not_packing,
)
from jaxinfer.quantization.tree import is_quantized, is_weight
from jaxinfer.sampling import SamplingParams, SamplingParamsError, from_generation_config
from jaxinfer.sampling.params import our_names
from jaxinfer.speculative import OWN_HEAD, Draft, HeadDraft, ModelDraft, draft_by_name, head_for
from jaxinfer.speculative.vocabularies import ModelTokens, TokenTables, token_tables
from jaxinfer.store import FoundModel, StoreError, find_model
from jaxinfer.store.names import parse_hub_name
from jaxinfer.text import (
    Tokenizer,
    TokenizerNotFoundError,
    check_same_tokens,
    has_same_tokens,
    read_tokenizer_files,
)

DEFAULT_MAX_MODEL_LEN = 4096
# The numbers of the layers whose weights go to the host's memory, of a configuration and abstract parameters.
ChooseLayers = Callable[[ModelConfig, Params], Sequence[int]]
# Bytes of host buffers in flight while weights are packed: more than the packed weights would be of a small model.
PACKING_BYTES = 32 * 2**20
LiveModel = tuple[Any, Any] | tuple[Any, Any, Tokenizer | None]


@dataclass(frozen=True)
class Opening:
    """How the files of a model were opened, so that others are opened alike.

    Attributes:
      config: as the files say it, before it is made for a length or a mesh.
      dtype: in which they were opened. packs: whether a CPU packs weights as it reads them. keeps_16_bits: whether
        packed weights keep 16 bits.
      chosen: what rounds weights as they are read, None for nothing.
      more: further arguments of `checkpoints_convert.open_checkpoint`.
    """

    config: ModelConfig
    dtype: str
    packs: bool = False
    keeps_16_bits: bool = False
    chosen: Selection | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadedModel:
    """Attributes:
    name: what the user called it. weights: the parameters, which other models may use too.
    default_params: generation_config.json's; ignored_defaults: its settings that are not applied.
    kv_scales: the checkpoint's scales for an fp8 cache, if it has some.
    has_head: False where its files have no head. embedding: how it embeds texts, where its files say so.
    system: the system prompt of an alias.
    activations: "int8" where products with packed weights round activations to 8 bits.
    source: the folder or GGUF file that it was read from; None for live parameters.
    fit: how the `mesh` runs it, where there is one; then `config` is the fit's.
    opening: how its files were opened, or how files with other weights for it are.
    """

    name: str
    config: ModelConfig
    weights: ModelWeights
    tokenizer: Tokenizer | None
    default_params: SamplingParams = field(default_factory=SamplingParams)
    ignored_defaults: Sequence[str] = ()
    eos_token_ids: tuple[int, ...] = ()
    kv_scales: KVScales | None = None
    has_head: bool = True
    embedding: EmbeddingConfig | None = None
    fit: MeshFit | None = None
    mesh: Mesh | None = None
    system: str | None = None
    activations: str = "float32"
    source: Path | None = None
    opening: Opening | None = None

    @property
    def params(self) -> Params:
        return self.weights.params

    def write_tree(self, tree: Any, *, is_partial: bool, copies: bool) -> None:
        """Replaces weights, in an update that has begun, by those of a tree like `params`, or of one of another library
        (`checkpoints_convert.trees`), whose weights are made one by one.

        Raises ValueError, with names, as `ModelWeights.write` and `OtherTree.check`, before anything is written.
        """
        assert self.opening is not None
        other = other_tree(tree, self.opening.config)
        if other is None:
            self.weights.write(tree, is_partial=is_partial, copies=copies)
            return
        other.check(is_partial=is_partial)
        if self.weights.has_host_layers:
            self.weights.write(other.params(), is_partial=is_partial, copies=copies)
            return
        self.weights.forms.check(other.shapes(), is_partial=is_partial)
        self.weights.write_each(other.each(), other.weights.keys(), copies=copies)

    def write_weights(self, path: str | Path) -> None:
        """Replaces all weights, in an update that has begun, by those of a checkpoint, which are read one by one.

        Raises CheckpointError, a ValueError, for files that cannot be read, and ValueError for those of another model
        or in another form, before anything is written.
        """
        import checkpoints_convert

        assert self.opening is not None
        opening, own = self.opening, self.weights.forms
        if self.weights.has_host_layers:
            raise ValueError("layers in the host's memory (offload) are replaced from a tree, not from files")
        with checkpoints_convert.open_checkpoint(path, dtype=opening.dtype, **opening.more) as checkpoint:
            if name := _other_field(checkpoint.config, opening.config):
                given, wanted = (getattr(config, name) for config in (checkpoint.config, opening.config))
                raise ValueError(f"{path}: weights of another model: its {name} is {given!r:.80}, not {wanted!r:.80}")
            _, shapes = _shapes(path, None, dtype=opening.dtype, requantize=opening.more.get("requantize"))
            own.check(by_path(shapes), is_partial=False)
            packing = packing_of(checkpoint.config, self.activations, opening.chosen) if opening.packs else None
            reading = _Reading(checkpoint, self.mesh, opening.chosen, packing)
            self.weights.write_each(reading.each(keeps_16_bits=opening.keeps_16_bits), own.forms.keys())

    def on_mesh(self, scales: KVScales | None) -> KVScales | None:
        """Scales of the checkpoint's key-value heads as the engine takes them."""
        if scales is None or self.fit is None:
            return scales
        return KVScales(self.fit.kv_scales(scales.keys), self.fit.kv_scales(scales.values))

    def runnable(self) -> WeightsView[tuple[Params, Copies | None]]:
        """The parameters as the engine takes them: on a CPU, packed weights; of quantized ones that cannot be packed
        float32 copies, as far as their budget goes, and none where layers stay on the disk, since memory is short."""
        has_all = self.fit is None and disk_layers(self.params) is None
        is_on_cpu, config, activations = has_all and jax.default_backend() == "cpu", self.config, self.activations
        run = self.weights.view(
            lambda stored: stored.for_cpu(config, activations) if is_on_cpu else (stored.params, None)
        )
        if activations != "float32" and not rounds_activations(run.value[0]):
            raise ValueError(
                f"activations={activations!r} is for integer weights of 4 to 8 bits in a model that computes in "
                f"float32, and {self.name} has none"
            )
        return run

    def for_length(self, max_model_len: int | None, *, has_policy: bool = False) -> tuple["LoadedModel", int]:
        """The model made for prompts and answers of that many tokens (None: what it allows, at most 4,096).

        Raises ValueError for more than the model declares, unless its positions stretch, or are those in a cache that
        has a policy.
        """
        config, length = for_length(self.config, max_model_len, has_policy=has_policy)
        params = self.default_params
        if params.max_tokens is not None and params.max_tokens >= length:  # no prompt would leave room for it
            params = replace(params, max_tokens=None)
        return replace(self, config=config, default_params=params), length


def for_length(config: ModelConfig, max_model_len: int | None, *, has_policy: bool = False) -> tuple[ModelConfig, int]:
    """`LoadedModel.for_length` of a configuration."""
    allowed = config.max_length
    length = min(allowed, DEFAULT_MAX_MODEL_LEN) if max_model_len is None else max_model_len
    stretches = any(rope.depends_on_length for rope in config.ropes) and not config.has_position_embedding
    if length > allowed and not stretches:
        config.for_length(length)  # which names a limit of its own
        if has_policy:
            return config, length
        raise ValueError(f"max_model_len={length} is more than the {allowed} tokens the model declares")
    return config.for_length(length), length


def load_model(
    model: str | Path | LiveModel,
    *,
    tokenizer: Tokenizer | str | Path | None = None,
    dtype: str = "auto",
    revision: str | None = None,
    quantize: str | None = OF_ALIAS,
    requantize: str | None = None,
    quantization: str | None = None,
    verify: bool | None = None,
    mesh: Mesh | None = None,
    offload: ChooseLayers | None = None,
    from_disk: bool = False,
    activations: str = "float32",
    is_draft: bool = False,
    is_mtp: bool = False,
) -> LoadedModel:
    """Loads what `find_model` finds, as its alias says, or checks live `(ModelConfig, params[, tokenizer])`.
    With a mesh the parameters lie there, and the configuration is as `fit_to_mesh` makes it.

    With `quantize`, the name of a `Recipe`, the weights of linear layers are rounded to it as they are read; None for
    none, whatever the alias says. `requantize` is for what a GGUF file quantized, `verify` for checksums, both as in
    `checkpoints_convert.load`; `quantization` names the quantized format that its files have to be in.
    `offload` chooses the layers for the host's memory (`engine.offload`), from the shapes of all; `from_disk`: all of
    them stay in the files (`models.disk_layers`).
    On a CPU weights are packed as they are read, with `activations="int8"` for products that round activations.
    A head that drafts is taken where `is_draft`. `is_mtp`: the head for multi-token prediction in the files, instead of
    the model.

    Raises FileNotFoundError or ValueError for a checkpoint that is missing or broken, with file and tensor; warns of
    generation_config settings that are not applied.
    """
    check_activations(activations, mesh)
    tell_what_is_slower()
    if isinstance(model, tuple):
        if requantize is not None:
            raise ValueError("requantize is for GGUF files, not for live parameters")
        if verify:
            raise ValueError("verify is for the files of a checkpoint, not for live parameters")
        check_format(quantization, None, "a live model")
        loaded = replace(_live(model, dtype, selection(quantize, {}), mesh, offload), activations=activations)
    else:
        named = find_model(model, revision)
        chosen = selection(quantize, {} if requantize else named.options)
        opening = {"requantize": requantize, "verify": verify, "is_mtp": is_mtp}
        needed = {"reads_tokenizer": tokenizer is None, "quantization": quantization, "activations": activations}
        loaded = _read(named, dtype, chosen, mesh, offload, opening=opening, from_disk=from_disk, **needed)
    if loaded.config.draft_head is not None and not (is_draft or is_mtp):
        raise ValueError(
            f"{loaded.name} is a head that drafts for another model: give that model, and this one as its draft"
        )
    chosen_tokenizer = loaded.tokenizer if tokenizer is None else tokenizer
    if isinstance(chosen_tokenizer, (str, Path)):
        chosen_tokenizer = Tokenizer.from_dir(chosen_tokenizer)
    if loaded.ignored_defaults:
        warnings.warn(
            f"{loaded.name}: generation_config.json asks for {', '.join(loaded.ignored_defaults)}, which is not "
            "applied",
            stacklevel=3,
        )
    eos_ids = set(loaded.eos_token_ids)
    if chosen_tokenizer is not None and chosen_tokenizer.eos_token_id is not None:
        eos_ids.add(chosen_tokenizer.eos_token_id)
    fit = None if mesh is None else fit_to_mesh(mesh, loaded.config)
    return replace(
        loaded,
        config=loaded.config if fit is None else fit.config,
        tokenizer=chosen_tokenizer,
        eos_token_ids=tuple(sorted(eos_ids)),
        fit=fit,
        mesh=mesh,
    )


class AdapterBase(Protocol):
    """The part of `LLM` that adapters are read for."""

    config: ModelConfig
    tokenizer: Tokenizer | None

    @property
    def params(self) -> Params: ...


class ReadAdapter(NamedTuple):
    """An adapter as it was read: the folder or hub id that it is from, "" for arrays, and the tokenizer in its folder,
    None for one that does as the base's."""

    adapter: Adapter
    source: str = ""
    tokenizer: Tokenizer | None = None


def load_adapter(
    given: Any, base: AdapterBase, base_names: Sequence[str], what: str, *, uses_tokenizer: bool = True
) -> ReadAdapter:
    """Reads an adapter of a base. `uses_tokenizer`: whether the tokenizer and chat template in its folder count.

    Copies of the base's own tables are left out: PEFT saves them beside an adapter that has pairs for the embedding or
    the head, and whole where tokens were added.

    Raises CheckpointError, a ValueError, as `read_adapter`, and for the adapter of another base model; TypeError for
    what is none.
    """
    if isinstance(given, Adapter):
        return ReadAdapter(given)
    if not isinstance(given, (str, Path)) or not str(given):
        shown = f"{type(given).__name__} {given!r:.60}"
        raise TypeError(f"adapter {what}: a folder or a jaxinfer.models.adapter.Adapter is wanted, got {shown}")
    from checkpoints_convert.adapters import read_adapter

    source = str(given)
    if isinstance(given, str) and not Path(given).expanduser().exists() and parse_hub_name(given) is not None:
        given = find_model(given).path or given
    folder = Path(given).expanduser()
    adapter = _without_copies(read_adapter(folder, base.config, base_model=base_names), base)
    return ReadAdapter(adapter, source, _own_tokenizer(folder, adapter, base) if uses_tokenizer else None)


def _without_copies(adapter: Adapter, base: AdapterBase) -> Adapter:
    """The adapter without tables whose first tokens have the base's vectors: of those the added tokens stay, as trained
    ones, with what a pair changes in them."""
    size, is_tied = base.config.vocab_size, base.config.tie_word_embeddings
    pairs, replaced, rows = dict(adapter.low_rank), dict(adapter.replaced), dict(adapter.token_rows)
    for which, own in {"embed": "embed", "lm_head": "embed" if is_tied else "lm_head"}.items():
        if which not in replaced:
            continue
        table = replaced[which] if which == "embed" else replaced[which].T
        if not _is_copy(table[:size], base.params[own], is_transposed=own == "lm_head"):
            continue
        added, pair = table[size:].astype(np.float32), pairs.get(which)
        if len(added) and pair is not None and pair.magnitude is not None:
            continue  # whose lengths are those of the whole table
        del replaced[which]
        if not len(added):
            continue
        if pair is not None:
            of_tokens, other = (pair.a, pair.b) if which == "embed" else (pair.b.T, pair.a.T)
            added += np.float32(pair.scale) * (of_tokens[size:].astype(np.float32) @ other.astype(np.float32))
            pairs[which] = replace(pair, **({"a": pair.a[:size]} if which == "embed" else {"b": pair.b[:, :size]}))
        tokens = {size + number: row for number, row in enumerate(added)}
        if (trained := rows.get(which)) is not None:
            tokens |= dict(zip(trained.tokens, trained.rows.astype(np.float32), strict=True))
        rows[which] = TokenRows(tuple(tokens), np.stack([*tokens.values()]))
    return replace(adapter, low_rank=pairs, replaced=replaced, token_rows=rows)


def _is_copy(rows: np.ndarray, table: Any, *, is_transposed: bool) -> bool:
    """True if rows [V, D] are a table, or the transposed one, of the parameters."""
    if rows.shape != (table.shape[::-1] if is_transposed else table.shape):
        return False
    own = np.asarray(table.dequantize() if is_weight(table) else table)
    return np.array_equal(rows.astype(np.float32), (own.T if is_transposed else own).astype(np.float32))


def _own_tokenizer(folder: Path, adapter: Adapter, base: AdapterBase) -> Tokenizer | None:
    """The tokenizer in an adapter's folder, with the base's chat template where it has none; None where there is none,
    and for one that does as the base's.

    Raises CheckpointError for a file that cannot be read, and for tokens of which neither has a vector.
    """
    from checkpoints_convert import CheckpointError

    common = base.tokenizer
    try:
        files = read_tokenizer_files(folder)
        templates = {} if common is None else common.chat_templates
        files = replace(files, chat_templates=files.chat_templates or templates)
        if common is not None and (files.digest, files.chat_templates) == (common.digest, templates):
            return None
        own = Tokenizer(files)
    except TokenizerNotFoundError:
        return None
    except ValueError as error:
        raise CheckpointError(folder, f"its tokenizer cannot be read: {error}") from None
    size = base.config.vocab_size + adapter.num_added("embed", base.config.vocab_size)
    for number, token in sorted(own.tokens_by_id().items()):
        if number >= size and not (common is not None and common.has_id(number)):
            raise CheckpointError(
                folder,
                f"its tokenizer has the token {token!r} with the id {number}, the model with it has {size} tokens",
            )
    return own


def _live(
    model: LiveModel, dtype: str, chosen: Selection | None, mesh: Mesh | None, offload: ChooseLayers | None
) -> LoadedModel:
    config, params, tokenizer = _check_live(model, dtype)
    if chosen is not None:
        params = quantize_params(params, chosen.recipe)
    if mesh is not None:
        params = fit_to_mesh(mesh, config).place(unpack_params(params))
    else:
        params = jax.tree.map(
            lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, params, is_leaf=is_weight
        )
    if offload is not None:
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        params = move_layers_to_host(params, offload(config, shapes), jax.default_backend())
    origin = Origin(chosen, fit=None if mesh is None else fit_to_mesh(mesh, config))
    opening = Opening(config, compute_dtype(params).name, chosen=chosen)
    weights = ModelWeights(_laid_out(params, mesh), origin=origin)
    return LoadedModel("live parameters", config, weights, tokenizer, opening=opening)


def _laid_out(params: Params, mesh: Mesh | None, *, donate: bool = False) -> Params:
    """The parameters as a device multiplies them: side by side on a GPU, and on one device in its layouts."""
    platform = jax.default_backend()
    if platform == "gpu":
        params = side_by_side.join(params, donate=donate)
    return params if platform == "cpu" or mesh is not None else in_layouts(params, platform, donate=donate)


def _read(
    named: FoundModel,
    dtype: str,
    chosen: Selection | None,
    mesh: Mesh | None,
    offload: ChooseLayers | None,
    *,
    from_disk: bool,
    reads_tokenizer: bool,
    quantization: str | None,
    opening: Mapping[str, Any],
    activations: str,
) -> LoadedModel:
    import checkpoints_convert

    path = named.path
    assert path is not None
    key = files_key(path, dtype, chosen, mesh, opening, activations)
    keeps_16_bits, dtype = dtype == "auto", resolved_dtype(dtype)
    with checkpoints_convert.open_checkpoint(path, dtype=dtype, **opening) as checkpoint:
        check_format(quantization, checkpoint.quantization, named.name)
        is_kept_gguf = checkpoint.quantization == "gguf" and not checkpoint.is_dequantized
        check_not_rounded(path, checkpoint.quantized() if is_kept_gguf else {}, chosen)
        # What is small is read, and refused, before the weights.
        try:
            defaults = from_generation_config(checkpoint.generation_config)
        except SamplingParamsError as error:
            raise checkpoints_convert.CheckpointError(path / "generation_config.json", str(error)) from None
        tokenizer = begin_tokenizer(path, checkpoint.tokenizer_files()) if reads_tokenizer else lambda: None
        shapes, on_host = {}, ()
        if offload is not None:
            _, shapes = _shapes(path, chosen, dtype=dtype, requantize=opening["requantize"])
            on_host = tuple(offload(checkpoint.config, shapes))
        reading = _Reading(checkpoint, mesh, chosen, packing_of(checkpoint.config, activations, chosen))

        def load() -> Params:
            if from_disk:
                again = opening["verify"] and None  # whole files have been compared
                files = checkpoints_convert.open_checkpoint(path, dtype=dtype, verify=again)
                reader = LayerReader.of(moved_layers(_shapes(path, None, dtype=dtype)[1]), files)
                params = reading.params(reader.takes, keeps_16_bits=keeps_16_bits, skips=reader.takes)
                return {**params, DISK_LAYERS: DiskLayers.of(reader)}
            host = HostStacks(shapes, on_host, jax.devices()[0], jax.default_backend()) if on_host else None
            elsewhere = (lambda path: False) if host is None else host.takes
            params = reading.params(elsewhere, keeps_16_bits=keeps_16_bits, host=host)
            return _laid_out(params, mesh, donate=True)

        fit = None if mesh is None else fit_to_mesh(mesh, checkpoint.config)
        origin = Origin(chosen, checkpoint.quantization, fit)
        return LoadedModel(
            named.name,
            checkpoint.config,
            ModelWeights.shared((key, on_host, from_disk), load, origin),
            tokenizer(),
            default_params=replace(defaults.params, **_alias_sampling(named)),
            ignored_defaults=defaults.ignored,
            eos_token_ids=(*checkpoint.eos_token_ids, *defaults.eos_token_ids),
            kv_scales=_kv_scales(checkpoint),
            has_head=not checkpoint.is_headless,
            embedding=read_embedding_config(path) if path.is_dir() else None,
            system=named.system,
            activations=activations,
            source=path,
            opening=Opening(checkpoint.config, dtype, True, keeps_16_bits, chosen, opening),
        )


def _other_field(config: ModelConfig, own: ModelConfig) -> str | None:
    """The name of a field in which two configurations differ, but for the dtype; None if there is none."""
    names = (entry.name for entry in fields(config) if entry.name != "dtype")
    return next((name for name in names if getattr(config, name) != getattr(own, name)), None)


def _kv_scales(checkpoint: Any) -> KVScales | None:
    layers = checkpoint.kv_scales
    if not layers:
        return None
    return KVScales.of_layers(checkpoint.config, [layer.k for layer in layers], [layer.v for layer in layers])


@dataclass(frozen=True)
class _Reading:
    """How the parameters of an open checkpoint are read: rounded as `chosen`, packed where a CPU runs them, unless
    `packing` is None."""

    checkpoint: Any
    mesh: Mesh | None
    chosen: Selection | None
    packing: Packing | None

    def params(self, elsewhere: Callable[[Sequence[str]], bool], *, keeps_16_bits: bool, **where: Any) -> Params:
        """The parameters; those that are `elsewhere` than on the device are not packed. `keeps_16_bits`: whether packed
        weights keep 16 bits; `where` as of `checkpoints_convert.load_params`."""
        import checkpoints_convert
        from checkpoints_convert.store import release_heap

        how = self._how(elsewhere, keeps_16_bits)
        params = checkpoints_convert.load_params(self.checkpoint, convert_host=self.chosen, **how, **where)
        if "limit" in how:
            release_heap()  # of the buffers that the weights were read to
        return params

    def each(self, *, keeps_16_bits: bool) -> Iterator[tuple[tuple[str, ...], Any]]:
        """The parameters by path, as `params` reads them, one after another."""
        import checkpoints_convert

        return checkpoints_convert.each_param(self.checkpoint, **self._how(lambda path: False, keeps_16_bits))

    def _how(self, elsewhere: Callable[[Sequence[str]], bool], keeps_16_bits: bool) -> dict[str, Any]:
        checkpoint, packing = self.checkpoint, self.packing
        how: dict[str, Any] = {"mesh": self.mesh, "progress": True}
        if packing is None or self.mesh is not None or why_not_packing(checkpoint.config.dtype) is not None:
            return {**how, "convert": self.chosen}
        if keeps_16_bits:
            checkpoint.keeps_16_bits = lambda path: packing.keeps_16_bits(path) and not elsewhere(path)
        return {**how, "convert": packing, "limit": PACKING_BYTES}


def _alias_sampling(named: FoundModel) -> dict[str, Any]:
    """The alias's fields of `SamplingParams`. Raises StoreError for what is none."""
    try:
        params = SamplingParams.from_dict({"max_tokens": None, **named.sampling})
    except SamplingParamsError as error:
        raise StoreError(f"alias {named.name}: sampling: {error}") from None
    return {name: getattr(params, name) for name in our_names(dict(named.sampling))}


def load_shapes(
    model: str | Path,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    quantize: str | None = OF_ALIAS,
    requantize: str | None = None,
    is_here: bool = False,
    activations: str = "float32",
    is_mtp: bool = False,
) -> tuple[ModelConfig, Params]:
    """The model that `load_model` would load for a TPU or GPU, as `jax.ShapeDtypeStruct`s: from configuration and
    headers alone. `is_here`: for the default device of this process, on a CPU with packed weights, which take at most
    those bytes.

    Raises as `load_model`.
    """
    named = find_model(model, revision, fetch=False)
    source, revision = named.source
    chosen = selection(quantize, {} if requantize else named.options)
    reading: dict[str, Any] = {"revision": revision, "requantize": requantize, "is_mtp": is_mtp}
    if not is_here or jax.default_backend() != "cpu":
        return _shapes(source, chosen, dtype=dtype, **reading)
    is_packed = why_not_packing(resolved_dtype(dtype)) is None
    if is_packed and dtype == "auto":
        reading["keeps_16_bits"] = Packing(is_tied=True, select=chosen).keeps_16_bits
    config, params = _shapes(source, chosen, dtype=resolved_dtype(dtype), **reading)
    return config, in_whole_bytes(packing_of(config, activations).params(params) if is_packed else params)


def _shapes(source: Any, chosen: Selection | None, **reading: Any) -> tuple[ModelConfig, Params]:
    import checkpoints_convert
    from checkpoints_convert.gguf.index import find_gguf

    config, params = checkpoints_convert.abstract(source, **reading)
    if chosen is not None:
        if find_gguf(Path(source)) is not None:
            leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
            paths = [tuple(key.key for key in path) for path, leaf in leaves if is_quantized(leaf)]
            check_not_rounded(source, {path: ".".join(path) for path in paths}, chosen)
        params = jax.eval_shape(partial(quantize_params, how=chosen.recipe), params)
    return config, params


def load_draft_shapes(
    draft: Any,
    model: str | Path,
    target: ModelConfig,
    params: Params,
    max_model_len: int,
    dtype: str,
    *,
    is_here: bool = False,
) -> Draft:
    """As `load_draft`, of shapes, for the target that `model` names. Tokenizers are compared where the sizes of the
    vocabularies differ and both are at hand; otherwise the draft is taken to have the target's tokens.

    Raises ValueError for layers:N of a model without as many, and as `load_shapes`.
    """
    if (named_draft := draft_by_name(draft, target, params)) is not None:
        return named_draft
    is_mtp = draft == OWN_HEAD
    config, draft_params = load_shapes(model if is_mtp else draft, dtype=dtype, is_here=is_here, is_mtp=is_mtp)
    made = draft_of(str(draft), config, draft_params, target, max_model_len)
    if not isinstance(made, ModelDraft) or config.vocab_size == target.vocab_size:
        return made
    theirs, ours = (_tokens_here(name, size) for name, size in ((model, target.vocab_size), (draft, config.vocab_size)))
    if theirs is None or ours is None or (tables := _tables_of(theirs, ours)) is None:
        return made
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in tables.arrays.items()}
    return made.for_tokens(tables, shapes)


def _tokens_here(model: Any, size: int) -> ModelTokens | None:
    """The tokens of a model with so many ids; None where its tokenizer is not on this machine."""
    path = find_model(model, fetch=False).path
    tokenizer = None if path is None else tokenizer_of(path)
    return None if tokenizer is None else ModelTokens(repr(str(model)), tokenizer, size)


def _tables_of(target: ModelTokens, draft: ModelTokens) -> TokenTables | None:
    """Tables of a draft for a target; None where the tokens are the same. Raises as `token_tables`."""
    return None if has_same_tokens(target.tokenizer, draft.tokenizer) else token_tables(target, draft)


def load_draft(
    draft: Any,
    target: LoadedModel,
    max_model_len: int,
    *,
    dtype: str = "auto",
    verify: bool | None = None,
) -> tuple[Draft, LoadedModel | None]:
    """Loads the draft of `target`: None for nothing, "ngram", "layers:N", "mtp" for the head in its own files, or a
    model or head as `load_model` takes it; and the latter two as they were loaded.

    A draft model with another tokenizer reads and drafts the target's tokens by tables (`speculative.vocabularies`).
    Raises ValueError where these have too little in common, or a head's tokens are not the target's, with the first id
    that differs, and as `load_model`.
    """
    if (named_draft := draft_by_name(draft, target.config, target.params)) is not None:
        return named_draft, None
    verify, is_mtp = None if isinstance(draft, tuple) else verify, draft == OWN_HEAD
    if is_mtp and target.source is None:
        raise ValueError(f"draft={draft!r} is in the model's own files, and {target.name} was not read from files")
    # A head computes in the dtype of the states that it reads.
    dtype = compute_dtype(target.params).name if dtype == "auto" and (is_mtp or _is_head(draft)) else dtype
    opening: dict[str, Any] = {"verify": verify, "mesh": target.mesh, "is_draft": True, "is_mtp": is_mtp}
    source: Any = target.source if is_mtp else draft
    loaded = load_model(source, dtype=dtype, **opening)
    own, its = _tokens_of(target), _tokens_of(loaded)
    tables = None
    if own is not None and its is not None:
        if loaded.config.draft_head is not None:
            check_same_tokens(own.tokenizer, its.tokenizer, (own.name, its.name))
        else:
            tables = _tables_of(own, its)
    elif target.config.vocab_size != loaded.config.vocab_size and loaded.config.draft_head is None:
        raise ValueError(
            f"the model has {target.config.vocab_size} tokens and the draft {loaded.config.vocab_size}; without a "
            f"tokenizer of both nothing says which of them are the same"
        )
    params, copies = loaded.runnable().value
    scales = loaded.on_mesh(loaded.kv_scales)
    made = draft_of(
        OWN_HEAD if is_mtp else loaded.name, loaded.config, params, target.config, max_model_len, scales, copies
    )
    if tables is not None and isinstance(made, ModelDraft):
        made = made.for_tokens(tables, DevicePlacement(target.mesh).put(tables.arrays))
    return made, loaded


def _tokens_of(model: LoadedModel) -> ModelTokens | None:
    """The tokens of a model; None without a tokenizer."""
    if model.tokenizer is None:
        return None
    return ModelTokens(repr(model.name), model.tokenizer, model.config.vocab_size, model.eos_token_ids)


def _is_head(draft: Any) -> bool:
    """True if a draft is a trained head, live or in files."""
    if isinstance(draft, tuple):
        return isinstance(draft[0], ModelConfig) and draft[0].draft_head is not None
    import checkpoints_convert

    path = find_model(draft, None).path
    return path is not None and checkpoints_convert.is_head_folder(path)


def draft_of(
    name: str,
    config: ModelConfig,
    params: Params,
    target: ModelConfig,
    max_model_len: int,
    scales: KVScales | None = None,
    copies: Copies | None = None,
) -> Draft:
    """A loaded model or head as the draft of a target. Raises ValueError, with its name, for one that does not fit."""
    try:
        if config.draft_head is not None:
            own, taps = head_for(config.for_length(max_model_len), target)
            return HeadDraft(name, own, params, taps, copies)
        config, _ = for_length(config, max_model_len)
    except ValueError as error:
        raise ValueError(f"draft {name!r}: {error}") from None
    return ModelDraft(name, config, params, scales, copies)


def _check_live(model: tuple, dtype: str) -> tuple[ModelConfig, Params, Tokenizer | None]:
    if len(model) not in (2, 3):
        raise TypeError("a live model is (ModelConfig, params) or (ModelConfig, params, tokenizer)")
    config = own_config(model[0])
    params = side_by_side.separate(plain(own_params(model[1], config)))
    wanted = jax.tree.map(lambda leaf: leaf.shape, abstract_params(config))
    given = jax.tree.map(jnp.shape, params, is_leaf=is_weight)
    if wanted != given:
        flat = dict(jax.tree_util.tree_leaves_with_path(wanted, is_leaf=lambda x: isinstance(x, tuple)))
        other = dict(jax.tree_util.tree_leaves_with_path(given, is_leaf=lambda x: isinstance(x, tuple)))
        path = next(path for path in [*flat, *other] if flat.get(path) != other.get(path))
        raise ValueError(
            f"params do not fit the config at {jax.tree_util.keystr(path)}: "
            f"shape {other.get(path, 'missing')}, the config makes it {flat.get(path, 'absent')}"
        )
    pairs = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight)
    leaves = [(tuple(key.key for key in path), leaf) for path, leaf in pairs]
    for path, leaf in leaves:
        if is_quantized(leaf):
            check(leaf, ".".join(path))
    dtypes = {leaf.dtype for path, leaf in leaves if not _keeps_dtype(path, leaf)}
    if len(dtypes) != 1:
        raise ValueError(f"params mix dtypes {', '.join(sorted(str(dtype) for dtype in dtypes))}: cast them to one")
    if dtype not in ("auto", str(next(iter(dtypes)))):

        def cast(path: Any, leaf: Any) -> Any:
            return leaf if _keeps_dtype([key.key for key in path], leaf) else leaf.astype(dtype)

        params = jax.tree_util.tree_map_with_path(cast, params, is_leaf=is_weight)
    return config, params, model[2] if len(model) == 3 else None


def own_config(config: Any) -> ModelConfig:
    """A live model's configuration: ours, or that of a model of Tunix. Raises TypeError for anything else."""
    if isinstance(config, ModelConfig):
        return config
    if not type(config).__module__.startswith("tunix."):
        raise TypeError(
            "a live model is (ModelConfig, params) or (ModelConfig, params, tokenizer), with a configuration of "
            f"jaxinfer or of a model of Tunix, not with {type(config).__name__} {config!r:.60}"
        )
    from checkpoints_convert.trees import config_of

    return config_of(config)


def other_tree(tree: Any, config: ModelConfig) -> Any:
    """A tree of another library, as `checkpoints_convert.trees` reads it; None for one of ours."""
    if isinstance(tree, Mapping) and "embed" in tree:  # ours as a whole: its names need not be looked through
        return None
    from checkpoints_convert.trees import read_tree

    return read_tree(tree, config)


def own_params(tree: Any, config: ModelConfig) -> Params:
    """Live parameters under our names. Raises ValueError as `OtherTree.check`."""
    other = other_tree(tree, config)
    if other is None:
        return tree
    other.check()
    return other.params(copies=True)  # a trainer donates its own


def _keeps_dtype(path: Sequence[str], leaf: Any) -> bool:
    """True for a parameter that is not cast: a quantized weight, one that is always float32, or places of tokens."""
    return is_weight(leaf) or keeps_float32(path) or jnp.issubdtype(leaf.dtype, jnp.integer)
