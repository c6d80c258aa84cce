"""What checkpoints cost: the time that steps lose to one, and the bandwidth of saving and loading, in one run.

    measure(job, directory, rounds=5)

A step's loss is measured, not modelled: the snapshot, and by how much the steps beside the writing are longer than
those before it. Bandwidth is held against DCP alone (no hashes, no manifest) and plain torch.save, on the same state.
"""

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from fivefold.job.config import Job
from fivefold.launch import ranks
from fivefold.support.formatting import bytes_text, si

NAMES = {"ours": "ours: hashed, synced, atomic", "dcp": "DCP alone: synced", "torch": "torch.save: synced"}


@dataclass
class Times:
    """Seconds, a number for each round."""

    bytes: int = 0
    usual: list[float] = field(default_factory=list)  # a step without a save
    snapshot: list[float] = field(default_factory=list)  # until `save` returns
    lost: list[float] = field(default_factory=list)  # by the steps beside the writing, snapshot included
    save: dict[str, list[float]] = field(default_factory=dict)
    load: dict[str, list[float]] = field(default_factory=dict)


def measure(job: Job, directory: str, rounds: int, steps: int, timeout: float) -> Times:
    function = "fivefold.bench.checkpoint_rank:run"
    found = ranks.run(job.layout.world, function, job, directory, rounds, steps, timeout=timeout)[0]
    assert isinstance(found, Times)
    return found


def as_json(job: Job, times: Times) -> dict[str, Any]:
    return {
        "model": job.model.name,
        "layout": str(job.layout),
        "bytes": times.bytes,
        "step": median(times.usual),
        "snapshot": median(times.snapshot),
        "lost": median(times.lost),
        "save": {name: times.bytes / median(seconds) for name, seconds in times.save.items()},
        "load": {name: times.bytes / median(seconds) for name, seconds in times.load.items()},
    }


def report(console: Console, job: Job, times: Times) -> None:
    found = as_json(job, times)
    size = f"{si(job.model.parameter_count)} parameters, {bytes_text(times.bytes)} of weights and moments"
    console.print(f"{job.model.name}, {size}, under {job.layout}; {len(times.usual)} rounds in turns, medians")
    step, snapshot, lost = (1e3 * found[key] for key in ("step", "snapshot", "lost"))
    console.print(
        f"a step takes {step:.0f} ms; a save stops it for {snapshot:.0f} ms, and beside the writing steps lose "
        f"{lost:.0f} ms in all ({lost / step:.2f} steps)",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("per second", "save", "load"):
        table.add_column(name, justify="left" if name == "per second" else "right")
    for name, words in NAMES.items():
        table.add_row(words, bytes_text(found["save"][name]), bytes_text(found["load"][name]))
    console.print(table)
    slowest = max(max(s) / min(s) for s in (*times.save.values(), *times.load.values()))
    console.print(f"noise: slowest rounds take up to {slowest:.2f} times the fastest")
