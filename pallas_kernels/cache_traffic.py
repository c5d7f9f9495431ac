"""What a GPU's L2 cache saves of the bytes that `hbm_traffic` counts: reads of what is still there.

The model: an array stays in the cache until as many bytes as the cache holds have been touched since. A kernel touches
its arrays evenly while it runs, so of what else it moves, half lies between an array that it makes and its end, half
between its start and an array that it reads. What a kernel writes counts always: the cache writes it back when it needs
the room, since nothing says that an array of temporaries is no longer needed.

The L2 cache of an H100 is two halves, and what multiprocessors of both read is in both: `SHARE` of it counts. The
replacement is taken to be that of the least recently used, which is not documented.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from pallas_kernels.hbm_traffic import Move

SHARE = 0.5


def through_cache(moves: Iterable[Move], l2_bytes: float, share: float = SHARE) -> list[Move]:
    """`moves`, of `Program.moves`, without the reads that a share of a cache of `l2_bytes` bytes serves; all of them
    where that is 0. A loop's iterations count alike, and the first finds nothing in the cache that it leaves there."""
    held, touched, found = share * l2_bytes, 0.0, []
    last_use: dict[str, float] = {}
    for move in moves:
        own = move.num_bytes / move.times
        saved = 0
        for access in move.reads:
            since = touched + (own - access.num_bytes) / 2 - last_use.get(access.array, -math.inf)
            saved += access.num_bytes * (since + access.array_bytes <= held)
        touched += own
        for access in (*move.reads, *move.writes):
            if access.array and access.num_bytes >= access.array_bytes:  # of a part it is not known which
                last_use[access.array] = touched - (own - access.num_bytes) / 2
        found.append(replace(move, num_bytes=move.num_bytes - saved * move.times))
    return found
