"""How long a kernel takes on a device: a roofline, with what a real GEMM loses to its tiles.

    device = Device.of(find_accelerator("H100"))
    device.gemm(8192, 28672, 8192)           # seconds

A GEMM is computed in tiles, and the tiles run in waves over the multiprocessors: a shape that needs 1.05 waves pays for
two. Hence hidden 14,400 can be slower than 13,824 on the same device. cuBLAS chooses the tile, and may cut the inner
dimension (split-K) to fill a wave; the best of a few choices stands for its search.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from msgspec import structs

from fivefold.cost.software import HIGH_PRECISION_BYTES, LOW_PRECISION_BYTES, Attention, SoftwareProfile
from fivefold.hardware.accelerators import Accelerator, Achieved, achieved
from fivefold.spec.operations import BlockOperations, Scores


class GemmTile(NamedTuple):
    """A part of a GEMM's output that one multiprocessor computes."""

    rows: int
    columns: int
    efficiency: float  # relative to the best tile's rate: smaller tiles read more per FLOP


GEMM_TILES = (
    GemmTile(256, 128, 1.0),
    GemmTile(128, 256, 1.0),
    GemmTile(128, 128, 0.92),
    GemmTile(128, 64, 0.78),
    GemmTile(64, 64, 0.6),
)
SPLIT_K = (1, 2, 4, 8)  # parts that the inner dimension may be cut into
# The inner dimension is cut where tiles are few, into parts that outlast their filling and draining.
MAX_SPLIT_WAVES, MIN_SPLIT_K = 2, 512
ATTENTION_TILE = 128  # queries, and keys, of one tile
# PyTorch's kernel for CPUs takes 32 queries at once below 192, 64 from there and 256 from 768 on. The smallest stands
# for all, as cores have no wave to fill and the tile counts only by what it pads.
CPU_ATTENTION_TILE = 32
# Of attention's forward rate, over 2.5 times its FLOPs (FlashAttention-2, arXiv 2307.08691, section 4).
ATTENTION_BACKWARD_EFFICIENCY = 0.8
HEAD_64_EFFICIENCY = 0.75  # heads of 64 give tensor cores half the work per element of the softmax

# Bytes per score, forward and backward, where attention is not one kernel (2-byte scores; the GEMMs' own included):
# fused: scale, mask and softmax in one kernel, and dropout; torch: each by itself, softmax in float32.
UNFUSED_BYTES: dict[str, tuple[float, float]] = {"fused": (13.0, 17.0), "torch": (26.0, 30.0)}
UNFUSED_KERNELS = {"fused": 3, "torch": 7}  # launched besides the two GEMMs, about


