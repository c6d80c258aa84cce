"""What a loss is: its settings, its value for a token, and its gradient by the logits.

A loss is a subclass of `Loss` in a file of its own, and a line in the table of `losses/__init__.py`; or in a module of
yours, which a job names as loss.name=package.module:Name. It sees a slice of the tokens and, under tp, a part of the
vocabulary: it says which sums over the words it needs, and with those of all words and the log-sum-exp it computes the
rest. Slices, masks, reductions, and the products with the head are the same for all: `model/linear_cross_entropy.py`.

Jobs and plans read this without torch: a loss is written in methods of tensors.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fivefold.support.errors import Problem, UserError
from fivefold.support.plugin_calls import Wanted, ask, value_text
from fivefold.support.plugin_settings import class_shortcomings
from fivefold.support.plugins import untrusted_problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Words(NamedTuple):
    """The words of the vocabulary that a rank has the logits of, [N, V/tp], and where the targets of N tokens are."""

    column: "Tensor"  # [N] of the target; outside of these logits where it is another rank's
    is_local: "Tensor"  # [N] whether it is one of these
    size: int  # of the whole vocabulary
    dtype: "torch.dtype"  # of sums: at least float32

    def pick(self, logits: "Tensor") -> "Tensor":
        """The targets' logits [N], and 0 where another rank has them."""
        index = self.column.masked_fill(~self.is_local, 0)[:, None]
        return logits.gather(-1, index)[:, 0].to(self.dtype).masked_fill(~self.is_local, 0.0)

    def put(self, grad: "Tensor", at_target: "Tensor") -> "Tensor":
        """The gradient by the logits, with other values [N] at the targets that this rank has; in its place."""
        index = self.column.masked_fill(~self.is_local, 0)[:, None]
        values = at_target.to(grad.dtype).where(self.is_local, grad.gather(-1, index)[:, 0])
        return grad.scatter_(-1, index, values[:, None])


class Loss(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name", tag=str.lower):
    @property
    def name(self) -> str:
        """What a job calls it: a name of the table, or "package.module:Name"."""
        return str(self.__struct_config__.tag)

    @property
    def reduced(self) -> int:
        """How many sums over the words it has: tp reduces them, beside the log-sum-exp, for every token."""
        return 1

    @staticmethod
    def shortcomings(kind: "type[Loss]", name: str) -> Iterator[str]:
        """What a class lacks that a job calls `name`."""
        yield from class_shortcomings(kind, Loss, name)
        for method, signature in _METHODS.items():
            if getattr(kind, method) is getattr(Loss, method):
                yield f"has no method {method}{signature}"

    def problems(self) -> Iterator[Problem]:
        """What is wrong with the settings, beyond their types."""
        yield from ()

    def sums(self, logits: "Tensor", words: Words) -> "tuple[Tensor, ...]":
        """`reduced` numbers for each token [N], which are added up over the words of all ranks."""
        raise NotImplementedError

    def value(self, lse: "Tensor", sums: "Sequence[Tensor]", size: int) -> "Tensor":
        """The loss of each token [N], of the log-sum-exp and the sums over all `size` words."""
        raise NotImplementedError

    def slope(self, logits: "Tensor", lse: "Tensor", sums: "Sequence[Tensor]", words: Words) -> "Tensor":
        """The gradient of each token's loss by its logits here [N, V/tp], in their dtype. The logits may be written to:
        nobody reads them again."""
        raise NotImplementedError

    def plain(self, logits: "Tensor", targets: "Tensor") -> "Tensor":
        """The loss of each token [N] of all logits [N, V], written for one process and autograd: what `verify` holds
        `value` and `slope` against."""
        raise NotImplementedError


_METHODS = {
    "sums": "(self, logits, words)",
    "value": "(self, lse, sums, size)",
    "slope": "(self, logits, lse, sums, words)",
    "plain": "(self, logits, targets), which verify holds it against",
}


_SUMS = Wanted(
    "a whole number of sums, 0 or more",
    lambda result: "" if type(result) is int and result >= 0 else value_text(result),
)


def reduced_problems(loss: Loss) -> list[str]:
    """What is wrong with how many sums it says it has: ranks count on that when they send them."""
    try:
        ask(loss, "reduced", wanted=_SUMS)
    except UserError as error:
        return error.coded
    return []


class UnknownLoss(Loss, frozen=True, kw_only=True):
    """One that a stored job names, and whose module nobody has imported here: its settings, and no rule."""

    def problems(self) -> Iterator[Problem]:
        yield untrusted_problem("loss.name", self.name)
