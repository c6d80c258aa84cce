"""How answers are chosen, as it is asked for. No torch here: ranks do the choosing."""

import math

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
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
