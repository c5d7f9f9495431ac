"""Reading an adapter's folder for a base model: everything is checked from the header before a tensor is read."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from checkpoints_convert.adapters.config import AdapterConfig, read_config
from checkpoints_convert.adapters.modules import EMBEDDING, HEAD, BaseModules, Module, cut_outputs, forms, name_of
from checkpoints_convert.adapters.patterns import suffixes
from checkpoints_convert.checkpoint import check_finite
from checkpoints_convert.errors import CheckpointError, CheckpointNotFoundError
from checkpoints_convert.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from checkpoints_convert.host_arrays import count_nonfinite
from checkpoints_convert.safetensors_files import FLOAT_DTYPES, SafetensorsFile, check_inside
from jaxinfer.models import ModelConfig
from jaxinfer.models.adapter import Adapter, LowRank, TokenRows

BASE_FINGERPRINT = "base_fingerprint"
"""Key of the file's metadata."""
PREFIX = "base_model.model."
MAX_HEADER_BYTES = 25_000_000
"""Enough for 100,000 tensors with names of 150 characters: one pair for each expert of a large model."""
MAX_MATCHES = 2_000_000
"""Modules times patterns of their ranks and alphas: a few seconds."""
_PICKLED = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")

# Kinds of tensors by the end of their names.
PAIR = {"a": ".lora_A.weight", "b": ".lora_B.weight", "bias": ".lora_B.bias", "magnitude": ".lora_magnitude_vector"}
EMBEDDING_PAIR = {"a": ".lora_embedding_A", "b": ".lora_embedding_B", "magnitude": ".lora_magnitude_vector"}
TOKEN_ROWS = ".token_adapter.trainable_tokens_delta"
BASE_LAYER = ".base_layer"
KINDS = {ending: kind for kinds in (PAIR, EMBEDDING_PAIR) for kind, ending in kinds.items()}


def read_adapter(
    folder: str | Path,
    config: ModelConfig,
    *,
    base_model: str | Sequence[str] | None = None,
    base_fingerprint: str | None = None,
) -> Adapter:
    """Reads `adapter_config.json` and `adapter_model.safetensors` of a folder, as PEFT 0.21 writes them.

    Args:
      config: of the base model.
      base_model: its name or path, or several of them; an adapter of another is refused. Names are compared without
        their folders, since one model has many. None or () for any.
      base_fingerprint: of its weights; an adapter whose file has another is refused. None for any.

    Raises CheckpointError: fields that are not applied, by name, before the tensors' file is opened; tensors that are
    missing, unknown, of wrong shapes, or not finite; targets that the base does not have; links that lead out of the
    folder; pickled tensors.
    """
    folder = Path(folder)
    path = folder / ADAPTER_WEIGHTS
    check_files(folder)
    settings = read_config(folder / ADAPTER_CONFIG)
    _check_base(folder / ADAPTER_CONFIG, settings.base_model, base_model)
    with SafetensorsFile(path, max_header_bytes=MAX_HEADER_BYTES) as file:
        trained_on = file.metadata.get(BASE_FINGERPRINT)
        if trained_on is not None and base_fingerprint is not None and trained_on != base_fingerprint:
            raise CheckpointError(path, f"is for a base with the fingerprint {trained_on}, not {base_fingerprint}")
        return _Reader(file, settings, config).adapter(trained_on)


def check_files(folder: Path) -> None:
    """Raises CheckpointError for a folder without the files of an adapter, and for links that lead out of it."""
    if not folder.is_dir():
        raise CheckpointNotFoundError(folder, "is not a folder")
    names = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    present = [name for name in names if (folder / name).exists()]
    if ADAPTER_WEIGHTS not in present:
        pickled = next((name for name in _PICKLED if (folder / name).exists()), None)
        if pickled is not None:
            raise CheckpointError(
                folder / pickled,
                f"is not opened, since a pickled file can run code: save the adapter as {ADAPTER_WEIGHTS}",
            )
    for name in names:
        if name not in present:
            raise CheckpointError(folder, f"has no {name}")
    check_inside(folder, names)


