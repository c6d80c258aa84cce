"""Parameter: a tensor of the model, and the facts that every room reads from it. Nothing else parses its name."""

import math
from typing import Literal, NamedTuple

Kind = Literal["embedding", "linear", "norm", "bias"]

# How the tp axis divides a parameter. "kv rows": rows of whole kv heads; where ranks outnumber these heads, every rank
# holds all of it and uses one head. "heads": every rank holds all of it and applies it to the rank's own heads only.
# "tokens": the same, and to the rank's own tokens only. "experts": tp does not divide it; ep does, by whole experts.
TensorRule = Literal["rows", "kv rows", "columns", "heads", "tokens", "whole", "experts"]

# A unit is a part of the decoder: a layer by its number, or what lies below or above the layers. In the order of these
# numbers forward needs the units, and in the opposite order backward finishes them.
BOTTOM, TOP = -1, 1 << 30


class Parameter(NamedTuple):
    name: str  # global: the same on every rank of every layout
    shape: tuple[int, ...]  # of a weight [..., rows, columns], of a norm or bias [..., rows]
    kind: Kind
    unit: int  # what must have run forward when this parameter is needed
    tp: TensorRule = "whole"
    tied: bool = False  # both ends of the pipeline hold it
    residual: bool = False  # it writes into the residual stream
    experts: int = 0  # that lie one below the other in its rows; 0: it belongs to no expert
    # Never rounded to a narrower dtype of compute. Such ones are small, no matmul reads them, and their rounding would
    # move all tokens alike, where that of activations averages out.
    exact: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def layer(self) -> int | None:
        """The number of its layer; None below and above the layers."""
        return self.unit if BOTTOM < self.unit < TOP else None

    @property
    def row_dim(self) -> int:
        return len(self.shape) - (2 if self.kind in ("linear", "embedding") else 1)

    @property
    def deferred(self) -> bool:
        """Whether a schedule that splits backward computes its gradient apart."""
        # A router's is small, and comes with its input's. The head's is taken with the loss: one for each microbatch
        # would wait, as large as the head, and nothing would be left to compute.
        return self.kind == "linear" and self.tp != "tokens" and self.layer is not None
