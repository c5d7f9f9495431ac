"""The modules of a base model by their published names, as adapters name them, and the parameters in each.

Names, shapes and the operations between stored tensors and parameters are those of the family's rules
(`huggingface.rules`), by which checkpoints are read and written.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from checkpoints_convert.huggingface.families import family_of
from checkpoints_convert.huggingface.family import embedding_name, head_names, renaming
from checkpoints_convert.huggingface.rules import TensorGroup, TensorPlacement
from jaxinfer.models import ModelConfig

EMBEDDING, HEAD = "embed", "lm_head"
_WEIGHT = ".weight"
_TABLES = ("embed", "position_embed", "layer_embed")  # parameters that are looked up, and not multiplied by


def name_of(placement: TensorPlacement) -> str:
    """Name of a parameter's weight, such as "layers.3.attention.q_proj"."""
    return ".".join(placement.target).removesuffix(_WEIGHT)


@dataclass(frozen=True)
class Module:
    """A published module with one weight, or one parameter of all experts of a layer, and our weights in it.

    Attributes:
      name: such as "model.layers.3.self_attn.q_proj", or "model.layers.3.mlp.experts.gate_up_proj".
      tensor: the name of its weight in checkpoints. group: the rule's tensors and parameters.
      number: the expert, of experts that are stored one by one; else None.
    """

    name: str
    tensor: str
    group: TensorGroup
    number: int | None = None

    @property
    def placements(self) -> tuple[TensorPlacement, ...]:
        return self.group.placements

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of the stored weight."""
        return self.placements[0].stored

    @property
    def in_out(self) -> tuple[int, int]:
        """Inputs and outputs; of the embedding, tokens and width."""
        *_, rows, columns = self.stored
        return (columns, rows) if self.placements[0].transpose else (rows, columns)

    @property
    def is_embedding(self) -> bool:
        return self.placements[0].target == (EMBEDDING,)

    @property
    def is_head(self) -> bool:
        return self.placements[0].target == (HEAD,)

    @property
    def is_table(self) -> bool:
        """True for embedding and head."""
        return self.is_embedding or self.is_head

    @property
    def is_router(self) -> bool:
        """True for a router of experts, which is a Linear in some versions of Transformers."""
        return self.placements[0].target[-2:-1] == ("router",)

    @property
    def is_expert(self) -> bool:
        return "experts" in self.placements[0].target


class BaseModules:
    """The modules and parameters of a base model that adapters can name.

    Attributes:
      config: of the base. modules: those with a weight [out, in], the embedding and the head among them, by name.
      stacks: parameters of all experts of a layer, by the name of the module that has them, in its order.
      tensors: every stored tensor that is no stack of others' (`Module`, whose `name` is then the tensor's).
    """

    def __init__(self, config: ModelConfig, form: str = ""):
        """`form`: the name under which the embedding is stored, one of `forms`; the family's own by default."""
        self.config = config
        family = family_of(config)
        rename = renaming(family, {form} if form else {embedding_name(family)})
        self.embedding = rename(embedding_name(family)).removesuffix(_WEIGHT)
        self.head = rename(head_names(family)[0]).removesuffix(_WEIGHT)
        self.modules: dict[str, Module] = {}
        self.stacks: dict[str, tuple[Module, ...]] = {}
        self.tensors: dict[str, Module] = {}
        # A tied head is a module of its own to adapters.
        layout = family.layout(replace(config, tie_word_embeddings=False))
        groups = dict.fromkeys(group for several in layout.of_target.values() for group in several)
        for group in groups:
            for number, source in enumerate(group.sources):
                name = rename(source)
                self._add(Module(name, name, group, number if group.is_stacked else None))
        # Rules stand in the order in which modules define their parameters.
        order = {rule.source.rpartition(".")[2]: number for number, rule in enumerate(family.tensors)}
        for parent, stack in self.stacks.items():
            self.stacks[parent] = tuple(sorted(stack, key=lambda module: order[module.name.rpartition(".")[2]]))

    def _add(self, tensor: Module) -> None:
        self.tensors[tensor.tensor] = tensor
        target, num_axes = tensor.placements[0].target, len(tensor.stored)
        if target[0] in _TABLES and not tensor.is_embedding:
            return
        if tensor.tensor.endswith(_WEIGHT) and num_axes == 2:
            name = tensor.tensor.removesuffix(_WEIGHT)
            self.modules[name] = replace(tensor, name=name)
        elif tensor.is_expert and target[-1] == "weight" and num_axes == 3:
            parent = tensor.tensor.rpartition(".")[0]
            self.stacks[parent] = (*self.stacks.get(parent, ()), tensor)

    def all_modules(self) -> Iterator[Module]:
        yield from self.modules.values()
        for stack in self.stacks.values():
            yield from stack


def forms(config: ModelConfig) -> tuple[str, ...]:
    """Names under which the embedding is stored: of the family, of the text part of a model of text and images (since
    Transformers 5, and before), and of a model without a head. All other names begin as it does."""
    family = family_of(config)
    name = embedding_name(family)
    bare = name.removeprefix(family.prefix)
    return (name, f"model.language_model.{bare}", f"language_model.{name}", bare)


def cut_outputs(placement: TensorPlacement, stored: np.ndarray) -> np.ndarray:
    """The part of [..., r, outputs of the stored weight] that is a parameter's: [..., r, out], or [heads, r, out]."""
    if placement.view is not None and len(placement.view) == 3:
        stored = np.moveaxis(stored.reshape(*stored.shape[:-1], placement.view[0], -1), -2, 0)
    return stored if placement.outputs is None else stored[..., placement.outputs.index]


def join_outputs(placements: Sequence[TensorPlacement], parts: Iterable[np.ndarray]) -> np.ndarray:
    """The inverse of `cut_outputs`, for all parameters of a stored weight."""
    parts = list(parts)
    whole, outputs = parts[0], placements[0].outputs
    if outputs is not None:
        whole = np.zeros((*whole.shape[:-1], outputs.stored), whole.dtype)
        for placement, part in zip(placements, parts, strict=True):
            if placement.outputs is not None:
                whole[..., placement.outputs.index] = part
    view = placements[0].view
    if view is None or len(view) != 3:
        return whole
    return np.moveaxis(whole, 0, -2).reshape(*whole.shape[1:-1], -1)
