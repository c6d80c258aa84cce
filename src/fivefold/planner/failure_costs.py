"""How often a planned job fails, and what failures and saves cost it: published and measured figures, with sources.

docs/goodput.md says of each figure how it was checked.
"""

from dataclasses import dataclass
from typing import NamedTuple

from fivefold.planner.checkpoint_interval import Failures
from fivefold.planner.option import Option
from fivefold.support.errors import UserError
from fivefold.support.ranges import MAX_SECONDS, misfit, within

HOUR, DAY = 3600.0, 86_400.0
GPUS_PER_SERVER = 8  # GPUs of a server, in the sources


class Fleet(NamedTuple):
    """GPUs whose failures were counted and published."""

    name: str
    hours: float  # between two failures of one GPU, with all that stands around it
    source: str


FLEETS = (
    Fleet("Llama 3, 16,384 H100", 54 * 24 * 16_384 / 419, "arXiv 2407.21783: 419 in 54 days, maintenance apart"),
    Fleet("Meta, 32,000 GPUs", 24 * GPUS_PER_SERVER * 1000 / 2.3, "arXiv 2602.00277: 2.3 a day for 1,000 servers"),
    Fleet("Meta RSC-2, A100", 24 * GPUS_PER_SERVER * 1000 / 2.34, "arXiv 2410.21680: 2.34 in 1,000 node-days"),
    Fleet("Meta RSC-1, A100", 24 * GPUS_PER_SERVER * 1000 / 6.50, "arXiv 2410.21680: 6.50 in 1,000 node-days"),
    Fleet("RSC, jobs of 1,024 A100", 7.9 * 1024, "arXiv 2410.21680: one in 7.9 hours"),
)
DEFAULT_FLEET = FLEETS[0]

HANG_SHARE = (
    0.099  # of failures: arXiv 2509.16293, table 1. Ranks notice them after train.timeout, and a dead rank at once
)
HANGS_SOURCE = "9.9% of failures are hangs (arXiv 2509.16293), seen after train.timeout; others at once"
DEFAULT_TIMEOUT = 600.0  # seconds of train.timeout, where a job does not say
RESTART_SECONDS = 600.0
RESTART_SOURCE = "Meta's synchronous restarts (arXiv 2602.00277); MegaScale's diagnosis stays below (arXiv 2402.15627)"

# What a save costs the steps. 405B on 8,960 GPUs: blocked 0.59 s, saved in 51.06 s (ByteCheckpoint, arXiv 2407.20143,
# table 8). This code has measured one H200: at most 0.25 s (benchmarks/h200-train-run.csv, steps 40 and 41).
BLOCKED_SECONDS = 0.59
BLOCKED_SOURCE = "405B on 8,960 GPUs (arXiv 2407.20143, table 8); one H200 with this code: at most 0.25 s"
GPU_COPY_RATE = 55e9  # bytes a second from a GPU to the host, beside the next step (docs/speed.md)
# On CPUs nothing runs beside the steps: 305 MB cost them 0.886 s (docs/checkpoints.md, two Arm cores, one rank).
CPU_COPY_RATE = 305e6 / 0.886
CPU_SOURCE = "305 MB cost the steps of two Arm cores 0.886 s (docs/checkpoints.md)"

# Bytes a second into storage: a node's own disk under this code (benchmarks/h200-train-8b-2-checkpoint.json), and all
# nodes together as in the 51.06 s above, at 12 bytes a parameter.
NODE_STORAGE_RATE = 2.08e9
MAX_STORAGE_RATE = 405.85e9 * 12 / 51.06
STORAGE_SOURCE = "2.08 a node (one H200, this code), at most 95 in all (arXiv 2407.20143: 405B saved in 51 s)"
READS_PER_LOAD = 2  # times that a load reads every byte: once to hash it (docs/checkpoints.md)

# One rank's steps: 35 of 0.602 s with a deviation of 4.4 ms (benchmarks/h200-train-run.csv, steps 6 to 40).
STEP_JITTER = 0.0072
JITTER_SOURCE = "one H200, this code"
SLOW_SHARE, SLOW_DELAY = 0.005, 0.10  # of machines, by as much: MegaScale, arXiv 2402.15627, section 6.3
SLOW_SOURCE = "arXiv 2402.15627: 0.5% of machines take 10% longer"

