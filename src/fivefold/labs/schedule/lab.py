"""A pipeline schedule of one's own."""

from pathlib import Path

from fivefold.labs.lab import FileVerdict, Lab
from fivefold.schedules.costs import Durations
from fivefold.schedules.result import Query
from fivefold.schedules.simulate import Simulation
from fivefold.schedules.text import load
from fivefold.support.errors import UserError

RANKS, MICROBATCHES = 4, 8
_OTHERS = ("1f1b", "zb-h1")
_SHOWN = 3  # problems of a file that is no schedule: one mistake makes many
_HEADS = ("schedule", ">makespan", ">bubble", ">activations held")


def judge(lab: Lab, file: Path) -> FileVerdict:
    """Against 1F1B, whose memory it may have, and the zero-bubble schedule of the same memory."""
    query = Query(_OTHERS, RANKS, MICROBATCHES, times=Durations.parse("f=1,i=1,w=1"))
    others = {name: query.simulate(name) for name in _OTHERS}
    rows = [_row(name, found) for name, found in others.items()]
    try:
        schedule = load(file)
        if (schedule.p, schedule.m) != (RANKS, MICROBATCHES):
            wanted = f"{RANKS} ranks and {MICROBATCHES} microbatches are asked for"
            return FileVerdict(
                lab.name, lab.title, _HEADS, rows, [f"this is for {schedule.p} and {schedule.m}: {wanted}"]
            )
        found = query.simulate(schedule)
    except UserError as error:
        shown, more = error.problems[:_SHOWN], len(error.problems) - _SHOWN
        return FileVerdict(lab.name, lab.title, _HEADS, rows, [*shown, *([f"and {more} more"] if more > 0 else [])])
    return FileVerdict(lab.name, lab.title, _HEADS, [_row("yours", found), *rows], _problems(found, others["1f1b"]))


def _row(name: str, found: Simulation) -> list[str]:
    peak = max(found.peak_activations)
    return [name, f"{found.makespan:g}", f"{found.bubble_makespan:.1%}", f"{peak:g}"]


def _problems(found: Simulation, known: Simulation) -> list[str]:
    problems = []
    if found.makespan >= known.makespan:
        problems.append(
            f"it takes {found.makespan:g}, and 1F1B {known.makespan:g}: find work for the ranks that wait; nobody "
            "needs the gradient of a weight (W) before the step's end"
        )
    if max(found.peak_activations) > max(known.peak_activations):
        rank = max(range(RANKS), key=lambda one: found.peak_activations[one])
        problems.append(
            f"rank {rank} holds {found.peak_activations[rank]:g} activations, and {max(known.peak_activations):g} are "
            "allowed: begin fewer microbatches before the first is through"
        )
    return problems


LAB = Lab(
    "schedule",
    "A pipeline schedule of your own",
    "where bubbles come from, and what fills them without more memory",
    suffix=".txt",
    read=judge,
)
