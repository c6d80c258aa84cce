"""What an action waits for: of its own rank the action before it, and of any rank the one whose result it reads.

lanes = [list(simulation.shown(rank)) for rank in range(simulation.schedule.p)]
needs(simulation.schedule, lanes)[2][5]     # [(1, 4)]: what rank 2 shows sixth reads what rank 1 shows fifth
"""

from collections.abc import Sequence

from fivefold.schedule.actions import FORWARD, GRADIENT_MAKERS, WEIGHT_GRAD, Action
from fivefold.schedule.schedule import Schedule
from fivefold.schedule.simulate import Shown

Place = tuple[int, int]  # a rank, and a place among what is shown of it


def needs(schedule: Schedule, lanes: Sequence[Sequence[Shown]]) -> list[list[list[Place]]]:
    """By rank and place, where the results that it reads are made; a joined pair in one box reads two."""
    stages, m = schedule.placement.stages, schedule.m
    # By stage and microbatch where each output, and each gradient of an input, is made.
    outputs: list[list[Place | None]] = [[None] * m for _ in range(stages)]
    gradients: list[list[Place | None]] = [[None] * m for _ in range(stages)]
    for rank, lane in enumerate(lanes):
        for place, one in enumerate(lane):
            for action in (one.action, one.beside):
                if action is None:
                    continue
                if action.kind is FORWARD:
                    outputs[action.stage][action.microbatch] = rank, place
                elif action.kind in GRADIENT_MAKERS:
                    gradients[action.stage][action.microbatch] = rank, place

    def reads(action: Action) -> Place | None:
        """The input of a forward pass, the gradient of a backward pass's output, or what an I leaves for its W."""
        kind, stage, microbatch, _ = action
        if kind is FORWARD:
            return outputs[stage - 1][microbatch] if stage else None
        if kind in GRADIENT_MAKERS:
            return outputs[stage][microbatch] if stage == stages - 1 else gradients[stage + 1][microbatch]
        return gradients[stage][microbatch] if kind is WEIGHT_GRAD else None

    return [
        [[read for action in (one.action, one.beside) if action and (read := reads(action))] for one in lane]
        for lane in lanes
    ]
