"""A dense feed-forward network, gated or plain as its activation says."""

from torch import Tensor, nn

from fivefold.model.layers import ACTIVATIONS, Linear, gated
from fivefold.model.ops import LocalOps
from fivefold.spec.kinds import BlockKind
from fivefold.spec.model import ModelSpec


class FeedForward(nn.Module):
    def __init__(self, spec: ModelSpec, ops: LocalOps, width: int):
        super().__init__()
        self.ops = ops
        self.gate = Linear(spec.hidden, width, bias=spec.bias) if gated(spec.activation) else None
        self.up = Linear(spec.hidden, width, bias=spec.bias)
        self.down = Linear(width, spec.hidden, bias=spec.bias)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.ops.row_parallel(self.activation(*self.ops.column_parallel(x, self.up)), self.down)
        return self.ops.row_parallel(self.activation(*self.ops.column_parallel(x, self.gate, self.up)), self.down)


class DenseMLP(FeedForward):
    """That of a layer without experts."""

    def __init__(self, kind: BlockKind, spec: ModelSpec, ops: LocalOps):
        super().__init__(spec, ops, spec.ffn)
