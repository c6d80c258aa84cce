"""Closed forms of what a step takes beside its passes: ZeRO's collectives, the optimizer, a pipeline's fill.

They are written once, for the numbers of one layout (step.py, block.py) and for arrays with an element a layout, by
which the search prunes (planner/closed.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from fivefold.cost.collective_time import Kind, Reach
from fivefold.cost.kernels import Device
from fivefold.cost.model_state import State
from fivefold.cost.moe import ParamShare
from fivefold.cost.software import SoftwareProfile
from fivefold.spec.model import ModelSpec

Number = Any  # a float, or an array of floats
UPDATES = 10  # kernels of an optimizer's step, about


def where(condition: Any, yes: Number, no: Number) -> Number:
    """As numpy has it, and of numbers a number; `least` and `most` likewise."""
    return np.where(condition, yes, no) if isinstance(condition, np.ndarray) else yes if condition else no


def least(first: Number, second: Number) -> Number:
    arrays = isinstance(first, np.ndarray) or isinstance(second, np.ndarray)
    return np.minimum(first, second) if arrays else min(first, second)


def most(first: Number, second: Number) -> Number:
    arrays = isinstance(first, np.ndarray) or isinstance(second, np.ndarray)
    return np.maximum(first, second) if arrays else max(first, second)


def hidden(seconds: Number, behind: Number, share: float) -> Number:
    """The exposed seconds of a collective, of which a `share` can run behind compute that takes `behind` seconds."""
    return seconds - share * least(seconds, behind)


# ---- ZeRO -----------------------------------------------------------------------------------------------------------


class Links(Protocol):
    """Between the ranks of a layout (`Topology`), or of many."""

    @property
    def device(self) -> Device: ...

    @property
    def reaches(self) -> Mapping[str, Reach]: ...

    def time(self, kind: Kind, axis: str, payload: Number, calls: Number = 1) -> Number: ...


@dataclass(frozen=True)
class ZeroCost:
    """What ZeRO makes of a rank's parameters. `zero` is its stage throughout."""

    spec: ModelSpec
    software: SoftwareProfile
    links: Links

    def states(self, count: ParamShare, zero: Any) -> dict[str, State]:
        """Bytes between steps, by the axis that ZeRO divides them over: what tp divides, and experts."""
        ranks = {axis: self.links.reaches[axis].ranks for axis in ("fsdp", "efsdp")}
        # FSDP2 keeps masters alone of all parameters, also of those that no other rank has.
        sharing = ranks["fsdp"] if self.spec.experts is None else most(*ranks.values())
        each = self.software.accounting
        return {
            axis: each.state(part, part / ranks[axis], zero, sharing) for axis, part in zip(ranks, count, strict=True)
        }

    def in_block(self, own: ParamShare, forward: Number, backward: Number, full: Any) -> tuple[Number, Number]:
        """Seconds that stage 3 adds to the passes of a block of a microbatch: weights are gathered in both, gradients
        are scattered. `forward` and `backward` are the seconds to hide behind; `full`: recompute is."""
        software, links, parts = self.software, self.links, self.software.unit_parts
        kind: Kind = "all-reduce" if software.reduces_whole else "reduce-scatter"
        gather = reduce = 0.0
        for axis, _, count in _parts(own):
            gather = gather + links.time("all-gather", axis, count * software.weight_bytes / parts, parts)
            reduce = reduce + links.time(kind, axis, count * software.gradient_bytes / parts, parts)
        if software.copies_parts:
            gather = gather + parts * links.reaches["fsdp"].ranks * links.device.reached.launch
        again, share = where(full, gather, 0.0) if software.gathers_again else 0.0, software.hides("zero")
        return hidden(gather, forward, share), hidden(again + gather + reduce, backward, share)

    def at_ends(self, count: ParamShare, tp: Any, microbatches: Any, forward: Number) -> Number:
        """Exposed seconds of a step with stage 3: of embedding and head, behind the last stage's `forward`; and of
        copies of the shards."""
        software, links = self.software, self.links
        ends = 2 * self.spec.vocab * self.spec.hidden / tp
        gather = links.time("all-gather", "fsdp", 2 * ends * software.weight_bytes)
        scatter = links.time("reduce-scatter", "fsdp", ends * software.gradient_bytes)
        exposed = microbatches * hidden(gather + scatter, forward, software.hides("zero"))
        return exposed + links.time("all-reduce", "replicate", self._owned(count) * software.gradient_bytes)

    def after(self, count: ParamShare, zero: Any, rounds: Any, forward: Number, backward: Number) -> Number:
        """Exposed seconds of a step with stages 0 to 2: gradients behind the last `backward` pass (stage 2: behind all
        `rounds` of them), weights behind the next `forward`."""
        software, links = self.software, self.links
        rounds = where(zero == 2, rounds, 1)
        gather = reduce = 0.0
        for axis, replicas, part in _parts(count):
            gradients, shards = part * software.gradient_bytes, links.reaches[axis].ranks
            calls = shards if software.broadcasts else 1
            fetch = links.time("all-gather", axis, part * software.weight_bytes / calls, calls)
            # Where the shards have copies, as groups of ZeRO 1 do, sums of shards go round these.
            scatter = links.time("reduce-scatter", axis, gradients)
            scatter = scatter + links.time("all-reduce", "replicate", gradients / shards)
            gather = gather + where(zero > 0, fetch, 0.0)
            reduce = reduce + where(zero > 0, scatter, links.time("all-reduce", replicas, gradients))
        exposed = hidden(rounds * reduce, rounds * backward, software.hides("dp"))
        return exposed + hidden(gather, forward, software.hides_weights)

    def optimizer(self, count: ParamShare, zero: Any) -> Number:
        """Seconds of its step."""
        software, device = self.software, self.links.device
        owned = where(zero > 0, self._owned(count), count.total)
        launching = UPDATES * device.reached.launch
        if software.computes_itself and device.reached.update:
            return device.reached.update * owned + launching
        moved = (2 * software.state_bytes + software.gradient_bytes + software.step_bytes) * owned
        # Where a rank has all gradients, they are zeroed and normed before they are sharded.
        moved = moved + where(zero < 2, 2 * software.gradient_bytes * (count.total - owned), 0.0)
        return moved / device.bandwidth + launching

    def _owned(self, count: ParamShare) -> Number:
        """Parameters that are updated here."""
        return count.dense / self.links.reaches["fsdp"].ranks + count.experts / self.links.reaches["efsdp"].ranks


