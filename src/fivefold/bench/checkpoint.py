"""`fivefold bench checkpoint`: the time that steps lose to a checkpoint, and the bandwidth of saving and loading.

    measure(None, ["model=small"], rounds=5)

A step's loss is measured, not modelled: the snapshot, and by how much the steps beside the writing are longer than
those before it. Bandwidth is held against DCP alone (no hashes, no manifest) and plain torch.save, on the same state.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import structs

from fivefold.bench.harness import Times, Told, caveats, refuse, too_small
from fivefold.job.config import Job, read_job
from fivefold.job.preflight import preflight
from fivefold.launch import ranks
from fivefold.report import Block, Result, Table, Text
from fivefold.support.formatting import bytes_text, counted, si

NAMES = {"ours": "ours: hashed, synced, atomic", "dcp": "DCP alone: synced", "torch": "torch.save: synced"}


@dataclass(frozen=True)
class CheckpointResult(Result):
    """Seconds, a number for each round."""

    job: Job
    bytes: int
    usual: list[float]  # a step without a save
    snapshot: list[float]  # until `save` returns
    lost: list[float]  # by the steps beside the writing, snapshot included
    save: Times
    load: Times

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
        found, model, rounds = self.to_dict(), self.job.model, len(self.usual)
        step, snapshot, lost = (1e3 * found[key] for key in ("step", "snapshot", "lost"))
        yield Text(
            f"{model.name}, {si(model.parameter_count)} parameters, {bytes_text(self.bytes)} of weights and moments, "
            f"under {self.job.layout}; {counted(rounds, 'round')} in turns, medians\n"
            f"a step takes {step:.0f} ms; a save stops it for {snapshot:.0f} ms, and beside the writing steps lose "
            f"{lost:.0f} ms in total ({lost / step:.2f} steps)"
        )
        rows = [(words, *(bytes_text(found[way][name]) for way in ("save", "load"))) for name, words in NAMES.items()]
        yield Table(["per second", ">save", ">load"], rows)
        yield from caveats([*self.save.values(), *self.load.values()], rounds, world=1, cores=1)


def measure(
    path: str | None, changes: list[str], rounds: int, steps: int, directory: Path | None, timeout: float, told: Told
) -> CheckpointResult:
    """On the job's ranks, started here, with files in `directory`; nothing is left there."""
    missing = [f"--directory {directory} is no directory"] if directory is not None and not directory.is_dir() else []
    refuse([*too_small(rounds=rounds, steps=steps), *missing])
    job = read_job(path, changes)
    job = structs.replace(job, train=structs.replace(job.train, steps=2 + 2 * rounds * steps, eval_samples=0))
    world = job.layout.world
    preflight(job, world)
    told(f"{counted(rounds, 'round')} on {counted(world, 'rank')}")
    with tempfile.TemporaryDirectory(prefix="fivefold-", dir=directory) as scratch:
        function = "fivefold.bench.checkpoint_rank:run"
        found: CheckpointResult = ranks.run(world, function, job, scratch, rounds, steps, timeout=timeout)[0]
    return found
