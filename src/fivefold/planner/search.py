"""The best layouts of a model on a cluster: closed forms evaluate all of them, schedules time the survivors.

ranking = search(workload)                  # the workload's own layout is not read
ranking.best.layout, ranking.best.seconds
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec import structs

from fivefold.cost.peak_memory import USABLE_FRACTION, Footprint, footprint
from fivefold.cost.step import Estimate, Workload, estimate, simulated_microbatches
from fivefold.hardware.accelerators import usual_node
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.planner.closed import SLACK
from fivefold.planner.mixed import divided, merged, refined, spanning
from fivefold.planner.mixed_space import MixedSpace, mixed_space
from fivefold.planner.space import SearchQuery, Space, few_of_a_kind, space
from fivefold.schedules.registry import CATALOGUE, LARGEST, RECORDS
from fivefold.schedules.text import rewired, to_text
from fivefold.support.errors import UserError
from fivefold.support.files import write
from fivefold.support.ranges import SEQUENCES, misfit, within
from fivefold.support.text import divisors, either

# ---- option ---------------------------------------------------------------------------------------------------------
# A layout with its time and its memory.
#
# evaluate(workload).seconds  # of the workload's own layout, exactly


@dataclass(frozen=True)
class Option:
    """A layout with its time and its memory."""

    workload: Workload
    estimate: Estimate
    footprint: Footprint

    @property
    def layout(self) -> Layout:
        return self.workload.layout

    @property
    def seconds(self) -> float:
        return self.estimate.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.workload.batch * self.workload.seq / self.seconds

    @property
    def device_memory(self) -> int:
        """Bytes of the fullest rank's device."""
        return self.workload.device_memory_of(self.footprint.rank)

    @property
    def limit(self) -> float:
        """Bytes of that device that a plan may fill."""
        return USABLE_FRACTION * self.device_memory

    @cached_property
    def fits(self) -> bool:
        """Whether the rank that fills its device the most does not overfill it, and so none does."""
        return self.footprint.total <= self.limit


def evaluate(workload: Workload) -> Option:
    """The workload's own layout, exactly."""
    return Option(workload, estimate(workload), footprint(workload))


# ---- search ---------------------------------------------------------------------------------------------------------
# The best layouts over unlike nodes: closed forms rank all of them, and the survivors' own schedules decide.
#
# Layers are divided anew for each (`mixed.py`). `auto` has no closed form worth its name on unequal stages: it is made
# for the best layouts of the other schedules, and competes with them.


MIXED_SURVIVORS, MIXED_ALIKE = 40, 2  # layouts that are timed exactly, and of a kind
MIXED_PATIENCE = 40_000  # (stage, microbatch) pairs of all of them, some 10 microseconds each
REFINED, MOVES = 6, 40  # of the best, the layers of which are moved about; and how often each, within the same patience
MADE = 1024  # pairs of all schedules that are made for their stages: half a millisecond each
ROUNDS = 32  # microbatches for each stage, beyond which the ends of a step are too short to gain anything there
WORTH = 0.999  # of the step with another schedule: what gains less is the same
WEIGHED = tuple(record.name for record in RECORDS if record.uses_stage_times)


def mixed_options(workload: Workload, combinations: MixedSpace, fixed: dict[str, Any], by: str) -> list[Option]:
    """The survivors, timed exactly; where nothing fits, the smallest."""
    options: list[Option] = []
    spent = 0
    for at in _survivors(combinations, by):
        candidate = combinations.workload(workload, at)
        spent += _pairs(candidate.layout)
        if spent > MIXED_PATIENCE and len(options) >= REFINED:
            break
        options.append(evaluate(divided(candidate)))
    if by == "memory":
        return options
    best = _best(options)[:REFINED]
    moved = [_moved(option) for option in best if not option.layout.record.uses_stage_times]
    rest = [option for option in options if option not in best or option.layout.record.uses_stage_times]
    made = [] if "schedule" in fixed else _made(_best([*moved, *rest]))
    return [*moved, *rest, *made]


def _pairs(layout: Layout) -> int:
    """What is simulated of a layout."""
    return layout.stages * simulated_microbatches(layout)


