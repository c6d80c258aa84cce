"""Which layouts `fivefold bench scaling` takes from one rank to many, and what the simulator says of them."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from fivefold.bench.comparison import OURS, Contest, Result, layout_of
from fivefold.hardware.accelerators import Accelerator, Link, find_accelerator
from fivefold.hardware.cluster import Cluster, Group
from fivefold.job.config import Job
from fivefold.layout.layout import Layout
from fivefold.plan.cost.stack import ON_CPUS
from fivefold.plan.cost.time import Case, estimate
from fivefold.support.errors import Note, UserError
from fivefold.support.formatting import did_you_mean

AXES = ("dp", "tp", "pp", "cp", "3d")


def layouts(job: Job, most: int, wanted: list[str], least: int = 2) -> list[str]:
    """Powers of two of each axis alone, then of three at once, as far as the model and the batch allow.

    A rank's share of the batch is one microbatch; where there are stages, each of its sequences is one.
    """
    if unknown := [one for one in wanted if one not in AXES]:
        raise UserError(f"--only {unknown[0]} is not a choice; {did_you_mean(unknown[0], list(AXES))}")
    sizes = [size for exponent in range(1, most.bit_length()) if least <= (size := 2**exponent) <= most]
    found = [f"{axis}={size}" for axis in AXES[:-1] if axis in wanted for size in sizes]
    if "3d" in wanted:
        found += [f"dp={size // 4},tp=2,pp=2" for size in sizes if size >= 8]
        found += [f"dp=2,tp=2,pp={size // 4}" for size in sizes if size >= 16]
    cut = [_cut(job, text) for text in found]
    problems = {text: layout_of(job, text).problems(job.model, seq=job.data.seq, batch=job.train.batch) for text in cut}
    for text, wrong in problems.items():
        if wrong:
            warnings.warn(Note(f"{text} is left out: {wrong[0]}"), stacklevel=2)
    fitting = [text for text, wrong in problems.items() if not wrong]
    if not fitting:
        ranks = f"{least} to {most}" if least > 2 else f"up to {most}"
        raise UserError(f"no layout of {', '.join(wanted)} with {ranks} ranks fits this model and batch")
    return fitting


def _cut(job: Job, text: str) -> str:
    layout = Layout.parse(text)
    return text if layout.pp == 1 else f"{text},microbatches={max(1, job.train.batch // layout.dp)}"


def contests(job: Job, chosen: Sequence[str], rounds: int) -> list[Contest]:
    """One for each number of ranks: all layouts of it, in turns with one process."""
    by_world: dict[int, list[str]] = {}
    for text in chosen:
        by_world.setdefault(layout_of(job, text).world, []).append(f"{OURS} {text}")
    return [Contest(job, (OURS, *systems), rounds) for _, systems in sorted(by_world.items())]


def predicted(job: Job, text: str, core: Accelerator) -> float:
    """The simulator's seconds of a step; `text` is a layout, or `OURS` for one process."""
    layout = layout_of(job, text)
    cluster, stack = Cluster((Group(1, layout.world, core),)), ON_CPUS.computing_in("fp32")
    return estimate(Case(job.model, layout, cluster, job.data.seq, job.train.batch, "fp32", stack)).seconds


def limit(job: Job, system: str) -> float:
    """What it could take of one process's step if nothing that is sent took time: what ranks repeat, and bubbles."""
    core, at_once = find_accelerator("CPU"), Link(1e30, 0.0, "at once")
    core = structs.replace(core, inside=at_once, across=at_once)
    return predicted(job, system, core) / predicted(job, OURS, core)


def rows(
    found: Sequence[tuple[Contest, Result]], chosen: Sequence[str], cores: Mapping[int, Accelerator]
) -> list[dict[str, Any]]:
    """A line for each layout that was measured, in the order that they were chosen in; `cores` by ranks at work."""
    by_layout = {system: (contest, result) for contest, result in found for system in contest.systems[1:]}
    alone = predicted(found[0][0].job, OURS, cores[1]) if cores else None
    lines = []
    for text in chosen:
        system = f"{OURS} {text}"
        if system not in by_layout:
            continue
        contest, result = by_layout[system]
        ratio = result.ratio(system, OURS)
        seconds = predicted(contest.job, text, cores[contest.world]) if cores else None
        lines.append(
            {
                "layout": text,
                "ranks": contest.world,
                "one_process_seconds": result.median(OURS),
                "seconds": result.median(system),
                "speed_up": 1 / ratio,
                "efficiency": 1 / ratio / contest.world,
                "predicted_seconds": seconds,
                "predicted_one_process_seconds": alone,
                "predicted_speed_up": alone / seconds if alone and seconds else None,
            }
        )
    return lines
