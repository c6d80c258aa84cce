"""The result of a dry run: each rank's figures next to the planner's, and its memory through the step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fivefold.cost.collective_time import Traffic
from fivefold.cost.matrices import MatrixCost
from fivefold.cost.model_state import state_of
from fivefold.cost.peak_memory import CUDA_CONTEXT_BYTES, FRAGMENTATION, Footprint, footprint_of
from fivefold.cost.routing import Rows, even_rows
from fivefold.cost.step import rank_flops
from fivefold.cost.traffic import display_axis, expected_traffic
from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job
from fivefold.layout.layout import Layout
from fivefold.layout.rank_part import RankCoords
from fivefold.layout.stages import stages_of
from fivefold.planner.plan import workload_of
from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.render.chart import TOP, Plot, legend, sheet
from fivefold.render.scene import COLOURS, GREY, INK, LABEL, MARGIN, SMALL, WIDTH, Curve, Line, Scene
from fivefold.render.scene import TextMark as Words
from fivefold.support.text import bytes_text, plural

if TYPE_CHECKING:
    from fivefold.dry.rank import RankRun


# ---- vs plan --------------------------------------------------------------------------------------------------------
# Compares a dry run's figures with the planner's. The two share no code: where they agree, both are right, or both are
# wrong in the same way.


@dataclass(frozen=True)
class Figure:
    """One quantity, counted and planned."""

    name: str
    dry: float
    plan: float
    unit: str  # "GB", "TFLOP", ""

    @property
    def difference(self) -> float:
        """The relative error of the plan."""
        return self.plan / self.dry - 1 if self.dry else float(self.plan != 0)


@dataclass(frozen=True)
class RankVsPlan:
    """The counts of one rank, and the plan for it."""

    dry: "RankRun"
    predicted: Footprint
    figures: tuple[Figure, ...]
    planned: tuple[Traffic, ...]
    layout: Layout

    @property
    def ranks(self) -> dict[str, int]:
        """The number of ranks of each axis."""
        return {axis: self.layout.size(axis) for axis in self.layout.table}

    @property
    def traffic_agrees(self) -> bool:
        return self.planned == self.dry.traffic

    @property
    def device_bytes(self) -> float:
        """The memory that the device needs: the peak, fragmentation, and the CUDA context."""
        return self.dry.peak * (1 + FRAGMENTATION) + CUDA_CONTEXT_BYTES

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
    """Compares a rank's run with the plan for it; `imbalance` is that of the run."""
    coords, layout, seq, batch = RankCoords.of(job.layout, dry.rank), job.layout, job.data.seq, job.train.batch
    workload = replace(workload_of(job, cluster), imbalance=imbalance)
    predicted = footprint_of(workload, coords.pp)
    state = state_of(job.model, layout, job.train.dtype, job.optimizer, coords, seq=seq)
    rows = _rows(job, coords, imbalance)
    sizes = (job.model, layout, seq, job.train.dtype, job.optimizer)
    matrices = MatrixCost.of(*sizes, coords)
    flops = rank_flops(job.model, layout, seq, batch, at=coords, rows=rows) + matrices.flops
    # Whether the peak is at the end of the first backward pass, where the gradients are allocated.
    late = (
        predicted.missing_grads_at_moment > 0
        and predicted.missing_grads_at_moment - predicted.missing_grads_at_end + predicted.end_of_first_backward
        > predicted.non_state
    )
    working = predicted.end_of_first_backward if late else predicted.non_state
    peak = state.total - (predicted.missing_grads_at_end if late else predicted.missing_grads_at_moment) + working
    figures = (
        Figure("parameters", dry.parameters, state.parameters, "GB"),
        Figure("gradients", dry.gradients, state.gradients, "GB"),
        Figure("optimizer", dry.optimizer, state.optimizer, "GB"),
        Figure("activations at the peak", dry.activations, working, "GB"),
        Figure("peak", dry.peak, peak, "GB"),
        Figure("FLOPs executed", dry.flops, flops, "TFLOP"),
    )
    balances = job.train.balance_loss > 0
    planned = expected_traffic(
        job.model, layout, seq, batch, job.train.dtype, coords=coords, balance_loss=balances, routed_rows=rows,
        optimizer=job.optimizer,
    )  # fmt: skip
    return RankVsPlan(dry, predicted, figures, tuple(planned), layout)


