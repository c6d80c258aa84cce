"""A dry run's figures beside the planner's. Neither knows the other: where they agree, both are right, or both
are wrong in the same way."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job
from fivefold.layout.collective_cost import Traffic
from fivefold.layout.layout import Layout
from fivefold.layout.stages import stages_of
from fivefold.plan.cost.dispatch import Rows, even_rows
from fivefold.plan.cost.executed import rank_flops
from fivefold.plan.cost.footprint import CONTEXT, FRAGMENTATION, Footprint, footprint_of
from fivefold.plan.cost.memory import state_of
from fivefold.plan.cost.traffic import Seat, expected
from fivefold.plan.plan import case_of

if TYPE_CHECKING:
    from fivefold.dryrun.run import RankRun


@dataclass(frozen=True)
class Figure:
    """One quantity, counted and planned."""

    name: str
    dry: float
    plan: float
    unit: str  # "GB", "TFLOP", ""

    @property
    def difference(self) -> float:
        """Relative."""
        return self.plan / self.dry - 1 if self.dry else float(self.plan != 0)


@dataclass(frozen=True)
class RankVsPlan:
    """One rank: what was counted, and what was planned for it."""

    dry: "RankRun"
    room: Footprint
    figures: tuple[Figure, ...]
    planned: tuple[Traffic, ...]
    layout: Layout

    @property
    def ranks(self) -> dict[str, int]:
        """Of each axis."""
        return {axis: self.layout.size(axis) for axis in self.layout.table}

    @property
    def traffic_agrees(self) -> bool:
        return self.planned == self.dry.traffic

    @property
    def device_bytes(self) -> float:
        """What the device must have: the peak, fragmentation, and the context."""
        return self.dry.peak * (1 + FRAGMENTATION) + CONTEXT

    def to_dict(self) -> dict[str, Any]:
        dry = self.dry
        figures = [{"name": f.name, "dry": f.dry, "plan": f.plan, "difference": f.difference} for f in self.figures]
        return {
            "rank": dry.rank,
            "place": dry.place,
            "layers": list(dry.layers),
            "seconds": dry.seconds,
            "peak_bytes": dry.peak,
            "peak_moment": dry.peak_moment,
            "device_bytes": self.device_bytes,
            "figures": figures,
            "live": dry.live,
            "live_allowed": dry.allowed,
            "traffic": [row.to_dict() | {"ranks": self.ranks.get(row.axis)} for row in dry.traffic],
            "planned_traffic": [row.to_dict() for row in self.planned],
            "traffic_agrees": self.traffic_agrees,
            "moments": [moment._asdict() | {"activations": moment.activations} for moment in dry.moments],
        }


def vs_plan(job: Job, dry: "RankRun", cluster: Cluster, imbalance: float = 1.0) -> RankVsPlan:
    """What the planner says of the rank that was run, which got `imbalance` times the mean of the tokens."""
    seat, layout, seq, batch = Seat.of(job.layout, dry.rank), job.layout, job.data.seq, job.train.batch
    case = replace(case_of(job, cluster), imbalance=imbalance)
    room = footprint_of(case, seat.pp)
    state = state_of(job.model, layout, job.train.dtype, job.optimizer, **seat._asdict(), seq=seq)
    rows = _rows(job, seat, imbalance)
    flops = rank_flops(job.model, layout, seq, batch, pp=seat.pp, tp=seat.tp, rows=rows)
    late = room.late > 0 and room.late - room.unmade + room.after > room.working  # the peak is where all gradients are
    working = room.after if late else room.working
    peak = state.total - (room.unmade if late else room.late) + working
    figures = (
        Figure("parameters", dry.parameters, state.parameters, "GB"),
        Figure("gradients", dry.gradients, state.gradients, "GB"),
        Figure("optimizer", dry.optimizer, state.optimizer, "GB"),
        Figure("activations at the peak", dry.activations, working, "GB"),
        Figure("peak", dry.peak, peak, "GB"),
        Figure("FLOPs executed", dry.flops, flops, "TFLOP"),
    )
    balances = job.train.balance_loss > 0
    planned = expected(job.model, layout, seq, batch, job.train.dtype, seat=seat, balance_loss=balances, rows=rows)
    return RankVsPlan(dry, room, figures, tuple(planned), layout)


def _rows(job: Job, seat: Seat, imbalance: float) -> Rows | None:
    """What experts are sent and get, as it was stated."""
    spec, layout, seq = job.model, job.layout, job.data.seq
    if spec.experts is None:
        return None
    stages = stages_of(spec, layout, seq)
    layers = [layer for number in layout.placement.of_rank[seat.pp] for layer in stages[number].layers]
    tokens = job.train.batch // layout.size("batch") // layout.microbatches * (seq // layout.cp)
    return even_rows(spec, layout, tokens, [n for n in layers if not spec.dense(n)], seat.tp, imbalance)
