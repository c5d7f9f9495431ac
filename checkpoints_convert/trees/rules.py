"""The form of a library's trees: a table from its names and axes to ours."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.models import ModelConfig

Change = Callable[[Any, ModelConfig], Any]


@dataclass(frozen=True)
class TreeRule:
    """A weight of ours in an array of theirs.

    Axes have the letters of jaxinfer/README.md, and G for the inner width of an expert; a number is an axis of that
    size. `Hq*K` is one axis.

    Attributes:
      source: name of the array, below its layer if it has one. target: our name, below ours.
      theirs, ours: axes of the array and of our weight, such as "Hq D K" and "D Hq*K".
      part: the index that is taken on the first axis, a number; None if there is no such axis.
      change: what is done to the numbers afterwards, in our shape; None for nothing.
    """

    source: str
    target: str
    theirs: str
    ours: str = ""
    part: int | None = None
    change: Change | None = None

    def shape(self, config: ModelConfig, layer: int | None) -> tuple[int, ...]:
        """The shape of the array in a model."""
        sizes = _sizes(config, layer)
        return tuple(_size(axis, sizes) for axis in self.theirs.split())

    def read(self, array: Any, config: ModelConfig, layer: int | None) -> Any:
        """Our weight of an array that has the rule's shape, or of a traced one."""
        axes, sizes = self.theirs.split(), _sizes(config, layer)
        if self.part is not None:
            array, axes = array[self.part], axes[1:]
        if self.ours:
            array = array.transpose([axes.index(axis) for axis in self.ours.replace("*", " ").split()])
            array = array.reshape([_size(axis, sizes) for axis in self.ours.split()])
        return array if self.change is None else self.change(array, config)

    def read_pair(self, a: Any, b: Any, config: ModelConfig, layer: int | None) -> tuple[Any, Any]:
        """LoRA's A [in, r] and B [r, out] of our weight, from those of theirs: A has its contracted axes before the
        rank, B the others after it. Raises ValueError for other sizes, and for what is no matrix of ours."""
        sizes, groups = _sizes(config, layer), (self.ours or self.theirs).split()
        if len(groups) != 2:
            raise ValueError(f"LoRA of {self.target!r}, with axes {self.theirs!r}, is not supported")
        inputs, outputs = (_size(axis, sizes) for axis in groups)
        rank, parts = b.shape[0], 1 if self.part is None else int(self.theirs.split()[0])
        if a.shape[-1] != rank or a.size != inputs * rank or b.size != rank * parts * outputs:
            raise ValueError(
                f"LoRA of {self.source!r}: A {list(a.shape)} and B {list(b.shape)} are not of {inputs} inputs and "
                f"{outputs} outputs" + (f" of {parts} parts" if parts > 1 else "")
            )
        return a.reshape(inputs, rank), b.reshape(rank, parts, outputs)[:, self.part or 0]


@dataclass(frozen=True)
class LayerSpan:
    """The layers that an array has weights of: one, or several along its axis 1 (`is_stacked`)."""

    numbers: tuple[int, ...]
    is_stacked: bool = False


@dataclass(frozen=True, eq=False)
class TreeForm:
    """Attributes:
    name: of the library. outside, inside: rules of what is in no layer, and in each.
    place: from a name, and the count of layers in a model, to its name below its layer and the layers; the name as it
      is, with None, outside of them.
    check: raises ValueError for a model whose form is not known; None if all are.
    """

    name: str
    outside: tuple[TreeRule, ...]
    inside: tuple[TreeRule, ...]
    place: Callable[[str, int], tuple[str, LayerSpan | None]]
    check: Callable[[ModelConfig], None] | None = None

    def rules(self, name: str, is_inside: bool) -> list[TreeRule]:
        """The rules that read an array."""
        return [rule for rule in (self.inside if is_inside else self.outside) if rule.source == name]

    def knows(self, name: str) -> bool:
        """True for the name of an array that the form has, or of a LoRA pair of it."""
        below, span = self.place(base_name(name), 1)
        return bool(self.rules(below, span is not None))


LORA_A, LORA_B = "_lora_a", "_lora_b"


def base_name(name: str) -> str:
    """The name of the array that an array of a LoRA pair changes; other names as they are."""
    return name.removesuffix(LORA_A).removesuffix(LORA_B)


def numbered(*prefixes: str) -> Callable[[str, int], tuple[str, LayerSpan | None]]:
    """`TreeForm.place` of names such as "layers.3.attn.q_proj.w", for the prefixes before the number."""

    def place(name: str, num_layers: int) -> tuple[str, LayerSpan | None]:
        for prefix in prefixes:
            number, _, below = name.removeprefix(prefix).partition(".")
            if name.startswith(prefix) and number.isdecimal():
                return below, LayerSpan((int(number),))
        return name, None

    return place


def _sizes(config: ModelConfig, layer: int | None) -> Mapping[str, int]:
    sizes = {"D": config.hidden_size, "V": config.vocab_size, "Hq": config.num_heads}
    if layer is None:
        return sizes
    sizes |= {"Hkv": config.num_kv_heads_of(layer), "K": config.head_dim_of(layer), "F": config.mlp_size(layer)}
    if (moe := config.experts_of(layer)) is not None:
        sizes |= {"E": moe.num_experts, "G": moe.expert_size}
    return sizes


def _size(axis: str, sizes: Mapping[str, int]) -> int:
    """The size of an axis; 0, which none has, for one that the model lacks."""
    return math.prod(int(part) if part.isdecimal() else sizes.get(part, 0) for part in axis.split("*"))
