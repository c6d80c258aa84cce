"""The best layouts of a model on a cluster: closed forms evaluate all of them, schedules time the survivors.

ranking = search(workload)                  # the workload's own layout is not read
ranking.best.layout, ranking.best.seconds
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec import structs

from fivefold.cost.peak_memory import USABLE_FRACTION, footprint
from fivefold.cost.step import Workload, estimate, simulated_microbatches
from fivefold.hardware.accelerators import usual_node
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.planner.closed_forms import MEMORY_SLACK, Array
from fivefold.planner.mixed import merge_groups, span_problems
from fivefold.planner.mixed_search import mixed_options
from fivefold.planner.mixed_space import mixed_space
from fivefold.planner.option import Option, evaluate
from fivefold.planner.space import SearchQuery, Space, few_of_a_kind, space
from fivefold.schedules.registry import CATALOGUE, MAX_SIZE
from fivefold.schedules.text import to_text, with_derived_messages
from fivefold.support.errors import UserError
from fivefold.support.files import write
from fivefold.support.ranges import SEQUENCES, misfit, within
from fivefold.support.text import divisors, either

By = Literal["throughput", "memory", "pareto"]
SURVIVORS = 24  # layouts that are timed exactly
PER_KIND = 2  # survivors with the same tp, pp, cp, ZeRO stage and recompute
ENOUGH_FITTING, TOO_SLOW = 8, 1.06  # after so many that fit, one that is this much slower by the closed form is skipped
MIN_TIMED, PAIR_BUDGET = 3, 50_000  # after so many, no more (stage, microbatch) pairs than this are simulated
MAX_CHECKED = 200  # layouts whose memory is computed exactly before closed forms must leave more room
MEMORY_SHARES = (
    MEMORY_SLACK,
    0.95,
    0.85,
    0.7,
)  # of the limit, that a closed form of memory may fill: tried in this order
MIN_NODE_TP_OPTIONS = 2  # layouts with tp within a node that are timed, however many across nodes seem faster
MIN_SEQ = 512  # tokens of a sequence: no shorter one is proposed where nothing fits
ORDERS_TRIED = 20  # by a schedule that is built for its stages, about


class TooLarge(UserError):
    """Layouts are legal, and none fits into the devices."""


class Ranking(NamedTuple):
    options: tuple[Option, ...]  # the best first
    evaluated: int  # combinations of choices
    fitting: int  # of them

    @property
    def best(self) -> Option:
        return self.options[0]


def search(workload: Workload, by: By = "throughput", top: int = 10, **fixed: Any) -> Ranking:
    """The best layouts. `fixed` choices (tp=8, zero=1, ...) are kept."""
    _check_fixed(workload, fixed)
    workload = replace(workload, cluster=merge_groups(workload.cluster))
    if len(workload.cluster.groups) > 1 and workload.spec.experts is not None:
        raise UserError(
            f"{workload.spec.name} has experts, which are not searched over the unlike nodes of {workload.cluster}; "
            "give one group of nodes, or a --layout to time",
            "search.nodes",
        )
    if len(workload.cluster.groups) > 1:
        return _search_mixed(workload, by, top, fixed)
    candidates = space(SearchQuery(workload, fixed))
    if not len(candidates):
        raise UserError(_no_layout(workload, fixed), "search.none")
    fits = candidates.memory <= workload.first_device.accelerator.memory * USABLE_FRACTION * MEMORY_SLACK
    options = _options(workload, candidates, by, fixed)
    if not options:
        raise TooLarge(_too_large(workload, candidates, fixed), "search.memory")
    return Ranking(_ranked(options, by)[:top], len(candidates), int(fits.sum()))


def _search_mixed(workload: Workload, by: By, top: int, fixed: dict[str, Any]) -> Ranking:
    """Over unlike nodes; each option's cluster has its groups in the order of its pipeline ranks."""
    candidates = mixed_space(SearchQuery(workload, fixed))
    if not len(candidates):
        raise UserError(_no_spanning(workload, fixed), "search.none")
    options = mixed_options(workload, candidates, fixed, by)
    if by != "memory" and not any(option.fits for option in options):
        # Those with the least memory may fit where the fastest do not.
        options = [*options, *mixed_options(workload, candidates, fixed, "memory")]
    if fitting := [option for option in options if option.fits]:
        return Ranking(_ranked(fitting, by)[:top], len(candidates), int(candidates.fits.sum()))
    least = min(options, key=lambda option: option.footprint.total / option.device_memory)
    raise UserError(
        f"{workload.spec.name} does not fit on the mixed nodes of {workload.cluster}: its smallest layout there, "
        f"{least.layout}, needs {least.footprint.total / 1e9:.1f} GB on pipeline rank {least.footprint.rank}, "
        f"and a plan may fill {least.limit / 1e9:.1f} GB; give more nodes, or a smaller batch",
        "search.memory",
    )


