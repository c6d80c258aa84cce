"""How the next token is chosen."""

import math

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is sampled. Temperature 0 takes the likeliest; otherwise a token is drawn from the `top_k`
    likeliest ones (0: all), and of these from the likeliest that together have the probability `top_p`."""

    temperature: float
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
        return [problem for valid, problem in rules if not valid]

    def __str__(self) -> str:
        """The options of a command that samples the same again."""
        if self.temperature == 0:
            return "--temperature 0"
        top_k = f" --top-k {self.top_k}" if self.top_k else ""
        return f"--temperature {self.temperature:g}{top_k} --top-p {self.top_p:g} --seed {self.seed}"
