"""A layout's memory and time as two stacked bars, and its memory beside that of the layouts one change away."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fivefold.plan.cost.footprint import HEADROOM, Footprint, footprint, footprint_of
from fivefold.plan.mixed.groups import groups_of
from fivefold.plan.search.explain import CAUSES, Neighbour
from fivefold.plan.search.option import Option
from fivefold.report.chart import TOP, Bar, Plot, amount, legend, sheet, stacked
from fivefold.report.look import BLUE, GREEN, GREY, MARGIN, ORANGE, PURPLE, RED, REST, SKY, WIDTH, hexed, mix, rgb
from fivefold.report.scene import Scene, cut

GB = 1e9
STAGES, NEIGHBOURS = 8, 14  # rows, at most
LEFT, RIGHT = 226.0, 210.0  # room for what stands left and right of bars
ROW = 32.0
LONGEST = 1.5  # of the device: a longer bar is cut
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
        (f"the fullest moment ({needs.moment})", RED, needs.transient),
        ("buffers", SKY, needs.buffers),
        ("context and fragmentation", REST, needs.margin),
    ]
    return [(name, colour, max(0.0, size) / GB) for name, colour, size in parts]


def detailed(needs: Footprint) -> Parts:
    """Of a rank, in GB: activations by kind, and the fullest moment by its name."""
    kinds = [name for name in needs.parts if name.startswith("activations")]
    colours = {name: colour for name, colour, _ in components(needs)} | {needs.moment: RED}
    colours |= {name: hexed(mix(rgb(PURPLE), (255, 255, 255), 0.6 * at / len(kinds))) for at, name in enumerate(kinds)}
    return [(name, colours[name], size / GB) for name, size in needs.parts.items() if size > 0]


def overview(option: Option) -> Scene:
    """Memory against the device, and the step by cause."""
    case = option.case
    memory = detailed(option.footprint)
    time = [(CAUSES[cause], TIMES[cause], length) for cause, length in option.estimate.causes.items() if length > 0]
    unit, scale = ("s", 1.0) if option.seconds >= 1 else ("ms", 1e3)
    time = [(name, colour, length * scale) for name, colour, length in time]
    scene = sheet(f"{case.spec.name} on {case.cluster}", str(option.layout), 0.0, str(option.layout))
    device, wide = option.device_memory / GB, WIDTH - 2 * MARGIN
    high = 1.06 * max(device, option.footprint.total / GB)
    plot = Plot(scene, MARGIN, TOP + 34, wide, 52, (0, 0), (high, 1))
    plot.axis_x(f"GB of the fullest rank: {option.footprint.total / GB:.1f}")
    plot.limit_x(device, f"device {device:.0f}")
    plot.limit_x(HEADROOM * device, f"a plan's limit {HEADROOM * device:.0f}", "end")
    stacked(plot, [Bar("", memory)], "GB")
    y = legend(scene, plot.bottom + 78, _named(memory, "GB"))
    plot = Plot(scene, MARGIN, y + 22, wide, 52, (0, 0), (1.06 * sum(size for *_, size in time), 1))
    plot.axis_x(f"{'seconds' if unit == 's' else 'milliseconds'} of a step: {option.seconds * scale:.3g}")
    stacked(plot, [Bar("", time)], unit)
    scene.height = legend(scene, plot.bottom + 78, _named(time, unit)) + 12
    return scene


def _named(parts: Parts, unit: str) -> Iterable[tuple[str, str]]:
    return [(f"{name} {amount(size)} {unit}", colour) for name, colour, size in parts]


def memory(option: Option, neighbours: Sequence[Neighbour]) -> Scene:
    """The layout, its pipeline ranks, and the layouts one change away, against the device's limit."""
    case, device = option.case, option.device_memory / GB
    bars = [Bar("this layout", components(option.footprint), f"{option.footprint.total / GB:.1f} GB", bold=True)]
    bars += _stages(option)
    around = list(_around(option, neighbours))
    bars += around[:NEIGHBOURS]
    left_out = len(around) - NEIGHBOURS
    said = f"{case.spec.name} on {case.cluster}, {case.batch} sequences of {case.seq:,} tokens: {option.layout}"
    scene = sheet(f"Memory of a {'CPU rank' if case.on.accelerator.is_cpu else 'GPU'}, by component", said, 0.0)
    high = min(LONGEST * device, 1.06 * max(device, *(bar.total for bar in bars)))
    plot = Plot(scene, LEFT, TOP + 40, WIDTH - LEFT - RIGHT, ROW * len(bars), (0, 0), (high, 1))
    more = f"; {left_out} more changes are left out" if left_out > 0 else ""
    plot.axis_x(f"GB on the fullest pipeline rank{more}")
    plot.limit_x(device, f"device {device:.0f} GB")
    plot.limit_x(HEADROOM * device, f"a plan's limit {HEADROOM * device:.0f} GB", "end")
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
    needs = [footprint_of(option.case, rank) for rank in ranks]
    return [Bar(f"pipeline rank {one.rank}", components(one), f"{one.total / GB:.1f} GB") for one in needs]


def _around(option: Option, neighbours: Sequence[Neighbour]) -> Iterable[Bar]:
    """Those that run, the fastest first; then those that do not fit. What cannot run at all has no bar."""
    for one in sorted(neighbours, key=lambda one: (one.slower is None, one.slower or 0.0)):
        if "cannot run" in one.sentence:
            continue
        case = replace(option.case, layout=one.layout, groups=groups_of(option.case.cluster, one.layout))
        needs = footprint(case)
        time = "does not fit" if one.slower is None else f"{one.slower:+.1%} time"
        yield Bar(cut(one.change, 15, LEFT - 24), components(needs), f"{needs.total / GB:.1f} GB, {time}")
