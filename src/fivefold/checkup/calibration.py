"""The fourth part: `fivefold calibrate`, and the cluster that it makes of these machines, beside the catalogue's."""

from contextlib import suppress
from typing import Any, NamedTuple

from msgspec import structs

from fivefold.checkup.course import Course, PartEnded, failure, figures_of
from fivefold.checkup.devices import Devices
from fivefold.checkup.report import PartReport
from fivefold.checkup.tasks import CALIBRATED
from fivefold.hardware.accelerators import ACCELERATORS, Accelerator, achieved, find_accelerator
from fivefold.hardware.cluster import Cluster, Group, read_accelerator
from fivefold.machines.judge import flops_text, rate_text
from fivefold.support.errors import UserError

_NOTABLE = 0.10  # relative: by how much a figure must differ from the catalogue's to be named
_THOROUGH_S = 100.0  # seconds in which a CPU is measured three times, as other work on it may spoil one
_SLOW_RANK = 1.10  # times as long as the fastest


class Constant(NamedTuple):
    """One of the planner's constants, here and in the catalogue."""

    what: str
    unit: str  # "FLOP/s", "bytes/s", "s"
    measured: float
    catalogue: float | None


def calibrate_machines(course: Course, part: PartReport) -> None:
    """Measure what the planner's formulas need. All ranks are measured at once, as they share memory and links."""
    course.catalogue = of_catalogue(course.devices, course.nodes, course.team.per_node)
    quick = course.devices.on_gpu or course.share < _THOROUGH_S
    ends = course.run(course.task(kind="calibrate", quick=quick))
    if ended := failure("calibrate", ends):
        raise ended
    figures = figures_of("calibrate", ends[0])
    file = course.base.folder(course.token) / CALIBRATED
    try:
        measured = Cluster.read(file) if course.team.size > 1 else Cluster((Group(1, 1, read_accelerator(str(file))),))
    except UserError as error:
        raise PartEnded("failed", f"calibrate wrote a file that cannot be read: {error}") from None
    course.cluster = uniform(measured, course.nodes, course.team.per_node, course.catalogue)
    part.data = {
        "figures": [figure._asdict() for figure in compared(course.cluster, course.catalogue)],
        "rows": figures.get("rows", []),
        "classes": figures.get("classes", []),
    }
    course.report.clusters["calibrated"] = course.cluster.to_dict()
    if course.catalogue:
        course.report.clusters["catalogue"] = course.catalogue.to_dict()
    else:
        part.says.append(f"the catalogue does not know {course.devices.name}; only measured figures are used")
    for figure in compared(course.cluster, course.catalogue):
        part.says.append(sentence_of(figure))
    for slow in part.data["classes"][1:]:
        if slow["slower"] > _SLOW_RANK:
            ranks = ", ".join(map(str, slow["ranks"]))
            part.says.append(
                f"a block takes {slow['slower']:.2f} times as long on rank {ranks}; the plan uses the slowest"
            )


def of_catalogue(devices: Devices, nodes: int, per_node: int) -> Cluster | None:
    """These machines by the catalogue; None if it does not know the device."""
    if not devices.on_gpu:
        return Cluster((Group(nodes, per_node, ACCELERATORS["CPU"]),))
    with suppress(UserError):
        return Cluster((Group(nodes, per_node, find_accelerator(devices.name)),))
    return None


def uniform(measured: Cluster, nodes: int, per_node: int, catalogue: Cluster | None) -> Cluster:
    """The measured cluster as equal nodes of its slowest rank's accelerator: a step waits for the slowest. Where there
    is one node of GPUs, the links to others are the catalogue's."""
    slowest = min((group.accelerator for group in measured.groups), key=_speed)
    if nodes == 1 and catalogue and not slowest.is_cpu:
        known = catalogue.groups[0].accelerator
        shares = structs.replace(
            slowest.achieved or achieved(slowest.name), across=(known.achieved or achieved(known.name)).across
        )
        slowest = structs.replace(slowest, across=known.across, achieved=shares)
    return Cluster((Group(nodes, per_node, slowest),))


def _speed(accelerator: Accelerator) -> float:
    own = accelerator.achieved or achieved(accelerator.name)
    return (accelerator.peak.bf16 or 0.0) * own.gemm


def compared(cluster: Cluster, catalogue: Cluster | None) -> list[Constant]:
    """The constants that decide most of a step's time, here and in the catalogue."""
    here = _constants(cluster)
    there = _constants(catalogue) if catalogue and not catalogue.groups[0].accelerator.is_cpu else {}
    return [Constant(what, unit, value, there.get((what, unit))) for (what, unit), value in here.items()]


def _constants(cluster: Cluster) -> dict[tuple[str, str], float]:
    [group] = cluster.groups
    device, precision = group.accelerator, "fp32" if group.accelerator.is_cpu else "bf16"
    own, rate = device.achieved or achieved(device.name), device.rate(precision)
    figures = {
        (f"matmuls, {precision}", "FLOP/s"): rate * own.gemm,
        (f"attention, {precision}", "FLOP/s"): rate * max(own.flash2, own.flash3),
        ("memory", "bytes/s"): device.memory_bandwidth * own.stream,
    }
    if group.gpus > 1:
        figures["links within a node", "bytes/s"] = device.inside.bandwidth * own.inside
        figures["their latency", "s"] = device.inside.latency
    if group.nodes > 1:
        figures["links between nodes", "bytes/s"] = device.across.bandwidth * own.across
        figures["latency between nodes", "s"] = device.across.latency
    return figures


def sentence_of(figure: Constant) -> str:
    """'matmuls, bf16: 612 TFLOP/s, 5% less than the catalogue's 644 TFLOP/s'."""
    text = f"{figure.what}: {amount_text(figure.measured, figure.unit)}"
    if figure.catalogue is None:
        return text
    change = figure.measured / figure.catalogue - 1
    if abs(change) < 0.005:
        return f"{text}, as in the catalogue"
    word = "more" if change > 0 else "less"
    return f"{text}, {abs(change):.0%} {word} than the catalogue's {amount_text(figure.catalogue, figure.unit)}"


def amount_text(value: float, unit: str) -> str:
    if unit == "s":
        return f"{1e6 * value:.1f} us"
    return flops_text(value) if unit == "FLOP/s" else rate_text(value)


def notable(figures: list[dict[str, Any]]) -> list[Constant]:
    """The figures that differ from the catalogue's by more than a tenth."""
    read = [Constant(**figure) for figure in figures]
    return [one for one in read if one.catalogue and abs(one.measured / one.catalogue - 1) > _NOTABLE]
