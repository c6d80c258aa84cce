"""What a mixer keeps of the tokens before these, so that text is generated token by token.

A mixer finds the `LayerCache` of its layer in `MixerInputs.cache`; in training there is none. How many numbers it
keeps, its kind says without torch (`BlockKind.cache`).
"""

import torch
from torch import Tensor


class LayerCache:
    """Of one sequence in one layer. Empty before its first tokens, which may be many: the prompt."""

    def __init__(self, length: int):
        """`length`: the tokens at most, prompt and answer."""
        self.length = length
        self.tensors: tuple[Tensor, ...] = ()  # what is kept; a recurrence, which keeps a state, may set it itself
        self.filled = 0  # tokens of tensors that have room for all

    def extend(self, *tensors: Tensor, dim: int = 1, last: int | None = None) -> tuple[Tensor, ...]:
        """Those of the earlier tokens that are kept, followed by these, along `dim`; [B, tokens, ...] each.

        From now on these are also kept: all of them, or with `last` so many of the last tokens.
        """
        if last is not None:
            earlier = self.tensors or tuple(x.narrow(dim, 0, 0) for x in tensors)
            extended = tuple(torch.cat(pair, dim) for pair in zip(earlier, tensors, strict=True))
            count = min(last, extended[0].shape[dim])
            self.tensors = tuple(x.narrow(dim, x.shape[dim] - count, count) for x in extended)
            return extended
        if not self.tensors:
            self.tensors = tuple(x.new_empty(_with(x.shape, dim, self.length)) for x in tensors)
        first, self.filled = self.filled, self.filled + tensors[0].shape[dim]
        for kept, new in zip(self.tensors, tensors, strict=True):
            kept.narrow(dim, first, new.shape[dim]).copy_(new)
        return tuple(kept.narrow(dim, 0, self.filled) for kept in self.tensors)


def _with(shape: torch.Size, dim: int, size: int) -> list[int]:
    return [size if at == dim else own for at, own in enumerate(shape)]
