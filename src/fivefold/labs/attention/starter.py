"""Tensor-parallel attention. The statement is in README.md; check with `fivefold lab check .`"""

import torch.distributed as dist
from torch import Tensor, nn


class TensorParallelAttention(nn.Module):
    """Causal self-attention without biases, of which each rank of `group` has some of the heads.

    The weights are whole, and the same on every rank: `q` [heads * d, D], `k` and `v` [kv_heads * d, D] and `o`
    [D, heads * d]. Keep this rank's shards, as the parameters q, k, v and o. Rank r has the r-th of equal parts of
    neighbouring heads; where there are fewer kv heads than ranks, those that its query heads use. Query head h uses
    kv head h // (heads // kv_heads), and scores are scaled by d ** -0.5.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, heads: int, kv_heads: int, group: dist.ProcessGroup):
        super().__init__()
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D], whole on every rank -> [B, S, D], whole on every rank"""
        return self.project(self.attend(x))

    def attend(self, x: Tensor) -> Tensor:
        """What this rank's heads give, side by side: [B, S, heads of this rank * d]"""
        raise NotImplementedError

    def project(self, mixed: Tensor) -> Tensor:
        """The layer's output, of what the heads give: [B, S, D]"""
        raise NotImplementedError
