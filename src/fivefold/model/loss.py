"""Next-token loss as (sum, count): nothing divides but the count of the whole global batch."""

from torch import Tensor
from torch.nn import functional as F

from fivefold.model.dtypes import wide

_IGNORED = -100


def loss_sum(logits: Tensor, targets: Tensor, mask: Tensor, smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    """Sum of the cross-entropies where `mask` is True, in at least float32. logits [B, S, V], the others [B, S].

    `head.Targets` says what `smoothing` and `z_loss` do.
    """
    widened = logits.to(wide(logits.dtype))
    ignored = targets.masked_fill(~mask, _IGNORED).flatten()
    total = F.cross_entropy(
        widened.flatten(0, 1), ignored, ignore_index=_IGNORED, reduction="sum", label_smoothing=smoothing
    )
    if z_loss:
        total = total + z_loss * widened.logsumexp(-1).square().masked_fill(~mask, 0.0).sum()
    return total
