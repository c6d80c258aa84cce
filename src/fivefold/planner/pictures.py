"""A layout's memory and time as two stacked bars, and its memory next to the layouts one change away."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fivefold.cost.peak_memory import USABLE_FRACTION, Footprint, footprint, footprint_of
from fivefold.planner.explain import CAUSE_NAMES, AxisTraffic, Neighbour, traffic, traffic_rank
from fivefold.planner.mixed import groups_of
from fivefold.planner.option import Option
from fivefold.render.chart import TOP, Bar, Plot, amount, legend, sheet, stacked
from fivefold.render.scene import (
    BLUE,
    GREEN,
    GREY,
    LABEL,
    MARGIN,
    ORANGE,
    PURPLE,
    RED,
    REST,
    SKY,
    WIDTH,
    Scene,
    TextMark,
    cut,
    hexed,
    mix,
    rgb,
)

GB = 1e9
STAGES, NEIGHBOURS = 8, 14  # rows, at most
LEFT, RIGHT = 226.0, 210.0  # room for what stands left and right of bars
ROW_HEIGHT = 32.0
MAX_BAR = 1.5  # of the device: a longer bar is cut
Parts = list[tuple[str, str, float]]  # name, colour, size
# Compute is blue and green, communication warm, waiting grey.
TIMES = {
    "gemm": BLUE,
    "attention": SKY,
    "memory": GREEN,
    "recompute": hexed(mix(rgb(GREEN), (255, 255, 255), 0.5)),
    "host": REST,
    "tp": ORANGE,
    "cp": hexed(mix(rgb(ORANGE), (255, 255, 255), 0.5)),
    "zero": hexed(mix(rgb(RED), (255, 255, 255), 0.5)),
    "ep": PURPLE,
    "bubble": GREY,
    "dp": RED,
    "optimizer": hexed(mix(rgb(BLUE), (0, 0, 0), 0.5)),
    "other": REST,
}


def components(needs: Footprint) -> Parts:
    """Of a rank, in GB. All activations are one; what the fullest moment adds has its name behind it."""
    parts = [
        ("parameters", BLUE, needs.state.parameters),
        ("gradients", ORANGE, needs.gradients),
        ("optimizer", GREEN, needs.state.optimizer),
        ("activations", PURPLE, needs.activations.total),
        (f"the fullest moment ({needs.moment_name})", RED, needs.moment_bytes),
        ("buffers", SKY, needs.buffers),
        ("context and fragmentation", REST, needs.margin),
    ]
    return [(name, colour, max(0.0, size) / GB) for name, colour, size in parts]


def memory_parts(needs: Footprint) -> Parts:
    """A rank's memory in GB: activations by kind, and the fullest moment by its name."""
    kinds = [name for name in needs.parts if name.startswith("activations")]
    colours = {name: colour for name, colour, _ in components(needs)} | {needs.moment_name: RED}
    colours |= {name: hexed(mix(rgb(PURPLE), (255, 255, 255), 0.6 * at / len(kinds))) for at, name in enumerate(kinds)}
    return [(name, colours[name], size / GB) for name, size in needs.parts.items() if size > 0]


def overview(option: Option) -> Scene:
    """Memory against the device, and the step by cause."""
    workload = option.workload
    memory = memory_parts(option.footprint)
    time = [
        (CAUSE_NAMES[cause], TIMES[cause], length) for cause, length in option.estimate.causes.items() if length > 0
    ]
    unit, scale = ("s", 1.0) if option.seconds >= 1 else ("ms", 1e3)
    time = [(name, colour, length * scale) for name, colour, length in time]
    scene = sheet(f"{workload.spec.name} on {workload.cluster}", str(option.layout), 0.0, str(option.layout))
    device, wide = option.device_memory / GB, WIDTH - 2 * MARGIN
    high = 1.06 * max(device, option.footprint.total / GB)
    plot = Plot(scene, MARGIN, TOP + 34, wide, 52, (0, 0), (high, 1))
    plot.axis_x(f"GB of the fullest rank: {option.footprint.total / GB:.1f}")
    plot.limit_x(device, f"device {device:.0f}")
    plot.limit_x(USABLE_FRACTION * device, f"a plan's limit {USABLE_FRACTION * device:.0f}", "end")
    stacked(plot, [Bar("", memory)], "GB")
    y = legend(scene, plot.bottom + 78, _parts_text(memory, "GB"))
    plot = Plot(scene, MARGIN, y + 22, wide, 52, (0, 0), (1.06 * sum(size for *_, size in time), 1))
    plot.axis_x(f"{'seconds' if unit == 's' else 'milliseconds'} of a step: {option.seconds * scale:.3g}")
    stacked(plot, [Bar("", time)], unit)
    scene.height = legend(scene, plot.bottom + 78, _parts_text(time, unit)) + 12
    return scene


def _parts_text(parts: Parts, unit: str) -> Iterable[tuple[str, str]]:
    return [(f"{name} {amount(size)} {unit}", colour) for name, colour, size in parts]


def _describe(option: Option) -> str:
    workload = option.workload
    sizes = f"{workload.batch} sequences of {workload.seq:,} tokens"
    return f"{workload.spec.name} on {workload.cluster}, {sizes}: {option.layout}"


