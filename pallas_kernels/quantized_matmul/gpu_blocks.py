"""How the GPU kernel cuts a product into thread blocks, and the bytes of weights that it keeps in flight.

A block has a tile of outputs and rows and, with several splits, a part of its groups of inputs. A multiprocessor of an
H100 has to have some 32 KB on the way to keep its memory busy (1 us x 3.35 TB/s / 132), and twice that to be safe: the
blocks that it holds at once have that together, if there are enough of them.
"""

from dataclasses import dataclass
from functools import cache

from pallas_kernels.quantized_matmul.specs import MatmulSpec

MULTIPROCESSORS = 132
SHARED_BYTES, BLOCK_BYTES = 227 * 1024, 1024  # of a multiprocessor, and those that the system takes of each block
TILE_OUTPUTS, MAX_TILE_ROWS = 64, 128
MAX_STAGES, MIN_STAGES, MIN_STEPS = 8, 4, 4
RESIDENT_BLOCKS = 4  # that a multiprocessor is to hold at once, if there are as many: 16 warps
ENOUGH_IN_FLIGHT = 64 * 1024
START_STEPS = 1.0  # time in which a block starts and writes its sums, in steps
ALONE = 1.5  # time of a block without another one that works while it waits
MOST_SUMS = 0.5  # bytes of the sums of splits over those of the weight


@dataclass(frozen=True)
class BlockPlan:
    """Thread blocks of a product.

    num_tiles: of outputs times those of rows; each is computed by `splits` blocks, whose sums are added afterwards.
    steps: groups of inputs of a block. stages: copies of groups that it has in flight.
    """

    tile_rows: int
    num_tiles: int
    splits: int
    steps: int
    stages: int
    weight_bytes: int  # of a group in a tile
    shared_bytes: int

    @property
    def num_blocks(self) -> int:
        return self.num_tiles * self.splits

    @property
    def resident_blocks(self) -> int:
        """Blocks that the busiest multiprocessor holds at once."""
        fitting = SHARED_BYTES // (self.shared_bytes + BLOCK_BYTES)
        return min(fitting, RESIDENT_BLOCKS, -(-self.num_blocks // MULTIPROCESSORS))

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of weights on their way to a multiprocessor."""
        return self.resident_blocks * self.stages * self.weight_bytes

    @property
    def balance(self) -> float:
        """The steps of an average multiprocessor over those of the busiest one."""
        return self.num_blocks / MULTIPROCESSORS / -(-self.num_blocks // MULTIPROCESSORS)

    @property
    def cost(self) -> float:
        """Time, in steps: those of the busiest multiprocessor, longer if too few bytes are in flight, and the sums of
        splits, which are written and read."""
        rounds = -(-self.num_blocks // MULTIPROCESSORS)
        waiting = max(ENOUGH_IN_FLIGHT / self.bytes_in_flight, ALONE if self.resident_blocks == 1 else 1.0)
        sums = 2 * 4 * TILE_OUTPUTS * self.tile_rows / self.weight_bytes if self.splits > 1 else 0.0
        return rounds * ((self.steps + START_STEPS) * waiting + sums)


def tile_rows(rows: int) -> int:
    """Rows of x in a tile."""
    return next(size for size in (8, 16, 32, 64, MAX_TILE_ROWS) if size >= min(rows, MAX_TILE_ROWS))


@cache
def plan(spec: MatmulSpec) -> BlockPlan:
    """The cheapest plan; of equal ones that with the fewest splits."""
    steps, size = spec.inputs // spec.block[0], tile_rows(spec.rows)
    bits = 4 if spec.values_dtype == "int4" else 8
    most = int(MOST_SUMS * spec.inputs * bits / 8 / (4 * size * -(-spec.rows // size)))
    counts = [count for count in range(2, most + 1) if steps % count == 0 and steps // count >= MIN_STEPS]
    return min((_with_splits(spec, count) for count in (1, *counts)), key=lambda made: (made.cost, made.splits))


def _with_splits(spec: MatmulSpec, splits: int) -> BlockPlan:
    size, group = tile_rows(spec.rows), spec.block[0]
    weight_bytes = TILE_OUTPUTS * group * (4 if spec.values_dtype == "int4" else 8) // 8
    stage_bytes, out_bytes = weight_bytes + 2 * size * group, 4 * TILE_OUTPUTS * size
    steps = spec.inputs // group // splits
    # As many stages as leave room for a second block; a tile of many rows, which takes more than half of the shared
    # memory with the fewest stages, has a multiprocessor for itself.
    beside_another = (SHARED_BYTES // 2 - BLOCK_BYTES - out_bytes) // stage_bytes
    stages = min(MAX_STAGES, max(MIN_STAGES, beside_another), steps)
    num_tiles = spec.outputs // TILE_OUTPUTS * -(-spec.rows // size)
    return BlockPlan(size, num_tiles, splits, steps, stages, weight_bytes, stages * stage_bytes + out_bytes)
