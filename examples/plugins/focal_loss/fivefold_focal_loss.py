"""Focal loss (Lin et al., arXiv 1708.02002): tokens that the model knows well count less. And a decay of the logits.

fivefold train job.toml loss.name=fivefold_focal_loss:Focal loss.gamma=2

(1 - p)^gamma (-log p) + decay / V sum of z^2        p: the target's probability; z: the logits of V words
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fivefold.losses.base import Loss, Words
from fivefold.support.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor


class Focal(Loss, frozen=True, kw_only=True, tag="fivefold_focal_loss:Focal"):
    gamma: float = 2.0  # the paper's
    decay: float = 0.0  # of the mean square of a token's logits

    @property
    def reduced(self) -> int:
        return 2

    def problems(self) -> Iterator[Problem]:
        if not 1 <= self.gamma < math.inf:  # below 1 its slope has no bound where p comes near 1
            yield Problem("loss.gamma.range", f"loss.gamma={self.gamma} must be at least 1; nearest: loss.gamma=1")
        if not 0 <= self.decay < math.inf:
            yield Problem("loss.decay.range", f"loss.decay={self.decay} must not be negative; 0 turns it off")

    def sums(self, logits: "Tensor", words: Words) -> "tuple[Tensor, ...]":
        return words.pick(logits), logits.to(words.dtype).square().sum(-1)

    def value(self, lse: "Tensor", sums: "Sequence[Tensor]", size: int) -> "Tensor":
        surprise = lse - sums[0]
        return (1 - (-surprise).exp()) ** self.gamma * surprise + self.decay / size * sums[1]

    def slope(self, logits: "Tensor", lse: "Tensor", sums: "Sequence[Tensor]", words: Words) -> "Tensor":
        surprise = lse - sums[0]
        missed = 1 - (-surprise).exp()  # 1 - p
        by_surprise = missed**self.gamma + self.gamma * surprise * missed ** (self.gamma - 1) * (1 - missed)
        wide, decay = logits.to(words.dtype), 2 * self.decay / words.size
        grad = by_surprise[:, None] * (wide - lse[:, None]).exp() + decay * wide
        return words.put(grad, by_surprise * -missed + decay * sums[0]).to(logits.dtype)

    def plain(self, logits: "Tensor", targets: "Tensor") -> "Tensor":
        log_p = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        return (1 - log_p.exp()) ** self.gamma * -log_p + self.decay * logits.square().mean(-1)
