"""The colours of actions: one hue per kind, one shade per chunk."""

from fivefold.render.scene import BLUE, GREEN, ORANGE, PURPLE, RGB, mix, rgb
from fivefold.schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, STEP, WEIGHT_GRAD, Action, Kind
from fivefold.schedules.schedule import Schedule

KIND_COLOURS: dict[Kind, RGB] = {
    FORWARD: rgb(BLUE),
    BACKWARD: rgb(GREEN),
    INPUT_GRAD: rgb(ORANGE),
    WEIGHT_GRAD: rgb(PURPLE),
    STEP: (90, 98, 110),
}
KIND_NAMES: dict[Kind, str] = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT_GRAD: "input gradient",
    WEIGHT_GRAD: "weight gradient",
    STEP: "optimizer",
}
LIGHTEST_SHADE = 0.68  # how far the last chunk's shade goes towards white


def shade(kind: Kind, chunk: int, chunks: int) -> RGB:
    """The colour of an action: full for chunk 0, lighter chunk by chunk."""
    lighter = LIGHTEST_SHADE * chunk / (chunks - 1) if chunks > 1 else 0.0
    return mix(KIND_COLOURS[kind], (255, 255, 255), lighter)


def colour_of(schedule: Schedule, action: Action) -> RGB:
    """The colour of an action of a schedule."""
    placement = schedule.placement
    return shade(action.kind, placement.chunk[action.stage], placement.chunks)