FIXABLE = (
    *("tp", "pp", "cp", "dp", "cp_kind", "zero", "replicate", "sp"),
    *("schedule", "chunks", "microbatches", "recompute", "samples"),
)
OF_EXPERTS = ("ep", "dispatch")


def _check_fixed(workload: Workload, fixed: dict[str, Any]) -> None:
    """Refuse choices that cannot be fixed, and numbers that make no sense."""
    allowed = FIXABLE if workload.spec.experts is None else (*FIXABLE, *OF_EXPERTS)
    expert_only = [key for key in OF_EXPERTS if key in fixed and key not in allowed]
    name = workload.spec.name
    problems = [f"{key}={fixed[key]} is of experts, and {name} has none; leave it out" for key in expert_only]
    unknown = [key for key in fixed if key not in (*allowed, *expert_only)]
    problems += [f"{key} cannot be fixed here; {either(allowed)} can" for key in unknown]
    counts = ("tp", "pp", "cp", "dp", "ep", "replicate", "microbatches", "samples")
    problems += filter(None, (misfit(key, fixed.get(key), within(1, SEQUENCES)) for key in counts))
    if fixed.get("zero", 0) not in (0, 1, 2, 3):
        problems.append(f"zero={fixed['zero']} is not a ZeRO stage; 0, 1, 2 or 3")
    if fixed.get("replicate", 1) != 1 and fixed.get("zero") != 3:
        problems.append(f"replicate={fixed['replicate']} copies the shards of zero=3; also fix zero=3")
    if workload.cluster.world % max(1, fixed.get("replicate", 1)):
        close = sorted(divisors(workload.cluster.world), key=lambda n: abs(n - fixed["replicate"]))[:2]
        near = either([f"replicate={n}" for n in close])
        problems.append(
            f"replicate={fixed['replicate']} does not divide {workload.cluster.world} ranks; nearest: {near}"
        )
    if fixed.get("replicate", 1) > 1 and len(workload.cluster.groups) > 1:
        problems.append(f"replicate cannot be fixed over the unlike nodes of {workload.cluster}")
    if problems:
        raise UserError(problems, "search.fixed")


