"""Cross-entropy, with label smoothing and z-loss."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fivefold.losses.base import Loss, Words
from fivefold.support.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor


class CrossEntropy(Loss, frozen=True, kw_only=True, tag="cross_entropy"):
    label_smoothing: float = 0.0  # share of the target's probability that is spread over the vocabulary
    z_loss: float = 0.0  # times the squared log-partition (PaLM, arXiv 2204.02311, section 5): logits do not drift

    @property
    def reduced(self) -> int:
        return 2 if self.label_smoothing else 1

    def problems(self) -> Iterator[Problem]:
        share, z_loss = self.label_smoothing, self.z_loss
        if not 0 <= share < 1:
            yield Problem("loss.label_smoothing.range", f"loss.label_smoothing={share} is a share: 0 <= it < 1")
        if not 0 <= z_loss < math.inf:
            yield Problem("loss.z_loss.range", f"loss.z_loss={z_loss} must not be negative; 0 turns it off")

    def sums(self, logits: "Tensor", words: Words) -> "tuple[Tensor, ...]":
        """The target's logit, and for label smoothing all of them."""
        picked = words.pick(logits)
        return (picked, logits.sum(-1, dtype=words.dtype)) if self.label_smoothing else (picked,)

    def value(self, lse: "Tensor", sums: "Sequence[Tensor]", size: int) -> "Tensor":
        loss = lse - (1 - self.label_smoothing) * sums[0]
        if self.label_smoothing:
            loss = loss - self.label_smoothing / size * sums[1]
        return loss + self.z_loss * lse.square() if self.z_loss else loss

    def slope(self, logits: "Tensor", lse: "Tensor", sums: "Sequence[Tensor]", words: Words) -> "Tensor":
        """The probabilities, minus one at the target."""
        grad = self._share(logits, lse[:, None], words.size).to(logits.dtype)
        # Rounded after the subtraction: for a confident answer the difference is small, and matters.
        return words.put(grad, self._share(sums[0].clone(), lse, words.size) - (1 - self.label_smoothing))

    def _share(self, logit: "Tensor", lse: "Tensor", size: int) -> "Tensor":
        share = logit.to(lse.dtype).sub_(lse).exp_()  # in place: nobody reads the logits again
        if self.z_loss:
            share = share * (1 + 2 * self.z_loss * lse)
        return share - self.label_smoothing / size if self.label_smoothing else share

    def plain(self, logits: "Tensor", targets: "Tensor") -> "Tensor":
        from torch.nn.functional import cross_entropy

        loss = cross_entropy(logits, targets, reduction="none", label_smoothing=self.label_smoothing)
        return loss + self.z_loss * logits.logsumexp(-1).square() if self.z_loss else loss


PLAIN = CrossEntropy()
