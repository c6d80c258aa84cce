"""The colours: one hue per kind of action, one shade per chunk."""

from fivefold.schedule.actions import BACKWARD, FORWARD, INPUT_GRAD, STEP, WEIGHT_GRAD, Action, Kind
from fivefold.schedule.schedule import Schedule

HUES: dict[Kind, tuple[int, int, int]] = {
    FORWARD: (46, 103, 178),  # blue
    BACKWARD: (24, 128, 112),  # sea green
    INPUT_GRAD: (214, 118, 22),  # orange
    WEIGHT_GRAD: (130, 84, 168),  # violet
    STEP: (70, 76, 86),
}
NAMES: dict[Kind, str] = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT_GRAD: "input gradient",
    WEIGHT_GRAD: "weight gradient",
    STEP: "optimizer",
}
LIGHTEST = 0.68  # how far the last chunk's shade goes towards white


def shade(kind: Kind, chunk: int, chunks: int) -> tuple[int, int, int]:
    """The colour of an action: full for chunk 0, lighter chunk by chunk."""
    lighter = LIGHTEST * chunk / (chunks - 1) if chunks > 1 else 0.0
    return mix(HUES[kind], (255, 255, 255), lighter)


def colour_of(schedule: Schedule, action: Action) -> tuple[int, int, int]:
    placement = schedule.placement
    return shade(action.kind, placement.chunk[action.stage], placement.chunks)


def mix(one: tuple[int, int, int], other: tuple[int, int, int], share: float) -> tuple[int, int, int]:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(one, other, strict=True))
    return red, green, blue


def text_on(colour: tuple[int, int, int]) -> str:
    """White on dark colours, ink on light ones."""
    red, green, blue = colour
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 150 else "#1f2733"


def hexed(colour: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
