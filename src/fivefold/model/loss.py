"""Next-token loss as (sum, count): nothing divides but the count of the whole global batch."""

import torch
from torch import Tensor
from torch.nn import functional as F

_IGNORED = -100


def loss_sum(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Sum of the cross-entropies where `mask` is True, in at least float32. logits [B, S, V], the others [B, S]."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(
        wide.flatten(0, 1), targets.masked_fill(~mask, _IGNORED).flatten(), ignore_index=_IGNORED, reduction="sum"
    )