def _rows(job: Job, coords: RankCoords, imbalance: float) -> Rows | None:
    """The rows that experts are sent and receive, by the given imbalance."""
    spec, layout, seq = job.model, job.layout, job.data.seq
    if spec.experts is None:
        return None
    stages = stages_of(spec, layout, seq)
    layers = [layer for number in layout.placement.of_rank[coords.pp] for layer in stages[number].layers]
    tokens = job.train.batch // layout.size("batch") // layout.microbatches * (seq // layout.cp)
    return even_rows(spec, layout, tokens, [n for n in layers if spec.kinds(n).routed], coords, imbalance)


# ---- result ---------------------------------------------------------------------------------------------------------


_MAX_FULL_RANKS = 4  # of more ranks only the first is shown in full
PICTURE_HEIGHT = 640.0
GB = 1e9


@dataclass(frozen=True)
class DryRunResult(Result):
    job: Job
    machines: Cluster
    ranks: Sequence[RankVsPlan]
    advice: str  # if it does not fit: by how much, and a change that fits; else empty
    imbalance: float = 1.0  # the tokens of experts that each of these ranks gets, over the mean of its ep group

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return not self.advice

    def to_dict(self) -> dict[str, Any]:
        job = self.job
        question = {"model": job.model.name, "layout": str(job.layout), "batch": job.train.batch, "seq": job.data.seq}
        if job.model.experts is not None:
            question["imbalance"] = self.imbalance
        return question | {"ranks": [rank.to_dict() for rank in self.ranks], "advice": self.advice or None}

    def scene(self) -> Scene:
        """Memory through the step, from its first action to its new weights: a line for each rank and the device's."""
        device, runs, job = self.machines.groups[0].accelerator, [rank.dry for rank in self.ranks], self.job
        moments = [_computing(run) for run in runs]
        subtitle = f"{job.model.name} as {job.layout}: {job.train.batch} sequences of {job.data.seq:,} tokens"
        scene = sheet(f"Memory of {plural(len(runs), 'rank')} through a training step", subtitle, PICTURE_HEIGHT)
        most = max(device.memory, *(run.peak for run in runs)) / GB
        first = max(moments, key=len)
        ends = (len(first), 1.08 * most)
        plot = Plot(scene, 110, TOP + 10, WIDTH - 110 - MARGIN, PICTURE_HEIGHT - TOP - 170, (0, 0), ends)
        plot.axis_y("GB, at most in each action")
        plot.limit(device.memory / GB, f"{device.name}: {device.memory / GB:.0f} GB", INK)
        _name_moments(plot, first, runs[moments.index(first)].rank if len(runs) > 1 else None)
        entries = []
        for number, (run, run_moments) in enumerate(zip(runs, moments, strict=True)):
            colour = COLOURS[number % len(COLOURS)]
            heights = [plot.y(peak / GB) for _, peak in run_moments]
            steps = ((plot.x(n + end), height) for n, height in enumerate(heights) for end in (0, 1))
            scene.shapes.append(Curve(tuple(steps), colour, 2.2))
            entries.append((f"rank {run.rank}: {run.peak / GB:.1f} GB in {run.peak_moment}", colour))
        scene.height = legend(scene, plot.bottom + 76, entries) + 10
        return scene

    def blocks(self) -> Iterator[Block]:
        job = self.job
        yield Text(
            f"{job.model.name} as {job.layout} in {job.train.dtype}: {job.train.batch} sequences of {job.data.seq:,} "
            f"tokens, {job.layout.world:,} ranks"
        )
        if job.model.experts is not None:
            yield Text(_routing(job, self.imbalance))
        if len(self.ranks) > 1:
            yield _stages(self.ranks)
        for rank in self.ranks[:1] if len(self.ranks) > _MAX_FULL_RANKS else self.ranks:
            yield from _rank(rank)
        if self.advice:
            yield Text(self.advice, "bad")


def _computing(run: "RankRun") -> list[tuple[str, int]]:
    """(name, peak) of each action that computes; messages are left out, but for one that is the rank's peak."""
    return [
        (moment.name, moment.peak)
        for moment in run.moments
        if not moment.name.startswith(("SEND", "RECV")) or moment.name == run.peak_moment
    ]


