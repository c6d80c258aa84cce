"""What each schedule makes of devices of unequal speed: step times side by side, on the clock of the schedule itself.

result = compare("llama3-70b", "2x8xH100+2x8xA100", layout="tp=8,pp=4,sp,microbatches=64,recompute=full", batch=256)
result.rows[0].layout, result.rows[0].seconds, result.rows[0].gain
compare("tiny", "1xfast.toml+1xslow.toml", layout="pp=2,microbatches=8", batch=16, seq=128)
compare("llama3-8b", "4x8xH100", slower=(1.5, 2))      # the second half of the nodes that many times slower
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from fivefold.cost.kernels import Device
from fivefold.cost.step import Workload
from fivefold.hardware.accelerators import PRECISIONS, Accelerator
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.planner.mixed import divide_layers, groups_of, merge_groups, refine_split
from fivefold.planner.option import Option, evaluate
from fivefold.planner.plan import question
from fivefold.planner.search import search
from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.schedules.registry import record_of
from fivefold.support.errors import UserError
from fivefold.support.ranges import misfit, within

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "auto")
ONE_STAGE_SCHEDULES = (
    "1f1b",
    "zb-h1",
)  # schedules of one stage a rank, for which layers are moved before `auto` is made for them


@dataclass(frozen=True)
class MixedRow:
    """One schedule with one split on one cluster."""

    slower: float | None  # how much slower the second half of the nodes was made; None: the cluster as it is
    split: str  # "even": as if all devices were alike; "speed": by the speed and the memory of each
    option: Option
    base: float  # seconds of a step of even 1F1B

    @property
    def schedule(self) -> str:
        return self.layout.schedule

    @property
    def layout(self) -> Layout:
        return self.option.layout

    @property
    def seconds(self) -> float:
        return self.option.seconds

    @property
    def gain(self) -> float:
        """Of speed over even 1F1B: 0.5 is half as many steps more in the same time."""
        return self.base / self.seconds - 1

    @property
    def idle(self) -> float:
        """The share of all ranks' time in the pipeline in which they do not compute."""
        return idle(self.option)

    def to_dict(self) -> dict[str, Any]:
        layers = [len(stage.layers) for stage in self.option.workload.stages]
        return {
            "cluster": str(self.option.workload.cluster),
            "slower": self.slower,
            "schedule": self.schedule,
            "split": self.split,
            "layers": layers,
            "predicted_seconds": self.seconds,
            "gain": self.gain,
            "bubble": self.idle,
            "memory_bytes": self.option.footprint.total,
            "memory_rank": self.option.footprint.rank,
            "fits": self.option.fits,
            "layout": str(self.layout),
        }


@dataclass(frozen=True)
class MixedSchedules(Result):
    workload: Workload  # what was asked; its layout is the one that schedules and splits were put into
    rows: tuple[MixedRow, ...]

    def to_dict(self) -> dict[str, Any]:
        asked = {"model": self.workload.spec.name, "batch": self.workload.batch, "seq": self.workload.seq}
        return asked | {"rows": [row.to_dict() for row in self.rows]}

    def blocks(self) -> Iterator[Block]:
        workload = self.workload
        yield Text(
            f"{workload.spec.name}, {workload.batch} sequences of {workload.seq:,} tokens per step, {workload.layout}"
        )
        for slower in dict.fromkeys(row.slower for row in self.rows):
            group = [row for row in self.rows if row.slower == slower]
            about = "" if slower is None else f", the second half of the nodes {slower:g} times slower"
            yield Table(
                ["schedule", "split", "~layers", ">step s", ">gain", ">bubble", ">memory GB"],
                [_cells(row) for row in group],
                title=f"{group[0].option.workload.cluster}{about}",
                caption="gain: of speed over even 1F1B; bubble: of all ranks' time in the pipeline; memory: of the "
                "rank that fills its device the most",
            )


def compare(
    model: Any,
    cluster: str | Path | Cluster | None = None,
    *,
    layout: str | Layout | None = None,
    schedules: Sequence[str] = SCHEDULES,
    slower: Sequence[float] = (),
    changes: Sequence[str] = (),
    batch: int | None = None,
    seq: int | None = None,
    precision: str = "",
    software: str = "fivefold",
) -> MixedSchedules:
    """Time a step of every schedule, with layers divided evenly and by speed.

    `layout` has the degrees, microbatches and recompute that all of them share; without one it is the planner's choice
    for 1F1B, with the groups in the order that suits it. `slower` makes the second half of a cluster of like nodes
    that many times slower, one table for each.
    """
    workload = question(model, cluster, changes, batch, seq, precision, software)
    clusters = _clusters(workload.cluster, slower)
    if layout is None:  # the planner's, and the order of the groups that it belongs to
        best = search(replace(workload, cluster=clusters[-1][1]), top=1, schedule="1f1b").best
        layout = best.layout
        clusters = clusters if slower else [(None, best.workload.cluster)]
    base = _base(replace(workload, cluster=clusters[-1][1]), layout)
    rows = [row for factor, machines in clusters for row in _rows(replace(base, cluster=machines), factor, schedules)]
    return MixedSchedules(base, tuple(rows))


