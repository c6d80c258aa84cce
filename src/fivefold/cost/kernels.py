"""How long a kernel takes on a device: a roofline, with what a real GEMM loses to its tiles.

    device = Device.of(find_accelerator("H100"))
    device.gemm(8192, 28672, 8192)           # seconds

A GEMM is computed in tiles, and the tiles run in waves over the multiprocessors: a shape that needs 1.05 waves pays for
two. Hence hidden 14,400 can be slower than 13,824 on the same device. cuBLAS chooses the tile, and may cut the inner
dimension to fill a wave; the best of a few choices stands for its search.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from msgspec import structs

from fivefold.cost.software import NARROW, WIDE, Attention, SoftwareProfile
from fivefold.hardware.accelerators import Accelerator, Achieved, achieved
from fivefold.spec.operations import BlockOperations, Scores

# Rows, columns, and how much of the best tile's rate a multiprocessor reaches with it: smaller tiles read more.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.78), (64, 64, 0.6))
CUTS = (1, 2, 4, 8)  # of the inner dimension
BACKWARD = 0.8  # of attention's forward rate, over 2.5 times its FLOPs (FlashAttention-2, arXiv 2307.08691, section 4)
NARROW_HEAD = 0.75  # of the rate, with heads of 64: half the tensor core's work per element of the softmax
QUERIES = 128  # of one attention tile
CPU_QUERIES = 32  # likewise, of torch's kernel for CPUs below 192 queries; from there 64, from 768 on 256

# Bytes per score, forward and backward, where attention is not one kernel (2-byte scores; the GEMMs' own included):
# fused: scale, mask and softmax in one kernel, and dropout; torch: each by itself, softmax in float32.
UNFUSED: dict[str, tuple[float, float]] = {"fused": (13.0, 17.0), "torch": (26.0, 30.0)}


T = TypeVar("T", bound=tuple[Any, ...])  # all of numbers, or all of such tuples


def plus(first: T, *others: T) -> T:
    """Field by field."""
    make: Any = type(first)
    columns = zip(first, *others, strict=True)
    return make(*((plus(*column) for column in columns) if isinstance(first[0], tuple) else map(sum, columns)))


def times(parts: T, factor: float) -> T:
    make: Any = type(parts)
    nested = isinstance(parts[0], tuple)
    return make(*([times(part, factor) for part in parts] if nested else [factor * part for part in parts]))


@dataclass(frozen=True)
class Device:
    """An accelerator, and how much of it kernels reach."""

    accelerator: Accelerator
    reached: Achieved

    @classmethod
    def of(cls, accelerator: Accelerator) -> "Device":
        return cls(accelerator, accelerator.achieved or achieved(accelerator.name))

    def but(self, **shares: float) -> "Device":
        return Device(self.accelerator, structs.replace(self.reached, **shares))

    def rate(self, precision: str = "bf16") -> float:
        """FLOP/s of large GEMMs."""
        return self.peak(precision) * getattr(self.reached, precision if precision in NARROW else "gemm")

    def peak(self, precision: str = "bf16") -> float:
        """The maker's rate; fp16's, where a device is older than bf16."""
        older = precision == "bf16" and self.accelerator.peak.bf16 is None
        return self.accelerator.rate("fp16" if older else precision)

    @property
    def bandwidth(self) -> float:
        return self.accelerator.memory_bandwidth * self.reached.stream

    @property
    def tile(self) -> int:
        """Queries, and keys, of one attention tile."""
        return CPU_QUERIES if self.accelerator.is_cpu else QUERIES

    def gemm(self, m: int, n: int, k: int, precision: str = "bf16", batch: int = 1) -> float:
        """Seconds of [m, k] x [k, n], `batch` of them."""
        width = NARROW.get(precision) or WIDE.get(precision, 2)
        moved = batch * (width * (m * k + k * n) + max(2, width) * m * n)
        waves = 2.0 * m * n * k * batch  # a core has no multiprocessors to fill
        if not self.accelerator.is_cpu:
            waves = _waves(m, n, k, batch, self.reached.units, self.reached.ramp)
        return max(waves / self.rate(precision), moved / self.bandwidth) + self.reached.launch

    def stream(self, moved: float, kernels: int = 1) -> float:
        """Seconds of kernels that read and write so many bytes together."""
        return moved / self.bandwidth + kernels * self.reached.launch

    def attention(
        self, kernel: Attention, batch: int, heads: int, head_dim: float, queries: int, keys: float
    ) -> tuple[float, float]:
        """Seconds forward and backward. Each query sees `keys` keys on average: half of the sequence, if causal."""
        if kernel in UNFUSED:
            return self._unfused(kernel, batch, heads, round(head_dim), queries, round(2 * keys))
        share = getattr(self.reached, kernel) * (NARROW_HEAD if head_dim <= 64 else 1.0)
        tiles = batch * heads * math.ceil(queries / self.tile)
        filled = tiles / (math.ceil(tiles / self.reached.units) * self.reached.units)
        forward = 4.0 * batch * heads * queries * keys * head_dim / (self.peak() * share * filled)
        moved = 8.0 * batch * heads * queries * head_dim
        return (
            max(forward, moved / self.bandwidth) + self.reached.launch,
            max(2.5 * forward / BACKWARD, 2 * moved / self.bandwidth) + 2 * self.reached.launch,
        )

    def _unfused(
        self, kernel: str, batch: int, heads: int, head_dim: int, queries: int, keys: int
    ) -> tuple[float, float]:
        """Scores as a matrix in memory, masked ones included."""
        scores, mixture = (queries, keys, head_dim), (queries, head_dim, keys)
        both = self.gemm(*scores, batch=batch * heads) + self.gemm(*mixture, batch=batch * heads)
        count = float(batch) * heads * queries * keys
        forward, backward = UNFUSED[kernel]
        kernels = 3 if kernel == "fused" else 7
        return both + self.stream(forward * count, kernels), 2 * both + self.stream(backward * count, kernels)


@lru_cache(maxsize=1 << 16)
def _waves(m: int, n: int, k: int, batch: int, units: int, ramp: float) -> float:
    """FLOPs that the device has the time for while the GEMM runs, idle multiprocessors counted in."""
    best = math.inf
    for rows, columns, share in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * batch
        work = 2.0 * rows * columns / share
        for cut in CUTS:
            if cut > 1 and (tiles * cut > 2 * units or k < 512 * cut):
                break
            waves = math.ceil(tiles * cut / units)
            best = min(best, waves * units * work * (k / cut + ramp * (1 if cut == 1 else 2)))
    return best


# ---- latent ---------------------------------------------------------------------------------------------------------
# Latent attention (MLA): what it moves beside its products, and how wide its scores' products are.


def copied(own: BlockOperations, software: SoftwareProfile) -> float:
    """Bytes a token, of 2-byte activations: keys are put together of their two parts, and values padded to them."""
    if not own.latent:
        return 0.0
    scores, made = own.attention, sum(matmul.outputs for matmul in own.attending.ups[-1])
    keys = made - scores.seen + scores.width
    values = scores.seen + scores.width if software.pads_values else 0
    queries = 2 * scores.width  # rotated in part, and put together again
    return 2.0 * (keys + values + queries)


def score_dim(software: SoftwareProfile, scores: Scores) -> float:
    """The mean of what queries meet keys with and what values have: half of each product's FLOPs."""
    return scores.head_dim if software.pads_values else (scores.head_dim + scores.v_dim) / 2


def remade(own: BlockOperations, tokens: int) -> list[tuple[int, int, int]]:
    """Rows, columns and inner dimension of the products that make heads of latents."""
    return [(tokens, sum(matmul.outputs for matmul in up), up[0].inputs) for up in own.attending.ups]
