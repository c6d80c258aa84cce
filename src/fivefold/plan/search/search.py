"""The best layouts for a model on a cluster: all are weighed by closed forms, the survivors timed by their schedules.

plan = search(case)                         # its layout is not looked at
plan.options[0].case.layout, plan.options[0].estimate.seconds
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from msgspec import structs

from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.plan.cost.footprint import HEADROOM, Footprint, footprint
from fivefold.plan.cost.time import Case, Estimate, estimate, repeating
from fivefold.plan.search.mixed import mixed_cases
from fivefold.plan.search.space import Space, Wish, divisors, space
from fivefold.support.errors import UserError
from fivefold.support.formatting import either

By = Literal["throughput", "memory", "pareto"]
SURVIVORS = 24  # that are timed exactly
ALIKE = 2  # of one tp, pp, cp, ZeRO stage and recompute among them
ENOUGH, HOPELESS = 8, 1.06  # after so many, those whose closed form is so much longer are left
FEWEST, PATIENCE = 3, 50_000  # after so many, no more (stage, microbatch) pairs than this are simulated
SLACK = 1.05  # of the memory: closed forms may be off by so much


@dataclass(frozen=True)
class Option:
    """A layout, what it takes and what it needs."""

    case: Case
    estimate: Estimate
    footprint: Footprint

    @property
    def layout(self) -> Layout:
        return self.case.layout

    @property
    def seconds(self) -> float:
        return self.estimate.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.case.batch * self.case.seq / self.seconds

    @property
    def memory(self) -> int:
        """Bytes that the smallest device has."""
        return min(group.accelerator.memory for group in self.case.cluster.groups)

    @cached_property
    def fits(self) -> bool:
        return self.footprint.total <= HEADROOM * self.memory


@dataclass(frozen=True)
class Plan:
    options: tuple[Option, ...]  # the best first
    weighed: int  # combinations
    fitting: int  # of them

    @property
    def best(self) -> Option:
        return self.options[0]


def weigh(case: Case) -> Option:
    """One layout, exactly."""
    return Option(case, estimate(case), footprint(case))


def search(case: Case, by: By = "throughput", top: int = 10, **fixed: Any) -> Plan:
    """The best layouts. `fixed` choices (tp=8, zero=1, ...) are kept."""
    _check_fixed(case, fixed)
    if alike := case.cluster.alike():
        case = replace(case, cluster=alike)
    if len(case.cluster.groups) > 1:
        found = [weigh(one) for one in mixed_cases(case, fixed)]
        fitting = [option for option in found if option.fits]
        if found and not fitting:
            least = min(found, key=lambda option: option.footprint.total / option.memory)
            raise UserError(
                f"{case.spec.name} does not fit over the unlike nodes of {case.cluster}: its smallest layout there, "
                f"{least.layout}, needs {least.footprint.total / 1e9:.1f} GB on pipeline rank {least.footprint.rank}, "
                f"and a plan may fill {HEADROOM * least.memory / 1e9:.1f} GB; give more nodes, or a smaller batch"
            )
        if not fitting:
            raise UserError(
                f"no layout of {case.spec.name} over the unlike groups of {case.cluster} fits; give one group"
            )
        return Plan(_ranked(fitting, by)[:top], len(found), len(fitting))
    every = space(Wish(case, fixed))
    if not len(every):
        raise UserError(_no_layout(case, fixed))
    room = case.on.accelerator.memory * HEADROOM
    fits = every.memory <= room * SLACK
    chosen = _survivors(every, fits, by)
    options = _timed(case, every, chosen)
    fitting = [option for option in options if option.fits]
    if not fitting:
        raise UserError(_too_large(case, options))
    return Plan(_ranked(fitting, by)[:top], len(every), int(fits.sum()))


FIXED = ("tp", "pp", "cp", "dp", "cp_kind", "zero", "sp", "schedule", "chunks", "microbatches", "recompute", "samples")
MIXED = ("tp", "dp", "zero", "recompute")  # those that unlike nodes leave to choose


def _check_fixed(case: Case, fixed: dict[str, Any]) -> None:
    """What is fixed can be fixed, and its numbers make sense."""
    mixed = len(case.cluster.groups) > 1 and not case.cluster.alike()
    allowed = MIXED if mixed else FIXED
    found = [f"{key} cannot be fixed here; {either(allowed)} can" for key in fixed if key not in allowed]
    found += [
        f"{key}={fixed[key]} must be at least 1"
        for key in ("tp", "pp", "cp", "dp", "microbatches", "samples")
        if key in fixed and fixed[key] < 1
    ]
    if fixed.get("zero", 0) not in (0, 1, 2, 3):
        found.append(f"zero={fixed['zero']} is not a ZeRO stage; 0, 1, 2 or 3")
    if found:
        raise UserError(found)


def _survivors(every: Space, fits: np.ndarray, by: By) -> list[int]:
    """The fastest by the closed form, few of a kind; those that need the least memory where that is asked for."""
    order = np.argsort(every.memory if by == "memory" else every.seconds, kind="stable")
    chosen: list[int] = []
    seen: dict[tuple[Any, ...], int] = {}
    least = np.inf
    for at in order:
        if not fits[at]:
            continue
        if by == "pareto":
            if every.memory[at] >= 0.98 * least:
                continue
            least = every.memory[at]
        recompute = every.shapes[every.of.shape[at]].recompute
        kind = (every.of.tp[at], every.of.pp[at], every.of.cp[at], every.of.zero[at], recompute)
        if seen.get(kind, 0) < ALIKE or by == "pareto":
            seen[kind] = seen.get(kind, 0) + 1
            chosen.append(int(at))
        if len(chosen) == SURVIVORS:
            break
    if not chosen:  # nothing fits: the smallest ones, to say by how much
        chosen = [int(at) for at in np.argsort(every.memory)[:3]]
    return chosen


def _timed(case: Case, every: Space, chosen: list[int]) -> list[Option]:
    """Exactly, until the closed form says that the rest cannot come near the best."""
    options: list[Option] = []
    spent = 0
    for at in chosen:
        fitting = [option.seconds for option in options if option.fits]
        if len(fitting) >= ENOUGH and every.seconds[at] > HOPELESS * min(fitting):
            continue
        layout = every.layout(at)
        size = layout.stages * repeating(layout.pp, layout.microbatches) if layout.pp > 1 else 1
        if len(fitting) >= FEWEST and spent + size > PATIENCE:
            continue
        spent += size
        options.append(weigh(replace(case, layout=layout)))
    return options


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


def _no_layout(case: Case, fixed: dict[str, Any]) -> list[str]:
    """Why there is none at all: what was fixed, or the batch."""
    world, batch = case.cluster.world, case.batch
    degrees = {axis: fixed.get(axis, 1) for axis in ("dp", "tp", "pp", "cp")}
    used = math.prod(degrees.values())
    known = {key: value for key, value in fixed.items() if key in Layout.__struct_fields__}
    one = Layout(**(known | {"dp": fixed.get("dp", 1)}))
    found = [problem for problem in one.problems(case.spec, seq=case.seq) if "microbatches" not in problem]
    if world % used:
        near = [n for n in divisors(world) if n != used]
        found.append(
            f"{', '.join(f'{axis}={n}' for axis, n in degrees.items() if n > 1)} take {used} ranks, which does not "
            f"divide the {world} GPUs of {case.cluster}; nearest: {min(near, key=lambda n: abs(n - used))} ranks"
        )
    schedule = fixed.get("schedule")
    if schedule and schedule not in case.stack.schedules:
        found.append(f"schedule={schedule} is not searched with {case.stack.name}; {either(case.stack.schedules)} are")
    if "chunks" in fixed and "schedule" not in fixed:
        found.append(f"chunks={fixed['chunks']} needs a schedule; write schedule=interleaved,chunks={fixed['chunks']}")
    for name, value in (("microbatch", fixed.get("samples")), ("microbatches", fixed.get("microbatches"))):
        if value and batch % value:
            near = sorted(divisors(batch), key=lambda n: abs(n - value))[:2]
            found.append(f"{name}={value} does not divide the batch of {batch}; nearest: {name}={either(near)}")
    if found:
        return found
    least = -(-world // (case.spec.heads * (case.spec.layers + 2)))
    near = sorted((n for n in divisors(world) if n >= least), key=lambda dp: abs(batch - dp))[:2]
    wanted = ", ".join(f"{key}={value}" for key, value in fixed.items())
    return [
        f"no layout of {case.spec.name} on {case.cluster} takes a batch of {batch} sequences of {case.seq} tokens"
        + (f" with {wanted}" if wanted else "")
        + f": dp must divide it, and tp x pp x cp the rest of {world} GPUs; nearest: batch={either(near)}"
    ]


def _too_large(case: Case, options: list[Option]) -> str:
    """What the smallest layout needs, and how many such GPUs would do."""
    smallest = min(options, key=lambda option: option.footprint.total)
    need, have = smallest.footprint.total, HEADROOM * smallest.memory
    parts = sorted(smallest.footprint.parts.items(), key=lambda part: -part[1])[:2]
    made = " and ".join(f"{size / 1e9:.1f} GB of {name}" for name, size in parts)
    group = case.cluster.groups[0]
    sentence = (
        f"{case.spec.name} fits nowhere on {case.cluster} with {case.batch} sequences of {case.seq} tokens: its "
        f"smallest layout, {smallest.layout}, needs {need / 1e9:.1f} GB a GPU ({made}), and a plan may fill "
        f"{have / 1e9:.1f} GB"
    )
    gpus = max(8, group.gpus)
    for nodes in (1 << power for power in range(12)):
        cluster = Cluster((structs.replace(group, nodes=nodes, gpus=gpus),))
        if cluster.world <= case.cluster.world:
            continue
        bigger = replace(case, cluster=cluster, batch=max(case.batch, cluster.world))
        there = space(Wish(bigger, {}))
        if len(there) and there.memory.min() <= HEADROOM * group.accelerator.memory:
            return f"{sentence}; it fits on {cluster}"
    return sentence
