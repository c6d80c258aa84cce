"""How often the job of a plan fails, and what failures and saves cost it, with where each figure comes from."""

from dataclasses import dataclass
from typing import NamedTuple

from fivefold.plan.cost.memory import checkpoint_bytes
from fivefold.plan.goodput import figures
from fivefold.plan.goodput.expected import Failures
from fivefold.plan.search.option import Option
from fivefold.support.errors import UserError
from fivefold.support.ranges import SECONDS, misfit, within

GB = 1e9
GIVEN = "as given"


@dataclass(frozen=True)
class Costs:
    """What the user knows better than the published figures; None: not given."""

    mtbf: float | None = None  # hours between failures of one GPU
    detect: float | None = None  # seconds
    restart: float | None = None  # seconds
    storage: float | None = None  # GB a second, of all nodes together
    save: float | None = None  # seconds that a save blocks the steps

    def check(self) -> None:
        hours, rate = within(1e-3, 1e12), within(1e-6, 1e9)
        ranges = {"mtbf": hours, "storage": rate} | dict.fromkeys(("detect", "restart", "save"), within(0, SECONDS))
        if wrong := [said for name, most in ranges.items() if (said := misfit(name, getattr(self, name), most))]:
            raise UserError(wrong)


PUBLISHED = Costs()


class Input(NamedTuple):
    """One of the figures that goodput rests on."""

    name: str
    value: float
    unit: str
    source: str


def saved_bytes(option: Option) -> int:
    """Of one checkpoint, all ranks together."""
    return checkpoint_bytes(option.case.spec, "float64" if option.case.precision == "fp64" else "bfloat16")


def failures_of(option: Option, costs: Costs = PUBLISHED, timeout: float = figures.TIMEOUT) -> Failures:
    """Those of a plan whose ranks wait `timeout` seconds for one that hangs; the sources are in `inputs`."""
    world, size, stored = option.layout.world, saved_bytes(option), _stored(option, costs)
    share = size / world
    if option.case.on.accelerator.is_cpu:
        blocked = share / figures.CPU_COPIED
    else:  # the copy runs beside the next step, and what is longer than that step blocks
        blocked = figures.BLOCKED + max(0.0, share / figures.COPIED - option.seconds)
    return Failures(
        between=(figures.USUAL.hours if costs.mtbf is None else costs.mtbf) * figures.HOUR / world,
        blocked=blocked if costs.save is None else costs.save,
        writing=size / stored,
        detect=figures.HANGS * timeout if costs.detect is None else costs.detect,
        restart=figures.RESTART if costs.restart is None else costs.restart,
        reload=figures.READS * size / stored,
    )


def inputs(option: Option, costs: Costs, it: Failures) -> list[Input]:
    """What `failures_of` has found, in the order in which it happens."""
    usual, world, on_cpu = figures.USUAL, option.layout.world, option.case.on.accelerator.is_cpu
    blocked = figures.CPU_SOURCE if on_cpu else figures.BLOCKED_SOURCE
    of_gpu = f"{usual.name} ({usual.source})" + ("; nobody has counted CPUs'" if on_cpu else "")
    size, rate = saved_bytes(option) / GB, _stored(option, costs) / GB

    def source(given: float | None, otherwise: str) -> str:
        return otherwise if given is None else GIVEN

    return [
        Input("a GPU fails once in", it.between * world / figures.HOUR, "h", source(costs.mtbf, of_gpu)),
        Input("the job", it.between / figures.HOUR, "h", f"that, over {world:,} ranks"),
        Input("to notice it", it.detect, "s", source(costs.detect, figures.HANGS_SOURCE)),
        Input("to start again", it.restart, "s", source(costs.restart, figures.RESTART_SOURCE)),
        Input("storage", rate, "GB/s", source(costs.storage, figures.STORES_SOURCE)),
        Input("to load", it.reload, "s", f"{size:,.4g} GB, read twice: once to be hashed"),
        Input("to write", it.writing, "s", "the same once, beside the steps; then the checkpoint counts"),
        Input("a save blocks", it.blocked, "s", source(costs.save, blocked)),
    ]


def _stored(option: Option, costs: Costs) -> float:
    """Bytes a second."""
    if costs.storage is not None:
        return costs.storage * GB
    return min(option.case.cluster.machines * figures.NODE_STORES, figures.STORES)