def _name_moments(plot: Plot, moments: Sequence[tuple[str, int]], rank: int | None) -> None:
    """Draws the x axis: actions in order, some of them with their names; `rank`: whose names, if there are several."""
    stride = max(1, round(len(moments) / 12))
    for number in range(0, len(moments), stride):
        x = plot.x(number + 0.5)
        plot.scene.shapes += [
            Line(x, plot.bottom, x, plot.bottom + 5, GREY),
            Words(x, plot.bottom + 18, moments[number][0], SMALL, "middle", GREY),
        ]
    label = "what is computed, in its order" + ("" if rank is None else f"; the names are those of rank {rank}")
    plot.scene.shapes += [
        Line(plot.left, plot.bottom, plot.left + plot.width, plot.bottom, GREY),
        Words(plot.left + plot.width / 2, plot.bottom + 42, label, LABEL, "middle"),
    ]


def _routing(job: Job, imbalance: float) -> str:
    """A sentence on the routing that was given in place of a router's choice."""
    if job.layout.ep == 1:
        return "routing is stated: every expert gets as many tokens"
    if imbalance == 1:
        return "routing is stated: every rank of ep, and every expert, gets as many tokens (--imbalance 1)"
    return f"routing is stated: the rank that runs gets {imbalance:g} times the mean of its {job.layout.ep} ranks of ep"


def _rank(rank: RankVsPlan) -> Iterator[Block]:
    from fivefold.trainer.outputs import chart

    dry = rank.dry
    place = ", ".join(f"{axis} {position}" for axis, position in dry.place.items())
    yield Text(f"\nrank {dry.rank} ({place}), layers {'+'.join(map(str, dry.layers))}, in {dry.seconds:.1f} s", "bold")
    yield _figures(rank)
    yield Text("")
    yield _traffic(rank)
    agrees = "as the schedule says" if dry.live == dry.allowed else f"and the schedule says {dry.allowed}"
    yield Text(f"\nmicrobatches that wait for their backward pass: {dry.live} at most, {agrees}")
    lines = chart([moment.peak / 1e9 for moment in dry.moments], {}, height=8)
    yield Text("\n".join([f"GB through the step; the peak is in {dry.peak_moment}", *lines]))


def _figures(rank: RankVsPlan) -> Table:
    rows = []
    for figure in rank.figures:
        scale = 1e9 if figure.unit == "GB" else 1e12
        same = "the same" if figure.dry == figure.plan else f"{figure.difference:+.2%}"
        rows.append([figure.name, *(f"{x / scale:,.3f} {figure.unit}" for x in (figure.dry, figure.plan)), same])
    return Table(["", ">dry run", ">planner", ">difference"], rows)


def _traffic(rank: RankVsPlan) -> Table:
    planned = {row[:2]: row for row in rank.planned}
    rows = []
    for row in rank.dry.traffic:
        plan = planned.pop(row[:2], None)
        plan_text = "none" if plan is None else f"{plan.calls} calls, {plan.payload} B"
        sent = (f"{row.calls:,}", bytes_text(row.payload), bytes_text(float(row.wire)))
        rows.append(
            [
                display_axis(rank.layout, row.axis, row.kind),
                f"{rank.ranks.get(row.axis, '')}",
                row.kind,
                *sent,
                "the same" if plan == row else plan_text,
            ]
        )
    for other in planned.values():
        rows.append(
            [
                display_axis(rank.layout, other.axis, other.kind),
                "",
                other.kind,
                "0",
                "",
                "",
                f"{other.calls} calls, {other.payload} B",
            ]
        )
    return Table(["axis", ">ranks", "collective", ">calls", ">payload", ">wire", ">planner"], rows)


def _stages(ranks: Sequence[RankVsPlan]) -> Table:
    rows = []
    for rank in ranks:
        dry = rank.dry
        state = dry.parameters + dry.gradients + dry.optimizer
        sizes = [f"{size / 1e9:.2f} GB" for size in (dry.parameters, state, dry.activations, dry.peak)]
        peak = next(figure for figure in rank.figures if figure.name == "peak")
        place = [str(dry.rank), str(dry.place["pp"]), "+".join(map(str, dry.layers))]
        rows.append([*place, *sizes, dry.peak_moment, f"{peak.difference:+.1%}"])
    heads = [">rank", ">stage", ">layers", ">parameters", ">state", ">activations", ">peak", "~at", ">planner's peak"]
    return Table(heads, rows, title="Stages")