def _options(workload: Workload, candidates: Space, by: By, fixed: dict[str, Any]) -> list[Option]:
    """The layouts that fit, timed: the fastest by the closed form, or those that need the least memory; few of a kind.
    Where none of the first fits, closed forms must leave more room, until only those with the least memory are left."""
    limit, node = workload.first_device.accelerator.memory * USABLE_FRACTION, workload.cluster.groups[0].gpus
    seconds, roomy = np.full(len(candidates), np.inf), candidates.memory <= limit * max(MEMORY_SHARES)
    may_fit, least = np.flatnonzero(roomy), _least_memory(candidates)  # the latter for where none of the others fits
    matter = np.array([*may_fit, *(at for at in least if not roomy[at])], dtype=np.int64)
    seconds[matter] = candidates.seconds_of(matter)
    order = may_fit[np.argsort((candidates.memory if by == "memory" else seconds)[may_fit], kind="stable")]
    copies = fixed.get("replicate", 1)
    order = order[candidates.of.dp[order] % copies == 0]
    timed = _TimedLayouts(workload, candidates, seconds, limit, copies)

    def kind(at: int) -> tuple[Any, ...]:
        of, dealt = candidates.of, candidates.dealt
        # Of experts' messages closed forms know less well what joined pairs hide: others are timed beside them.
        spread = () if dealt is None else (dealt.ep[at], candidates.pipelines[of.pipeline[at]].schedule.joins)
        return of.tp[at], of.pp[at], of.cp[at], of.zero[at], candidates.shapes[of.shape[at]].recompute, *spread

    for share in MEMORY_SHARES:
        timed.checked = 0
        roomy = order[candidates.memory[order] <= limit * share]
        if by == "throughput":
            # Among equals tp within a node wins, so some of those are timed, and first: the budget may run out.
            few_of_a_kind(
                roomy[candidates.of.tp[roomy] <= node].tolist(), lambda at: at, 1, MIN_NODE_TP_OPTIONS, timed.take
            )
        front = _pareto_front(candidates, roomy.tolist())[:SURVIVORS] if by == "pareto" else roomy.tolist()
        few_of_a_kind(front, kind, PER_KIND, SURVIVORS, timed.take)
        if timed.options:
            return [*timed.options, *(timed.with_replicas() if by == "throughput" and "replicate" not in fixed else ())]
    for at in least:
        timed.take(at)
    return timed.options


def _least_memory(candidates: Space) -> list[int]:
    memory, most = candidates.memory, min(SURVIVORS, len(candidates)) - 1
    least = np.flatnonzero(memory <= np.partition(memory, most)[most])  # of two million, these alone are sorted
    return [int(at) for at in least[np.argsort(memory[least], kind="stable")[:SURVIVORS]]]


@dataclass
class _TimedLayouts:
    """Layouts that fit, timed exactly, until closed forms say that the rest cannot come near."""

    workload: Workload
    candidates: Space
    seconds: Array  # of candidates, by the closed form
    limit: float
    copies: int  # of the shards of ZeRO 3, which closed forms do not know
    options: list[Option] = field(default_factory=list)
    checked: int = 0
    pairs_spent: int = 0
    seen: set[int] = field(default_factory=set)

    def take(self, at: int) -> bool:
        """Time a layout if that is worth it; False if it does not fit."""
        count, layout = len(self.options), self.candidates.layout(at)
        if at in self.seen or self.checked > MAX_CHECKED:
            return True
        if count >= ENOUGH_FITTING and self.seconds[at] > TOO_SLOW * min(option.seconds for option in self.options):
            return True
        size = (
            layout.stages * simulated_microbatches(layout) * (ORDERS_TRIED if layout.record.uses_stage_times else 1)
            if layout.pp > 1
            else 1
        )
        if count >= MIN_TIMED and self.pairs_spent + size > PAIR_BUDGET:
            return True
        if self.copies > 1:
            layout = structs.replace(layout, replicate=self.copies)
        self.checked += 1
        if self.copies > 1 and layout.problems(self.workload.spec, seq=self.workload.seq, batch=self.workload.batch):
            return False
        workload = replace(self.workload, layout=layout)
        memory = footprint(workload)
        if memory.total > self.limit:
            return False
        self.pairs_spent += size
        self.seen.add(at)
        self.options.append(Option(workload, estimate(workload), memory))
        return True

    def with_replicas(self) -> list[Option]:
        """The fastest with ZeRO 3 as hybrid sharding: closed forms do not know it, and each costs little."""
        sharded = [option for option in self.options if option.layout.zero == 3 and option.layout.pp == 1]
        options = []
        for option in sorted(sharded, key=lambda option: option.seconds)[:MIN_NODE_TP_OPTIONS]:
            for copies in divisors(option.layout.dp)[1:-1]:
                workload = replace(option.workload, layout=structs.replace(option.layout, replicate=copies))
                if workload.layout.problems(workload.spec, seq=workload.seq, batch=workload.batch):
                    continue
                if (memory := footprint(workload)).total <= self.limit:
                    options.append(Option(workload, estimate(workload), memory))
        return options