def _parts(count: ParamShare) -> Iterator[tuple[str, str, Number]]:
    """Parameters by the axis that ZeRO shards them over, and that of all ranks that have them; what there is none of
    sends nothing."""
    for axis, replicas, part in (("fsdp", "dp_cp", count.dense), ("efsdp", "expert_dp", count.experts)):
        if np.any(part):
            yield axis, replicas, part


# ---- pipeline -------------------------------------------------------------------------------------------------------


class PipelineForm(NamedTuple):
    """A schedule's numbers, and what its record says of its bubble."""

    p: Any
    m: Any
    chunks: Any
    fill: Number
    waits: Any
    refills: Any

    def seconds(self, slowest: Number, total: Number, send: Number, hides: float) -> Number:
        """A makespan, nearly: all microbatches on the busiest rank, and the others' first and last. A microbatch takes
        `slowest` seconds of that rank and `total` of all; a message takes `send`, of which compute `hides` a share."""
        p, m, chunks, fill, waits, refills = self
        passes = m * slowest + (total - slowest) / chunks * where(refills, m, fill)
        # Forward and input passes are two thirds of a microbatch's compute.
        passes = most(passes, waits * (p > 1) * (p + m) * slowest * 2 / 3)
        return passes + 2 * (1 - hides) * send * m * chunks + 2 * (p - 1) * send