def _base(workload: Workload, layout: str | Layout) -> Workload:
    """The layout into which schedules and splits are put."""
    given = Layout.parse(layout) if isinstance(layout, str) else layout
    plain = structs.replace(given, schedule="1f1b", chunks=0, split=())
    if problems := plain.problems(workload.spec, world=workload.cluster.world, seq=workload.seq, batch=workload.batch):
        raise UserError(problems)
    if plain.pp == 1:
        raise UserError(
            f"{plain} has one pipeline stage, and a schedule needs several; give pp=2 or more", "compare.stages"
        )
    return replace(workload, layout=plain)


def _rows(workload: Workload, factor: float | None, schedules: Sequence[str]) -> Iterator[MixedRow]:
    workload = replace(workload, groups=groups_of(workload.cluster, workload.layout))
    even = evaluate(workload)
    yield MixedRow(factor, "even", even, even.seconds)
    for name in schedules:
        shaped = replace(
            workload, layout=structs.replace(workload.layout, schedule=name, chunks=record_of(name).chunks)
        )
        if problems := shaped.layout.problems(workload.spec, seq=workload.seq, batch=workload.batch):
            raise UserError(problems)
        if name != "1f1b":
            yield MixedRow(factor, "even", evaluate(shaped), even.seconds)
        yield MixedRow(factor, "speed", evaluate(best_split(shaped)), even.seconds)


def best_split(workload: Workload) -> Workload:
    """Layers by speed and memory, refined on the clock; `auto`, which is made for a split, takes the better of two."""
    if not workload.layout.record.uses_stage_times:
        return refine_split(divide_layers(workload))
    splits = {_with_schedule(workload, name) for name in ONE_STAGE_SCHEDULES}
    options = [evaluate(replace(workload, layout=structs.replace(workload.layout, split=split))) for split in splits]
    return min(options, key=lambda option: (not option.fits, option.seconds)).workload


def _with_schedule(workload: Workload, name: str) -> tuple[int, ...]:
    return refine_split(
        divide_layers(replace(workload, layout=structs.replace(workload.layout, schedule=name)))
    ).layout.split


def idle(option: Option) -> float:
    """The share of all ranks' time in the pipeline in which they do not compute."""
    workload, times = option.workload, option.workload.durations
    backward = [i + w for i, w in zip(times.i, times.w, strict=True)] if workload.splits_backward else times.b
    busy = workload.layout.microbatches * (sum(times.f) + sum(backward))
    return 1 - busy / (workload.layout.pp * option.estimate.pipeline)


def _clusters(cluster: Cluster, slower: Sequence[float]) -> list[tuple[float | None, Cluster]]:
    like = merge_groups(cluster)
    if not slower:
        if len(like.groups) == 1:
            raise UserError(
                f"{cluster} has devices of one kind; give several, or how much slower half of them is", "compare.halves"
            )
        return [(None, like)]
    if len(like.groups) > 1:
        raise UserError(
            f"{cluster} is mixed as it is; give one kind of nodes to make half of them slower", "option.conflict"
        )
    return [(factor, slow_half(like, factor)) for factor in slower]


def slow_half(cluster: Cluster, factor: float) -> Cluster:
    """Two groups: the second half of the nodes, or of a single node's devices, that many times slower."""
    (group,) = cluster.groups
    field = "nodes" if group.nodes > 1 else "gpus"
    if wrong := misfit("slower", factor, within(1, 1000)):
        raise UserError(wrong, "option.range")
    count = getattr(group, field)
    if count % 2:
        raise UserError(f"{cluster} has {count} {field}, which do not halve; nearest: {count + 1}", "compare.halves")
    half = structs.replace(group, **{field: count // 2})
    return Cluster((half, structs.replace(half, accelerator=slow_accelerator(group.accelerator, factor))))


def slow_accelerator(accelerator: Accelerator, factor: float) -> Accelerator:
    """The same device at a lower clock: rates, memory and the host's work are slower, links are not."""
    achieved, peak = Device.of(accelerator).achieved, accelerator.peak
    slow = {name: rate / factor for name in PRECISIONS if (rate := getattr(peak, name)) is not None}
    times = {name: getattr(achieved, name) * factor for name in ("launch", "host", "update")}
    return structs.replace(
        accelerator,
        peak=structs.replace(peak, **slow),
        memory_bandwidth=accelerator.memory_bandwidth / factor,
        achieved=structs.replace(achieved, **times),
    )


def _cells(row: MixedRow) -> list[str]:
    layers = ",".join(str(len(stage.layers)) for stage in row.option.workload.stages)
    memory = f"{row.option.footprint.total / 1e9:.1f}" + ("" if row.option.fits else " (too much)")
    step = f"{row.seconds:.3g}" if row.seconds < 100 else f"{row.seconds:.1f}"
    return [row.schedule, row.split, layers, step, f"{row.gain:+.1%}", f"{row.idle:.1%}", memory]
