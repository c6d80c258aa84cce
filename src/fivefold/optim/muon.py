"""Muon: momentum, orthogonalised matrix by matrix (Jordan et al. 2024; Liu et al., arXiv 2502.16982, "Moonlight").

It updates the matrices of the layers: every linear of attention and feed-forward networks, of each expert its own, and
the router, as Moonlight does, whose code spares what has one dimension, embeddings and the head. AdamW updates those:
rows of embeddings and head belong to words, of which a batch has few, so no singular value of theirs is worth as much
as another; norms, sinks and biases are no matrices. q, k and v, and gate and up, are matrices of their own here; those
of latent attention (kv_down, kv_up) and the shared experts are one linear each, as their makers store them.

The update of a matrix [rows, columns] is scaled by 0.2 sqrt(max(rows, columns)), which gives it the size of AdamW's:
so both parts share one learning rate and one weight decay.

Newton-Schulz runs in the dtype that the model computes in: bfloat16 as usual, float64 where a layout is proven.
"""

import math
from typing import TYPE_CHECKING, Any

import msgspec

from fivefold.optim.adamw import AdamW
from fivefold.optim.base import Rule, bound

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fivefold.optim.base import States, Tensors
    from fivefold.spec.operations import Parameter

# Of the quintic a x + b x^3 + c x^5, by which an iteration moves every singular value towards 1: the steepest at zero
# that leaves those between 0.7 and 1.2 there (Jordan et al.).
QUINTIC_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(AdamW, frozen=True, kw_only=True):
    """AdamW, with another rule for matrices."""

    unit = "matrix"
    states = ("momentum_buffer", "exp_avg", "exp_avg_sq")

    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5  # of Newton-Schulz
    ns_eps: float = 1e-7  # a matrix of a smaller norm is divided by this one

    def own_rules(self) -> list[Rule]:
        return [
            (0 <= self.momentum < 1, bound("momentum", f"{self.momentum} must lie in [0, 1)")),
            (0 < self.ns_steps <= 20, bound("ns_steps", f"{self.ns_steps} must be from 1 to 20; usual: 5")),
            (0 < self.ns_eps < math.inf, bound("ns_eps", f"{self.ns_eps} must be positive")),
            *super().own_rules(),
        ]

    def states_of(self, parameter: "Parameter") -> tuple[str, ...]:
        return self.states[:1] if self.group(parameter).rule == "matrix" else self.states[1:]

    # ---- matrices ----------------------------------------------------------------------------------------------------

    def accumulate(self, grads: "Tensors", states: "States", step: int) -> "Tensors":
        import torch

        buffers = [*states["momentum_buffer"]]
        torch._foreach_mul_(buffers, self.momentum)
        torch._foreach_add_(buffers, [*grads])
        return torch._foreach_add([*grads], buffers, alpha=self.momentum) if self.nesterov else buffers

    def matrix_update(self, matrices: "Tensor") -> "Tensor":
        rows, columns = matrices.shape[-2:]
        x = matrices.mT if rows > columns else matrices
        x = orthogonalise(x, self.ns_steps, self.ns_eps).mul_(0.2 * math.sqrt(max(rows, columns)))
        return x.mT if rows > columns else x

    def matrix_flops(self, rows: int, columns: int) -> float:
        short, long = sorted((rows, columns))
        return self.ns_steps * (4.0 * short**2 * long + 2.0 * short**3)

    def matrix_memory(self, rows: int, columns: int) -> int:
        """The last two iterates, and the product of one with itself; the first is the matrix."""
        return min(2, self.ns_steps) * rows * columns + min(rows, columns) ** 2

    def stock(self, groups: list[dict[str, Any]], **options: Any) -> "torch.optim.Optimizer":
        from fivefold.optim.plain_muon import PlainMuon

        return PlainMuon(groups, msgspec.structs.asdict(self) | options)


def orthogonalise(x: "Tensor", steps: int, eps: float) -> "Tensor":
    """[n, rows, columns], rows <= columns: each matrix with all singular values near 1, by Newton-Schulz. Writes to x.

    Beside x, at most two more of its size exist and a square one.
    """
    import torch

    a, b, c = QUINTIC_COEFFICIENTS
    x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_(min=eps))  # its spectral norm is below 1
    for _ in range(steps):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
        del gram
    return x