def _check_base(where: Path, trained_on: str | None, base_model: str | Sequence[str] | None) -> None:
    if trained_on is None or not base_model:
        return
    names = [base_model] if isinstance(base_model, str) else base_model
    if _last_part(trained_on) not in map(_last_part, names):
        own = " or ".join(map(repr, names))
        raise CheckpointError(
            where,
            f"base_model_name_or_path is {trained_on!r}, the base model is {own}; if these are one model under"
            f" two names, give the adapter's: --base-model {trained_on} (base_model={trained_on!r} in Python)",
        )


def _last_part(name: str) -> str:
    """The last part of a path or hub id. In the hub's cache, the id is the name two folders above."""
    parts = re.split(r"[/\\]", name.rstrip("/\\"))
    if len(parts) > 2 and parts[-2] == "snapshots":
        return parts[-3].rpartition("--")[2].lower()
    return parts[-1].lower()


class _Reader:
    """Plans all arrays from the header, then reads them."""

    def __init__(self, file: SafetensorsFile, settings: AdapterConfig, config: ModelConfig):
        self.file, self.settings, self.config = file, settings, config
        self.problems: list[str] = []
        self.pairs: dict[str, dict[str, str]] = {}  # by module, as in the file: names of tensors by their endings
        self.rows: dict[str, str] = {}
        self.whole: dict[str, str] = {}  # names of the base's tensors, to names in the file
        names = [name.removeprefix(PREFIX) for name in file.tensors]
        self.base = _base_of(config, names)
        self.experts_of: dict[str, Module] = {}  # by the name of their pairs in the file
        for parent, stack in self.base.stacks.items():
            wrapped = [module for module in stack if settings.is_target_parameter(module.name)]
            for depth, module in enumerate(reversed(wrapped)):  # the last one is the outermost
                self.experts_of[parent + BASE_LAYER * depth] = module

    def adapter(self, base_fingerprint: str | None) -> Adapter:
        self._sort()
        num_patterns = len(self.settings.ranks) + len(self.settings.alphas)
        if (count := len(self.pairs) * num_patterns) > MAX_MATCHES:
            self._problem(
                f"{num_patterns} patterns of ranks and alphas for {len(self.pairs)} modules are {count} tries, the "
                f"limit is {MAX_MATCHES}"
            )
            self._raise()
        vocab_size = self._vocab_size()
        plans = list(self._plan_pairs(vocab_size))
        self._check_targets()
        whole = list(self._plan_whole(vocab_size))
        rows = list(self._plan_rows(vocab_size))
        outside = [token for token in self.settings.invocation_tokens if token >= vocab_size]
        if outside:
            self._problem(f"alora_invocation_tokens has {outside[0]}, the vocabulary has {vocab_size} tokens")
        if not (self.problems or plans or whole or rows):
            self._problem("holds no tensors of an adapter")
        self._raise()
        low_rank = self._experts_together(make() for make in plans)
        replaced = {name: array for make in whole for name, array in make().items()}
        token_rows = {name: read for make in rows for name, read in make().items()}
        return Adapter(
            low_rank=low_rank,
            replaced=replaced,
            token_rows=token_rows,
            invocation_tokens=self.settings.invocation_tokens,
            base_model=self.settings.base_model,
            base_fingerprint=base_fingerprint,
        )

    def _problem(self, text: str) -> None:
        self.problems.append(text)

    def _raise(self) -> None:
        if self.problems:
            raise CheckpointError(self.file.path, *self.problems)

    def _sort(self) -> None:
        """Sorts the names of all tensors by kind; those that no kind has are problems."""
        for stored in self.file.tensors:
            name = stored.removeprefix(PREFIX)
            ending = next((ending for ending in KINDS if name.endswith(ending)), None)
            if ending is not None:
                tensors = self.pairs.setdefault(name.removesuffix(ending), {})
                self._check_once(tensors.get(ending), stored)
                tensors[ending] = stored
            elif name.endswith(TOKEN_ROWS):
                module = name.removesuffix(TOKEN_ROWS)
                self._check_once(self.rows.get(module), stored)
                self.rows[module] = stored
            else:
                own = name.replace(f"{BASE_LAYER}.", ".")
                self._check_once(self.whole.get(own), stored)
                self.whole[own] = stored

    def _check_once(self, other: str | None, stored: str) -> None:
        if other is not None:
            self._problem(f"tensors {other!r} and {stored!r} are the same one of the adapter")

    def _vocab_size(self) -> int:
        """Number of rows of the embedding and the head, which are larger than the base's where tokens were added."""
        sizes = {
            stored: self.file.tensors[stored].shape[0]
            for module in (self.base.embedding, self.base.head)
            if (stored := self.whole.get(f"{module}.weight")) and len(self.file.tensors[stored].shape) == 2
        }
        own = self.config.vocab_size
        for name, size in sizes.items():
            if size < own:
                self._problem(f"tensor {name!r} has {size} rows, fewer than the {own} tokens of the base model")
        size = max([own, *sizes.values()])
        is_resized = size > own
        wanted = {f"{self.base.embedding}.weight"} | (
            set() if self.config.tie_word_embeddings else {f"{self.base.head}.weight"}
        )
        if is_resized and (len(set(sizes.values())) > 1 or not wanted <= self.whole.keys()):
            self._problem(f"embedding and head must both have the {size} tokens of the larger one, the base has {own}")
        return size

    # Pairs.

    def _plan_pairs(self, vocab_size: int) -> Iterator[Callable[[], dict[str, tuple[Module, LowRank]]]]:
        for name, stored in self.pairs.items():
            module = self.base.modules.get(name) or self.experts_of.get(name)
            some = next(iter(stored.values()))
            if module is None:
                self._problem(f"tensor {some!r} is of no module of the base model, {self.config.architecture}")
                continue
            endings = EMBEDDING_PAIR if module.is_embedding else PAIR
            tensors = {kind: stored[ending] for kind, ending in endings.items() if ending in stored}
            if unknown := sorted(stored.keys() - set(endings.values())):
                self._problem(f"tensor {stored[unknown[0]]!r} is not of the kind that its module has")
                continue
            if not self._is_target(module):
                self._problem(f"tensor {some!r} is of a module that adapter_config.json does not target")
                continue
            if self._has_problem(module, tensors, vocab_size):
                continue
            yield lambda module=module, tensors=tensors: self._read_pair(module, tensors)

    def _is_target(self, module: Module) -> bool:
        settings = self.settings
        return settings.is_target_parameter(module.tensor) or (
            module.name != module.tensor and settings.is_target(module.name, is_table=module.is_table)
        )

    def _has_problem(self, module: Module, tensors: Mapping[str, str], vocab_size: int) -> bool:
        """Records what is wrong with the tensors of a pair."""
        before = len(self.problems)
        for kind, other in (("a", "b"), ("b", "a")):
            if kind not in tensors:
                present = tensors.get(other, next(iter(tensors.values())))
                self._problem(f"tensor {present!r} has no {'lora_A' if kind == 'a' else 'lora_B'} beside it")
        settings, is_stack = self.settings, module.name == module.tensor
        wanted = {"magnitude": settings.is_dora, "bias": settings.has_lora_bias}
        for kind, is_on in wanted.items():
            field_name = "use_dora" if kind == "magnitude" else "lora_bias"
            if kind in tensors and not is_on:
                self._problem(f"tensor {tensors[kind]!r} is there, and {field_name} is false")
            if kind not in tensors and is_on and (kind == "magnitude" or not module.is_embedding):
                self._problem(f"module {module.name!r} has no {kind}, and {field_name} is true")
            if is_on and is_stack:
                self._problem(f"{field_name} is not supported for {module.name!r}, a parameter of all experts")
        if len(self.problems) == before:
            self._check_shapes(module, tensors, vocab_size)
        return len(self.problems) > before

    def _check_shapes(self, module: Module, tensors: Mapping[str, str], vocab_size: int) -> None:
        rank, _ = self.settings.rank_and_scale(module.name)
        inputs, outputs = module.in_out
        if module.is_embedding:
            inputs = vocab_size
        elif module.is_head:
            outputs = vocab_size
        shapes = {"a": (rank, inputs), "b": (outputs, rank), "magnitude": (outputs,), "bias": (outputs,)}
        swapped = shapes
        if module.name == module.tensor:
            rank *= module.stored[0]
            shapes = {"a": (rank, inputs), "b": (outputs, rank)}
            swapped = {"a": (rank, outputs), "b": (inputs, rank)}
        for kind, stored in tensors.items():
            shape = self.file.tensors[stored].shape
            if shape != shapes[kind] and not (shape == swapped[kind] and self._is_swapped(tensors, swapped)):
                self._problem(f"tensor {stored!r} has shape {shape}, not {shapes[kind]} (rank {rank})")
            self._check_dtype(stored)

    def _is_swapped(self, tensors: Mapping[str, str], swapped: Mapping[str, tuple[int, ...]]) -> bool:
        return all(self.file.tensors[stored].shape == swapped[kind] for kind, stored in tensors.items())

    def _check_dtype(self, stored: str) -> None:
        dtype = self.file.tensors[stored].dtype
        if dtype not in FLOAT_DTYPES:
            self._problem(f"tensor {stored!r} has the dtype {dtype}, not {', '.join(FLOAT_DTYPES)}")

    def _read_pair(self, module: Module, tensors: Mapping[str, str]) -> dict[str, tuple[Module, LowRank]]:
        _, scale = self.settings.rank_and_scale(module.name)
        arrays = {kind: self._read(stored) for kind, stored in tensors.items()}
        a, b = (np.swapaxes(arrays[kind], -1, -2) for kind in ("a", "b"))
        if module.name == module.tensor:
            a, b = _of_experts(arrays["a"], arrays["b"], module)
        a = np.ascontiguousarray(a)
        pairs = {}
        for placement in module.placements:
            more = {
                kind: np.ascontiguousarray(cut_outputs(placement, arrays[kind][None])[..., 0, :])
                for kind in ("magnitude", "bias")
                if kind in arrays
            }
            own = np.ascontiguousarray(cut_outputs(placement, b))
            pairs[name_of(placement)] = (module, LowRank(a, own, scale, **more))
        return pairs

    def _experts_together(self, read: Iterable[Mapping[str, tuple[Module, LowRank]]]) -> dict[str, LowRank]:
        """The pairs by name, in which those of experts that are stored one by one are a stack."""
        low_rank: dict[str, LowRank] = {}
        apart: dict[str, dict[int, LowRank]] = {}
        for pairs in read:
            for name, (module, pair) in pairs.items():
                if module.number is None:
                    low_rank[name] = pair
                else:
                    apart.setdefault(name, {})[module.number] = pair
        return low_rank | {name: _stacked([experts[i] for i in range(len(experts))]) for name, experts in apart.items()}

    def _check_targets(self) -> None:
        """Records targets without tensors, and names of targets that the base does not have."""
        present: dict[str, dict[int | None, Module]] = {}  # by our names of weights with pairs, and by expert
        for name in self.pairs:
            module = self.base.modules.get(name) or self.experts_of.get(name)
            for target in map(name_of, module.placements if module else ()):
                others = present.setdefault(target, {})
                if module is not None and others.setdefault(module.number, module) is not module:
                    self._problem(f"modules {others[module.number].name!r} and {name!r} are the same {target!r}")
        apart = {target: modules for target, modules in present.items() if modules.keys() != {None}}
        for target, experts in apart.items():
            self._check_experts(target, experts)
        used: set[str] = set()
        used_parameters: set[str] = set()
        for module in self.base.all_modules():
            used.update(suffixes(module.name))
            used_parameters.update(suffixes(module.tensor))
            # A router is a Linear, and experts are modules, in some versions of Transformers only.
            is_optional = module.is_router or (module.number is not None and not apart)
            is_missing = not all(name_of(placement) in present for placement in module.placements)
            if is_missing and not is_optional and self._is_target(module):
                self._problem(f"module {module.name!r} is a target, and has no tensors")
        settings = self.settings
        unused = (
            ("target_modules", settings.modules.names - used),
            ("target_parameters", settings.parameters.names - used_parameters),
        )
        for where, names in unused:
            for name in sorted(names):
                self._problem(f"{where} has {name!r}, which {self.config.architecture} does not have")

    def _check_experts(self, target: str, experts: Mapping[int | None, Module]) -> None:
        """Records experts without pairs beside some that have them, and experts of different ranks and scales."""
        number, first = next(iter(experts.items()))
        if None in experts:
            self._problem(f"{target!r} has pairs of experts one by one, and of all in one tensor")
            return
        count = len(first.group.sources)
        for other in range(count):
            if other not in experts:
                self._problem(f"expert {other} of {target!r} has no tensors, {len(experts)} of {count} have")
                return
        wanted = self.settings.rank_and_scale(first.name)
        for other, module in experts.items():
            if (own := self.settings.rank_and_scale(module.name)) != wanted:
                self._problem(
                    f"experts {number} and {other} of {target!r} have ranks and scales {wanted} and {own}, not the same"
                )
                return

    # Whole parameters.

    def _plan_whole(self, vocab_size: int) -> Iterator[Callable[[], dict[str, np.ndarray]]]:
        self._check_saved()
        for own, stored in self.whole.items():
            tensor = self.base.tensors.get(own)
            if tensor is None or tensor.number is not None or not self._is_expected(own):
                self._problem(f"tensor {stored!r} is none of the adapter's")
                continue
            shape, wanted = self.file.tensors[stored].shape, tensor.stored
            if own in (f"{self.base.embedding}.weight", f"{self.base.head}.weight"):
                wanted = (vocab_size, *wanted[1:])
            if shape != wanted:
                self._problem(f"tensor {stored!r} has shape {shape}, not {wanted}")
            self._check_dtype(stored)
            yield lambda tensor=tensor, stored=stored: self._read_whole(tensor, stored)

    def _is_expected(self, own: str) -> bool:
        """True for a tensor of a saved module, for the embedding and the head, which are saved where they are targets
        or have more tokens than the base, and for trained biases."""
        module, _, kind = own.rpartition(".")
        is_table = kind == "weight" and module in (self.base.embedding, self.base.head)
        is_bias = kind == "bias" and self.settings.bias != "none"
        return is_table or is_bias or self.settings.is_saved(module)

    def _check_saved(self) -> None:
        tensors = [(own, own.rpartition(".")[0]) for own in self.base.tensors]
        stored = {
            placement.target
            for own in self.whole
            if (tensor := self.base.tensors.get(own))
            for placement in tensor.placements
        }
        for own, module in tensors:
            targets = {placement.target for placement in self.base.tensors[own].placements}
            if self.settings.is_saved(module) and not targets <= stored:
                self._problem(f"module {module!r} is in modules_to_save, and its {own!r} is missing")
        unused = set(self.settings.saved)
        for _, module in tensors:
            unused.difference_update(module[start:] for start in range(len(module)))
        for name in sorted(unused):
            self._problem(f"modules_to_save has {name!r}, which {self.config.architecture} does not have")

    def _read_whole(self, tensor: Module, stored: str) -> dict[str, np.ndarray]:
        array = self._read(stored)
        replaced = {}
        for placement in tensor.placements:
            own = array
            if placement.view is not None and not tensor.is_table:
                own = own.reshape(placement.view)
            axis = -2 if placement.transpose and own.ndim > 1 else -1
            own = own if placement.outputs is None else np.take(own, placement.outputs.index, axis)
            own = own.swapaxes(-1, -2) if placement.transpose and own.ndim > 1 else own
            replaced[".".join(placement.target)] = own
        if tensor.is_embedding and self._is_tied_to(stored):
            replaced[HEAD] = array.T
        return replaced

    def _is_tied_to(self, stored: str) -> bool:
        """True if an embedding is the tied head's too: not if it is a copy, as saved modules are."""
        is_own = f"{self.base.head}.weight" in self.whole
        is_copy = self.settings.is_saved(self.base.embedding) and BASE_LAYER not in stored
        return self.config.tie_word_embeddings and not is_own and not is_copy

    # Trained tokens.

    def _plan_rows(self, vocab_size: int) -> Iterator[Callable[[], dict[str, TokenRows]]]:
        targets = {EMBEDDING: self.base.embedding, HEAD: self.base.head}
        wanted: dict[str, tuple[int, ...]] = {}
        for name, tokens in self.settings.token_indices.items():
            place = next((key for key, module in targets.items() if module.endswith(name)), None) if name else EMBEDDING
            if place is None:
                self._problem(f"trainable_token_indices has {name!r}, which is neither embedding nor head")
                continue
            wanted[place] = tokens
            if max(tokens) >= vocab_size:
                self._problem(f"trainable_token_indices has {max(tokens)}, the vocabulary has {vocab_size} tokens")
        is_shared = self.config.tie_word_embeddings and wanted.get(HEAD, wanted.get(EMBEDDING)) == wanted.get(EMBEDDING)
        if is_shared:
            wanted.pop(HEAD, None)
        for place, tokens in wanted.items():
            stored = self.rows.pop(targets[place], None)
            if stored is None:
                self._problem(f"the rows of trainable_token_indices of {targets[place]!r} are missing")
                continue
            shape, needed = self.file.tensors[stored].shape, (len(tokens), self.config.hidden_size)
            if shape != needed:
                self._problem(f"tensor {stored!r} has shape {shape}, not {needed}")
            self._check_dtype(stored)
            places = (EMBEDDING, HEAD) if is_shared else (place,)

            def read(stored: str = stored, tokens: tuple[int, ...] = tokens, places: Iterable[str] = places):
                rows = TokenRows(tokens, self._read(stored))
                return dict.fromkeys(places, rows)

            yield read
        for stored in self.rows.values():
            self._problem(f"tensor {stored!r} is not in trainable_token_indices")

    def _read(self, stored: str) -> np.ndarray:
        """A tensor in its dtype; float64 becomes float32."""
        entry = self.file.tensors[stored]
        buffer = bytearray(entry.end - entry.begin)
        self.file.read_into(stored, 0, memoryview(buffer))
        array = np.frombuffer(buffer, FLOAT_DTYPES[entry.dtype]).reshape(entry.shape)
        if array.dtype == np.float64:
            with np.errstate(over="ignore"):
                array = array.astype(np.float32)
        check_finite(self.file.path, stored, count_nonfinite(array), array.size)
        return array


