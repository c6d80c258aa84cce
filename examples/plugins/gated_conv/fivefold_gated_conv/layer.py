"""The gated short convolution, written in ops: tensor parallelism gives each rank its channels.

Shapes: B batch, S sequence, E hidden, C channels of this rank, T taps.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.model.layers import Linear
from fivefold.model.ops import LocalOps, MixerInputs
from fivefold.spec.model import ModelSpec
from fivefold_gated_conv import GatedConv


class Filter(nn.Module):
    def __init__(self, width: int, taps: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, taps))


class GatedConvLayer(nn.Module):
    def __init__(self, kind: GatedConv, spec: ModelSpec, ops: LocalOps):
        super().__init__()
        self.ops, self.taps = ops, kind.taps
        self.b, self.c, self.x = (Linear(spec.hidden, spec.hidden, bias=False) for _ in range(3))
        self.filter = Filter(spec.hidden, kind.taps)
        self.out = Linear(spec.hidden, spec.hidden, bias=False)

    def forward(self, x: Tensor, shared: MixerInputs) -> Tensor:
        """[B, S, E] -> [B, S, E]"""
        b, c, values = self.ops.column_parallel(x, self.b, self.c, self.x)  # [B, S, C] each
        weight, gated, documents = self.ops.weight(self.filter), b * values, shared.positions.documents
        if shared.cache is not None:  # text is generated: earlier tokens come first, and their outputs are left out
            (gated,) = shared.cache.extend(gated, last=self.taps - 1)
        y = gated * weight[:, 0]
        for tap in range(1, min(self.taps, gated.shape[1])):
            earlier = gated[:, :-tap]
            if documents is not None:
                earlier = earlier * (documents[:, tap:] == documents[:, :-tap])[..., None]
            y = y + F.pad(earlier, (0, 0, tap, 0)) * weight[:, tap]
        if shared.cache is not None:
            y = y[:, -c.shape[1] :]
        return self.ops.row_parallel(c * y, self.out)
