"""ZeRO 1 and 3. The statement is in README.md; check with `fivefold lab check .`

Rank r has the r-th of `torch.tensor_split(flat, ranks)`: shards whose sizes may differ by one.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ZeroOneSGD:
    """SGD with momentum, whose state is divided over the ranks.

    `parameters` are whole on every rank, and their gradients are of this rank's samples. All of them, one after the
    other and flat, are divided in shards; a rank updates its own by `self.optimizer`, a `torch.optim.SGD`.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float, group: dist.ProcessGroup):
        self.optimizer: torch.optim.SGD
        raise NotImplementedError

    def step(self) -> None:
        """Afterwards all ranks have the same weights: those that the mean of their gradients gives."""
        raise NotImplementedError


class ShardedLinear(nn.Module):
    """y = x @ weight.T, whose weight is divided over the ranks: this rank's shard is the parameter `weight`, flat.

    Every rank has other samples. The whole weight is there while it is multiplied with, forward and backward, and not
    in between. The gradient of the shard is the mean over ranks.
    """

    def __init__(self, weight: Tensor, group: dist.ProcessGroup):
        """`weight` [out, in] is whole, and the same on every rank."""
        super().__init__()
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """[samples of this rank, in] -> [samples of this rank, out]"""
        raise NotImplementedError
