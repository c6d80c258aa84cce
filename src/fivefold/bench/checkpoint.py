"""`fivefold bench checkpoint`: how much a checkpoint slows steps, and the bandwidth of saving and loading.

    measure(None, ["model=small"], rounds=5)

The time that steps lose is measured, not modelled: the snapshot, and by how much the steps while it is written are
longer than those before it. The bandwidth is compared with that of DCP alone (no hashes, no manifest) and of plain
torch.save, on the same state.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from msgspec import structs

from fivefold.bench.harness import OnProgress, RoundTimes, caveats, ratio, refuse, too_small, turns
from fivefold.job.config import Job
from fivefold.job.preflight import preflight
from fivefold.job.reading import read_job
from fivefold.launch import processes
from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.support.text import bytes_text, plural, si

_RANK = "fivefold.bench.checkpoint_rank"
SHOWN_NAMES = {"ours": "ours: hashed, synced, atomic", "dcp": "DCP alone: synced", "torch": "torch.save: synced"}


@dataclass(frozen=True)
class CheckpointResult(Result):
    """The costs of saves, in seconds, one number per round."""

    job: Job
    bytes: int
    usual: list[float]  # a step without a save
    snapshot: list[float]  # the call of `save`
    lost: list[float]  # extra time of the snapshot and of the steps while it is written
    save: RoundTimes
    load: RoundTimes

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.job.model.name,
            "layout": str(self.job.layout),
            "bytes": self.bytes,
            "step": median(self.usual),
            "snapshot": median(self.snapshot),
            "lost": median(self.lost),
            "save": {name: self.bytes / self.save.median(name) for name in self.save},
            "load": {name: self.bytes / self.load.median(name) for name in self.load},
        }

    def blocks(self) -> Iterator[Block]:
        figures, model, rounds = self.to_dict(), self.job.model, len(self.usual)
        step, snapshot, lost = (1e3 * figures[key] for key in ("step", "snapshot", "lost"))
        yield Text(
            f"{model.name}, {si(model.parameter_count)} parameters, {bytes_text(self.bytes)} of weights and moments, "
            f"under {self.job.layout}; {plural(rounds, 'round')} in turns, medians\n"
            f"a step takes {step:.0f} ms; a save stops it for {snapshot:.0f} ms, and while it is written steps lose "
            f"{lost:.0f} ms in total ({lost / step:.2f} steps)"
        )
        rows = [
            (words, *(bytes_text(figures[way][name]) for way in ("save", "load")))
            for name, words in SHOWN_NAMES.items()
        ]
        yield Table(["per second", ">save", ">load"], rows)
        yield from caveats([*self.save.values(), *self.load.values()], rounds, world=1, cores=1)


class BenchOptions(NamedTuple):
    rounds: int  # saves and loads, or starts, of each kind
    steps: int  # before each save, and while it is written
    directory: Path | None  # on the disk to measure; what is written there is removed
    timeout: float  # seconds of the whole run, or of each start

    def check(self) -> None:
        problems = too_small(rounds=self.rounds, steps=self.steps)
        if self.directory is not None and not self.directory.is_dir():
            problems.append(f"--directory {self.directory} is not a directory")
        refuse(problems)


def measure(path: str | None, changes: list[str], options: BenchOptions, on_progress: OnProgress) -> CheckpointResult:
    """Start the job's ranks on this machine and measure them."""
    options.check()
    rounds, steps, directory, timeout = options
    job = _with_steps(read_job(path, changes), 2 + 2 * rounds * steps)
    world = job.layout.world
    on_progress(f"{plural(rounds, 'round')} on {plural(world, 'rank')}")
    with tempfile.TemporaryDirectory(prefix="fivefold-", dir=directory) as scratch:
        result: CheckpointResult = processes.run(world, f"{_RANK}:run", job, scratch, rounds, steps, timeout=timeout)[0]
    return result


def _with_steps(job: Job, steps: int) -> Job:
    """The job with so many steps and no evaluation; a job that cannot train is refused."""
    job = structs.replace(job, train=structs.replace(job.train, steps=steps, eval_samples=0))
    preflight(job, job.layout.world)
    return job


# ---- recovery -------------------------------------------------------------------------------------------------------
# `fivefold bench checkpoint --recovery`: how long restarted ranks take to load their state, from memory and from disk.
#
#     measure_recovery(None, ["model=small", "layout=dp=2,zero=1"], BenchOptions(5, ...), on_progress)
#
# Starts from memory and from disk take turns. Each start has new processes, so that both touch all pages for the first
# time; files on disk are evicted from the page cache first. The cost of a snapshot is measured on the steps during it.


RECOVERY_TIERS = ("memory", "disk")
_SNAPSHOT_EVERY = 10  # steps between snapshots, if the job takes none


