"""Sequence parallelism. The statement is in README.md; check with `fivefold lab check .`"""

import torch.distributed as dist
from torch import Tensor, nn


class SequenceParallelMLP(nn.Module):
    """norm, column-parallel linear, gelu, row-parallel linear; between blocks each rank has a part of the tokens.

    All are given whole: the norm's `weight` and `bias` [D] (eps 1e-5), `up` [H, D] and `down` [D, H], which have no
    bias. Keep them as the parameters weight, bias (whole) and up, down (this rank's shards).
    """

    def __init__(self, weight: Tensor, bias: Tensor, up: Tensor, down: Tensor, group: dist.ProcessGroup):
        super().__init__()
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """[B, S / ranks, D] -> [B, S / ranks, D]: rank r has the r-th part of the tokens of every sequence"""
        return self.scatter(self.mlp(self.gather(self.norm(x))))

    def norm(self, x: Tensor) -> Tensor:
        """The layer norm of this rank's tokens"""
        raise NotImplementedError

    def gather(self, x: Tensor) -> Tensor:
        """[B, S / ranks, D] -> [B, S, D]"""
        raise NotImplementedError

    def mlp(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]: a summand of the output, of this rank's features"""
        raise NotImplementedError

    def scatter(self, summand: Tensor) -> Tensor:
        """[B, S, D] -> [B, S / ranks, D]: the sum over ranks, of this rank's tokens"""
        raise NotImplementedError
