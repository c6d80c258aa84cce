"""What a rank sends in a step: a bar for each axis and collective, by the links that its bytes cross."""

from fivefold.plan.search.explain import AxisTraffic, sender, traffic
from fivefold.plan.search.option import Option
from fivefold.report.chart import TOP, Bar, Plot, amount, legend, sheet, stacked
from fivefold.report.look import BLUE, GREY, LABEL, MARGIN, ORANGE, WIDTH
from fivefold.report.scene import Scene, Text

LEFT, RIGHT, ROW = 220.0, 290.0, 40.0
SMALL = 4096  # bytes: a smaller payload has no row


def sent(option: Option) -> Scene:
    """Bytes on the wire, and the seconds they would take if nothing hid them."""
    case, card = option.case, option.case.on.accelerator
    rows = [row for row in traffic(option) if row.payload > SMALL]
    unit, size = ("GB", 1e9) if any(row.inside + row.across >= 1e8 for row in rows) else ("MB", 1e6)
    said = f"{case.spec.name} on {case.cluster}, {case.batch} sequences of {case.seq:,} tokens: {option.layout}"
    scene = sheet("What a rank sends in a step", said, 300.0)
    if not rows:
        scene.shapes.append(Text(WIDTH / 2, 180, "nothing: there is one rank", LABEL, "middle"))
        return scene
    bars = [Bar(f"{row.axis}  {row.kind}", _parts(row, size), _said(row, size, unit)) for row in rows]
    high = 1.04 * max(bar.total for bar in bars)
    plot = Plot(scene, LEFT, TOP + 6, WIDTH - LEFT - RIGHT, ROW * len(bars), (0, 0), (high, 1))
    plot.axis_x(f"{unit} on the wire per step, of pipeline rank {sender(option)}")
    stacked(plot, bars, unit)
    links = [(f"within a node: {card.inside.name}, {card.inside.bandwidth / 1e9:.3g} GB/s each way", BLUE)]
    if any(row.across for row in rows):
        links.append((f"between nodes: {card.across.name}, {card.across.bandwidth / 1e9:.3g} GB/s each way", ORANGE))
    y = legend(scene, plot.bottom + 76, links)
    note = f"Seconds: of the calls one after the other. The step takes {option.seconds:.3g} s: compute hides some."
    scene.shapes.append(Text(MARGIN, y + 4, note, LABEL, fill=GREY))
    scene.height = y + 34
    return scene


def _parts(row: AxisTraffic, size: float) -> list[tuple[str, str, float]]:
    return [("within a node", BLUE, row.inside / size), ("between nodes", ORANGE, row.across / size)]


def _said(row: AxisTraffic, size: float, unit: str) -> str:
    alone = row.seconds or 0.0
    time = f", {amount(alone)} s" if alone >= 0.1 else f", {amount(1e3 * alone)} ms" if alone else ""
    calls = "1 call" if row.calls == 1 else f"{row.calls:,} calls"
    return f"{amount((row.inside + row.across) / size)} {unit} in {calls}{time}"
