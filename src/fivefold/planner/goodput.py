"""The expected length of a run that fails now and then, and the interval between saves that makes it shortest.

Failures are a Poisson process: one in M seconds on average, at any time. A save blocks the steps for b seconds and
counts after w more, in which training goes on. After a failure, R seconds pass until steps run again, from the newest
save that counts; a failure within them begins them anew. Between two saves that count lie T = interval + b seconds. A
run that goes on must get through T, one that was restarted through T + w, so that of W seconds of work

  E = W/interval M e^((R + w)/M) (e^(T/M) - 1) + M e^(R/M) (e^(w/M) - 1)

exactly; the last term is the wait for the last save. With w = 0 this is Daly's formula (Future Generation Computer
Systems 22, 2006). The best interval depends on b and M alone: (1 - interval/M) e^(T/M) = 1, which is nearly Young's
sqrt(2 b M).
"""

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from fivefold.planner.search import Option
from fivefold.support.errors import UserError
from fivefold.support.ranges import SECONDS, misfit, within


class Failures(NamedTuple):
    """How often a job fails, and what failures and saves cost it, in seconds."""

    between: float  # two failures of the whole job, on average
    blocked: float  # steps, by a save
    writing: float  # beside the steps, until the save counts
    detect: float
    restart: float
    reload: float

    @property
    def down(self) -> float:
        return self.detect + self.restart + self.reload

    def cycle(self, interval: float) -> float:
        """Seconds from save to save: one waits until the one before is written."""
        return max(interval + self.blocked, self.writing)


def expected_seconds(work: float, interval: float, it: Failures) -> float:
    """Seconds that `work` seconds of steps take on average; inf where they come to no end."""
    mean, interval = it.between, min(interval, work)
    try:
        each = mean * math.exp((it.down + it.writing) / mean) * math.expm1(it.cycle(interval) / mean)
        return work / interval * each + mean * math.exp(it.down / mean) * math.expm1(it.writing / mean)
    except OverflowError:
        return math.inf


def young_interval(it: Failures) -> float:
    return math.sqrt(2 * it.blocked * it.between)


def daly_interval(it: Failures) -> float:
    """His higher-order estimate; it does not hold for a save that blocks for longer than 2 M."""
    ratio = it.blocked / (2 * it.between)
    return young_interval(it) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - it.blocked if ratio < 1 else it.between


def best_interval(it: Failures) -> float:
    """Seconds of work between saves, for the least expected time: the root of ln(1 - x) + x + b/M, x = interval/M."""
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if math.log1p(-middle) + middle + it.blocked / it.between > 0 else (low, middle)
    return max(low * it.between, it.writing - it.blocked)


def best_steps(step: float, max_steps: int, it: Failures) -> int:
    """The same in whole steps, from 1 to `max_steps`, in two digits: the curve is flat there."""
    exact = best_interval(it) / step
    if exact >= max_steps:
        return max(1, max_steps)
    near = {max(1, math.floor(exact)), math.ceil(exact)} if exact < 100 else {round(float(f"{exact:.1e}"))}
    return min(near, key=lambda steps: expected_seconds(max_steps * step, steps * step, it))


# ---- figures --------------------------------------------------------------------------------------------------------
# How often GPUs fail, what a failure costs, and how unevenly ranks run: published and measured, each with its source.
#
# docs/goodput.md says of each figure how it was checked.


HOUR, DAY = 3600.0, 86_400.0
GPUS_PER_SERVER = 8  # GPUs of a server, in the sources


class Fleet(NamedTuple):
    """GPUs whose failures somebody has counted."""

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


# ---- failures -------------------------------------------------------------------------------------------------------
# How often the job of a plan fails, and what failures and saves cost it, with where each figure comes from.


GB = 1e9
GIVEN_SOURCE = "as given"


@dataclass(frozen=True)
class FailureCosts:
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
            raise UserError(wrong, "option.range")


