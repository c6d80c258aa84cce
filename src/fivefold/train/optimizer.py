"""AdamW over float32 (or float64) weights, whatever the model computes in.

In bfloat16 the model holds bfloat16 weights and this holds their float32 masters: each microbatch's gradients are added
to the master's float32 gradient as soon as autograd has made them, the step is taken on the masters, and the rounded
result goes back into the model. In float32 and float64 the weights are their own masters.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fivefold.spec import ModelSpec
from fivefold.train.config import OptimizerConfig


class Optimizer:
    def __init__(self, model: nn.Module, spec: ModelSpec, config: OptimizerConfig, compute: torch.dtype):
        """Takes a freshly initialised model in full precision and leaves it in `compute`."""
        self.clip = config.clip
        self.weights = dict(model.named_parameters())
        self.masters = self.weights
        if compute == torch.bfloat16:
            self.masters = {name: nn.Parameter(weight.detach().clone()) for name, weight in self.weights.items()}
            model.to(compute)
            for name, weight in self.weights.items():
                weight.register_post_accumulate_grad_hook(_adder(self.masters[name]))
        # Decay pulls matrices towards zero; a norm's scale, a bias and an embedding row have no reason to go there.
        decayed = {parameter.name for parameter in spec.parameters() if parameter.kind == "linear"}
        groups = [
            {"params": [p for name, p in self.masters.items() if name in decayed], "weight_decay": config.weight_decay},
            {"params": [p for name, p in self.masters.items() if name not in decayed], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    def gradient_norm(self) -> Tensor:
        """The norm over all parameters, before clipping."""
        return get_total_norm(p.grad for p in self.masters.values() if p.grad is not None)

    def step(self, rate: float | None, norm: Tensor) -> None:
        """One update at `rate` (None: no update), with gradients scaled down to `clip` where their `norm` is above it.

        The gradients are gone afterwards.
        """
        if rate is not None:
            if self.clip:
                clip_grads_with_norm_(self.masters.values(), self.clip, norm)
            for group in self.adam.param_groups:
                group["lr"] = rate
            self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        if self.masters is not self.weights:
            with torch.no_grad():
                torch._foreach_copy_(list(self.weights.values()), list(self.masters.values()))


def _adder(master: nn.Parameter) -> Callable[[Tensor], None]:
    """Moves a weight's new gradient into the master's, widening it on the way."""

    def add(weight: Tensor) -> None:
        assert weight.grad is not None  # this runs right after autograd has set it
        if master.grad is None:
            master.grad = weight.grad.to(master.dtype)
        else:
            master.grad.add_(weight.grad)
        weight.grad = None

    return add
