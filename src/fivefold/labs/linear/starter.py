"""Column- and row-parallel linear layers. The statement is in README.md; check with `fivefold lab check .`"""

import torch.distributed as dist
from torch import Tensor, nn


class ColumnParallelLinear(nn.Module):
    """y = x @ weight.T + bias, of which each rank computes its part of the output's features.

    `weight` [out, in] and `bias` [out] are whole, and the same on every rank. Keep this rank's shards, as the
    parameters `weight` and `bias`. x is whole on every rank, so is its gradient.
    """

    def __init__(self, weight: Tensor, bias: Tensor, group: dist.ProcessGroup):
        super().__init__()
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] on every rank -> [..., out / ranks]"""
        raise NotImplementedError


class RowParallelLinear(nn.Module):
    """y = x @ weight.T + bias, of which each rank has its part of the input's features.

    `weight` [out, in] and `bias` [out] are whole, as above. The output is whole on every rank.
    """

    def __init__(self, weight: Tensor, bias: Tensor, group: dist.ProcessGroup):
        super().__init__()
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """[..., in / ranks] -> [..., out] on every rank"""
        raise NotImplementedError
