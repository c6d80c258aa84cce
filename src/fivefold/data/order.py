"""The order of the data: a pure function of (seed, sample index).

A split of T tokens holds n = (T - 1) // S windows of S tokens (each with the one token after it, the last target).
Sample i belongs to epoch i // n, and its window is the (i % n)-th of a permutation drawn for (seed, epoch). The
permutation is computed pointwise, so nothing is shuffled, stored or replayed: a batch does not depend on the number of
ranks or workers, and a restart at sample i costs the same as a start.

The permutation is a Feistel network over Z_a x Z_b with a * b barely above n (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", 2002), and cycle walking for the few values in between: an image that falls outside [0, n) is
sent through again until it falls inside.
"""

from collections.abc import Callable
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from fivefold.support.errors import UserError

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

# Four rounds do for large n, but a small split has halves of a few values: over many seeds the 720 orders of 6 windows
# are visibly uneven up to 12 rounds, and even at 16, which for a batch of a thousand samples still takes under 2 ms.
FEISTEL_ROUNDS = 16

GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / phi: consecutive multiples of it are far apart
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def windows(tokens: int, seq: int) -> int:
    """How many windows of `seq` tokens, each with a target after it, fit in a split."""
    if seq < 1:
        raise UserError(f"a sequence of {seq} tokens cannot be trained on; the shortest is 1", "data.seq.range")
    count = (tokens - 1) // seq
    if count < 1:
        longest = f"the longest sequence that fits is {tokens - 1}" if tokens > 1 else "prepare more text"
        raise UserError(
            f"a split of {tokens} tokens holds no window of {seq} tokens and their targets "
            f"({seq + 1} are needed); {longest}",
            "data.seq.tokens",
        )
    return count


def window_of(samples: I64, count: int, seed: int) -> I64:
    """The window that each sample reads, of `count` windows."""
    samples = np.asarray(samples, np.int64)
    if samples.size and int(samples.min()) < 0:
        raise UserError(f"sample {int(samples.min())} does not exist; samples count from 0", "data.sample.range")
    return permute(samples % count, count, keyed(seed, samples // count))


def samples_of(windows: I64, count: int, seed: int, epoch: int) -> I64:
    """The samples of an epoch that read the given windows, of `count`: the inverse of `window_of`."""
    return unpermute(windows, count, keyed(seed, np.full(windows.shape, epoch))) + epoch * count


def permute(index: I64, count: int, keys: U64) -> I64:
    """The image of each index under the permutation of range(count) that its key names (one key per index)."""
    return _walk(index, count, keys, _network)


def unpermute(image: I64, count: int, keys: U64) -> I64:
    """The index of each image."""
    return _walk(image, count, keys, _inverse)


def _walk(start: I64, count: int, keys: U64, network: Callable[[U64, int, int, U64], U64]) -> I64:
    columns, rows = _grid(count)
    out = start.astype(np.uint64)
    outside = np.ones(out.shape, bool)
    while outside.any():
        out[outside] = network(out[outside], columns, rows, keys[outside])
        outside = out >= np.uint64(count)
    return out.astype(np.int64)


def _grid(count: int) -> tuple[int, int]:
    """The smallest a x b with a even and close to the square root. With both odd every round would be an even
    permutation, and half of all orders could never occur."""
    columns = isqrt(max(count - 1, 0)) + 1
    columns += columns % 2
    return columns, -(-count // columns)


def _network(x: U64, columns: int, rows: int, keys: U64) -> U64:
    left, right = x // np.uint64(rows), x % np.uint64(rows)
    for turn in range(FEISTEL_ROUNDS):
        keys = keys + GOLDEN_RATIO
        if turn % 2 == 0:
            left = _turn(left, right, columns, keys)
        else:
            right = _turn(right, left, rows, keys)
    return left * np.uint64(rows) + right


def _inverse(x: U64, columns: int, rows: int, keys: U64) -> U64:
    left, right = x // np.uint64(rows), x % np.uint64(rows)
    of_turns = [keys := keys + GOLDEN_RATIO for _ in range(FEISTEL_ROUNDS)]
    for turn in reversed(range(FEISTEL_ROUNDS)):
        if turn % 2 == 0:
            left = (left + np.uint64(columns) - _shift(right, columns, of_turns[turn])) % np.uint64(columns)
        else:
            right = (right + np.uint64(rows) - _shift(left, rows, of_turns[turn])) % np.uint64(rows)
    return left * np.uint64(rows) + right


def _turn(half: U64, other: U64, size: int, keys: U64) -> U64:
    """half + F(other) mod size, which is invertible whatever F is."""
    return (half + _shift(other, size, keys)) % np.uint64(size)


def _shift(other: U64, size: int, keys: U64) -> U64:
    bits = mix64(mix64(keys) ^ other)
    # The top 32 bits scaled to [0, size): cheaper than a division, and size stays below 2**32 for n < 2**63.
    return ((bits >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32)


# ---- the mixer: where every pseudo-random choice about data comes from ----------------------------------------------
# Stateless on purpose: a choice is a hash of what it is about (seed, document, sample), so it is the same on all ranks,
# after every restart and on every numpy. There is no generator whose stream a library release could change.


def mix64(x: U64) -> U64:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014, variant 13): a bijection in which each input bit
    flips each output bit with probability close to one half."""
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def keyed(seed: int, stream: NDArray[np.int64] | U64) -> U64:
    """A 64-bit key for every element of `stream`; any Python integer is a seed."""
    # The seed is mixed before the stream is added, or (seed, i + 1) and (seed + GOLDEN_RATIO, i) would be one key.
    base = mix64(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64) + GOLDEN_RATIO)
    return mix64(base + np.asarray(stream).astype(np.uint64) * GOLDEN_RATIO)


def uniform(seed: int, stream: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number in [0, 1) for every element of `stream`."""
    return (keyed(seed, stream) >> np.uint64(11)).astype(np.float64) * 2.0**-53