def _stacked(pairs: Sequence[LowRank]) -> LowRank:
    """One pair [E, ...] of those of all experts."""

    def stack(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
        present = [array for array in arrays if array is not None]
        return np.stack(present) if present else None

    return LowRank(
        np.stack([pair.a for pair in pairs]),
        np.stack([pair.b for pair in pairs]),
        pairs[0].scale,
        stack([pair.magnitude for pair in pairs]),
        stack([pair.bias for pair in pairs]),
    )


def _of_experts(a: np.ndarray, b: np.ndarray, module: Module) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of all experts, a [E, in, r] and b [E, r, out], of A [E * r, in] and B [out, r * E].

    The rows of A are one expert after the other, the columns of B one of each expert in turn (PEFT's `ParamWrapper`).
    Versions of PEFT differ in which side of a weight they take for its inputs: where A has the width of the outputs,
    the two stand for one another.
    """
    count, inputs = module.stored[0], module.in_out[0]
    a = a.reshape(count, -1, a.shape[-1])  # [E, r, x]
    b = b.reshape(b.shape[0], -1, count).transpose(2, 0, 1)  # [E, y, r]
    if a.shape[-1] == inputs and b.shape[1] == module.in_out[1]:
        return a.swapaxes(1, 2), b.swapaxes(1, 2)
    return b, a


def _base_of(config: ModelConfig, names: Iterable[str]) -> BaseModules:
    """The base's modules under the names that the adapter has."""
    names = list(names)
    for form in forms(config):
        base = BaseModules(config, form)
        own = {name.rpartition(".")[0] for name in base.tensors} - {base.head}
        if any(_module_of(name) in own or name.rpartition(".")[0] in own for name in names):
            return base
    return BaseModules(config)


def _module_of(name: str) -> str:
    ending = next((ending for ending in (*KINDS, TOKEN_ROWS, f"{BASE_LAYER}.weight") if name.endswith(ending)), "")
    return name.removesuffix(ending).replace(BASE_LAYER, "")
