"""AdamW (Loshchilov and Hutter, arXiv 1711.05101). The kernels are PyTorch's, and on a GPU one of our own.

torch.optim is not used around them: it imports the compiler and would double the start of a rank.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fivefold.optim.base import OptimizerConfig, Rule, bound

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fivefold.optim.base import States, Tensors


class AdamW(OptimizerConfig, frozen=True, kw_only=True):
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    fuses = True

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def own_rules(self) -> list[Rule]:
        return [
            (all(0 <= beta < 1 for beta in self.betas), bound("betas", f"{list(self.betas)} must lie in [0, 1)")),
            (0 < self.eps < math.inf, bound("eps", f"{self.eps} must be positive")),
        ]

    def update(
        self, masters: "Tensors", grads: "Tensors", states: "States", rate: float, decay: float, step: int
    ) -> None:
        import torch

        steps = [torch.full((), float(step), device=masters[0].device)] * len(masters)
        first, second = states["exp_avg"], states["exp_avg_sq"]
        beta1, beta2 = self.betas
        options: Any = {"lr": rate, "beta1": beta1, "beta2": beta2, "weight_decay": decay, "eps": self.eps}
        lists = [[*masters], [*grads], [*first], [*second], [], steps]
        torch._fused_adamw_(*lists, **options, amsgrad=False, maximize=False)

    def fused_update(
        self,
        master: "Tensor",
        states: "Mapping[str, Tensor]",
        scale: "Tensor",
        compute_copy: "Tensor | None",
        rate: float,
        decay: float,
        step: int,
    ) -> None:
        from fivefold.optim.kernels import adamw

        moments = states["exp_avg"], states["exp_avg_sq"]
        adamw(master, moments, scale, compute_copy, self.betas, self.eps, rate, decay, step)

    def stock(self, groups: list[dict[str, Any]], **options: Any) -> "torch.optim.Optimizer":
        import torch

        return torch.optim.AdamW(groups, betas=self.betas, eps=self.eps, **({"lr": self.lr} | options))
