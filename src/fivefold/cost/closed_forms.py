"""Closed forms of what a step takes besides its passes: ZeRO's collectives, the optimizer, a pipeline's fill.

Each is written once, for the numbers of one layout (step.py, block.py) and for arrays with one element per layout, by
which the search prunes (planner/closed_forms.py).
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

Number = Any  # a float, or an array with one element per layout; integers and conditions likewise
OPTIMIZER_KERNELS = 10  # launched by an optimizer's step, about


def where(condition: Number, yes: Number, no: Number) -> Number:
    """np.where for arrays, and a plain choice for numbers; `minimum` and `maximum` likewise."""
    return np.where(condition, yes, no) if isinstance(condition, np.ndarray) else yes if condition else no


def minimum(first: Number, second: Number) -> Number:
    arrays = isinstance(first, np.ndarray) or isinstance(second, np.ndarray)
    return np.minimum(first, second) if arrays else min(first, second)


def maximum(first: Number, second: Number) -> Number:
    arrays = isinstance(first, np.ndarray) or isinstance(second, np.ndarray)
    return np.maximum(first, second) if arrays else max(first, second)


def exposed_seconds(seconds: Number, behind: Number, overlap_fraction: float) -> Number:
    """Exposed seconds of a collective if `overlap_fraction` of it can hide behind `behind` seconds of compute."""
    return seconds - overlap_fraction * minimum(seconds, behind)


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

    def states(self, params: ParamShare, zero: Number) -> dict[str, State]:
        """Model state in bytes, by the axis that ZeRO shards it over: dense parameters, and experts."""
        dense_ranks, expert_ranks = (self.links.reaches[axis].ranks for axis in ("fsdp", "efsdp"))
        # FSDP2 keeps masters only, even for parameters with no replica.
        sharing = dense_ranks if self.spec.experts is None else maximum(dense_ranks, expert_ranks)
        accounting = self.software.accounting
        return {
            "fsdp": accounting.state(params.dense, params.dense / dense_ranks, zero, sharing),
            "efsdp": accounting.state(params.experts, params.experts / expert_ranks, zero, sharing),
        }

    def exposed_zero3_in_block(
        self, params: ParamShare, forward: Number, backward: Number, *, full_recompute: Number
    ) -> tuple[Number, Number]:
        """Exposed seconds of stage 3 in a block's forward and backward: weights are all-gathered in both, gradients
        are reduced in backward. They hide behind `forward` and `backward` seconds of compute."""
        software, links, parts = self.software, self.links, self.software.unit_parts
        reduction: Kind = "all-reduce" if software.reduces_whole else "reduce-scatter"
        gather = reduce = 0.0
        for axis, _, count in _zero_units(params):
            gather = gather + links.time("all-gather", axis, count * software.weight_bytes / parts, parts)
            reduce = reduce + links.time(reduction, axis, count * software.gradient_bytes / parts, parts)
        if software.copies_parts:
            gather = gather + parts * links.reaches["fsdp"].ranks * links.device.achieved.launch
        recompute_gather = where(full_recompute, gather, 0.0) if software.gathers_again else 0.0
        overlap_fraction = software.hides("zero")
        return (
            exposed_seconds(gather, forward, overlap_fraction),
            exposed_seconds(recompute_gather + gather + reduce, backward, overlap_fraction),
        )

    def exposed_zero3_outside_blocks(
        self, params: ParamShare, tp: Number, microbatches: Number, forward: Number
    ) -> Number:
        """Exposed seconds of a step with stage 3 outside its blocks: embedding and head in each microbatch, behind the
        last stage's `forward`, and with HSDP one all-reduce of all gradient shards between the replicas."""
        software, links = self.software, self.links
        tables = 2 * self.spec.vocab * self.spec.hidden / tp  # of embedding and head
        gathers = links.time("all-gather", "fsdp", 2 * tables * software.weight_bytes)  # in forward and in backward
        reduce = links.time("reduce-scatter", "fsdp", tables * software.gradient_bytes)
        exposed = microbatches * exposed_seconds(gathers + reduce, forward, software.hides("zero"))
        return exposed + links.time("all-reduce", "replicate", self._owned(params) * software.gradient_bytes)

    def exposed_sync(
        self, params: ParamShare, zero: Number, microbatches: Number, forward: Number, backward: Number
    ) -> Number:
        """Exposed seconds of a step with stages 0 to 2: gradients behind the last `backward` pass (stage 2: behind all
        `microbatches`), weights behind the next `forward`."""
        software, links = self.software, self.links
        reductions = where(zero == 2, microbatches, 1)
        gather = reduce = 0.0
        for axis, replica_axis, count in _zero_units(params):
            gradient_bytes, shards = count * software.gradient_bytes, links.reaches[axis].ranks
            calls = shards if software.broadcasts else 1
            gather_weights = links.time("all-gather", axis, count * software.weight_bytes / calls, calls)
            reduce_sharded = links.time("reduce-scatter", axis, gradient_bytes)
            # With replicas of the shards, reduced shards are all-reduced across them.
            reduce_sharded = reduce_sharded + links.time("all-reduce", "replicate", gradient_bytes / shards)
            reduce_whole = links.time("all-reduce", replica_axis, gradient_bytes)
            gather = gather + where(zero > 0, gather_weights, 0.0)
            reduce = reduce + where(zero > 0, reduce_sharded, reduce_whole)
        exposed = exposed_seconds(reductions * reduce, reductions * backward, software.hides("dp"))
        return exposed + exposed_seconds(gather, forward, software.hides_weights)

    def optimizer(self, params: ParamShare, zero: Number) -> Number:
        """Seconds of the optimizer's step."""
        software, device = self.software, self.links.device
        owned = where(zero > 0, self._owned(params), params.total)
        launching = OPTIMIZER_KERNELS * device.achieved.launch
        if software.computes_itself and device.achieved.update:
            return device.achieved.update * owned + launching
        moved = (2 * software.state_bytes + software.gradient_bytes + software.step_bytes) * owned
        # A rank with all gradients zeroes them, and computes their norm, before they are sharded.
        moved = moved + where(zero < 2, 2 * software.gradient_bytes * (params.total - owned), 0.0)
        return moved / device.bandwidth + launching

    def updated_bytes(self, params: ParamShare, zero: Number) -> Number:
        """Bytes that an update cannot avoid to move: masters and states read and written, gradients read."""
        accounting = self.software.accounting
        return (2 * accounting.saved + accounting.gradient) * where(zero > 0, self._owned(params), params.total)

    def _owned(self, params: ParamShare) -> Number:
        """Parameters that this rank updates under ZeRO."""
        reaches = self.links.reaches
        return params.dense / reaches["fsdp"].ranks + params.experts / reaches["efsdp"].ranks


