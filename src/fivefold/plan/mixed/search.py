"""The best layouts over unlike nodes: closed forms rank all of them, and the survivors' own schedules decide.

Layers are divided anew for each (split.py). `auto` has no closed form worth its name on unequal stages: it is made for
the best layouts of the other schedules, and competes with them.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs

from fivefold.layout.layout import Layout
from fivefold.plan.cost.time import Case, repeating
from fivefold.plan.mixed.space import MixedSpace
from fivefold.plan.mixed.split import divided, refined
from fivefold.plan.search.option import Option, evaluate
from fivefold.plan.search.space import few_of_a_kind
from fivefold.schedule.catalogue import RECORDS

SURVIVORS, ALIKE = 40, 2  # layouts that are timed exactly, and of a kind
PATIENCE = 40_000  # (stage, microbatch) pairs of all of them, some 10 microseconds each
REFINED, MOVES = 6, 40  # of the best, the layers of which are moved about; and how often each, within the same patience
MADE = 1024  # pairs of all schedules that are made for their stages: half a millisecond each
ROUNDS = 32  # microbatches for each stage, beyond which the ends of a step are too short to gain anything there
WORTH = 0.999  # of the step with another schedule: what gains less is the same
WEIGHED = tuple(record.name for record in RECORDS if record.weighs)


def mixed_options(case: Case, every: MixedSpace, fixed: dict[str, Any], by: str) -> list[Option]:
    """The survivors, timed exactly; where nothing fits, the smallest."""
    found: list[Option] = []
    spent = 0
    for at in _survivors(every, by):
        one = every.case(case, at)
        spent += _pairs(one.layout)
        if spent > PATIENCE and len(found) >= REFINED:
            break
        found.append(evaluate(divided(one)))
    if by == "memory":
        return found
    best = _best(found)[:REFINED]
    moved = [_moved(option) for option in best if not option.layout.record.weighs]
    rest = [option for option in found if option not in best or option.layout.record.weighs]
    made = [] if "schedule" in fixed else _made(_best([*moved, *rest]))
    return [*moved, *rest, *made]


def _pairs(layout: Layout) -> int:
    """What is simulated of a layout."""
    return layout.stages * repeating(layout)


def _moved(option: Option) -> Option:
    moves = min(MOVES, PATIENCE // (REFINED * _pairs(option.layout)))
    return evaluate(refined(option.case, moves)) if moves else option


def _best(options: list[Option]) -> list[Option]:
    return sorted(options, key=lambda option: (not option.fits, option.seconds))


def _made(options: list[Option]) -> list[Option]:
    """The best layouts with one stage a rank, with a schedule that is made for the seconds of these stages; those that
    it makes quicker."""
    found: list[Option] = []
    spent = 0
    for option in options:
        for name in (name for name in WEIGHED if name in option.case.stack.schedules):
            layout = structs.replace(option.layout, schedule=name)
            pairs = layout.pp * layout.microbatches
            if option.layout.chunks == 1 and can_be_made(layout) and spent + pairs <= MADE:
                spent += pairs
                one = evaluate(replace(option.case, layout=layout))
                found += [one] if one.seconds < option.seconds * WORTH else []
    return found


def can_be_made(layout: Layout) -> bool:
    """Whether a schedule for these very stages could gain anything, and does not take long to make."""
    return layout.pp * layout.microbatches <= MADE and layout.microbatches <= ROUNDS * layout.pp


def _survivors(every: MixedSpace, by: str) -> list[int]:
    """The fastest by the closed form, or those that fill their devices the least; few of a kind."""
    space = every.space
    order = np.argsort(space.memory if by == "memory" else space.seconds, kind="stable")
    of = space.of

    def kind(at: int) -> tuple[Any, ...]:
        recompute = space.shapes[of.shape[at]].recompute
        return of.tp[at], of.pp[at], of.cp[at], of.zero[at], of.pipeline[at], recompute

    chosen = few_of_a_kind(order[every.fits[order]].tolist(), kind, ALIKE, SURVIVORS)
    return chosen or [int(at) for at in np.argsort(space.memory)[:3]]
