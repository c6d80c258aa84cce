"""How the next token is chosen: the settings, and the sampler that follows them.

Commands check the settings without torch: the sampler imports it where it computes.
"""

from typing import TYPE_CHECKING

import msgspec

from fivefold.support.errors import Problem
from fivefold.support.ranges import MAX_TOKENS, misfit, within

if TYPE_CHECKING:
    from torch import Tensor


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is sampled. Temperature 0 takes the likeliest; otherwise a token is drawn from the `top_k`
    likeliest ones (0: all), and of these from the likeliest that together have the probability `top_p`."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def problems(self) -> list[str]:
        sampled = self.temperature != 0
        found = [
            misfit("--temperature", self.temperature, within(1e-3, 1e6, "0 is greedy")) if sampled else None,
            misfit("--seed", self.seed, within(0, (1 << 63) - 1)),
            misfit("--top-k", self.top_k, within(0, MAX_TOKENS, "0 means all")),
            misfit("--top-p", self.top_p, within(1e-6, 1)),
        ]
        return [Problem("option.range", sentence) for sentence in found if sentence]

    def __str__(self) -> str:
        """The options of a command that samples the same again."""
        if self.temperature == 0:
            return "--temperature 0"
        top_k = f" --top-k {self.top_k}" if self.top_k else ""
        return f"--temperature {self.temperature:g}{top_k} --top-p {self.top_p:g} --seed {self.seed}"


class Sampler:
    """Samples tokens from logits. The same logits and seed give the same tokens on every rank."""

    def __init__(self, sampling: Sampling):
        import torch

        self.sampling = sampling
        self.random = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: "Tensor") -> int:
        """A token from logits [V]."""
        import torch

        sampling = self.sampling
        if sampling.temperature == 0:
            return int(logits.argmax())
        probabilities = torch.softmax(logits.double().cpu() / sampling.temperature, dim=0)
        sorted_probs, order = probabilities.sort(descending=True, stable=True)
        if sampling.top_k:
            sorted_probs[sampling.top_k :] = 0.0
        likelier = sorted_probs.cumsum(0) - sorted_probs  # the probability of all likelier tokens
        sorted_probs[likelier >= sampling.top_p * sorted_probs.sum()] = 0.0
        return int(order[torch.multinomial(sorted_probs, 1, generator=self.random)])
