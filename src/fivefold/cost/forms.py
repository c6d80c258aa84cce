"""Closed forms of what a step takes besides its passes: ZeRO's collectives, the optimizer, a pipeline's fill.

Each is written once, for the numbers of one layout (step.py, block.py) and for arrays with one element per layout, by
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
OPTIMIZER_KERNELS = 10  # launched by an optimizer's step, about


def where(condition: Any, yes: Number, no: Number) -> Number:
    """np.where for arrays, and a plain choice for numbers; `minimum` and `maximum` likewise."""
    return np.where(condition, yes, no) if isinstance(condition, np.ndarray) else yes if condition else no


def minimum(first: Number, second: Number) -> Number:
    arrays = isinstance(first, np.ndarray) or isinstance(second, np.ndarray)
    return np.minimum(first, second) if arrays else min(first, second)


def maximum(first: Number, second: Number) -> Number:
    arrays = isinstance(first, np.ndarray) or isinstance(second, np.ndarray)
    return np.maximum(first, second) if arrays else max(first, second)


def exposed_seconds(seconds: Number, behind: Number, share: float) -> Number:
    """Exposed seconds of a collective, a `share` of which can run behind compute that takes `behind` seconds."""
    return seconds - share * minimum(seconds, behind)


# ---- ZeRO -----------------------------------------------------------------------------------------------------------


class Links(Protocol):
    """The links between the ranks of one layout (`Topology`), or of many."""

    @property
    def device(self) -> Device: ...

    @property
    def reaches(self) -> Mapping[str, Reach]: ...

    def time(self, kind: Kind, axis: str, payload: Number, calls: Number = 1) -> Number: ...


@dataclass(frozen=True)
class ZeroCost:
    """What ZeRO costs for a rank's parameters. `zero` is its stage throughout."""

    spec: ModelSpec
    software: SoftwareProfile
    links: Links

    def states(self, count: ParamShare, zero: Any) -> dict[str, State]:
        """Model state in bytes, by the axis that ZeRO shards it over: dense parameters, and experts."""
        ranks = {axis: self.links.reaches[axis].ranks for axis in ("fsdp", "efsdp")}
        # FSDP2 keeps masters alone of all parameters, also of those that no other rank has.
        sharing = ranks["fsdp"] if self.spec.experts is None else maximum(*ranks.values())
        each = self.software.accounting
        return {
            axis: each.state(part, part / ranks[axis], zero, sharing) for axis, part in zip(ranks, count, strict=True)
        }

    def in_block(self, own: ParamShare, forward: Number, backward: Number, full: Any) -> tuple[Number, Number]:
        """Seconds that stage 3 adds to a block's forward and backward: weights are all-gathered in both, gradients
        reduce-scattered. `forward` and `backward` are the seconds to hide behind; `full`: recompute is full."""
        software, links, parts = self.software, self.links, self.software.unit_parts
        kind: Kind = "all-reduce" if software.reduces_whole else "reduce-scatter"
        gather = reduce = 0.0
        for axis, _, count in _zero_units(own):
            gather = gather + links.time("all-gather", axis, count * software.weight_bytes / parts, parts)
            reduce = reduce + links.time(kind, axis, count * software.gradient_bytes / parts, parts)
        if software.copies_parts:
            gather = gather + parts * links.reaches["fsdp"].ranks * links.device.reached.launch
        again, share = where(full, gather, 0.0) if software.gathers_again else 0.0, software.hides("zero")
        return exposed_seconds(gather, forward, share), exposed_seconds(again + gather + reduce, backward, share)

    def at_embedding_and_head(self, count: ParamShare, tp: Any, microbatches: Any, forward: Number) -> Number:
        """Exposed seconds of a step with stage 3: of embedding and head, behind the last stage's `forward`, and of
        all-reduces between copies of the shards."""
        software, links = self.software, self.links
        ends = 2 * self.spec.vocab * self.spec.hidden / tp
        gather = links.time("all-gather", "fsdp", 2 * ends * software.weight_bytes)
        scatter = links.time("reduce-scatter", "fsdp", ends * software.gradient_bytes)
        exposed = microbatches * exposed_seconds(gather + scatter, forward, software.hides("zero"))
        return exposed + links.time("all-reduce", "replicate", self._owned(count) * software.gradient_bytes)

    def exposed_sync(
        self, count: ParamShare, zero: Any, microbatches: Any, forward: Number, backward: Number
    ) -> Number:
        """Exposed seconds of a step with stages 0 to 2: gradients behind the last `backward` pass (stage 2: behind all
        `microbatches`), weights behind the next `forward`."""
        software, links = self.software, self.links
        reductions = where(zero == 2, microbatches, 1)
        gather = reduce = 0.0
        for axis, replicas, part in _zero_units(count):
            gradients, shards = part * software.gradient_bytes, links.reaches[axis].ranks
            calls = shards if software.broadcasts else 1
            fetch = links.time("all-gather", axis, part * software.weight_bytes / calls, calls)
            # Where the shards have copies, as groups of ZeRO 1 do, sums of shards go round these.
            scatter = links.time("reduce-scatter", axis, gradients)
            scatter = scatter + links.time("all-reduce", "replicate", gradients / shards)
            gather = gather + where(zero > 0, fetch, 0.0)
            reduce = reduce + where(zero > 0, scatter, links.time("all-reduce", replicas, gradients))
        exposed = exposed_seconds(reductions * reduce, reductions * backward, software.hides("dp"))
        return exposed + exposed_seconds(gather, forward, software.hides_weights)

    def optimizer(self, count: ParamShare, zero: Any) -> Number:
        """Seconds of the optimizer's step."""
        software, device = self.software, self.links.device
        owned = where(zero > 0, self._owned(count), count.total)
        launching = OPTIMIZER_KERNELS * device.reached.launch
        if software.computes_itself and device.reached.update:
            return device.reached.update * owned + launching
        moved = (2 * software.state_bytes + software.gradient_bytes + software.step_bytes) * owned
        # A rank with all gradients zeroes them, and computes their norm, before they are sharded.
        moved = moved + where(zero < 2, 2 * software.gradient_bytes * (count.total - owned), 0.0)
        return moved / device.bandwidth + launching

    def updated_bytes(self, count: ParamShare, zero: Any) -> Number:
        """Bytes that the update alone reads and writes at least: masters and states twice, gradients once."""
        each = self.software.accounting
        return (2 * each.saved + each.gradient) * where(zero > 0, self._owned(count), count.total)

    def _owned(self, count: ParamShare) -> Number:
        """Parameters that are updated here."""
        return count.dense / self.links.reaches["fsdp"].ranks + count.experts / self.links.reaches["efsdp"].ranks


def _zero_units(count: ParamShare) -> Iterator[tuple[str, str, Number]]:
    """Parameters, with the axis that ZeRO shards them over and that of all their replicas; none of a kind sends
    nothing."""
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
        passes = maximum(passes, waits * (p > 1) * (p + m) * slowest * 2 / 3)
        return passes + 2 * (1 - hides) * send * m * chunks + 2 * (p - 1) * send