GB = 1e9
GIVEN_SOURCE = "as given"


@dataclass(frozen=True)
class FailureCosts:
    """Figures that the user gives in place of the published ones; None: not given."""

    mtbf: float | None = None  # hours between failures of one GPU
    detect: float | None = None  # seconds
    restart: float | None = None  # seconds
    storage: float | None = None  # GB a second, of all nodes together
    save: float | None = None  # seconds that a save blocks the steps

    def check(self) -> None:
        hours, rate = within(1e-3, 1e12), within(1e-6, 1e9)
        ranges = {"mtbf": hours, "storage": rate} | dict.fromkeys(("detect", "restart", "save"), within(0, MAX_SECONDS))
        if wrong := [said for name, most in ranges.items() if (said := misfit(name, getattr(self, name), most))]:
            raise UserError(wrong, "option.range")


PUBLISHED = FailureCosts()


class Input(NamedTuple):
    """One of the figures that goodput rests on."""

    name: str
    value: float
    unit: str
    source: str


def saved_bytes(option: Option) -> int:
    """The bytes of one checkpoint, over all ranks."""
    return round(option.workload.spec.parameter_count * option.workload.software.accounting.saved)


def failures_of(option: Option, costs: FailureCosts = PUBLISHED, timeout: float = DEFAULT_TIMEOUT) -> Failures:
    """A plan's failures, if ranks wait `timeout` seconds for one that hangs; `failure_inputs` has the sources."""
    world, size, stored = option.layout.world, saved_bytes(option), _storage_rate(option, costs)
    share = size / world
    if option.workload.first_device.accelerator.is_cpu:
        blocked = share / CPU_COPY_RATE
    else:  # the copy runs beside the next step, and what is longer than that step blocks
        blocked = BLOCKED_SECONDS + max(0.0, share / GPU_COPY_RATE - option.seconds)
    return Failures(
        between=(DEFAULT_FLEET.hours if costs.mtbf is None else costs.mtbf) * HOUR / world,
        blocked=blocked if costs.save is None else costs.save,
        writing=size / stored,
        detect=HANG_SHARE * timeout if costs.detect is None else costs.detect,
        restart=RESTART_SECONDS if costs.restart is None else costs.restart,
        reload=READS_PER_LOAD * size / stored,
    )


def failure_inputs(option: Option, costs: FailureCosts, it: Failures) -> list[Input]:
    """The figures behind `failures_of`, in the order of events."""
    usual, world, on_cpu = DEFAULT_FLEET, option.layout.world, option.workload.first_device.accelerator.is_cpu
    blocked = CPU_SOURCE if on_cpu else BLOCKED_SOURCE
    of_gpu = f"{usual.name} ({usual.source})" + ("; nobody has counted CPUs'" if on_cpu else "")
    size, rate = saved_bytes(option) / GB, _storage_rate(option, costs) / GB

    def source(given: float | None, otherwise: str) -> str:
        return otherwise if given is None else GIVEN_SOURCE

    return [
        Input("a GPU fails once in", it.between * world / HOUR, "h", source(costs.mtbf, of_gpu)),
        Input("the job", it.between / HOUR, "h", f"that, over {world:,} ranks"),
        Input("to notice it", it.detect, "s", source(costs.detect, HANGS_SOURCE)),
        Input("to start again", it.restart, "s", source(costs.restart, RESTART_SOURCE)),
        Input("storage", rate, "GB/s", source(costs.storage, STORAGE_SOURCE)),
        Input("to load", it.reload, "s", f"{size:,.4g} GB, read twice: once to be hashed"),
        Input("to write", it.writing, "s", "the same once, beside the steps; then the checkpoint counts"),
        Input("a save blocks", it.blocked, "s", source(costs.save, blocked)),
    ]


def _storage_rate(option: Option, costs: FailureCosts) -> float:
    """Bytes per second into storage, over all nodes."""
    if costs.storage is not None:
        return costs.storage * GB
    return min(option.workload.cluster.machines * NODE_STORAGE_RATE, MAX_STORAGE_RATE)
