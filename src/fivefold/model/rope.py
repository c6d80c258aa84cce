"""Rotary position embeddings (RoFormer, arXiv 2104.09864), with the frequencies scaled as Llama 3.1 or YaRN do it."""

import math

import torch
from torch import Tensor

from fivefold.spec.blocks import RopeScaling, Yarn
from fivefold.spec.model import ModelSpec

Rotation = tuple[Tensor, Tensor]  # cosines and sines, [B, 1, S, D/2]


def rope_frequencies(spec: ModelSpec) -> Tensor:
    """Radians per position of each pair of dims, float64 [D/2]; float32 is off by 0.004 at position 100,000."""
    pairs = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float64)
    inverse = spec.rope_theta ** (-pairs / spec.rotary_dim)
    match spec.rope_scaling:
        case None:
            return inverse
        case RopeScaling() as scaling:
            rotations = scaling.original_context * inverse / (2 * math.pi)  # full turns within the original context
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            unscaled = ((rotations - low) / (high - low)).clamp(0, 1)
        case Yarn() as scaling:
            unscaled = _yarn_ramp(scaling, spec.rotary_dim, spec.rope_theta)
    return inverse * unscaled + inverse / scaling.factor * (1 - unscaled)


def _yarn_ramp(yarn: Yarn, dim: int, theta: float) -> Tensor:
    """The share of each pair's frequency that YaRN leaves unscaled. The ramp is linear in the pair's index, not in its
    number of rotations."""

    def pair_of(rotations: float) -> float:
        return dim * math.log(yarn.original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low or 0.001)
    return 1 - ramp.clamp(0, 1)


def rope_cache(spec: ModelSpec, positions: int) -> Tensor:
    """Cosines and sines of every position, float64 [positions, 2, D/2]; YaRN scales both (its attention factor)."""
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * rope_frequencies(spec)
    scale = spec.rope_scaling.rotation_scale if isinstance(spec.rope_scaling, Yarn) else 1.0
    return scale * torch.stack((angles.cos(), angles.sin()), dim=1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first R dims of x [B, H, S, D] by cos, sin [.., 1, S, R/2]; the others pass through.

    Dims i and i + R/2 make a pair, as in Hugging Face; `interleaved`: dims 2i and 2i + 1, and the result has the first
    of every pair before the second, which no product of two results notices.
    """
    rotary_dim = 2 * cos.shape[-1]
    x, rest = (x, None) if rotary_dim == x.shape[-1] else (x[..., :rotary_dim], x[..., rotary_dim:])
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    # bfloat16 meets float32 tables, so the products are float32
    parts = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    return torch.cat(parts if rest is None else [*parts, rest], dim=-1)
