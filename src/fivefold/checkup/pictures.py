"""The pictures of a checkup's page, narrow enough to be read on a phone: step times, and the two loss curves."""

from collections.abc import Sequence

from fivefold.checkup.report import CheckupReport, LayoutRun, LayoutStep
from fivefold.render.chart import Plot
from fivefold.render.scene import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    REST,
    Curve,
    Line,
    Mark,
    Rect,
    Scene,
    TextMark,
    cut,
)

WIDE, EDGE = 480.0, 12.0
_TYPE, _SMALL = 17.0, 15.0
_BAR, _GAP = 22.0, 6.0
_WAIT = "#8a5a00"  # exposed communication, within a bar


def steps_picture(runs: Sequence[LayoutRun]) -> Scene | None:
    """For each layout what was measured, and what was predicted with the calibrated and the catalogue's figures."""
    shown = [run for run in runs if run.measured]
    if not shown:
        return None
    longest = max(step.seconds for run in shown for _, step, _ in _bars(run))
    scene = Scene(WIDE, 0.0, "Seconds of a step: measured, and predicted")
    room = WIDE - 2 * EDGE - 96
    y = 16.0
    for run in shown:
        scene.shapes.append(TextMark(EDGE, y + 8, cut(run.layout, _TYPE, WIDE - 2 * EDGE), _TYPE, bold=True))
        y += 28
        for name, step, colour in _bars(run):
            length = room * step.seconds / longest
            scene.shapes.append(Rect(EDGE, y, max(2.0, length), _BAR, colour, f"{name}: {1e3 * step.seconds:.1f} ms"))
            if step.exposed:
                share = room * step.exposed / longest
                scene.shapes.append(
                    Rect(EDGE + length - share, y + _BAR - 6, share, 6, _WAIT, f"exposed: {1e3 * step.exposed:.1f} ms")
                )
            scene.shapes.append(TextMark(EDGE + length + 8, y + _BAR / 2, f"{1e3 * step.seconds:.4g} ms", _SMALL))
            y += _BAR + _GAP
        y += 14
    entries = (("measured", BLUE), ("calibrated", ORANGE), ("catalogue", REST), ("exposed", _WAIT))
    x = EDGE
    for name, colour in entries:
        scene.shapes += [Rect(x, y + 1, 14, 14, colour), TextMark(x + 20, y + 8, name, _SMALL, fill=GREY)]
        x += 20 + 9.2 * len(name) + 22
    scene.height = y + 30
    return scene


def _bars(run: LayoutRun) -> list[tuple[str, LayoutStep, str]]:
    pairs = (
        ("measured", run.measured, BLUE),
        ("calibrated", run.calibrated, ORANGE),
        ("catalogue", run.catalogue, REST),
    )
    # A catalogue's figures that are not meant for these devices would make all other bars too short to be read.
    most = 3 * run.measured.seconds if run.measured else 0.0
    return [
        (name, step, colour) for name, step, colour in pairs if step and (name != "catalogue" or step.seconds <= most)
    ]


def losses_picture(report: CheckupReport) -> Scene | None:
    """The loss of the undisturbed run as a line, and that of the run that lost a rank as marks on it."""
    part = report.part("lost-rank")
    whole = part.data.get("undisturbed") if part else None
    if not part or not whole or len(whole) < 2:
        return None
    lost: list[float] = part.data.get("losses", [])
    low, high = min([*whole, *lost]), max([*whole, *lost])
    space = 0.08 * (high - low) or 0.1
    scene = Scene(WIDE, 320.0, "Loss of the undisturbed run and of the one that lost a rank")
    plot = Plot(scene, 78, 40, WIDE - 78 - EDGE, 214, (1, low - space), (len(whole), high + space))
    for step in range(1, len(whole) + 1):
        x = plot.x(step)
        scene.shapes += [
            Line(x, plot.top, x, plot.bottom),
            TextMark(x, plot.bottom + 18, str(step), _SMALL, "middle", GREY),
        ]
    for value in (low, (low + high) / 2, high):
        y = plot.y(value)
        scene.shapes += [
            Line(plot.left, y, plot.left + plot.width, y),
            TextMark(plot.left - 8, y, f"{value:.3f}", _SMALL, "end", GREY),
        ]
    step = part.data["step"]
    x = plot.x(step)
    scene.shapes += [
        Line(x, plot.top - 6, x, plot.bottom, INK, 2.0, dashed=True),
        TextMark(x + 6, plot.top - 14, f"rank {part.data['rank']} is killed", _SMALL),
        Curve(tuple((plot.x(at), plot.y(loss)) for at, loss in enumerate(whole, 1)), BLUE, 3.0),
        *(Mark(plot.x(at), plot.y(loss), 6.5, ORANGE, 3) for at, loss in enumerate(lost, 1)),
        TextMark(plot.left + plot.width, 306, "step", _SMALL, "end", GREY),
        Line(EDGE, 306, EDGE + 26, 306, BLUE, 3.0),
        TextMark(EDGE + 34, 306, "undisturbed", _SMALL, fill=GREY),
        Mark(EDGE + 150, 306, 6.5, ORANGE, 3),
        TextMark(EDGE + 166, 306, "with the lost rank", _SMALL, fill=GREY),
    ]
    return scene
