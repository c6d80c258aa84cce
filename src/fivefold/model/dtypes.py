"""Which dtype sums are kept in."""

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of masters, of sums of gradients, losses and attention, for a model that computes in `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32
