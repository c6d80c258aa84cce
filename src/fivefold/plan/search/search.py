"""The best layouts of a model on a cluster: closed forms evaluate all of them, schedules time the survivors.

found = search(case)                        # the case's own layout is not read
found.best.layout, found.best.seconds
"""

import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec import structs

from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.plan.cost.footprint import HEADROOM
from fivefold.plan.cost.time import Case, repeating
from fivefold.plan.mixed.groups import merged, spanning
from fivefold.plan.mixed.search import mixed_options
from fivefold.plan.mixed.space import mixed_space
from fivefold.plan.search.closed import SLACK
from fivefold.plan.search.option import Option, evaluate
from fivefold.plan.search.space import Space, Wish, few_of_a_kind, space
from fivefold.schedule.catalogue import CATALOGUE, LARGEST
from fivefold.support.errors import UserError
from fivefold.support.formatting import either
from fivefold.support.numbers import divisors
from fivefold.support.ranges import SEQUENCES, misfit, within

By = Literal["throughput", "memory", "pareto"]
SURVIVORS = 24  # layouts that are timed exactly
ALIKE = 2  # survivors with the same tp, pp, cp, ZeRO stage and recompute
ENOUGH, HOPELESS = 8, 1.06  # after so many layouts that fit, one whose closed form is so much slower is skipped
FEWEST, PATIENCE = 3, 50_000  # after so many, no more (stage, microbatch) pairs than this are simulated
RIVALS = 2  # layouts with tp within a node that are timed, however many across nodes seem faster
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


def search(case: Case, by: By = "throughput", top: int = 10, **fixed: Any) -> Ranking:
    """The best layouts. `fixed` choices (tp=8, zero=1, ...) are kept."""
    _check_fixed(case, fixed)
    case = replace(case, cluster=merged(case.cluster))
    if len(case.cluster.groups) > 1 and case.spec.experts is not None:
        raise UserError(
            f"{case.spec.name} has experts, which are not searched over the unlike nodes of {case.cluster}; give one "
            "group of nodes, or a layout to 'fivefold simulate'"
        )
    if len(case.cluster.groups) > 1:
        return _search_mixed(case, by, top, fixed)
    every = space(Wish(case, fixed))
    if not len(every):
        raise UserError(_no_layout(case, fixed))
    fits = every.memory <= case.on.accelerator.memory * HEADROOM * SLACK
    options = _timed(case, every, _survivors(every, fits, by, case.cluster.groups[0].gpus))
    fitting = [option for option in options if option.fits]
    if not fitting:
        raise TooLarge(_too_large(case, options))
    return Ranking(_ranked(fitting, by)[:top], len(every), int(fits.sum()))


def _search_mixed(case: Case, by: By, top: int, fixed: dict[str, Any]) -> Ranking:
    """Over unlike nodes; each option's cluster has its groups in the order in which its pipeline passes through."""
    every = mixed_space(Wish(case, fixed))
    if not len(every):
        raise UserError(_no_spanning(case, fixed))
    found = mixed_options(case, every, fixed, by)
    if fitting := [option for option in found if option.fits]:
        return Ranking(_ranked(fitting, by)[:top], len(every), int(every.fits.sum()))
    least = min(found, key=lambda option: option.footprint.total / option.device_memory)
    raise UserError(
        f"{case.spec.name} does not fit on the mixed nodes of {case.cluster}: its smallest layout there, "
        f"{least.layout}, needs {least.footprint.total / 1e9:.1f} GB on pipeline rank {least.footprint.rank}, "
        f"and a plan may fill {least.limit / 1e9:.1f} GB; give more nodes, or a smaller batch"
    )


FIXED = ("tp", "pp", "cp", "dp", "cp_kind", "zero", "sp", "schedule", "chunks", "microbatches", "recompute", "samples")
OF_EXPERTS = ("ep", "dispatch")


def _check_fixed(case: Case, fixed: dict[str, Any]) -> None:
    """Refuse choices that cannot be fixed, and numbers that make no sense."""
    allowed = FIXED if case.spec.experts is None else (*FIXED, *OF_EXPERTS)
    alien = [key for key in OF_EXPERTS if key in fixed and key not in allowed]
    found = [f"{key}={fixed[key]} is of experts, and {case.spec.name} has none; leave it out" for key in alien]
    unknown = [key for key in fixed if key not in (*allowed, *alien)]
    found += [f"{key} cannot be fixed here; {either(allowed)} can" for key in unknown]
    counts = ("tp", "pp", "cp", "dp", "ep", "microbatches", "samples")
    found += filter(None, (misfit(key, fixed.get(key), within(1, SEQUENCES)) for key in counts))
    if fixed.get("zero", 0) not in (0, 1, 2, 3):
        found.append(f"zero={fixed['zero']} is not a ZeRO stage; 0, 1, 2 or 3")
    if found:
        raise UserError(found)


