"""Logits to a token."""

import torch
from torch import Tensor

from fivefold.generate.sampling import Sampling


class Chooser:
    def __init__(self, sampling: Sampling):
        self.sampling = sampling
        self.random = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: Tensor) -> int:
        """Of [V]. The same logits and seed choose the same on every rank."""
        sampling = self.sampling
        if sampling.temperature == 0:
            return int(logits.argmax())
        chances = torch.softmax(logits.double().cpu() / sampling.temperature, dim=0)
        sorted_chances, order = chances.sort(descending=True, stable=True)
        if sampling.top_k:
            sorted_chances[sampling.top_k :] = 0.0
        before = sorted_chances.cumsum(0) - sorted_chances
        sorted_chances[before >= sampling.top_p * sorted_chances.sum()] = 0.0
        return int(order[torch.multinomial(sorted_chances, 1, generator=self.random)])
