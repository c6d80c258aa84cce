"""Expert parallelism. The statement is in README.md; check with `fivefold lab check .`"""

import torch.distributed as dist
from torch import Tensor, nn


class ExpertParallelMoE(nn.Module):
    """A mixture of experts whose experts are divided over the ranks, and whose tokens are, too.

    `router` [E, D], `up` [E, H, D] and `down` [E, D, H] are whole, and the same on every rank. Keep the router whole,
    and of up and down this rank's experts: rank r has the r-th of equal parts of neighbouring ones. A token x goes to
    the `top` experts with the largest scores `router @ x`; their weights are the softmax over these scores. Expert e
    gives `down[e] @ gelu(up[e] @ x)`.
    """

    def __init__(self, router: Tensor, up: Tensor, down: Tensor, top: int, group: dist.ProcessGroup):
        super().__init__()
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """[tokens of this rank, D] -> the same shape; ranks have different numbers of tokens, or none"""
        raise NotImplementedError
