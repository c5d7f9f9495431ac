"""Options of a calibration: weights, methods and bits."""

import fnmatch
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from jaxinfer.quantization import Recipe
from jaxinfer.quantization.gptq import GptqOptions
from jaxinfer.quantization.grid import IntegerGrid

Method = Literal["rtn", "gptq", "awq", "smoothquant"]
METHODS: tuple[Method, ...] = ("rtn", "gptq", "awq", "smoothquant")
_GROUP_SIZE = 128
KEEP_AS_IS = 16  # bits of a weight that is not quantized


@dataclass(frozen=True)
class Keep:
    """An exception for some weights: `bits` 2 to 8, or 16 to leave them unquantized.

    `pattern` is a name with shell wildcards, such as "layers.0.mlp.down_proj"; the name of a module, such as "layers.0"
    or "layers.*.mlp", stands for all weights in it.
    """

    pattern: str
    bits: int = KEEP_AS_IS

    def __post_init__(self) -> None:
        if not (2 <= self.bits <= 8 or self.bits == KEEP_AS_IS):
            raise ValueError(f"keep {self.pattern!r}: bits must be 2 to 8, or {KEEP_AS_IS}, got {self.bits}")

    @classmethod
    def parse(cls, text: str) -> "Keep":
        """Reads PATTERN or PATTERN=BITS. Raises ValueError."""
        pattern, equals, bits = text.partition("=")
        if not pattern or (equals and not bits.isdecimal()):
            raise ValueError(f"{text!r} is not PATTERN or PATTERN=BITS, such as layers.0.*=8")
        return cls(pattern, int(bits) if equals else KEEP_AS_IS)

    def fits(self, name: str) -> bool:
        return fnmatch.fnmatchcase(name, self.pattern) or fnmatch.fnmatchcase(name, self.pattern + ".*")


@dataclass(frozen=True)
class CalibrationOptions:
    """How a model is quantized.

    Attributes:
      method: "rtn" (rounding to nearest, without activations), "gptq", "awq", or "smoothquant" (W8A8).
      bits: of the weights of linear layers; smoothquant has 8.
      group_size: inputs that share a scale; None for one scale per output; "auto" is 128, and None for 8 bits. Weights
        with 8 bits by `keep` always have one scale per output.
      symmetric: whether the range of values is symmetric around 0.
      keep: exceptions; the last one that fits a weight applies.
      dtype: in which the model is stored; scales, norms and biases are rounded to it before calibration.
      expert_memory: bytes of device memory for the Hessians of experts; a layer with more of them is calibrated block
        by block, with the same result.
      importance: weights of the rounding error of the inputs of linear layers, float32 [inputs] or [experts, inputs],
        by name, such as "layers.0.mlp.up_proj"; with method "rtn". Layers without are rounded to nearest.
      gptq: options of GPTQ. duo_scaling, clip: of AWQ. alpha: of SmoothQuant, the exponent of the activations' sizes.
    """

    method: Method = "gptq"
    bits: int = 4
    group_size: int | Literal["auto"] | None = "auto"
    symmetric: bool = True
    keep: tuple[Keep, ...] = ()
    dtype: str = "bfloat16"
    gptq: GptqOptions = field(default_factory=GptqOptions)
    duo_scaling: bool = True
    clip: bool = True
    alpha: float = 0.8
    expert_memory: int = 4 * 2**30
    importance: Mapping[str, np.ndarray] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} is none of {', '.join(METHODS)}")
        self.grid(self.bits)
        if self.method == "smoothquant" and (self.bits != 8 or not self.symmetric or self.grid(8).group_size):
            raise ValueError("smoothquant makes symmetric weights of 8 bits, with one scale for each output")
        if self.method == "smoothquant" and any(exception.bits != KEEP_AS_IS for exception in self.keep):
            raise ValueError("with smoothquant a weight has 8 bits or stays as it is")
        if self.importance is not None and self.method != "rtn":
            raise ValueError(f"weights of the rounding error are of the method 'rtn', not of {self.method!r}")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be 0 to 1, got {self.alpha}")

    def bits_of(self, name: str) -> int:
        """Bits of a linear layer's weight; 16 if it is not quantized."""
        return next((exception.bits for exception in reversed(self.keep) if exception.fits(name)), self.bits)

    def grid(self, bits: int) -> IntegerGrid:
        if bits == 8 and (self.group_size == "auto" or self.bits != 8):
            return IntegerGrid(8, None, self.symmetric, self.dtype)
        return IntegerGrid(
            bits, _GROUP_SIZE if self.group_size == "auto" else self.group_size, self.symmetric, self.dtype
        )

    def recipe(self, bits: int) -> Recipe:
        """The recipe for rounding to nearest with so many bits."""
        activations = "int8" if self.method == "smoothquant" else None
        return Recipe("int", bits, (self.grid(bits).group_size, 1), self.symmetric, activations=activations)

    def check_keep(self, names: list[str]) -> None:
        """Raises ValueError for a pattern that fits none of a model's linear layers."""
        for exception in self.keep:
            if not any(exception.fits(name) for name in names):
                raise ValueError(f"no linear layer is called {exception.pattern!r}; the first is {names[0]!r}")

    @property
    def needs_activations(self) -> bool:
        return self.method != "rtn"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready options that determine the result."""
        options = {name: value for name, value in asdict(self).items() if name not in ("expert_memory", "importance")}
        if self.importance is None:
            return options
        digest = hashlib.sha256()
        for name, array in sorted(self.importance.items()):
            digest.update(f"{name} {array.shape} ".encode() + np.ascontiguousarray(array, np.float32).tobytes())
        return {**options, "importance": digest.hexdigest()}