def _survivors(every: Space, fits: np.ndarray, by: By, node: int) -> list[int]:
    """The fastest by the closed form, or those that need the least memory; few of a kind."""
    order = np.argsort(every.memory if by == "memory" else every.seconds, kind="stable")
    fitting = order[fits[order]].tolist()

    def kind(at: int) -> tuple[Any, ...]:
        of, dealt = every.of, every.dealt
        # Of experts' messages closed forms know less well what joined pairs hide: others are timed beside them.
        spread = () if dealt is None else (dealt.ep[at], every.pipelines[of.pipeline[at]].schedule.joins)
        return of.tp[at], of.pp[at], of.cp[at], of.zero[at], every.shapes[of.shape[at]].recompute, *spread

    leaner = by == "pareto"
    chosen = _leaner(every, fitting)[:SURVIVORS] if leaner else few_of_a_kind(fitting, kind, ALIKE, SURVIVORS)
    # Among equals tp within a node is chosen, so some of those are timed, and first: patience may end.
    inside = order[fits[order] & (every.of.tp[order] <= node)][:RIVALS].tolist() if by == "throughput" else []
    chosen = [*inside, *(at for at in chosen if at not in inside)]
    # Nothing fits: the smallest ones show by how much.
    return chosen or [int(at) for at in np.argsort(every.memory)[:3]]


def _leaner(every: Space, order: list[int]) -> list[int]:
    """Those that need less memory than all before them."""
    chosen: list[int] = []
    for at in order:
        if not chosen or every.memory[at] < 0.98 * every.memory[chosen[-1]]:
            chosen.append(at)
    return chosen


def _timed(case: Case, every: Space, chosen: list[int]) -> list[Option]:
    """The exact times, until the closed form says that the rest cannot come near the best."""
    options: list[Option] = []
    spent = 0
    for at in chosen:
        fitting = [option.seconds for option in options if option.fits]
        if len(fitting) >= ENOUGH and every.seconds[at] > HOPELESS * min(fitting):
            continue
        layout = every.layout(at)
        size = layout.stages * repeating(layout) * (TRIED if layout.record.weighs else 1) if layout.pp > 1 else 1
        if len(fitting) >= FEWEST and spent + size > PATIENCE:
            continue
        spent += size
        options.append(evaluate(replace(case, layout=layout)))
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
    """Why there is no layout at all: because of what was fixed, or because of the batch."""
    world, batch = case.cluster.world, case.batch
    degrees = {axis: fixed.get(axis, 1) for axis in ("dp", "tp", "pp", "cp")}
    used = math.prod(degrees.values())
    known = {key: value for key, value in fixed.items() if key in Layout.__struct_fields__}
    # As many microbatches as there can be, so that a schedule complains only if it can never have enough; and as many
    # ranks as ep asks for.
    most = {"microbatches": min(batch, LARGEST), "dp": known.get("ep", 1)}
    found = Layout(**(most | known)).problems(case.spec, seq=case.seq)
    if world % used:
        near = [n for n in divisors(world) if n != used]
        found.append(
            f"{', '.join(f'{axis}={n}' for axis, n in degrees.items() if n > 1)} take {used} ranks, which does not "
            f"divide the {world} GPUs of {case.cluster}; nearest: {min(near, key=lambda n: abs(n - used))} ranks"
        )
    schedule = fixed.get("schedule")
    if schedule in CATALOGUE and schedule not in case.stack.schedules:
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


def _no_spanning(case: Case, fixed: dict[str, Any]) -> list[str]:
    """Why no layout spans the groups: because of what was fixed, or of the nodes."""
    degrees = {axis: fixed[axis] for axis in ("dp", "tp", "pp", "cp") if axis in fixed}
    found = [] if "pp" in fixed else spanning(case.cluster, Layout(**degrees))
    nodes = math.gcd(*(group.nodes for group in case.cluster.groups))
    why = (
        f"no layout of {case.spec.name} spans the mixed nodes of {case.cluster} with a batch of {case.batch}: each "
        f"replica takes whole nodes of each kind, so dp divides {nodes}, and dp x tp x cp the GPUs of every group; "
        "give one group, or as many nodes of each kind"
    )
    return found or ([*_no_layout(case, fixed), why] if fixed else [why])


def _too_large(case: Case, options: list[Option]) -> str:
    """What the smallest layout needs, and on how many such devices the model would fit."""
    smallest = min(options, key=lambda option: option.footprint.total)
    need, have = smallest.footprint.total, smallest.limit
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
