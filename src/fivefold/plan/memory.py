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

from fivefold.buckets import held
from fivefold.layout import Layout
from fivefold.schedule.catalogue import placement
from fivefold.spec import ModelSpec
from fivefold.stages import stages_of

BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


def wide_bytes(dtype: str) -> int:
    """Of masters and sums: float32, or float64 in float64 runs."""
    return max(BYTES["float32"], BYTES[dtype])


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
    """What a rank holds at most: uneven shards are largest on the first of their axis."""
    compute, full = BYTES[dtype], wide_bytes(dtype)
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
    """Parameters of the first of tp x `ranks` ranks, of the pipeline rank that has the most."""
    parts = held(spec, layout)
    stages = stages_of(spec, layout, spec.context)
    owners = placement(layout.schedule, layout.pp, layout.chunks)
    names = [{name for stage in mine for name in stages[stage].names(spec)} for mine in owners.of_rank]
    return max(sum(parts[name].share_size(ranks) for name in held_here) for held_here in names)