PUBLISHED = FailureCosts()


class Input(NamedTuple):
    """One of the figures that goodput rests on."""

    name: str
    value: float
    unit: str
    source: str


def saved_bytes(option: Option) -> int:
    """Of one checkpoint, all ranks together."""
    return round(option.workload.spec.parameter_count * option.workload.software.accounting.saved)


def failures_of(option: Option, costs: FailureCosts = PUBLISHED, timeout: float = DEFAULT_TIMEOUT) -> Failures:
    """Those of a plan whose ranks wait `timeout` seconds for one that hangs; the sources are in `failure_inputs`."""
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
    """What `failures_of` has found, in the order in which it happens."""
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
    """Bytes a second."""
    if costs.storage is not None:
        return costs.storage * GB
    return min(option.workload.cluster.machines * NODE_STORAGE_RATE, MAX_STORAGE_RATE)


# ---- simulate -------------------------------------------------------------------------------------------------------
# Runs that fail at random, many at a time: how long each takes, and what the time goes into.


SIMULATED_RUNS = 1000
FAILURES_PER_DRAW = 64  # failures of each run that are drawn together
MAX_FAILURES = 100_000  # failures of a run, on average, that are still simulated


@dataclass(frozen=True)
class SimulatedRuns:
    """Of each run: seconds from the first step to the last save, failures, and seconds without steps after them."""

    work: float
    saving: float  # seconds that saves block, and the last one takes
    seconds: Any
    failures: Any
    down: Any

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.seconds, share))

    @property
    def goodput(self) -> float:
        """The share of the time that goes into steps that stay, over all runs."""
        return self.work / float(self.seconds.mean())

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a run on average, by cause, adding up to its length."""
        total, down = float(self.seconds.mean()), float(self.down.mean())
        lost = total - self.work - self.saving - down
        return {"training": self.work, "saves": self.saving, "steps made again": lost, "failures": down}


@lru_cache(maxsize=64)
def simulate_runs(
    work: float, interval: float, it: Failures, runs: int = SIMULATED_RUNS, seed: int = 0
) -> SimulatedRuns | None:
    """`runs` runs of `work` seconds of steps, saved every `interval`; None where failures leave no progress.

    Time passes from failure to failure, many of all runs at once. What is lost by one is all since the newest save that
    had been written by then.
    """
    interval = min(interval, work)
    if expected_seconds(work, interval, it) > MAX_FAILURES * it.between:
        return None
    draw, cycle = np.random.default_rng(seed), it.cycle(interval)
    left = np.full(runs, work / interval)  # intervals of work that no written save has yet
    seconds, failures, down = np.zeros(runs), np.zeros(runs, dtype=int), np.zeros(runs)
    before = np.full(FAILURES_PER_DRAW, it.down)  # from a failure to the first step
    before[0], running = 0.0, np.arange(runs)
    while running.size:
        lasts = draw.exponential(it.between, (running.size, FAILURES_PER_DRAW))
        gains = np.maximum(0.0, np.floor((lasts - before - it.writing) / cycle))
        needs = before + (left[running, None] - gains.cumsum(1) + gains) * cycle + it.writing
        ends = lasts >= needs
        over = ends.any(1)
        last = np.where(over, ends.argmax(1), FAILURES_PER_DRAW)  # the failure that does not come
        happens = np.arange(FAILURES_PER_DRAW) < last[:, None]
        lasts = np.where(ends, needs, lasts) * (np.arange(FAILURES_PER_DRAW) <= last[:, None])
        seconds[running] += lasts.sum(1)
        down[running] += np.minimum(lasts, before).sum(1)
        failures[running] += happens.sum(1)
        left[running] -= (gains * happens).sum(1)
        running, before[0] = running[~over], it.down
    saving = work / interval * (cycle - interval) + it.writing
    return SimulatedRuns(work, saving, seconds, failures, down)


def standard_error(runs: SimulatedRuns) -> float:
    """Of the mean of `seconds`."""
    return float(runs.seconds.std(ddof=1)) / math.sqrt(len(runs.seconds))


# ---- run ------------------------------------------------------------------------------------------------------------
# A planned run under failures: its steps, how often they are saved, and how long that takes.


LOW_QUANTILE, HIGH_QUANTILE = 0.1, 0.9  # of simulated runs


@dataclass(frozen=True)
class GoodputRun:
    steps: int
    step: float  # seconds of one, as planned
    every: int  # steps between saves; 0: one save, at the end
    failures: Failures

    @property
    def work(self) -> float:
        """Seconds that nothing disturbs."""
        return self.steps * self.step

    @property
    def interval(self) -> float:
        return min(self.every or self.steps, self.steps) * self.step

    @property
    def expected(self) -> float:
        return expected_seconds(self.work, self.interval, self.failures)

    @property
    def best(self) -> int:
        """Steps between saves, for the shortest run; at most a tenth of it."""
        return best_steps(self.step, self.most, self.failures)

    @property
    def most(self) -> int:
        return max(1, self.steps // 10)

    def simulated(self, runs: int = SIMULATED_RUNS, seed: int = 0) -> SimulatedRuns | None:
        return simulate_runs(self.work, self.interval, self.failures, runs, seed)

    def days(self, runs: SimulatedRuns) -> list[float]:
        return [runs.quantile(share) / DAY for share in (LOW_QUANTILE, 0.5, HIGH_QUANTILE)]

    def figures(self) -> dict[str, Any]:
        """The same as plain data, with what 1,000 runs have come to; None where they come to no end."""
        runs = self.simulated()
        return {
            "hours_between_failures": self.failures.between / HOUR,
            "checkpoint_every": self.every,
            "days": dict(zip(("p10", "median", "p90"), self.days(runs), strict=True)) if runs is not None else None,
            "goodput": None if runs is None else self.work / self.expected,
        }


def days_text(days: float) -> str:
    """115 days, 3.1 hours, 2.0 minutes."""
    if days >= 100:
        return f"{days:,.0f} days"
    units = {"days": 1.0, "hours": 1 / 24, "minutes": 1 / 1440, "seconds": 1 / DAY}
    unit = next((unit for unit, size in units.items() if days >= 2 * size), "seconds")
    return f"{days / units[unit]:.1f} {unit}"


# ---- stragglers -----------------------------------------------------------------------------------------------------
# What it costs that a synchronous step ends with its slowest rank.


class Straggling(NamedTuple):
    """Of a number of ranks that wait for each other once a step."""

    ranks: int
    jitter: float  # by how much the slowest rank's step is longer than the mean, on average
    chance: float  # that at least one machine is one of the slow ones
    slow: float  # what that costs a step on average, until the machine is found and left out

    def to_dict(self) -> dict[str, float]:
        return self._asdict()


@cache
def expected_maximum(draws: int) -> float:
    """The mean of the largest of so many standard normal draws."""
    if draws == 1:
        return 0.0
    width = 0.005
    at = np.arange(-10.0, 10.0, width) + width / 2
    tails = np.array([math.erfc(abs(x) / math.sqrt(2)) / 2 for x in at])
    below = np.where(at < 0, np.log(tails), np.log1p(-tails))
    all_below = np.exp(draws * below)  # the distribution of the maximum
    return float(np.where(at > 0, 1 - all_below, -all_below).sum() * width)


def expected_straggling(ranks: int, per_machine: int, deviation: float = STEP_JITTER) -> Straggling:
    """`deviation` is that of a rank's step, as a share of its mean; normal, and independent from rank to rank."""
    chance = -math.expm1(math.ceil(ranks / per_machine) * math.log1p(-SLOW_SHARE))
    return Straggling(ranks, deviation * expected_maximum(ranks), chance, SLOW_DELAY * chance)