@dataclass(frozen=True)
class RecoveryResult(Result):
    """The times of snapshots and restarts, in seconds, one number per round."""

    job: Job
    bytes: int
    usual: list[float]  # a step
    blocked: list[float]  # the call that takes a snapshot
    lost: list[float]  # extra time of that call and of the steps after it
    starting: RoundTimes
    load: RoundTimes
    publish: RoundTimes  # writing the model's weights from the masters that were loaded

    def repeated(self, tier: str) -> float:
        """Seconds of the steps that are repeated, on average: half of those between two saves."""
        config = self.job.checkpoint
        return (config.memory_every if tier == "memory" else config.every) / 2 * median(self.usual)

    def to_dict(self) -> dict[str, Any]:
        by_tier: dict[str, Any] = {
            tier: {
                "start": self.starting.median(tier),
                "load": self.load.median(tier),
                "publish": self.publish.median(tier),
                "repeated": self.repeated(tier),
            }
            for tier in RECOVERY_TIERS
        }
        steps = {"step": median(self.usual), "blocked": median(self.blocked), "lost": median(self.lost)}
        times = {"times": {tier: self.load[tier] for tier in RECOVERY_TIERS}}
        names = {"model": self.job.model.name, "layout": str(self.job.layout), "bytes": self.bytes}
        return {**names, **steps, **by_tier, "faster": ratio(self.load["disk"], self.load["memory"]), **times}

    def blocks(self) -> Iterator[Block]:
        figures, model, rounds = self.to_dict(), self.job.model, len(self.load["disk"])
        step, blocked, lost = (1e3 * figures[key] for key in ("step", "blocked", "lost"))
        yield Text(
            f"{model.name}, {si(model.parameter_count)} parameters, {bytes_text(self.bytes)} of weights and moments, "
            f"under {self.job.layout}; {plural(rounds, 'start')} from each, in turns, medians\n"
            f"a step takes {step:.0f} ms; a snapshot into memory stops it for {blocked:.0f} ms, and with the steps "
            f"beside it costs {lost:.0f} ms ({lost / step:.2f} steps)"
        )
        config = self.job.checkpoint
        words = {
            "start": "start-up: processes, data, model",
            "load": "load: find, check and read the state",
            "publish": "the model's weights, of what was loaded",
            "repeated": f"steps done again: half of {config.memory_every}, and of {config.every}",
        }
        rows = [(text, *(f"{figures[tier][key]:.3f}" for tier in RECOVERY_TIERS)) for key, text in words.items()]
        yield Table(["seconds", *(f">from {tier}" for tier in RECOVERY_TIERS)], rows)
        yield Text(
            f"the load from memory is {figures['faster']:.1f} times as fast: the median of each round's own ratio"
        )
        yield from caveats([*self.load.values()], rounds, world=1, cores=1)


def measure_recovery(
    path: str | None, changes: list[str], options: BenchOptions, on_progress: OnProgress
) -> RecoveryResult:
    """Restart the job's ranks on this machine repeatedly, with files on disk and in shared memory."""
    options.check()
    rounds, steps, directory, timeout = options
    job = read_job(path, changes)
    every = job.checkpoint.memory_every or _SNAPSHOT_EVERY
    checkpoint = structs.replace(job.checkpoint, memory_every=every, save=True, url="")
    job = _with_steps(structs.replace(job, checkpoint=checkpoint), 3 + 2 * rounds * steps)
    world = job.layout.world
    shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    memory = tempfile.mkdtemp(prefix="fivefold-bench-", dir=shared)
    try:
        with tempfile.TemporaryDirectory(prefix="fivefold-", dir=directory) as scratch:
            on_progress(f"a run on {plural(world, 'rank')} that is lost")
            size, usual, blocked, lost = processes.run(
                world, f"{_RANK}:lose", job, scratch, memory, rounds, steps, timeout=timeout
            )[0]
            starting, load, publish = (RoundTimes({tier: [] for tier in RECOVERY_TIERS}) for _ in range(3))
            for number, tier in turns(RECOVERY_TIERS, rounds):
                on_progress(f"round {number + 1} of {rounds}: from {tier}")
                _evict_from_page_cache(Path(scratch))
                arguments = (job, scratch, memory, tier, time.time())
                by_rank = processes.run(world, f"{_RANK}:find", *arguments, timeout=timeout)  # (start, load, publish)
                for times, seconds in zip((starting, load, publish), zip(*by_rank, strict=True), strict=True):
                    times[tier].append(max(seconds))  # all ranks wait for the slowest
    finally:
        for directory_in_memory in (memory, f"{memory}-none"):
            shutil.rmtree(directory_in_memory, ignore_errors=True)
    return RecoveryResult(job, size, usual, blocked, lost, starting, load, publish)


def _evict_from_page_cache(directory: Path) -> None:
    os.sync()
    for file in directory.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
