"""Rotary positions (RoFormer, arXiv 2104.09864), with the wavelengths stretched as Llama 3.1 or YaRN do it."""

import math

import torch
from torch import Tensor

from fivefold.spec.attention import RopeScaling, Yarn
from fivefold.spec.model import ModelSpec

Rotation = tuple[Tensor, Tensor]  # cosines and sines, [B, 1, S, D/2]


def frequencies(spec: ModelSpec) -> Tensor:
    """Radians per position of each pair of dims, float64 [D/2]; float32 is off by 0.004 at position 100,000."""
    pairs = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float64)
    inverse = spec.rope_theta ** (-pairs / spec.rotary_dim)
    match spec.rope_scaling:
        case None:
            return inverse
        case RopeScaling() as scaling:
            turns = scaling.original_context * inverse / (2 * math.pi)  # full turns within the original context
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept = ((turns - low) / (high - low)).clamp(0, 1)
        case Yarn() as scaling:
            kept = _kept(scaling, spec.rotary_dim, spec.rope_theta)
    return inverse * kept + inverse / scaling.factor * (1 - kept)


def _kept(yarn: Yarn, dim: int, theta: float) -> Tensor:
    """How much of each pair's frequency YaRN keeps. The ramp is over the number of the pair, not over its turns."""

    def pair_that_turns(times: float) -> float:
        return dim * math.log(yarn.original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low or 0.001)
    return 1 - ramp.clamp(0, 1)


def tables(spec: ModelSpec, positions: int) -> Tensor:
    """Cosines and sines of every position, float64 [positions, 2, D/2]; YaRN's are longer than 1."""
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies(spec)
    length = spec.rope_scaling.rotation if isinstance(spec.rope_scaling, Yarn) else 1.0
    return length * torch.stack((angles.cos(), angles.sin()), dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x [B, H, S, D] turned by cos, sin [.., 1, S, R/2], in its first R dims; the others pass.

    Dims i and i + R/2 make a pair, as in Hugging Face; `interleaved`: dims 2i and 2i + 1, and the result has the first
    of every pair before the second, which no product of two results notices.
    """
    turned = 2 * cos.shape[-1]
    x, rest = (x, None) if turned == x.shape[-1] else (x[..., :turned], x[..., turned:])
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    # bfloat16 meets float32 tables, so the products are float32
    parts = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    return torch.cat(parts if rest is None else [*parts, rest], dim=-1)
