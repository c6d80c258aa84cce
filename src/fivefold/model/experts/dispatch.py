"""Dispatch: tokens in the order of their experts, and what the experts said of them, weighted and added up.

This is one device's; `parallel/experts/` has the same across ranks. Nothing is dropped: what would not fit depends on
who asks, and so on the layout.
Shapes: n tokens, E hidden, X experts, K of them for each token; a token has K slots.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.model.dtypes import wide
from fivefold.model.experts.grouped import GroupedLinear, Groups
from fivefold.model.experts.host import Host
from fivefold.model.experts.router import Routed

Compute = Callable[[Tensor, Groups], Tensor]  # what the experts make of rows that lie expert by expert
Beside = Callable[[], Tensor] | None  # what can be computed while tokens travel: the expert that all of them visit


Watch = Callable[[str], AbstractContextManager[None]]
DISPATCH, COMBINE = "dispatch", "combine"  # tokens on their way to experts, and what came of them on its way back


class LocalDispatch:
    watch: Watch = staticmethod(lambda name: nullcontext())  # surrounds the two
    host = Host()
    travels = False  # whether tokens go to other ranks
    hand_over: Callable[[], None] = staticmethod(lambda: None)  # called before a wait: something else may run

    def adopt(self, model: nn.Module) -> None:
        """Meet the model, on the meta device: ranks that share its experts take theirs here."""

    def own_tokens(self, x: Tensor) -> Tensor:
        """Of the residual stream [B, S, E] the tokens that this rank routes, [n, E]."""
        return x.flatten(0, 1)

    def all_tokens(self, y: Tensor, like: Tensor) -> Tensor:
        """What came of them, [n, E], as the residual stream."""
        return y.view_as(like)

    def rows(self, x: Tensor) -> Tensor:
        """The row of the batch that each of these tokens stands in, [n]."""
        return torch.arange(x.shape[0], device=x.device).repeat_interleave(x.shape[1])

    def over_sequence(self, counts: Tensor) -> Tensor:
        """Numbers of rows, summed over the ranks that share these rows."""
        return counts

    def run(
        self, x: Tensor, routed: Routed, compute: Compute, stream: int, beside: Beside = None
    ) -> tuple[Tensor, Tensor | None]:
        """x [n, E] -> [n, E], and what `beside` gives; `stream`: how many tokens the residual stream has here."""
        with self.watch(DISPATCH):
            order = sorted_slots(routed.chosen)
            groups = Groups(tuple(self.host.by_expert(routed.counts, len(order))), x.device)
            rows = x[order // routed.chosen.shape[1]]
        out = compute(rows, groups)
        with self.watch(COMBINE):
            y = weighted(out[places(order)], routed.weights)
        return y, beside() if beside is not None else None

    def linear(self, x: Tensor, linear: nn.Module, groups: Groups) -> Tensor:
        """A linear of every expert, on the rows of each."""
        return grouped_linear(x, linear, groups, _at_once)


def _at_once() -> None:
    return None


def grouped_linear(x: Tensor, linear: Any, groups: Groups, put_off: Callable[[], Any]) -> Tensor:
    y = GroupedLinear.apply(x, linear.weight, groups, put_off)
    return y if linear.bias is None else y + linear.bias.unflatten(0, (len(groups.sizes), -1))[groups.numbers]


def sorted_slots(chosen: Tensor) -> Tensor:
    """The slots [n * K] in the order of their experts, then of the tokens."""
    return chosen.flatten().sort(dim=0, stable=True).indices


def places(order: Tensor) -> Tensor:
    """Where each slot went."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def weighted(out: Tensor, weights: Tensor) -> Tensor:
    """What the experts said in each slot, [n * K, E], weighted and added up in the order of the slots: [n, E]."""
    slots = out.unflatten(0, weights.shape) if weights.numel() else out.view(*weights.shape, out.shape[-1])
    return (slots.to(wide(out.dtype)) * weights[..., None]).sum(1).to(out.dtype)