def _moved(option: Option) -> Option:
    moves = min(MOVES, MIXED_PATIENCE // (REFINED * _pairs(option.layout)))
    return evaluate(refined(option.workload, moves)) if moves else option


def _best(options: list[Option]) -> list[Option]:
    return sorted(options, key=lambda option: (not option.fits, option.seconds))


def _made(options: list[Option]) -> list[Option]:
    """The best layouts with one stage a rank, with a schedule that is made for the seconds of these stages; those that
    it makes quicker."""
    quicker: list[Option] = []
    spent = 0
    for option in options:
        for name in (name for name in WEIGHED if name in option.workload.software.schedules):
            layout = structs.replace(option.layout, schedule=name)
            pairs = layout.pp * layout.microbatches
            if option.layout.chunks == 1 and can_be_made(layout) and spent + pairs <= MADE:
                spent += pairs
                candidate = evaluate(replace(option.workload, layout=layout))
                quicker += [candidate] if candidate.seconds < option.seconds * WORTH else []
    return quicker


def can_be_made(layout: Layout) -> bool:
    """Whether a schedule for these very stages could gain anything, and does not take long to make."""
    return layout.pp * layout.microbatches <= MADE and layout.microbatches <= ROUNDS * layout.pp


def _survivors(combinations: MixedSpace, by: str) -> list[int]:
    """The fastest by the closed form, or those that fill their devices the least; few of a kind."""
    space = combinations.space
    order = np.argsort(space.memory if by == "memory" else space.seconds, kind="stable")
    of = space.of

    def kind(at: int) -> tuple[Any, ...]:
        recompute = space.shapes[of.shape[at]].recompute
        return of.tp[at], of.pp[at], of.cp[at], of.zero[at], of.pipeline[at], recompute

    chosen = few_of_a_kind(order[combinations.fits[order]].tolist(), kind, MIXED_ALIKE, MIXED_SURVIVORS)
    return chosen or [int(at) for at in np.argsort(space.memory)[:3]]


# ---- search ---------------------------------------------------------------------------------------------------------


By = Literal["throughput", "memory", "pareto"]
SURVIVORS = 24  # layouts that are timed exactly
ALIKE = 2  # survivors with the same tp, pp, cp, ZeRO stage and recompute
ENOUGH, HOPELESS = 8, 1.06  # after so many layouts that fit, one whose closed form is so much slower is skipped
FEWEST, PATIENCE = 3, 50_000  # after so many, no more (stage, microbatch) pairs than this are simulated
CHECKED = 200  # layouts whose memory is counted exactly before a closed form must leave more room
TIGHTER = (SLACK, 0.95, 0.85, 0.7)  # the room that a closed form of memory may fill, one after the other
RIVALS = 2  # layouts with tp within a node that are timed, however many across nodes seem faster
SHORTEST = 512  # tokens of a sequence: no shorter one is proposed where nothing fits
TRIED = 20  # orders that a schedule which is made for its stages tries, about


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
    workload = replace(workload, cluster=merged(workload.cluster))
    if len(workload.cluster.groups) > 1 and workload.spec.experts is not None:
        raise UserError(
            f"{workload.spec.name} has experts, which are not searched over the unlike nodes of {workload.cluster}; "
            "give one group of nodes, or a --layout to time"
        )
    if len(workload.cluster.groups) > 1:
        return _search_mixed(workload, by, top, fixed)
    combinations = space(SearchQuery(workload, fixed))
    if not len(combinations):
        raise UserError(_no_layout(workload, fixed))
    fits = combinations.memory <= workload.first_device.accelerator.memory * USABLE_FRACTION * SLACK
    options = _options(workload, combinations, by, fixed)
    if not options:
        raise TooLarge(_too_large(workload, combinations, fixed))
    return Ranking(_ranked(options, by)[:top], len(combinations), int(fits.sum()))


def _search_mixed(workload: Workload, by: By, top: int, fixed: dict[str, Any]) -> Ranking:
    """Over unlike nodes; each option's cluster has its groups in the order in which its pipeline passes through."""
    combinations = mixed_space(SearchQuery(workload, fixed))
    if not len(combinations):
        raise UserError(_no_spanning(workload, fixed))
    options = mixed_options(workload, combinations, fixed, by)
    if by != "memory" and not any(option.fits for option in options):  # the leanest ones may, where the fastest do not
        options = [*options, *mixed_options(workload, combinations, fixed, "memory")]
    if fitting := [option for option in options if option.fits]:
        return Ranking(_ranked(fitting, by)[:top], len(combinations), int(combinations.fits.sum()))
    least = min(options, key=lambda option: option.footprint.total / option.device_memory)
    raise UserError(
        f"{workload.spec.name} does not fit on the mixed nodes of {workload.cluster}: its smallest layout there, "
        f"{least.layout}, needs {least.footprint.total / 1e9:.1f} GB on pipeline rank {least.footprint.rank}, "
        f"and a plan may fill {least.limit / 1e9:.1f} GB; give more nodes, or a smaller batch"
    )


FIXED = (
    *("tp", "pp", "cp", "dp", "cp_kind", "zero", "replicate", "sp"),
    *("schedule", "chunks", "microbatches", "recompute", "samples"),
)
OF_EXPERTS = ("ep", "dispatch")


def _check_fixed(workload: Workload, fixed: dict[str, Any]) -> None:
    """Refuse choices that cannot be fixed, and numbers that make no sense."""
    allowed = FIXED if workload.spec.experts is None else (*FIXED, *OF_EXPERTS)
    alien = [key for key in OF_EXPERTS if key in fixed and key not in allowed]
    problems = [f"{key}={fixed[key]} is of experts, and {workload.spec.name} has none; leave it out" for key in alien]
    unknown = [key for key in fixed if key not in (*allowed, *alien)]
    problems += [f"{key} cannot be fixed here; {either(allowed)} can" for key in unknown]
    counts = ("tp", "pp", "cp", "dp", "ep", "replicate", "microbatches", "samples")
    problems += filter(None, (misfit(key, fixed.get(key), within(1, SEQUENCES)) for key in counts))
    if fixed.get("zero", 0) not in (0, 1, 2, 3):
        problems.append(f"zero={fixed['zero']} is not a ZeRO stage; 0, 1, 2 or 3")
    if fixed.get("replicate", 1) != 1 and fixed.get("zero") != 3:
        problems.append(f"replicate={fixed['replicate']} copies the shards of zero=3; fix zero=3, too")
    if workload.cluster.world % max(1, fixed.get("replicate", 1)):
        close = sorted(divisors(workload.cluster.world), key=lambda n: abs(n - fixed["replicate"]))[:2]
        near = either([f"replicate={n}" for n in close])
        problems.append(
            f"replicate={fixed['replicate']} does not divide {workload.cluster.world} ranks; nearest: {near}"
        )
    if fixed.get("replicate", 1) > 1 and len(workload.cluster.groups) > 1:
        problems.append(f"replicate cannot be fixed over the unlike nodes of {workload.cluster}")
    if problems:
        raise UserError(problems)


def _options(workload: Workload, combinations: Space, by: By, fixed: dict[str, Any]) -> list[Option]:
    """Of the layouts that fit, timed: the fastest by the closed form, or those that need the least memory; few of a
    kind. Where none of the first fits, closed forms must leave more room, until only the leanest are left."""
    order = np.argsort(combinations.memory if by == "memory" else combinations.seconds, kind="stable")
    room, node = workload.first_device.accelerator.memory * USABLE_FRACTION, workload.cluster.groups[0].gpus
    copies = fixed.get("replicate", 1)
    order = order[combinations.of.dp[order] % copies == 0]
    timed = _Timed(workload, combinations, room, copies)

    def kind(at: int) -> tuple[Any, ...]:
        of, dealt = combinations.of, combinations.dealt
        # Of experts' messages closed forms know less well what joined pairs hide: others are timed beside them.
        spread = () if dealt is None else (dealt.ep[at], combinations.pipelines[of.pipeline[at]].schedule.joins)
        return of.tp[at], of.pp[at], of.cp[at], of.zero[at], combinations.shapes[of.shape[at]].recompute, *spread

    for share in TIGHTER:
        timed.checked = 0
        roomy = order[combinations.memory[order] <= room * share]
        if by == "throughput":
            # Among equals tp within a node is chosen, so some of those are timed, and first: patience may end.
            few_of_a_kind(roomy[combinations.of.tp[roomy] <= node].tolist(), lambda at: at, 1, RIVALS, timed.take)
        front = _leaner(combinations, roomy.tolist())[:SURVIVORS] if by == "pareto" else roomy.tolist()
        few_of_a_kind(front, kind, ALIKE, SURVIVORS, timed.take)
        if timed.options:
            return [*timed.options, *(timed.copied() if by == "throughput" and "replicate" not in fixed else ())]
    for at in _leanest(combinations):
        timed.take(at)
    return timed.options


def _leanest(combinations: Space) -> list[int]:
    return [int(at) for at in np.argsort(combinations.memory, kind="stable")[:SURVIVORS]]


@dataclass
class _Timed:
    """Layouts of a space that fit, with their exact times, until closed forms say that the rest cannot come near."""

    workload: Workload
    combinations: Space
    room: float
    copies: int  # of the shards of ZeRO 3, which closed forms do not know
    options: list[Option] = field(default_factory=list)
    checked: int = 0
    spent: int = 0
    seen: set[int] = field(default_factory=set)

    def take(self, at: int) -> bool:
        """Time it if it is worth it; False if it does not fit."""
        count, layout = len(self.options), self.combinations.layout(at)
        if at in self.seen or self.checked > CHECKED:
            return True
        if count >= ENOUGH and self.combinations.seconds[at] > HOPELESS * min(
            option.seconds for option in self.options
        ):
            return True
        size = (
            layout.stages * simulated_microbatches(layout) * (TRIED if layout.record.uses_stage_times else 1)
            if layout.pp > 1
            else 1
        )
        if count >= FEWEST and self.spent + size > PATIENCE:
            return True
        if self.copies > 1:
            layout = structs.replace(layout, replicate=self.copies)
        self.checked += 1
        if self.copies > 1 and layout.problems(self.workload.spec, seq=self.workload.seq, batch=self.workload.batch):
            return False
        workload = replace(self.workload, layout=layout)
        memory = footprint(workload)
        if memory.total > self.room:
            return False
        self.spent += size
        self.seen.add(at)
        self.options.append(Option(workload, estimate(workload), memory))
        return True

    def copied(self) -> list[Option]:
        """The fastest with ZeRO 3, in copies of fewer shards: closed forms do not know them, and each costs little."""
        sharded = [option for option in self.options if option.layout.zero == 3 and option.layout.pp == 1]
        options = []
        for option in sorted(sharded, key=lambda option: option.seconds)[:RIVALS]:
            for copies in divisors(option.layout.dp)[1:-1]:
                workload = replace(option.workload, layout=structs.replace(option.layout, replicate=copies))
                if workload.layout.problems(workload.spec, seq=workload.seq, batch=workload.batch):
                    continue
                if (memory := footprint(workload)).total <= self.room:
                    options.append(Option(workload, estimate(workload), memory))
        return options


def _leaner(combinations: Space, order: list[int]) -> list[int]:
    """Those that need less memory than all before them."""
    chosen: list[int] = []
    for at in order:
        if not chosen or combinations.memory[at] < 0.98 * combinations.memory[chosen[-1]]:
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
    most = {"microbatches": min(batch, LARGEST), "dp": known.get("ep", 1)}
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
    problems = [] if "pp" in fixed else spanning(workload.cluster, Layout(**degrees))
    nodes = math.gcd(*(group.nodes for group in workload.cluster.groups))
    why = (
        f"no layout of {workload.spec.name} spans the mixed nodes of {workload.cluster} with a batch of "
        f"{workload.batch}: each replica takes whole nodes of each kind, so dp divides {nodes}, and dp x tp x cp the "
        "GPUs of every group; give one group, or as many nodes of each kind"
    )
    return problems or ([*_no_layout(workload, fixed), why] if fixed else [why])


def _too_large(workload: Workload, combinations: Space, fixed: dict[str, Any]) -> str:
    """What the smallest layout needs, and the nearest thing that would fit."""
    smallest = min(
        (evaluate(replace(workload, layout=combinations.layout(at))) for at in _leanest(combinations)[:3]),
        key=lambda option: option.footprint.total,
    )
    need, have = smallest.footprint.total, smallest.limit
    parts = sorted(smallest.footprint.parts.items(), key=lambda part: -part[1])[:2]
    made = " and ".join(f"{size / 1e9:.1f} GB of {name}" for name, size in parts)
    sentence = (
        f"{workload.spec.name} fits nowhere on {workload.cluster} with {workload.batch} sequences of {workload.seq} "
        f"tokens: its smallest layout, {smallest.layout}, needs {need / 1e9:.1f} GB a GPU ({made}), and a plan "
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
        if seq < SHORTEST:
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
    """The leanest layout, if it fits exactly."""
    there = space(SearchQuery(workload, fixed))
    for at in _leanest(there) if len(there) else ():
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
# `auto` is made for the seconds of stages on unlike devices, of which a trainer knows nothing. So the schedule itself
# is written beside the job, and the job's layout names the file.


def schedule_text(option: Option) -> str:
    """The schedule as a file, where a name and a layout do not give it; else empty."""
    workload = option.workload
    if not (workload.groups and workload.layout.pp > 1 and workload.layout.record.uses_stage_times):
        return ""
    schedule = workload.schedule()
    return to_text(schedule, implied=rewired(schedule) == schedule)


def write_schedule(option: Option, path: str | Path) -> str:
    """Writes the schedule of an option that has one of its own, and returns the file's name; else an empty one."""
    if text := schedule_text(option):
        write(Path(path), text)
    return str(path) if text else ""


def trained(option: Option, path: str | Path) -> Layout:
    """The layout of a job that trains as planned; where it needs a schedule of its own, that is written to `path`."""
    named = write_schedule(option, path)
    return structs.replace(option.layout, schedule=named) if named else option.layout
