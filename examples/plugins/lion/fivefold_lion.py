"""Lion (Chen et al., arXiv 2302.06675): the sign of a blend of the gradient and its average. One state, AdamW has two.

fivefold train job.toml optimizer.name=fivefold_lion:Lion optimizer.lr=3e-4
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fivefold.optim.base import OptimizerConfig, Rule, bound

if TYPE_CHECKING:
    import torch

    from fivefold.optim.base import States, Tensors


class Lion(OptimizerConfig, frozen=True, kw_only=True, tag="fivefold_lion:Lion"):
    states = ("exp_avg",)

    lr: float = 3e-4  # a third to a tenth of AdamW's, as the paper advises
    weight_decay: float = 1.0  # and its decay three to ten times as large
    betas: tuple[float, float] = (0.9, 0.99)  # of the blend, and of the average
    # The sign of x is x / (|x| + eps). `fivefold verify` sets an eps of the gradients' size: rounding noise, where a
    # gradient is zero in theory, has a sign of its own in every layout.
    eps: float = 1e-30

    def own_rules(self) -> list[Rule]:
        return [
            (all(0 <= beta < 1 for beta in self.betas), bound("betas", f"{list(self.betas)} must lie in [0, 1)")),
            (0 < self.eps < math.inf, bound("eps", f"{self.eps} must be positive")),
        ]

    def update(
        self, masters: "Tensors", grads: "Tensors", states: "States", rate: float, decay: float, step: int
    ) -> None:
        import torch

        averages = states["exp_avg"]
        blend, average = self.betas
        signs = torch._foreach_lerp([*averages], [*grads], 1 - blend)
        torch._foreach_div_(signs, torch._foreach_add(torch._foreach_abs(signs), self.eps))
        torch._foreach_mul_([*masters], 1 - rate * decay)
        torch._foreach_add_([*masters], signs, alpha=-rate)
        torch._foreach_lerp_([*averages], [*grads], 1 - average)

    def stock(self, groups: list[dict[str, Any]], **options: Any) -> "torch.optim.Optimizer":
        return _reference()(groups, {"lr": self.lr, "betas": self.betas, "eps": self.eps, "weight_decay": 0.0})


def _reference() -> "Callable[..., torch.optim.Optimizer]":
    """As the paper's algorithm 2 says it, one weight after the other: what `fivefold verify` holds `update` against."""
    import torch

    class Reference(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                blend, average = group["betas"]
                for weight in group["params"]:
                    if weight.grad is None:
                        continue
                    m = self.state[weight].setdefault("m", torch.zeros_like(weight))
                    c = blend * m + (1 - blend) * weight.grad
                    direction = c / (c.abs() + group["eps"])
                    weight -= group["lr"] * (direction + group["weight_decay"] * weight)
                    self.state[weight]["m"] = average * m + (1 - average) * weight.grad

    return Reference
