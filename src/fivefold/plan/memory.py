"""Bytes that a rank holds between steps: parameters, gradients, optimizer state, by ZeRO stage.

With N ranks to shard over (dp x cp, or dp/replicate x cp), P parameters per tp rank, in bytes per parameter:

  stage   parameters   gradients   optimizer state
  0       c            a           s
  1       c            a           s/N
  2       c            a/N         s/N
  3       a/N          a/N         2a/N     (FSDP2 keeps the full-precision weights themselves in shards)

c is the compute dtype's size, a the accumulation dtype's (4, or 8 in float64), s is 2a for AdamW's two moments and a
more where a full-precision master is kept beside a bfloat16 weight.
"""

from dataclasses import dataclass
from math import prod

from fivefold.layout import Layout
from fivefold.sharding import chunk, over_tp
from fivefold.spec import ModelSpec

BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class State:
    """Bytes of one rank."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def state(spec: ModelSpec, layout: Layout, dtype: str) -> State:
    """What the first rank holds, which holds the most: uneven shards are largest there."""
    compute = BYTES[dtype]
    full = max(4, compute)
    moments = 2 * full
    master = full if compute < full else 0
    ranks = layout.dp // layout.replicate * layout.cp
    whole, share = _held(spec, layout, 1), _held(spec, layout, ranks)
    if layout.zero == 3 and ranks * layout.replicate > 1:
        return State(full * share, full * share, moments * share)
    gradients = share if layout.zero == 2 else whole
    optimizer = share if layout.zero else whole
    return State(compute * whole, full * gradients, (moments + master) * optimizer)


def _held(spec: ModelSpec, layout: Layout, ranks: int) -> int:
    """Parameters of the first of tp x `ranks` ranks: a chunk over tp, and of that a chunk of the rows."""
    table = over_tp(spec, layout)
    total = 0
    for parameter in spec.parameters():
        shape = list(parameter.shape)
        dim = table[parameter.name].dim
        if dim is not None:
            shape[dim] = len(chunk(shape[dim], layout.tp, 0))
        total += prod((len(chunk(shape[0], ranks, 0)), *shape[1:]))
    return total
