"""Counter-based random numbers: a function of (seed, name, position), not of earlier draws.

    random_words(random_key(0, "layers.3.mlp.up.weight"), column_block, row)     # four 32-bit words per position

Any rank can draw any block of any tensor, so every layout starts from the same weights and drops the same
activations, to the bit, on CPU and CUDA alike. This takes two things. The generator is Philox-4x32-10 (Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), integer arithmetic only. And the step to a normal uses
nothing but exactly rounded operations in float64 (+ - x /, each its own kernel, so that nothing is contracted into
an FMA): `log`, `cos` and even `sqrt` differ in the last bit between a GPU and a CPU whose vector library is not
exact. Written by hand because torch's own generators depend on the device and on the order of calls.
"""

import hashlib
import math

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
Key = tuple[int, int]


def random_key(*parts: object) -> Key:
    """A 64-bit Philox key for a named stream."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def random_words(key: Key, c0: Tensor, c1: Tensor | int = 0, c2: Tensor | int = 0, c3: Tensor | int = 0) -> Tensor:
    """Philox-4x32-10: four 32-bit words (in int64) for each position of the broadcast counters, as a new last dim."""
    counters = [torch.as_tensor(c, dtype=torch.int64, device=c0.device) & _MASK for c in (c0, c1, c2, c3)]
    x0, x1, x2, x3 = torch.broadcast_tensors(*counters)
    k0, k1 = key
    for _ in range(10):
        (high0, low0), (high2, low2) = _product(x0, _MULTIPLIERS[0]), _product(x2, _MULTIPLIERS[1])
        x0, x1, x2, x3 = high2 ^ x1 ^ k0, low2, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack((x0, x1, x2, x3), dim=-1)


def _product(words: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of a product of two 32-bit numbers."""
    if torch.compiler.is_compiling():  # in C++ a product that overflows is undefined, and Inductor's came out wrong
        low, high = words * (multiplier & 0xFFFF), words * (multiplier >> 16)
        return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & _MASK
    product = words * multiplier  # wraps modulo 2^64 with the right bits; the mask drops the sign's copies
    return (product >> 32) & _MASK, product & _MASK


def random_normal(key: Key, rows: range, columns: range, device: torch.device | str = "cpu") -> Tensor:
    """Standard normals (float64) at rows x columns of an unbounded matrix; its elements do not depend on the block."""
    first, last = columns.start // 4, -(-columns.stop // 4)  # a block of four neighbouring columns
    blocks = torch.arange(first, last, device=device)
    places = torch.arange(rows.start, rows.stop, device=device)[:, None]
    drawn = _box_muller(random_words(key, blocks, places & _MASK, places >> 32)).flatten(-2)
    return drawn[:, columns.start - 4 * first : columns.stop - 4 * first]


def random_uniform(key: Key, rows: range, columns: range, device: torch.device | str = "cpu") -> Tensor:
    """Numbers in (0, 1) (float64) at rows x columns of an unbounded matrix, as `random_normal` draws them."""
    first, last = columns.start // 4, -(-columns.stop // 4)
    places = torch.arange(rows.start, rows.stop, device=device)[:, None]
    words = random_words(key, torch.arange(first, last, device=device), places & _MASK, places >> 32).flatten(-2)
    return (words[:, columns.start - 4 * first : columns.stop - 4 * first].double() + 0.5) * 2.0**-32


def dropout_mask(key: Key, probability: float, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> Tensor:
    """True with `probability`, by an integer comparison; four decisions for each position."""
    return random_words(key, c0, c1, c2, c3) < round(probability * 2**32)


def _box_muller(bits: Tensor) -> Tensor:
    """Pairs of words to pairs of normals: a radius from one, an angle from the other."""
    radius_bits, angle_bits = bits[..., 0::2], bits[..., 1::2]
    uniform = (radius_bits.double() + 0.5) * 2.0**-32  # (0, 1): the log stays finite, |z| stays below 6.8
    radius = _sqrt(log(uniform) * -2.0)
    # Two bits choose a quarter of the circle, thirty an angle within (-pi/4, pi/4) of its middle.
    angle = ((angle_bits & 0x3FFFFFFF).double() + 0.5) * 2.0**-30 * (math.pi / 2) - math.pi / 4
    square = angle * angle
    cosine = _horner(square, [(-1.0) ** k / math.factorial(2 * k) for k in range(9)])
    sine = _horner(square, [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(8)]) * angle
    cosine = torch.where(angle_bits & 0x40000000 == 0, cosine, -cosine)
    swap = angle_bits & 0x80000000 == 0
    pair = torch.stack((torch.where(swap, sine, cosine), torch.where(swap, cosine, sine)), dim=-1)
    return (pair * radius[..., None]).flatten(-2)


def log(x: Tensor) -> Tensor:
    """Natural log of positive normal float64s, to a few ulp, by exact operations only."""
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = (bits & 0x000FFFFFFFFFFFFF | 0x3FF0000000000000).view(torch.float64)  # [1, 2)
    large = mantissa > math.sqrt(2.0)
    mantissa = torch.where(large, mantissa * 0.5, mantissa)  # around 1, where the series below is short
    exponent = exponent + large
    s = (mantissa - 1.0) / (mantissa + 1.0)
    series = _horner(s * s, [2.0 / (2 * k + 1) for k in range(11)])  # 2 atanh(s) / s
    return series * s + exponent.double() * math.log(2.0)


def exp(x: Tensor) -> Tensor:
    """The exponential of float64s between -700 and 700, to a few ulp, by exact operations only."""
    power = torch.round(x * (1.0 / math.log(2.0)))
    rest = x - power * 0.693147180369123816490 - power * 1.90821492927058770002e-10  # ln 2 in two parts
    scale = (power.to(torch.int64) + 1023 << 52).view(torch.float64)
    return _horner(rest, [1.0 / math.factorial(k) for k in range(16)]) * scale


def _sqrt(x: Tensor) -> Tensor:
    """Square root of positive normal float64s, to an ulp: Newton steps for 1/sqrt(x), from a guess by its exponent."""
    inverse = (0x5FE6EB50C7B537A9 - (x.view(torch.int64) >> 1)).view(torch.float64)  # within 3.5%
    for _ in range(4):  # 3.5e-2, 1.8e-3, 5e-6, 4e-11, below an ulp
        inverse = inverse * (1.5 - x * 0.5 * inverse * inverse)
    return x * inverse


def _horner(x: Tensor, coefficients: list[float]) -> Tensor:
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total.mul_(x).add_(coefficient)
    return total
