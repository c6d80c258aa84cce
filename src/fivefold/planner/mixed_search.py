"""The best layouts over mixed nodes: closed forms rank all of them, and the survivors' own schedules decide.

Each survivor's layers are divided anew (`mixed.py`). `auto` has no useful closed form on unequal stages: it is built
for the best layouts of the other schedules, and competes with them.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs

from fivefold.cost.step import Workload, simulated_microbatches
from fivefold.layout.layout import Layout
from fivefold.planner.mixed import divide_layers, refine_split
from fivefold.planner.mixed_space import MixedSpace
from fivefold.planner.option import Option, evaluate
from fivefold.planner.space import few_of_a_kind
from fivefold.schedules.registry import RECORDS

MIXED_SURVIVORS, MIXED_PER_KIND = 40, 2  # layouts that are timed exactly, in all and of one kind
MIXED_BUDGET = 40_000  # (stage, microbatch) pairs to simulate for all of them, some 10 microseconds each
MIXED_REFINED = 6  # of the best, layers are moved between stages
MAX_MOVES = 40  # for each of these, within the same budget
MAX_BUILT_PAIRS = 1024  # pairs of all schedules that are built for their stages: half a millisecond each
MAX_ROUNDS = 32  # microbatches per stage, beyond which the ends of a step are too short to gain anything there
NOTICEABLE = 0.999  # of the step with another schedule: a smaller gain counts as none
BUILT_FOR_STAGES = tuple(record.name for record in RECORDS if record.uses_stage_times)


def mixed_options(workload: Workload, candidates: MixedSpace, fixed: dict[str, Any], by: str) -> list[Option]:
    """The survivors, timed exactly; if nothing fits, the smallest."""
    options: list[Option] = []
    spent = 0
    for at in _survivors(candidates, by):
        candidate = candidates.workload(workload, at)
        spent += _simulated_pairs(candidate.layout)
        if spent > MIXED_BUDGET and len(options) >= MIXED_REFINED:
            break
        options.append(evaluate(divide_layers(candidate)))
    if by == "memory":
        return options
    best = _fitting_first(options)[:MIXED_REFINED]
    moved = [_with_layers_moved(option) for option in best if not option.layout.record.uses_stage_times]
    rest = [option for option in options if option not in best or option.layout.record.uses_stage_times]
    built = [] if "schedule" in fixed else _with_built_schedules(_fitting_first([*moved, *rest]))
    return [*moved, *rest, *built]


def _simulated_pairs(layout: Layout) -> int:
    """How many (stage, microbatch) pairs of a layout are simulated."""
    return layout.stages * simulated_microbatches(layout)


def _with_layers_moved(option: Option) -> Option:
    moves = min(MAX_MOVES, MIXED_BUDGET // (MIXED_REFINED * _simulated_pairs(option.layout)))
    return evaluate(refine_split(option.workload, moves)) if moves else option


def _fitting_first(options: list[Option]) -> list[Option]:
    return sorted(options, key=lambda option: (not option.fits, option.seconds))


def _with_built_schedules(options: list[Option]) -> list[Option]:
    """The layouts with one stage per rank that a schedule built for the seconds of their stages makes faster."""
    quicker: list[Option] = []
    spent = 0
    for option in options:
        for name in (name for name in BUILT_FOR_STAGES if name in option.workload.software.schedules):
            layout = structs.replace(option.layout, schedule=name)
            pairs = layout.pp * layout.microbatches
            if option.layout.chunks == 1 and can_be_built(layout) and spent + pairs <= MAX_BUILT_PAIRS:
                spent += pairs
                candidate = evaluate(replace(option.workload, layout=layout))
                quicker += [candidate] if candidate.seconds < option.seconds * NOTICEABLE else []
    return quicker


def can_be_built(layout: Layout) -> bool:
    """Whether a schedule built for these very stages could gain anything, and does not take long to build."""
    return layout.pp * layout.microbatches <= MAX_BUILT_PAIRS and layout.microbatches <= MAX_ROUNDS * layout.pp


def _survivors(candidates: MixedSpace, by: str) -> list[int]:
    """The fastest by the closed form, or those that need the smallest share of their devices; few of a kind."""
    space = candidates.space
    order = np.argsort(space.memory if by == "memory" else space.seconds, kind="stable")
    of = space.of

    def kind(at: int) -> tuple[Any, ...]:
        recompute = space.shapes[of.shape[at]].recompute
        return of.tp[at], of.pp[at], of.cp[at], of.zero[at], of.pipeline[at], recompute

    chosen = few_of_a_kind(order[candidates.fits[order]].tolist(), kind, MIXED_PER_KIND, MIXED_SURVIVORS)
    return chosen or [int(at) for at in np.argsort(space.memory)[:3]]
