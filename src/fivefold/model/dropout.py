"""Dropout whose mask is a function of (seed, layer, sample, position, feature), so that every layout drops the same."""

import torch
from torch import Tensor, nn

from fivefold.model import random
from fivefold.model.positions import TokenPositions


class Dropout(nn.Module):
    """Drops features of the residual stream, [B, S, E]; the identity in eval mode and at rate 0."""

    def __init__(self, rate: float, seed: int, name: str):
        super().__init__()
        self.rate, self.key = rate, random.key(seed, "dropout", name)

    def forward(self, x: Tensor, positions: TokenPositions) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        features = torch.arange(-(-x.shape[-1] // 4), device=x.device)
        sample, position = positions.samples[:, None, None], positions.position_ids[..., None]
        kept = random.keep(self.key, 1.0 - self.rate, features, position, sample, sample >> 32)
        return x * (kept.flatten(-2)[..., : x.shape[-1]].to(x.dtype) / (1.0 - self.rate))
