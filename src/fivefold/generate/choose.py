"""Logits to a token."""

import math

import msgspec
import torch
from torch import Tensor


class Taste(msgspec.Struct, frozen=True, kw_only=True):
    """Temperature 0 takes the likeliest; else a token is drawn among the `top_k` likeliest (0: all) that together have
    the probability `top_p`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def problems(self) -> list[str]:
        rules = [
            (
                self.temperature == 0 or 1e-3 <= self.temperature < math.inf,
                f"--temperature {self.temperature:g} must be 0, which is greedy, or at least 0.001",
            ),
            (0 <= self.seed < 1 << 63, f"--seed {self.seed} must lie between 0 and 2^63 - 1"),
            (self.top_k >= 0, f"--top-k {self.top_k} must not be negative; 0 means all"),
            (0 < self.top_p <= 1, f"--top-p {self.top_p:g} is a probability above 0, and at most 1"),
        ]
        return [sentence for holds, sentence in rules if not holds]


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
