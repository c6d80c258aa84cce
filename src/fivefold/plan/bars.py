"""A layout's memory and time as two stacked bars."""

from collections.abc import Iterator

from fivefold.plan.search.explain import CAUSES
from fivefold.plan.search.option import Option
from fivefold.report.svg import COLOURS, document, line, rect, text

WIDTH, BAR, ROW, MARGIN = 640, 24, 16, 12
Parts = dict[str, float]


def bars(option: Option) -> str:
    memory = {name: size / 1e9 for name, size in option.footprint.parts.items() if size > 0}
    time = {CAUSES[cause]: length for cause, length in option.estimate.causes.items() if length > 0}
    limits = {"limit of a plan": option.limit / 1e9, "device": option.device_memory / 1e9}
    top = MARGIN + ROW + 4
    # Under each bar is a legend of two columns.
    below, end = (2 * ROW + BAR + ROW * -(-len(parts) // 2) + MARGIN for parts in (memory, time))
    shapes = [
        text(MARGIN, MARGIN + ROW / 2, str(option.layout), font_weight="bold"),
        *_bar(top, f"memory of the fullest rank: {sum(memory.values()):.1f} GB", memory, "GB", limits),
        *_bar(top + below, f"time of a step: {option.seconds:.3g} s", time, "s", {}),
    ]
    return document(WIDTH, top + below + end, shapes, font_size=11, title=str(option.layout))


def _bar(y: float, title: str, parts: Parts, unit: str, limits: Parts) -> Iterator[str]:
    """A stacked bar, marks at the limits, and a legend of two columns below."""
    total = sum(parts.values())
    scale = (WIDTH - 2 * MARGIN) / max([total, *limits.values()])
    yield text(MARGIN, y + ROW - 4, title)
    x, y = float(MARGIN), y + ROW
    for number, (name, size) in enumerate(parts.items()):
        colour, label = COLOURS[number % len(COLOURS)], f"{name}: {size:.3g} {unit} ({size / total:.0%})"
        yield rect(x, y, size * scale, BAR, label, fill=colour)
        x += size * scale
        column, row = divmod(number, -(-len(parts) // 2))
        left, middle = MARGIN + column * WIDTH / 2, y + BAR + ROW * (row + 1)
        yield rect(left, middle - 9, 10, 10, fill=colour)
        yield text(left + 16, middle, label)
    for name, size in limits.items():
        at = MARGIN + size * scale
        yield line(at, y - 4, at, y + BAR + 4, stroke="black", stroke_width=2)
        yield text(at, y - 6, name, text_anchor="end")
