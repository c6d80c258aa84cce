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
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
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
    def send_weights(self) -> None:
        rounded = [name for name, weight in self.weights.items() if weight.dtype != self.masters[name].dtype]
        if rounded:
            torch._foreach_copy_([self.weights[name] for name in rounded], [self.masters[name] for name in rounded])