def memory(option: Option, neighbours: Sequence[Neighbour]) -> Scene:
    """The layout, its pipeline ranks, and the layouts one change away, against the device's limit."""
    workload, device = option.workload, option.device_memory / GB
    bars = [Bar("this layout", components(option.footprint), f"{option.footprint.total / GB:.1f} GB", bold=True)]
    bars += _stages(option)
    around = list(_neighbour_bars(option, neighbours))
    bars += around[:NEIGHBOURS]
    left_out = len(around) - NEIGHBOURS
    description = _describe(option)
    scene = sheet(
        f"Memory of a {'CPU rank' if workload.first_device.accelerator.is_cpu else 'GPU'}, by component",
        description,
        0.0,
    )
    high = min(MAX_BAR * device, 1.06 * max(device, *(bar.total for bar in bars)))
    plot = Plot(scene, LEFT, TOP + 40, WIDTH - LEFT - RIGHT, ROW_HEIGHT * len(bars), (0, 0), (high, 1))
    more = f"; {left_out} more changes are left out" if left_out > 0 else ""
    plot.axis_x(f"GB on the fullest pipeline rank{more}")
    plot.limit_x(device, f"device {device:.0f} GB")
    plot.limit_x(USABLE_FRACTION * device, f"a plan's limit {USABLE_FRACTION * device:.0f} GB", "end")
    stacked(plot, bars, "GB")
    names = [(name, colour) for name, colour, _ in components(option.footprint)]
    scene.height = legend(scene, plot.bottom + 76, names) + 8
    return scene


def _stages(option: Option) -> list[Bar]:
    """Pipeline ranks: all, or some of many, the first and the last among them."""
    pp = option.layout.pp
    if pp == 1:
        return []
    many = min(pp, STAGES)
    ranks = sorted({round(at * (pp - 1) / (many - 1)) for at in range(many)})
    needs = [footprint_of(option.workload, rank) for rank in ranks]
    return [Bar(f"pipeline rank {need.rank}", components(need), f"{need.total / GB:.1f} GB") for need in needs]


def fastest_first(neighbours: Sequence[Neighbour]) -> list[Neighbour]:
    """Those that run, the fastest first; then those that do not fit or cannot run."""
    return sorted(neighbours, key=lambda neighbour: (neighbour.slower is None, neighbour.slower or 0.0))


def _neighbour_bars(option: Option, neighbours: Sequence[Neighbour]) -> Iterable[Bar]:
    """A bar for each neighbour that can run."""
    for neighbour in fastest_first(neighbours):
        if "cannot run" in neighbour.sentence:
            continue
        workload = replace(
            option.workload, layout=neighbour.layout, groups=groups_of(option.workload.cluster, neighbour.layout)
        )
        needs = footprint(workload)
        time = "does not fit" if neighbour.slower is None else f"{neighbour.slower:+.1%} time"
        yield Bar(cut(neighbour.change, 15, LEFT - 24), components(needs), f"{needs.total / GB:.1f} GB, {time}")


# ---- traffic --------------------------------------------------------------------------------------------------------
# What a rank sends in a step: a bar for each axis and collective, by the links that its bytes cross.


TRAFFIC_LEFT, TRAFFIC_RIGHT, TRAFFIC_ROW = 220.0, 290.0, 40.0
SMALL_PAYLOAD = 4096  # bytes: a smaller payload has no row


def sent(option: Option) -> Scene:
    """Bytes on the wire, and the seconds they would take if nothing hid them."""
    card = option.workload.first_device.accelerator
    rows = [row for row in traffic(option) if row.payload > SMALL_PAYLOAD]
    unit, size = ("GB", 1e9) if any(row.inside + row.across >= 1e8 for row in rows) else ("MB", 1e6)
    description = _describe(option)
    scene = sheet("What a rank sends in a step", description, 300.0)
    if not rows:
        scene.shapes.append(TextMark(WIDTH / 2, 180, "nothing: there is one rank", LABEL, "middle"))
        return scene
    bars = [Bar(f"{row.axis}  {row.kind}", _parts(row, size), _traffic_text(row, size, unit)) for row in rows]
    high = 1.04 * max(bar.total for bar in bars)
    plot = Plot(
        scene, TRAFFIC_LEFT, TOP + 6, WIDTH - TRAFFIC_LEFT - TRAFFIC_RIGHT, TRAFFIC_ROW * len(bars), (0, 0), (high, 1)
    )
    plot.axis_x(f"{unit} on the wire per step, of pipeline rank {traffic_rank(option)}")
    stacked(plot, bars, unit)
    links = [(f"within a node: {card.inside.name}, {card.inside.bandwidth / 1e9:.3g} GB/s each way", BLUE)]
    if any(row.across for row in rows):
        links.append((f"between nodes: {card.across.name}, {card.across.bandwidth / 1e9:.3g} GB/s each way", ORANGE))
    y = legend(scene, plot.bottom + 76, links)
    note = f"Seconds: of the calls one after the other. The step takes {option.seconds:.3g} s: compute hides some."
    scene.shapes.append(TextMark(MARGIN, y + 4, note, LABEL, fill=GREY))
    scene.height = y + 34
    return scene


def _parts(row: AxisTraffic, size: float) -> list[tuple[str, str, float]]:
    return [("within a node", BLUE, row.inside / size), ("between nodes", ORANGE, row.across / size)]


def _traffic_text(row: AxisTraffic, size: float, unit: str) -> str:
    alone = row.seconds or 0.0
    time = f", {amount(alone)} s" if alone >= 0.1 else f", {amount(1e3 * alone)} ms" if alone else ""
    calls = "1 call" if row.calls == 1 else f"{row.calls:,} calls"
    return f"{amount((row.inside + row.across) / size)} {unit} in {calls}{time}"
