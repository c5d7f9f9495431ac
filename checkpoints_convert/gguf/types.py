"""The types a tensor of a GGUF file is stored in: how many values a block has, and how many bytes."""

from dataclasses import dataclass

# Numbers of ggml's types. Those not in `TYPES` are known only so that they can be refused by name.
TYPE_NAMES = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1"))),
    **dict(enumerate(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S"), 10)),
    **dict(enumerate(("IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16"), 20)),
    **dict(enumerate(("Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0", "TQ2_0"), 31)),
    **dict(enumerate(("IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4", "NVFP4", "Q1_0"), 36)),
}


@dataclass(frozen=True)
class BlockType:
    """Attributes:
    name: ggml's. block_size: consecutive values of a row that are stored together, in `block_bytes` bytes.
    """

    name: str
    block_size: int
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        return self.block_size > 1


# Source: ggml-common.h, the block_* structures.
TYPES: dict[str, BlockType] = {
    kind.name: kind
    for kind in (
        BlockType("F32", 1, 4),
        BlockType("F16", 1, 2),
        BlockType("BF16", 1, 2),
        BlockType("Q4_0", 32, 18),
        BlockType("Q4_1", 32, 20),
        BlockType("Q5_0", 32, 22),
        BlockType("Q5_1", 32, 24),
        BlockType("Q8_0", 32, 34),
        BlockType("Q4_K", 256, 144),
        BlockType("Q5_K", 256, 176),
        BlockType("Q6_K", 256, 210),
        BlockType("MXFP4", 32, 17),
    )
}
