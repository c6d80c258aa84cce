"""What a dry run found: each rank's figures beside the planner's, and its memory through the step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.dryrun.vs_plan import RankVsPlan
from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job
from fivefold.report import Block, Result, Table, Text
from fivefold.report.svg import COLOURS, document, line, path, text
from fivefold.support.formatting import bytes_text

_SHOWN = 4  # ranks that are shown in full; of more the first
WIDTH, HEIGHT, LEFT, TOP = 720, 320, 64, 20  # of the picture


@dataclass(frozen=True)
class DryRunResult(Result):
    job: Job
    machines: Cluster
    ranks: Sequence[RankVsPlan]
    advice: str  # where it does not fit: by how much, and what would; else empty
    imbalance: float = 1.0  # of experts, as it was stated: what each of these ranks gets, over the mean of its ep group

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return not self.advice

    def to_dict(self) -> dict[str, Any]:
        job = self.job
        asked = {"model": job.model.name, "layout": str(job.layout), "batch": job.train.batch, "seq": job.data.seq}
        if job.model.experts is not None:
            asked["imbalance"] = self.imbalance
        return asked | {"ranks": [one.to_dict() for one in self.ranks], "advice": self.advice or None}

    def svg(self) -> str:
        """Memory through the step, from its first action to its new weights: a line for each rank and the device's."""
        memory = self.machines.groups[0].accelerator.memory
        top = 1.05 * max(memory, *(one.dry.peak for one in self.ranks)) / 1e9

        def up(size: float) -> float:
            return TOP + HEIGHT * (1 - size / 1e9 / top)

        shapes = [
            line(LEFT, up(memory), LEFT + WIDTH, up(memory), stroke="#c00", stroke_dasharray="6 4"),
            text(LEFT - 6, up(memory) + 4, f"{memory / 1e9:.0f} GB", text_anchor="end"),
            text(LEFT - 6, TOP + HEIGHT, "0", text_anchor="end"),
        ]
        for at, run in enumerate(one.dry for one in self.ranks):
            colour, count = COLOURS[at % len(COLOURS)], max(1, len(run.moments) - 1)
            points = [(LEFT + WIDTH * index / count, up(moment.peak)) for index, moment in enumerate(run.moments)]
            label = f"rank {run.rank}: {run.peak / 1e9:.1f} GB at {run.peak_moment}"
            shapes += [
                path(points, fill="none", stroke=colour, stroke_width=1.4),
                text(LEFT, TOP + HEIGHT + 20 + 16 * at, label, fill=colour),
            ]
        return document(LEFT + WIDTH + 16, TOP + HEIGHT + 24 + 16 * len(self.ranks), shapes, font_size=12)

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
        for one in self.ranks[:1] if len(self.ranks) > _SHOWN else self.ranks:
            yield from _rank(one)
        if self.advice:
            yield Text(self.advice, "bad")


def _routing(job: Job, imbalance: float) -> str:
    """What was stated in place of what a router would have chosen."""
    if job.layout.ep == 1:
        return "routing is stated: every expert gets as many tokens"
    if imbalance == 1:
        return "routing is stated: every rank of ep, and every expert, gets as many tokens (--imbalance 1)"
    return f"routing is stated: the rank that runs gets {imbalance:g} times the mean of its {job.layout.ep} ranks of ep"


def _rank(one: RankVsPlan) -> Iterator[Block]:
    from fivefold.train.display import chart

    dry = one.dry
    place = ", ".join(f"{axis} {at}" for axis, at in dry.place.items())
    yield Text(f"\nrank {dry.rank} ({place}), layers {'+'.join(map(str, dry.layers))}, in {dry.seconds:.1f} s", "bold")
    yield _figures(one)
    yield Text("")
    yield _traffic(one)
    agrees = "as the schedule says" if dry.live == dry.allowed else f"and the schedule says {dry.allowed}"
    yield Text(f"\nmicrobatches that wait for their backward pass: {dry.live} at most, {agrees}")
    lines = chart([moment.peak / 1e9 for moment in dry.moments], {}, height=8)
    yield Text("\n".join([f"GB through the step; the peak is in {dry.peak_moment}", *lines]))


def _figures(one: RankVsPlan) -> Table:
    rows = []
    for figure in one.figures:
        scale = 1e9 if figure.unit == "GB" else 1e12
        same = "the same" if figure.dry == figure.plan else f"{figure.difference:+.2%}"
        rows.append([figure.name, *(f"{x / scale:,.3f} {figure.unit}" for x in (figure.dry, figure.plan)), same])
    return Table(["", ">dry run", ">planner", ">difference"], rows)


def _traffic(one: RankVsPlan) -> Table:
    planned = {row[:2]: row for row in one.planned}
    rows = []
    for row in one.dry.traffic:
        other = planned.pop(row[:2], None)
        same = "the same" if other == row else "none" if other is None else f"{other.calls} calls, {other.payload} B"
        sent = (f"{row.calls:,}", bytes_text(row.payload), bytes_text(float(row.wire)))
        rows.append([row.axis, f"{one.ranks.get(row.axis, '')}", row.kind, *sent, same])
    for other in planned.values():
        rows.append([other.axis, "", other.kind, "0", "", "", f"{other.calls} calls, {other.payload} B"])
    return Table(["axis", ">ranks", "collective", ">calls", ">payload", ">wire", ">planner"], rows)


def _stages(found: Sequence[RankVsPlan]) -> Table:
    rows = []
    for one in found:
        dry = one.dry
        state = dry.parameters + dry.gradients + dry.optimizer
        sizes = [f"{size / 1e9:.2f} GB" for size in (dry.parameters, state, dry.activations, dry.peak)]
        peak = next(figure for figure in one.figures if figure.name == "peak")
        place = [str(dry.rank), str(dry.place["pp"]), "+".join(map(str, dry.layers))]
        rows.append([*place, *sizes, dry.peak_moment, f"{peak.difference:+.1%}"])
    heads = [">rank", ">stage", ">layers", ">parameters", ">state", ">activations", ">peak", "~at", ">planner's peak"]
    return Table(heads, rows, title="Stages")
