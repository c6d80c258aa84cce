"""Bytes of a mixture of experts on one rank: what a microbatch keeps, and what its backward pass needs for a while.

    mixture = MixtureMemory(spec, layout, stack, tokens=4096, wide=2, imbalance=1.2)
    mixture.everything, mixture.outputs, mixture.passing

A rank routes n of the microbatch's tokens, fills K slots for each, and computes N rows of its own experts: the fullest
rank `imbalance` times as many as it sends. Letters as in experts.py: E hidden, F an expert's width, X experts.
This code weighs what experts said in float32: in backward that is the largest part of it, the gradients of the slots
and their products with the slots.
"""

from dataclasses import dataclass
from functools import cached_property

from fivefold.layout.layout import Layout
from fivefold.plan.cost.dispatch import Routed
from fivefold.plan.cost.stack import Stack
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Matmul, block

# What a fused kernel does not write of a gated activation: the gate's; or clamped gate, sigmoid, their product, input.
GATES = {"swiglu": 1, "swiglu_clamped": 4}
_SLOT = 40  # bytes of the numbers of a slot: its expert, its places before and after, its weight


def written_by_activation(spec: ModelSpec, stack: Stack) -> int:
    """Tensors of its width that an activation keeps besides what it read and what it wrote."""
    return GATES.get(spec.activation, 0) if stack.pointwise in ("eager", "fivefold") else 0


@dataclass(frozen=True)
class MixtureMemory(Routed):
    """Of one block and microbatch with `tokens` on a cp rank; `wide` is the bytes of an activation."""

    spec: ModelSpec
    layout: Layout
    stack: Stack
    tokens: int
    wide: int = 2
    imbalance: float = 1.0
    splits: bool = False  # whether backward passes have two halves

    @property
    def gathers(self) -> bool:
        """Whether every rank gets all tokens."""
        return self.layout.dispatch == "allgather" and self.layout.ep > 1

    @property
    def widened(self) -> int:
        """Bytes of what is computed in float32 at least."""
        return max(4, self.wide)

    @property
    def eager(self) -> bool:
        """Whether experts' outputs are weighed, and the router's input is widened, by kernels of their own. Other
        software weighs inside of the activation, and its router reads what the norm wrote."""
        return self.stack.pointwise in ("eager", "fivefold")

    @cached_property
    def matmuls(self) -> list[Matmul]:
        return [one for one in block(self.spec).matmuls if one.experts]

    @property
    def inner(self) -> float:
        """Bytes of one of the experts' intermediates."""
        return self.rows * self.matmuls[-1].inputs * self.wide

    @property
    def said(self) -> float:
        """Bytes of what experts said: a row for each slot; where tokens are gathered, for each row here, widened."""
        return self.spec.hidden * (self.rows * self.widened if self.gathers else self.slots * self.wide)

    @property
    def router(self) -> float:
        """The widened input and weight, the scores, and the numbers of slots."""
        experts, hidden = self.experts.count, self.spec.hidden
        entering = self.routed * hidden * (self.widened if self.eager else self.wide)
        weight = experts * hidden * self.widened if self.wide < self.widened else 0
        return entering + weight + self.routed * experts * self.widened + self.slots * _SLOT

    @property
    def everything(self) -> float:
        """What autograd saves without recompute."""
        *columns, down = self.matmuls
        inner = sum(one.outputs for one in columns) + (1 + written_by_activation(self.spec, self.stack)) * down.inputs
        found = self.router + self.rows * self.wide * (self.spec.hidden + inner)
        if not self.eager:
            return found
        return found + self.said * (2 if self.gathers else 1)  # its sum over ranks keeps what it adds up, too

    @property
    def outputs(self) -> float:
        """What selective recompute keeps: outputs of matmuls, and all that came from other ranks."""
        hidden, wide, experts = self.spec.hidden, self.wide, self.experts
        # Of rows that travel back nothing is read where they were made.
        written = self.matmuls[:-1] if self.layout.ep > 1 and not self.gathers else self.matmuls
        found = self.rows * wide * sum(one.outputs for one in written)
        found += self.routed * experts.count * self.widened
        if self.gathers:
            found += self._tokens * wide + self.layout.ep * self.slots * (8 + self.widened)
            found += self.routed * hidden * self.widened
        elif self.layout.ep > 1:
            found += (self.rows + self.slots) * hidden * wide
        if self.layout.tp > 1 and not self.layout.sp:  # all slices of the tokens
            found += self.tokens * hidden * wide
        return found

    @property
    def put_off(self) -> float:
        """Between I and W: rows and intermediates, the gradients of what experts' linears wrote."""
        *columns, down = self.matmuls
        features = columns[0].inputs + down.inputs + sum(one.outputs for one in self.matmuls)
        return self.rows * self.wide * features

    @property
    def returning(self) -> float:
        """Bytes on top of `everything` while rows are added up for all ranks: zeros and the sums; or, where a block
        runs again, zeros and the gradient of the sums, which has been gathered. Beside them what they are made of, and
        what selective recompute keeps of the way back, for which nobody has asked yet."""
        if not self.gathers:
            return 0.0
        kept = self.routed * self.spec.hidden * self.widened if self.layout.recompute == "selective" else 0.0
        return self._tokens * (2 * self.widened + self.wide) + self._row + kept

    @property
    def weighing(self) -> float:
        """Bytes on top of `everything` while backward undoes the weighing; none of the block's gradients exist yet."""
        if not self.eager:
            return 0.0
        return 2 * (self.rows if self.gathers else self.slots) * self.spec.hidden * self.widened

    @property
    def weighed(self) -> float:
        """Of `everything` what is gone after that."""
        return self.said * (2 if self.gathers else 1) if self.eager else 0.0

    @property
    def arriving(self) -> float:
        """Bytes on top of `everything` when the gradients of rows have come from other ranks, and are put in order."""
        return 2 * self._row - self.weighed if self.layout.ep > 1 and not self.gathers else 0.0

    @property
    def linears(self) -> float:
        """Bytes on top of `everything` while the last of an expert's linears and its activation run backward: gradients
        of intermediates; or of a row, an intermediate and the weight. What the second half of a backward pass reads
        stays: an intermediate, and the gradient of a row."""
        if self.splits:
            return 3 * self.inner + self._row - self.weighed
        return max(2 * self.inner, self._row + self.inner + self._weight) - self.weighed

    @property
    def columns(self) -> float:
        """The same when the linears before it have run: gradients of rows and of a weight; the intermediates are
        gone."""
        made = self._row + (self.put_off if self.splits else self._weight)
        return made - (self.everything - self.router)

    @property
    def first_gradient(self) -> float:
        """The share of an expert's parameters that its last linear has, whose gradient is made first."""
        return 1 / len(self.matmuls)

    @property
    def _tokens(self) -> float:
        """Elements of the tokens of all ranks of ep."""
        return self.layout.ep * self.routed * self.spec.hidden

    @property
    def _row(self) -> float:
        return self.rows * self.spec.hidden * self.wide

    @property
    def _weight(self) -> float:
        """Bytes of a weight's gradient, of all experts here, before it is widened."""
        down = self.matmuls[-1]
        return down.inputs * down.outputs * self.experts.count / self.layout.ep * self.wide

    @property
    def leaving(self) -> float:
        """The same when they have run: gradients of rows, and room for them in the order in which they came."""
        waits = self.put_off if self.splits else 0.0
        return 3 * self._row + waits - (self.everything - self.router)
