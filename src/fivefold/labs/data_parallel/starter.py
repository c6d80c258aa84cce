"""Data parallelism. The statement is in README.md; check with `fivefold lab check .`"""

import torch.distributed as dist
from torch import Tensor, nn


class DataParallel(nn.Module):
    """A module whose ranks see other samples, and have the same gradients: the mean over ranks.

    Gradients are sent in buckets, from the last parameter to the first, while the backward pass still runs; a bucket is
    sent when it has `bucket_bytes` or more.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, bucket_bytes: int):
        """The module of each rank has other weights: all begin with those of rank 0."""
        super().__init__()
        self.module = module
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    def finish(self) -> None:
        """Called after backward: when it returns, the gradient of every parameter is the mean over ranks."""
        raise NotImplementedError