def _pareto_front(candidates: Space, order: list[int]) -> list[int]:
    """Those that need less memory than all faster ones."""
    chosen: list[int] = []
    for at in order:
        if not chosen or candidates.memory[at] < 0.98 * candidates.memory[chosen[-1]]:
            chosen.append(at)
    return chosen


def _ranked(options: list[Option], by: By) -> tuple[Option, ...]:
    if by == "memory":
        return tuple(sorted(options, key=lambda option: option.footprint.total))
    ranked = sorted(options, key=lambda option: option.seconds)
    if by == "throughput":
        return tuple(ranked)
    front: list[Option] = []
    for option in ranked:
        if not front or option.footprint.total < front[-1].footprint.total:
            front.append(option)
    return tuple(front)


def _no_layout(workload: Workload, fixed: dict[str, Any]) -> list[str]:
    """Why there is no layout at all: because of what was fixed, or because of the batch."""
    world, batch = workload.cluster.world, workload.batch
    degrees = {axis: fixed.get(axis, 1) for axis in ("dp", "tp", "pp", "cp")}
    used = math.prod(degrees.values())
    known = {key: value for key, value in fixed.items() if key in Layout.__struct_fields__}
    # As many microbatches as there can be, so that a schedule complains only if it can never have enough; and as many
    # ranks as ep asks for.
    most = {"microbatches": min(batch, MAX_SIZE), "dp": known.get("ep", 1)}
    problems = Layout(**(most | known)).problems(workload.spec, seq=workload.seq)
    if world % used:
        near = [n for n in divisors(world) if n != used]
        problems.append(
            f"{', '.join(f'{axis}={n}' for axis, n in degrees.items() if n > 1)} take {used} ranks, which does not "
            f"divide the {world} GPUs of {workload.cluster}; nearest: {min(near, key=lambda n: abs(n - used))} ranks"
        )
    schedule = fixed.get("schedule")
    if schedule in CATALOGUE and schedule not in workload.software.schedules:
        problems.append(
            f"schedule={schedule} is not searched with {workload.software.name}; "
            f"{either(workload.software.schedules)} are"
        )
    if "chunks" in fixed and "schedule" not in fixed:
        problems.append(
            f"chunks={fixed['chunks']} needs a schedule; write schedule=interleaved,chunks={fixed['chunks']}"
        )
    for name, value in (("microbatch", fixed.get("samples")), ("microbatches", fixed.get("microbatches"))):
        if value and batch % value:
            near = sorted(divisors(batch), key=lambda n: abs(n - value))[:2]
            problems.append(f"{name}={value} does not divide the batch of {batch}; nearest: {name}={either(near)}")
    if problems:
        return problems
    least = -(-world // (workload.spec.heads * (workload.spec.layers + 2)))
    near = sorted((n for n in divisors(world) if n >= least), key=lambda dp: abs(batch - dp))[:2]
    wanted = ", ".join(f"{key}={value}" for key, value in fixed.items())
    return [
        f"no layout of {workload.spec.name} on {workload.cluster} takes a batch of {batch} sequences of "
        f"{workload.seq} tokens"
        + (f" with {wanted}" if wanted else "")
        + f": dp must divide it, and tp x pp x cp the rest of {world} GPUs; nearest: batch={either(near)}"
    ]


def _no_spanning(workload: Workload, fixed: dict[str, Any]) -> list[str]:
    """Why no layout spans the groups: because of what was fixed, or of the nodes."""
    degrees = {axis: fixed[axis] for axis in ("dp", "tp", "pp", "cp") if axis in fixed}
    problems = [] if "pp" in fixed else span_problems(workload.cluster, Layout(**degrees))
    nodes = math.gcd(*(group.nodes for group in workload.cluster.groups))
    why = (
        f"no layout of {workload.spec.name} spans the mixed nodes of {workload.cluster} with a batch of "
        f"{workload.batch}: each replica takes whole nodes of each kind, so dp divides {nodes}, and dp x tp x cp the "
        "GPUs of every group; give one group, or as many nodes of each kind"
    )
    return problems or ([*_no_layout(workload, fixed), why] if fixed else [why])


def _too_large(workload: Workload, candidates: Space, fixed: dict[str, Any]) -> str:
    """What the smallest layout needs, and the nearest thing that would fit."""
    smallest = min(
        (evaluate(replace(workload, layout=candidates.layout(at))) for at in _least_memory(candidates)[:3]),
        key=lambda option: option.footprint.total,
    )
    need, have = smallest.footprint.total, smallest.limit
    parts = sorted(smallest.footprint.parts.items(), key=lambda part: -part[1])[:2]
    built = " and ".join(f"{size / 1e9:.1f} GB of {name}" for name, size in parts)
    sentence = (
        f"{workload.spec.name} fits nowhere on {workload.cluster} with {workload.batch} sequences of {workload.seq} "
        f"tokens: its smallest layout, {smallest.layout}, needs {need / 1e9:.1f} GB a GPU ({built}), and a plan "
        f"may fill {have / 1e9:.1f} GB"
    )
    ways = _ways_out(workload, fixed)
    return f"{sentence}; it fits {either(ways)}" if ways else sentence


def _ways_out(workload: Workload, fixed: dict[str, Any]) -> list[str]:
    """What would fit, by a layout that was found: other choices, shorter sequences, or more GPUs."""
    ways, group = list[str](), workload.cluster.groups[0]
    if fixed and (without := _fitting(workload, {})):
        wanted = ",".join(f"{key}={value}" for key, value in fixed.items())
        return [f"without fixed {wanted}, as {without}"]
    for seq in (workload.seq >> power for power in range(1, workload.seq.bit_length())):
        if seq < MIN_SEQ:
            break
        if _fitting(replace(workload, seq=seq), fixed):
            ways.append(f"with --seq {seq}")
            break
    node = max(usual_node(group.accelerator.name) or group.gpus, group.gpus)
    sizes = [(1, gpus) for gpus in (2, 4) if gpus < node] + [(1 << power, node) for power in range(12)]
    for cluster in (Cluster((structs.replace(group, nodes=nodes, gpus=gpus),)) for nodes, gpus in sizes):
        if cluster.world <= workload.cluster.world:
            continue
        bigger = replace(workload, cluster=cluster, batch=max(workload.batch, cluster.world))
        if _fitting(bigger, {key: value for key, value in fixed.items() if key not in ("dp", "microbatches")}):
            ways.append(f"on {cluster}")
            break
    return ways


def _fitting(workload: Workload, fixed: dict[str, Any]) -> Layout | None:
    """The layout that needs the least memory, if it fits, counted exactly."""
    there = space(SearchQuery(workload, fixed))
    for at in _least_memory(there) if len(there) else ():
        layout = there.layout(at)
        if (
            footprint(replace(workload, layout=layout)).total
            <= USABLE_FRACTION * workload.first_device.accelerator.memory
        ):
            return layout
    return None


# ---- written --------------------------------------------------------------------------------------------------------
# What a job needs so that the trainer runs the very schedule that was planned.
#
# `auto` is built for the seconds of stages on unlike devices, which a trainer does not know. So the schedule itself is
# written beside the job, and the job's layout names the file.


def schedule_text(option: Option) -> str:
    """The schedule's text, where its name and the layout do not determine it; else empty."""
    workload = option.workload
    if not (workload.groups and workload.layout.pp > 1 and workload.layout.record.uses_stage_times):
        return ""
    schedule = workload.schedule()
    return to_text(schedule, implied=with_derived_messages(schedule) == schedule)


def write_schedule(option: Option, path: str | Path) -> str:
    """Writes an option's schedule to a file if it was made for it, and returns the file's name, else an empty text."""
    if text := schedule_text(option):
        write(Path(path), text)
    return str(path) if text else ""


def trained_layout(option: Option, path: str | Path) -> Layout:
    """The layout of a job that trains as planned; a schedule that was made for it is written to `path`."""
    named = write_schedule(option, path)
    return structs.replace(option.layout, schedule=named) if named else option.layout