@dataclass(frozen=True)
class Device:
    """An accelerator, and the fractions of its ceilings that kernels achieve."""

    accelerator: Accelerator
    achieved: Achieved

    @classmethod
    def of(cls, accelerator: Accelerator) -> "Device":
        return cls(accelerator, accelerator.achieved or achieved(accelerator.name))

    def achieving(self, **changes: float) -> "Device":
        """The same accelerator with some fractions replaced."""
        return Device(self.accelerator, structs.replace(self.achieved, **changes))

    def rate(self, precision: str = "bf16") -> float:
        """FLOP/s of large GEMMs."""
        return self.peak(precision) * getattr(self.achieved, precision if precision in LOW_PRECISION_BYTES else "gemm")

    def peak(self, precision: str = "bf16") -> float:
        """The maker's rate; fp16's, where a device is older than bf16."""
        older = precision == "bf16" and self.accelerator.peak.bf16 is None
        return self.accelerator.rate("fp16" if older else precision)

    @property
    def bandwidth(self) -> float:
        return self.accelerator.memory_bandwidth * self.achieved.stream

    @property
    def attention_tile(self) -> int:
        """Queries, and keys, of one attention tile."""
        return CPU_ATTENTION_TILE if self.accelerator.is_cpu else ATTENTION_TILE

    def gemm(self, m: int, n: int, k: int, precision: str = "bf16", batch: int = 1) -> float:
        """Seconds of [m, k] x [k, n], `batch` of them."""
        input_bytes = LOW_PRECISION_BYTES.get(precision) or HIGH_PRECISION_BYTES.get(precision, 2)
        output_bytes = max(2, input_bytes)
        moved = batch * (input_bytes * (m * k + k * n) + output_bytes * m * n)
        if self.accelerator.is_cpu:  # cores have no waves to fill
            flops = 2.0 * m * n * k * batch
        else:
            flops = _padded_flops(m, n, k, batch, self.achieved.units, self.achieved.ramp)
        return max(flops / self.rate(precision), moved / self.bandwidth) + self.achieved.launch

    def stream(self, moved: float, kernels: int = 1) -> float:
        """Seconds of kernels that read and write so many bytes together."""
        return moved / self.bandwidth + kernels * self.achieved.launch

    def attention(
        self, kernel: Attention, batch: int, heads: int, head_dim: float, queries: int, mean_keys: float
    ) -> tuple[float, float]:
        """Seconds forward and backward. A query sees `mean_keys` keys on average: half of the sequence, if causal."""
        if kernel in UNFUSED_BYTES:
            return self._unfused(kernel, batch, heads, round(head_dim), queries, round(2 * mean_keys))
        efficiency = getattr(self.achieved, kernel) * (HEAD_64_EFFICIENCY if head_dim <= 64 else 1.0)
        tiles = batch * heads * math.ceil(queries / self.attention_tile)
        occupancy = tiles / (math.ceil(tiles / self.achieved.units) * self.achieved.units)
        forward = 4.0 * batch * heads * queries * mean_keys * head_dim / (self.peak() * efficiency * occupancy)
        moved = 8.0 * batch * heads * queries * head_dim  # q, k, v and the output, 2 bytes each
        return (
            max(forward, moved / self.bandwidth) + self.achieved.launch,
            max(2.5 * forward / ATTENTION_BACKWARD_EFFICIENCY, 2 * moved / self.bandwidth) + 2 * self.achieved.launch,
        )

    def _unfused(
        self, kernel: str, batch: int, heads: int, head_dim: int, queries: int, all_keys: int
    ) -> tuple[float, float]:
        """Attention as two GEMMs and kernels between them, which keep the scores in memory, masked ones included."""
        scores, output = (queries, all_keys, head_dim), (queries, head_dim, all_keys)
        gemms = self.gemm(*scores, batch=batch * heads) + self.gemm(*output, batch=batch * heads)
        count = float(batch) * heads * queries * all_keys
        forward, backward = UNFUSED_BYTES[kernel]
        kernels = UNFUSED_KERNELS[kernel]
        return gemms + self.stream(forward * count, kernels), 2 * gemms + self.stream(backward * count, kernels)


@lru_cache(maxsize=1 << 16)
def _padded_flops(m: int, n: int, k: int, batch: int, units: int, ramp: float) -> float:
    """FLOPs that the device has the time for while the GEMM runs, idle multiprocessors counted in."""
    best = math.inf
    for tile in GEMM_TILES:
        tiles = math.ceil(m / tile.rows) * math.ceil(n / tile.columns) * batch
        flops_per_k = 2.0 * tile.rows * tile.columns / tile.efficiency
        for parts in SPLIT_K:
            if parts > 1 and (tiles * parts > MAX_SPLIT_WAVES * units or k < MIN_SPLIT_K * parts):
                break
            waves = math.ceil(tiles * parts / units)
            ramps = 1 if parts == 1 else 2  # the parts are summed by a second pass
            best = min(best, waves * units * flops_per_k * (k / parts + ramp * ramps))
    return best


# ---- multi-head latent attention ------------------------------------------------------------------------------------
# What MLA moves beside its GEMMs, and how wide the GEMMs of its scores are.


def mla_concat_bytes(operations: BlockOperations, software: SoftwareProfile) -> float:
    """Bytes per token, of 2-byte activations, that making heads moves: keys are concatenated of a part from the latent
    and a rotary one, queries are rotated in part and concatenated again, and values are padded to the keys' width."""
    if not operations.latent:
        return 0.0
    scores = operations.attention
    up_projected = sum(matmul.outputs for matmul in operations.attending.ups[-1])  # keys' latent part, and values
    keys = up_projected - scores.seen + scores.width
    values = scores.seen + scores.width if software.pads_values else 0
    queries = 2 * scores.width
    return 2.0 * (keys + values + queries)


def mla_up_projections(operations: BlockOperations, tokens: int) -> list[tuple[int, int, int]]:
    """Rows, columns and inner dimension of the GEMMs that make heads of latents."""
    groups = operations.attending.ups
    return [(tokens, sum(matmul.outputs for matmul in group), group[0].inputs) for group in groups]


def mean_head_dim(software: SoftwareProfile, scores: Scores) -> float:
    """The mean of the head dims of q k^T and of the product with v; each is half of attention's FLOPs."""
    return scores.head_dim if software.pads_values else (scores.head_dim + scores.v_dim) / 2
