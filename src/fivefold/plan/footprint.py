"""Peak memory of a rank: state, activations in flight, what the loss and the collectives need, and a margin.

footprint(case).total       # bytes on the fullest pipeline rank
footprint(case).parts       # by component
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from msgspec import structs

from fivefold.layout import Layout
from fivefold.plan.activations import Kept, kept
from fivefold.plan.memory import Accounting, State
from fivefold.plan.stack import Stack
from fivefold.plan.time import Case, schedule_of, stage_parameters
from fivefold.schedule.actions import FORWARD, LAST_READERS, Action
from fivefold.schedule.catalogue import placement
from fivefold.spec import ModelSpec

GiB = 1 << 30
CONTEXT = 1.5e9  # bytes that CUDA, cuBLAS and NCCL take before the first tensor
FRAGMENTATION = 0.04  # of what is allocated: holes between blocks that no request fits
HEADROOM = 0.88  # of the memory that a plan may fill: what no model counts takes the rest
GATHERED = 6.0  # bytes per logit of the parts, the whole made of them, and its gradient, where logits are gathered


@dataclass(frozen=True)
class Footprint:
    rank: int  # the pipeline rank that has the most
    state: State
    activations: Kept  # of all microbatches in flight
    ends: float  # embedding and logits
    buffers: float  # gathered weights, buckets, a block under recompute
    margin: float

    lazy: bool = False  # no gradient exists while the activations do

    @property
    def allocated(self) -> float:
        held = self.activations.total + self.ends + self.buffers
        if self.lazy:
            return self.state.total - self.state.gradients + max(held, self.state.gradients)
        return self.state.total + held

    @property
    def _but_gradients(self) -> float:
        return self.state.total - self.state.gradients + self.activations.total + self.ends + self.buffers

    @property
    def total(self) -> float:
        return self.allocated + self.margin

    @property
    def parts(self) -> dict[str, float]:
        return {
            "parameters": self.state.parameters,
            "gradients": self.allocated - self._but_gradients,
            "optimizer": self.state.optimizer,
            **{f"activations: {kind}": size for kind, size in self.activations._asdict().items() if size},
            "logits and embedding": self.ends,
            "buffers": self.buffers,
            "context and fragmentation": self.margin,
        }


def footprint(case: Case) -> Footprint:
    """Of the pipeline rank that needs the most."""
    ranks = range(case.layout.pp)
    return max((footprint_of(case, rank) for rank in ranks), key=lambda one: one.total)


def footprint_of(case: Case, rank: int) -> Footprint:
    layout, stack, spec = case.layout, case.stack, case.spec
    mine = placement(layout.schedule, layout.pp, layout.chunks).of_rank[rank]
    stages = [case.stages[number] for number in mine]
    count = sum(stage_parameters(spec, stage) for stage in stages) / layout.tp
    held = Accounting(stack.weight_bytes, stack.gradient_bytes, stack.state_bytes)
    shards = layout.dp // layout.replicate * layout.cp
    state = held.state(count, count / shards, layout.zero, shards * layout.replicate)
    block = kept(spec, layout, stack, case.samples, case.seq)
    flying = in_flight(layout.schedule, layout.pp, layout.microbatches, layout.chunks)[rank]
    layers = sum(flying[number] * len(case.stages[number].layers) for number in mine)
    tokens = case.work.tokens
    ends = 0.0
    if any(stage.last for stage in stages) and spec.vocab > 1:
        ends += logits_held(spec, layout, stack) * tokens + 4 * tokens * spec.hidden
    buffers = 0.0
    if layout.recompute != "none":
        whole = kept(spec, structs.replace(layout, recompute="none"), stack, case.samples, case.seq)
        buffers += whole.total - block.total
    one = case.work.block_parameters
    if layout.zero == 3:
        # Two blocks' weights gathered, one block's gradients whole; the ends' too.
        table = spec.vocab * spec.hidden / layout.tp
        buffers += 2 * one * stack.weight_bytes + max(one, table) * (stack.weight_bytes + stack.gradient_bytes)
    buffers += stack.bucket_bytes + case.work.exchange_bytes
    lazy = stack.lazy_gradients and layout.microbatches == 1 and layout.chunks == 1
    found = Footprint(rank, state, block.times(layers), ends, buffers, 0.0, lazy)
    return replace(found, margin=CONTEXT + FRAGMENTATION * found.allocated)


def logits_held(spec: ModelSpec, layout: Layout, stack: Stack) -> float:
    """Bytes per token at the loss's peak."""
    if stack.gathers_logits and layout.tp > 1:
        return (stack.peak_logit_bytes + GATHERED) * spec.vocab
    return stack.peak_logit_bytes * -(-spec.vocab // layout.tp)


@lru_cache(maxsize=512)
def in_flight(schedule: str, p: int, m: int, chunks: int) -> list[dict[int, int]]:
    """By pipeline rank and stage: microbatches whose activations are held when the rank holds the most in all."""
    found: list[dict[int, int]] = []
    for order in _orders(schedule, p, m, chunks):
        live: dict[int, int] = {}
        best: dict[int, int] = {}
        for action in order:
            if action.kind is FORWARD:
                live[action.stage] = live.get(action.stage, 0) + 1
                if sum(live.values()) > sum(best.values()):
                    best = dict(live)
            elif action.kind in LAST_READERS:
                live[action.stage] -= 1
        found.append({stage: best.get(stage, 0) for stage in placement(schedule, p, chunks).of_rank[len(found)]})
    return found


def _orders(schedule: str, p: int, m: int, chunks: int) -> list[tuple[Action, ...]]:
    built = schedule_of(schedule, p, m, chunks)
    return [built.compute(rank) for rank in range(p)]