def _zero_units(params: ParamShare) -> Iterator[tuple[str, str, Number]]:
    """Dense parameters and those of experts, where there are any: the axis that ZeRO shards them over, that of all
    their replicas, and their number."""
    units = (("fsdp", "dp_cp", params.dense), ("efsdp", "expert_dp", params.experts))
    for axis, replica_axis, count in units:
        if np.any(count):
            yield axis, replica_axis, count


# ---- pipeline -------------------------------------------------------------------------------------------------------


class PipelineForm(NamedTuple):
    """A pipeline's size, and what its schedule's record (`schedules/info.py`) says of the bubble."""

    p: Number  # pipeline ranks
    m: Number  # microbatches
    chunks: Number  # stages per rank
    fill: Number  # fraction of 1F1B's warm-up and cool-down bubble that the schedule leaves
    waits: Number  # whether with few microbatches the weight gradients fill no bubble
    refills: Number  # whether the pipeline fills again for every microbatch

    def seconds(self, slowest: Number, total: Number, send: Number, overlap_fraction: float) -> Number:
        """Approximate makespan. A microbatch takes `slowest` seconds of the busiest rank and `total` of all ranks; a
        message takes `send`, and `overlap_fraction` of it hides behind compute.

        The busiest rank computes all m microbatches. It idles while the first of them comes to it and the last leaves
        it, each through one chunk of every other rank: (total - slowest) / chunks, of which the schedule leaves `fill`.
        """
        p, m, chunks, fill, waits, refills = self
        passes = m * slowest + (total - slowest) / chunks * where(refills, m, fill)
        # Where weight gradients fill no bubble, the forward and input passes of p + m microbatches follow one another;
        # they are two thirds of a microbatch's compute.
        passes = maximum(passes, waits * (p > 1) * (p + m) * slowest * 2 / 3)
        # Activations go one way and gradients the other, with overlap; those of filling and draining have none.
        overlapped_sends = 2 * (1 - overlap_fraction) * send * m * chunks
        return passes + overlapped_sends + 2 * (p - 1) * send
