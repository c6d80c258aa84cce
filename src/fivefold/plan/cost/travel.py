"""What runs beside the experts' messages: the shared expert, and in a joined pair the other half's compute.

    travel = Travel(mixture)
    travel.hidden                                   # by the shared expert, in a forward and a backward pass
    travel.forward(seconds)                         # a block's pass as `schedule/pairs.py` plays it

A token travels to its experts (dispatch) and what they made of it back (combine); gradients take the same ways the
other way around. The shared expert needs neither, and runs while tokens are on their way to the others.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fivefold.plan.cost.experts import Mixture, dense_gemms
from fivefold.plan.cost.stack import MOVED
from fivefold.schedule.pairs import Segment, Segments
from fivefold.spec.operations import block


class Messages(NamedTuple):
    """Seconds of what can run beside compute; the rest of the experts' collectives stands among the compute."""

    dispatch: float = 0.0
    combine: float = 0.0
    combine_back: float = 0.0
    dispatch_back: float = 0.0


class Shared(NamedTuple):
    """Seconds of the expert that all tokens visit."""

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0


@dataclass(frozen=True)
class Travel:
    """The messages of one block's mixture, and what there is to do meanwhile."""

    of: Mixture

    @cached_property
    def messages(self) -> Messages:
        """All but the numbers of tokens that each expert gets: they go first, and are waited for."""
        share = self.of.stack.hides_experts
        if not share or self.of.layout.ep == 1:
            return Messages()
        each = [share * seconds for _, seconds in self.of.collectives("ep")]
        if self.of.layout.dispatch == "alltoall":
            return Messages(*each[-1:] * 4)
        tokens, weights, choices, sums, tokens_back, weights_back, sums_back = each
        return Messages(tokens + weights + choices, sums, sums_back, tokens_back + weights_back)

    @cached_property
    def shared(self) -> Shared:
        of = self.of
        if not of.experts.shared:
            return Shared()
        own = [one for one in block(of.spec, of.layout.tp).matmuls if one.name.startswith("shared.")]
        forward = inputs = weights = 0.0
        for m, n, k in dense_gemms(tuple(own), of.tokens, of.stack.columns_apart, 1):
            forward += of.device.gemm(m, n, k, of.precision)
            inputs += of.device.gemm(m, k, n, of.precision)
            weights += of.device.gemm(n, k, m, of.precision)
        kinds = MOVED[of.stack.pointwise]
        each = kinds.swiglu if of.spec.activation.startswith("swiglu") else kinds.gelu
        elements = of.wide / 2 * of.tokens * of.experts.shared_ffn / of.layout.tp
        one, other = (of.device.stream(moved * elements) for moved in each)
        return Shared(forward + one, inputs + other, weights)

    @cached_property
    def hidden(self) -> tuple[float, float]:
        """Seconds that the shared expert hides, forward and backward; weight gradients that are put off do not."""
        back = self.shared.inputs + (0.0 if self.of.layout.splits_backward else self.shared.weights)
        return min(self.messages.dispatch, self.shared.forward), min(self.messages.dispatch_back, back)

    def forward(self, seconds: float) -> Segments:
        """A block's forward pass, which takes so long without any overlap."""
        there, back, *_ = self.messages
        made, added = self.of.computing[0], self.of.summing[0]
        before = seconds - sum((there, back, self.shared.forward, made, added))
        return Segment(before, there, self.shared.forward), Segment(made, back), Segment(added)

    def backward(self, seconds: float) -> Segments:
        """Its backward pass, the gradients of the weights in their places; likewise, and without recomputation."""
        *_, back, there = self.messages
        _, inputs, weights = self.of.computing
        made, added, shared = inputs + weights, self.of.summing[1], self.shared.inputs + self.shared.weights
        rest = seconds - sum((back, there, shared, made, added))
        return Segment(added, back), Segment(made, there, shared), Segment(rest)
