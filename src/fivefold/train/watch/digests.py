"""Digests of tensors: a number that changes with the bits, computed where they lie.

A tensor is read as words w of 32 bits (16 of 2-byte numbers), and its digest is the sum of (2i + 1) * w[i] modulo 2^64.
The sum has no order, so that all devices agree on it. Every single flipped bit changes it: 2^b * (2i + 1) is not 0
modulo 2^64. So does every pair of flipped bits in a tensor of up to 2^30 words: 2^a * (2i + 1) = 2^b * (2j + 1) asks
for a = b and i = j. Of three flips or more, those are missed whose terms happen to cancel.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by bytes of a number
_AT_A_TIME = {"cpu": 1 << 20, "cuda": 1 << 22}  # words; each takes 8 bytes more while it is multiplied


@cache
def _odd(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, 2 * count, 2, dtype=torch.int64, device=device)


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Of a tensor's bits, in their order; one int64 on its device."""
    words = tensor.detach().reshape(-1).view(_WORDS[tensor.element_size()])
    size = _AT_A_TIME.get(tensor.device.type, 1 << 20)
    odd, total = _odd(size, tensor.device), torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first in range(0, words.numel(), size):
        part = words[first : first + size]
        total += (part * odd[: part.numel()]).sum()
        if first:
            total += part.sum() * (2 * first)
    return total


def digests(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """One of each, in a row."""
    return (
        torch.stack([digest(one) for one in tensors]) if tensors else torch.zeros(0, dtype=torch.int64, device=device)
    )
