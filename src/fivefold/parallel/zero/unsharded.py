"""Gradients in which nobody else has a part: each on its own, without buffers. A single device needs no more."""

import torch
from torch import Tensor, nn


class Loose:
    """Parameters whose gradients are final as they come; the master takes each one over, widened where needed."""

    def __init__(self, weights: dict[str, Tensor], masters: dict[str, nn.Parameter]):
        self.weights, self.masters = weights, masters

    @torch.no_grad()
    def add(self, name: str, gradient: Tensor) -> None:
        master = self.masters[name]
        if master.grad is None and gradient.dtype == master.dtype:
            master.grad = gradient
        elif master.grad is None:
            master.grad = torch.empty_like(master)
            torch._foreach_copy_([master.grad], [gradient])  # on a GPU three times as fast as `to`
        else:
            master.grad.add_(gradient)

    def hand_over(self) -> None:
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)

    def forget(self) -> None:
        for master in self.masters.values():
            master.grad = None

    @torch.no_grad()
    def send_weights(self, but: frozenset[str] = frozenset()) -> None:
        stale = [name for name in self.mirrors() if name not in but]
        if stale:
            torch._foreach_copy_([self.weights[name] for name in stale], [self.masters[name] for name in stale])

    def mirrors(self) -> dict[str, Tensor]:
        """The model's weights that are rounded copies of their masters."""
        return {name: weight for name, weight in self.weights.items() if weight.dtype != self.masters[name].dtype}
