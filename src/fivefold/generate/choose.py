"""Logits to a token."""

import torch
from torch import Tensor

from fivefold.generate.taste import Taste


class Chooser:
    def __init__(self, taste: Taste):
        self.taste = taste
        self.random = torch.Generator().manual_seed(taste.seed)

    def __call__(self, logits: Tensor) -> int:
        """Of [V]. The same logits and seed choose the same on every rank."""
        taste = self.taste
        if taste.temperature == 0:
            return int(logits.argmax())
        chances = torch.softmax(logits.double().cpu() / taste.temperature, dim=0)
        sorted_chances, order = chances.sort(descending=True, stable=True)
        if taste.top_k:
            sorted_chances[taste.top_k :] = 0.0
        before = sorted_chances.cumsum(0) - sorted_chances
        sorted_chances[before >= taste.top_p * sorted_chances.sum()] = 0.0
        return int(order[torch.multinomial(sorted_chances, 1, generator=self.random)])
