"""A loss of a module of its own: focal loss (Lin et al., arXiv 1708.02002), and a decay of the logits.

(1 - p)^gamma (-log p) + decay / V sum of z^2
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fivefold.losses.base import Loss, Words
from fivefold.support.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor


class Focal(Loss, frozen=True, kw_only=True, tag="focal_loss:Focal"):
    gamma: float = 2.0
    decay: float = 0.1

    @property
    def reduced(self) -> int:
        return 2

    def problems(self) -> Iterator[Problem]:
        if self.gamma < 1:
            yield Problem("focal.gamma", f"loss.gamma={self.gamma} is below 1")

    def sums(self, logits: "Tensor", words: Words) -> "tuple[Tensor, ...]":
        return words.pick(logits), logits.to(words.dtype).square().sum(-1)

    def value(self, lse: "Tensor", sums: "Sequence[Tensor]", size: int) -> "Tensor":
        surprise = lse - sums[0]
        return (1 - (-surprise).exp()) ** self.gamma * surprise + self.decay / size * sums[1]

    def slope(self, logits: "Tensor", lse: "Tensor", sums: "Sequence[Tensor]", words: Words) -> "Tensor":
        surprise = lse - sums[0]
        missed = 1 - (-surprise).exp()
        by_surprise = missed**self.gamma + self.gamma * surprise * missed ** (self.gamma - 1) * (1 - missed)
        wide, decay = logits.to(words.dtype), 2 * self.decay / words.size
        grad = by_surprise[:, None] * (wide - lse[:, None]).exp() + decay * wide
        return words.put(grad, by_surprise * -missed + decay * sums[0]).to(logits.dtype)

    def plain(self, logits: "Tensor", targets: "Tensor") -> "Tensor":
        log_p = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        return (1 - log_p.exp()) ** self.gamma * -log_p + self.decay * logits.square().mean(-1)
