"""Hold layouts against one device: start the ranks, run both, judge.

with Judge() as judge:
    verdict = judge(job)
verdict.passed, verdict.problems
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from fivefold.job.config import Job
from fivefold.launch import ranks
from fivefold.layout.collective_cost import Traffic
from fivefold.layout.layout import Layout
from fivefold.layout.stages import schedule_of
from fivefold.plan.cost.memory import state_of
from fivefold.plan.cost.traffic import Seat, expected
from fivefold.schedule.schedule import peak_live
from fivefold.verify.verdict import Verdict

PATIENCE = 120.0  # seconds for one layout


class Judge:
    """Judges jobs one after another; the reference of a model is computed once.

    No torch in this process: what computes is named, and runs in processes of its own.
    """

    def __init__(self, patience: float = PATIENCE, hook: str = ""):
        self.patience, self.hook = patience, hook
        self.home = tempfile.TemporaryDirectory(prefix="fivefold-verify-")
        self.references: dict[bytes, Path] = {}

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *_: Any) -> None:
        self.home.cleanup()

    def __call__(self, job: Job) -> Verdict:
        measure = "fivefold.verify.measure:measure"
        start = time.perf_counter()
        try:
            reference = self._reference(job)
            start = time.perf_counter()
            found = ranks.run(job.layout.world, measure, job, reference, self.hook, timeout=self.patience)
        except ranks.RankError as error:
            return Verdict(job, time.perf_counter() - start, broken=str(error), details=error.details)
        forms = closed_forms(job) if not found[0].graphs else [[] for _ in found]  # what is compiled is not counted
        return Verdict.of(job, found, forms, holdings(job), time.perf_counter() - start)

    def _reference(self, job: Job) -> Path:
        """One for all layouts of a model with the same dp, on which the data's masks depend."""
        plain = msgspec.structs.replace(job, layout=Layout(dp=job.layout.size("batch")))
        key = msgspec.json.encode(plain)
        if key not in self.references:
            path = Path(self.home.name, f"{len(self.references)}.reference")
            ranks.run(1, "fivefold.verify.reference:write_reference", plain, path, timeout=self.patience)
            self.references[key] = path
        return self.references[key]


def closed_forms(job: Job) -> list[list[Traffic]]:
    """What each rank should send in a step."""
    train, seats = job.train, [Seat.of(job.layout, rank) for rank in range(job.layout.world)]
    forms = {
        seat: expected(
            job.model, job.layout, job.data.seq, train.batch, train.dtype,
            seat=seat, smoothing=train.label_smoothing > 0,
        )
        for seat in set(seats)
    }  # fmt: skip
    return [forms[seat] for seat in seats]


def holdings(job: Job) -> list[dict[str, float]]:
    """What each rank should hold when gradients are complete, and how many microbatches its schedule lets wait."""
    seats = [Seat.of(job.layout, rank) for rank in range(job.layout.world)]
    schedule = schedule_of(job.model, job.layout, job.data.seq)
    live = [peak_live(schedule.compute(rank)) for rank in range(job.layout.pp)]
    forms = {}
    for seat in set(seats):
        place = {"pp": seat.pp, "tp": seat.tp, "zero": seat.zero, "seq": job.data.seq}
        state = state_of(job.model, job.layout, job.train.dtype, job.optimizer, **place)
        sizes = {"parameters": state.parameters, "gradients": state.gradients, "optimizer": state.optimizer}
        forms[seat] = sizes | {"microbatches in flight": live[seat.pp]}
    return [forms[seat] for seat in seats]
