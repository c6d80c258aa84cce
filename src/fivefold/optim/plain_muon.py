"""Muon as its papers write it, one whole matrix after the other: what `fivefold verify` holds every layout against.

It shares no code with `muon.py`, and computes in the dtype of the weights: torch.optim.Muon rounds to bfloat16.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fivefold.spec.operations import Parameter


class PlainMuon(torch.optim.Optimizer):
    """A group's "about" says what its "params" are, and "rule" whether they are matrices; AdamW updates others."""

    def __init__(self, groups: list[dict[str, Any]], settings: Mapping[str, Any]):
        """`settings`: of `[optimizer]`, by name."""
        self.steps = 0
        super().__init__(groups, dict(settings))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for weight, about in zip(group["params"], group["about"], strict=True):
                if weight.grad is None:
                    continue
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                change = self._muon(weight, about) if group["rule"] == "matrix" else self._adamw(weight)
                weight.sub_(group["lr"] * change)

    def _muon(self, weight: Tensor, about: "Parameter") -> Tensor:
        state, mu = self.state[weight], self.defaults["momentum"]
        state["momentum"] = mu * state.get("momentum", torch.zeros_like(weight)) + weight.grad
        used = weight.grad + mu * state["momentum"] if self.defaults["nesterov"] else state["momentum"]
        matrices = used.chunk(max(1, about.experts))  # experts lie one below the other
        return torch.cat([0.2 * math.sqrt(max(m.shape)) * self._newton_schulz(m) for m in matrices])

    def _newton_schulz(self, g: Tensor) -> Tensor:
        x = g / max(float(torch.linalg.matrix_norm(g)), self.defaults["ns_eps"])
        for _ in range(self.defaults["ns_steps"]):
            square = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x  # the same polynomial from either side
            poly = -4.7750 * square + 2.0315 * square @ square
            x = 3.4445 * x + (poly @ x if x.shape[0] <= x.shape[1] else x @ poly)
        return x

    def _adamw(self, weight: Tensor) -> Tensor:
        state, (beta1, beta2) = self.state[weight], self.defaults["betas"]
        gradient, zeros = weight.grad, torch.zeros_like(weight)
        assert gradient is not None
        state["first"] = beta1 * state.get("first", zeros) + (1 - beta1) * gradient
        state["second"] = beta2 * state.get("second", zeros) + (1 - beta2) * gradient**2
        first, second = state["first"] / (1 - beta1**self.steps), state["second"] / (1 - beta2**self.steps)
        return first / (second.sqrt() + self.defaults["eps"])
