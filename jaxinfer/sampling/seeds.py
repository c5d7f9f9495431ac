"""Seeds for requests and for the answers of one request. Plain Python."""

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SAMPLES = 0x73616D706C6573  # "samples": separates the seeds of answers from those of requests


def derive_seed(seed: int, *path: int) -> int:
    """A 64-bit seed derived from `seed` for a path of indices, such as (row number) or (epoch, row number).

    A pure function, the same on every machine. Each index i selects output i of the SplitMix64 generator (Steele, Lea
    and Flood, OOPSLA 2014) seeded with the mixed parent, so all i in 0..2**64-1 give different seeds, and the order of
    a path matters.
    """
    for index in (seed, *path):
        if not 0 <= index <= _MASK:
            raise ValueError(f"seeds and indices are integers in 0..2**64-1, got {index}")
    for index in path:
        seed = _mix(_mix(seed) + (index + 1) * _GOLDEN)
    return seed


def sample_seed(seed: int, index: int) -> int:
    """The seed of answer `index` of a request's n answers. Answer 0 has the request's own seed, so it does not depend
    on n."""
    return seed if index == 0 else derive_seed(seed, _SAMPLES, index)


def _mix(x: int) -> int:
    """SplitMix64's finalizer, a bijection of 64-bit integers."""
    x &= _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)
