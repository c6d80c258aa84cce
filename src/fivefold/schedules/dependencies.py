"""The actions whose results an action reads. (It also waits for the action before it on its own rank.)

lanes = [list(simulation.drawn(rank)) for rank in range(simulation.schedule.p)]
dependencies(simulation.schedule, lanes)[2][5]  # [(1, 4)]: span 5 of rank 2 reads what span 4 of rank 1 makes
"""

from collections.abc import Sequence

from fivefold.schedules.actions import FORWARD, GRADIENT_MAKERS, WEIGHT_GRAD, Action
from fivefold.schedules.schedule import Schedule
from fivefold.schedules.simulate import DrawnSpan

Place = tuple[int, int]  # a rank, and the index of one of its spans


def dependencies(schedule: Schedule, lanes: Sequence[Sequence[DrawnSpan]]) -> list[list[list[Place]]]:
    """By rank and span, the spans whose results it reads; a joined pair in one span reads two."""
    stages, m = schedule.placement.stages, schedule.m
    # By stage and microbatch, the span that makes the output, and the one that makes the gradient of the input.
    outputs: list[list[Place | None]] = [[None] * m for _ in range(stages)]
    gradients: list[list[Place | None]] = [[None] * m for _ in range(stages)]
    for rank, lane in enumerate(lanes):
        for place, span in enumerate(lane):
            for action in (span.action, span.beside):
                if action is None:
                    continue
                if action.kind is FORWARD:
                    outputs[action.stage][action.microbatch] = rank, place
                elif action.kind in GRADIENT_MAKERS:
                    gradients[action.stage][action.microbatch] = rank, place

    def reads(action: Action) -> Place | None:
        """The span that makes a forward's input, a backward's output gradient, or what an I leaves for its W."""
        kind, stage, microbatch, _ = action
        if kind is FORWARD:
            return outputs[stage - 1][microbatch] if stage else None
        if kind in GRADIENT_MAKERS:
            return outputs[stage][microbatch] if stage == stages - 1 else gradients[stage + 1][microbatch]
        return gradients[stage][microbatch] if kind is WEIGHT_GRAD else None

    return [
        [[read for action in (span.action, span.beside) if action and (read := reads(action))] for span in lane]
        for lane in lanes
    ]
