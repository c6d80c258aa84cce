"""A strong 64-bit mixer: where every pseudo-random choice about data comes from.

Stateless on purpose. A choice is a hash of what it is about (seed, document, sample), so it is the same on every rank,
after every restart and on every numpy: no generator whose stream a library release could change.
"""

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / phi: consecutive multiples of it are far apart
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix64(x: U64) -> U64:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014, variant 13): a bijection in which each input bit
    flips each output bit with probability close to one half."""
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def keyed(seed: int, stream: NDArray[np.int64] | U64) -> U64:
    """A 64-bit key for every element of `stream`; any Python integer is a seed."""
    # The seed is mixed before the stream is added, or (seed, i + 1) and (seed + GOLDEN, i) would be one key.
    base = mix64(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64) + GOLDEN)
    return mix64(base + np.asarray(stream).astype(np.uint64) * GOLDEN)


def uniform(seed: int, stream: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number in [0, 1) for every element of `stream`."""
    return (keyed(seed, stream) >> np.uint64(11)).astype(np.float64) * 2.0**-53
