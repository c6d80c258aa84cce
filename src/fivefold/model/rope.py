"""Rotary positions (RoFormer, arXiv 2104.09864) with Llama 3.1's scaling of the wavelengths."""

import math

import torch
from torch import Tensor

from fivefold.spec.model import ModelSpec, RopeScaling


def frequencies(spec: ModelSpec) -> Tensor:
    """Radians per position of each pair of dims, float64 [D/2]; float32 is off by 0.004 at position 100,000."""
    pairs = torch.arange(0, spec.head_dim, 2, dtype=torch.float64)
    inverse = spec.rope_theta ** (-pairs / spec.head_dim)
    return inverse if spec.rope_scaling is None else _stretch(inverse, spec.rope_scaling)


def _stretch(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Wavelengths longer than the original context are stretched, short ones kept, and a ramp joins them."""
    turns = scaling.original_context * inverse / (2 * math.pi)  # full turns within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return inverse * kept + inverse / scaling.factor * (1 - kept)


def tables(spec: ModelSpec, positions: int) -> Tensor:
    """Cosines and sines of every position, float64 [positions, 2, D/2]."""
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies(spec)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, S, D] turned by cos, sin [.., 1, S, D/2]; dims i and i + D/2 make a pair, as in Hugging Face."""
    first, second = x.chunk(2, dim=-1)  # bfloat16 meets float32 tables, so the products are float32
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
