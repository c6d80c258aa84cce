"""`fivefold bench peers --scaling`: layouts from one rank to many, against one process and the prediction."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.bench.comparison import (
    Comparison,
    ComparisonResult,
    base_job,
    layout_of,
    limit,
    measure_all,
    predict,
    verdict,
)
from fivefold.bench.harness import ONE_RANK_SENTENCE, OURS, OnProgress, choices, refuse, table, too_small
from fivefold.cost.kernels import Device
from fivefold.hardware.accelerators import Accelerator
from fivefold.job.config import Job
from fivefold.layout.layout import Layout
from fivefold.render.blocks import Block, Result, Text
from fivefold.support.errors import Note, UserError
from fivefold.support.ranges import MAX_RANKS, check_range, within

AXES = ("dp", "tp", "pp", "cp", "3d")
EXPERTS_AXIS = "ep"  # its model has experts, so it has a run of its own
# The other axes' model with experts: the two that a token visits are as wide as its dense network.
EXPERTS_CHANGES = ("model.experts.count=8", "model.experts.top_k=2", "model.experts.ffn=688")
COLUMNS = {
    "~layout": "shown",  # without microbatches, which the number of stages decides
    ">ranks": "ranks", ">alone": "one_process_seconds:.3f", ">step": "seconds:.3f", ">speed-up": "speed_up:.2f",
    ">efficiency": "efficiency:.0%", ">simulated": "simulated",
}  # fmt: skip
# The columns of `ep`, as fractions of one process's step.
EP_COLUMNS = {
    "~layout": "layout", ">ranks": "ranks", ">alone": "one_process_seconds:.3f", ">step": "seconds:.3f",
    ">of one": "of_one:.3f", ">simulated": "simulated_of_one", ">limit": "limit_of_one:.3f",
    ">fullest": "imbalance:.2f",
}  # fmt: skip


@dataclass(frozen=True)
class ScalingResult(Result):
    """The comparisons so far, one for each number of ranks."""

    layouts: Sequence[str]  # in the order in which they are shown
    runs: Sequence[ComparisonResult]
    cores: Mapping[int, Accelerator]  # a measured core by how many ranks are at work; empty without a prediction

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return all(run.ok for run in self.runs)

    @property
    def rows(self) -> list[dict[str, Any]]:
        runs = {system.removeprefix(f"{OURS} "): run for run in self.runs for system in run.case.systems[1:]}
        return [self._row(layout, runs[layout]) for layout in self.layouts if layout in runs]

    def _row(self, layout: str, run: ComparisonResult) -> dict[str, Any]:
        times, world, system, job = run.seconds, run.case.world, f"{OURS} {layout}", run.case.job
        of_one, imbalance = times.ratio(system, OURS), run.imbalance.get(system)
        cores = (self.cores[1], self.cores[world]) if self.cores else None
        alone = predict(job, OURS, cores[0]) if cores else None
        seconds = predict(job, layout, cores[1], imbalance or 1.0) if cores else None
        return {
            "layout": layout,
            "ranks": world,
            "one_process_seconds": times.median(OURS),
            "seconds": times.median(system),
            "speed_up": 1 / of_one,
            "efficiency": 1 / of_one / world,
            "predicted_seconds": seconds,
            "predicted_one_process_seconds": alone,
            "predicted_speed_up": alone / seconds if alone and seconds else None,
            "of_one": of_one,
            "predicted_of_one": seconds / alone if alone and seconds else None,
            "limit_of_one": limit(job, layout, cores, imbalance or 1.0),
            "imbalance": imbalance,
        }

    def to_dict(self) -> dict[str, Any]:
        runs = [{"ranks": run.case.world, "agree": run.ok, "seconds": run.seconds} for run in self.runs]
        cores = {ranks: _core_figures(core, ranks) for ranks, core in sorted(self.cores.items())}
        result = self.runs[0].setup() | {"layouts": self.rows, "runs": runs}
        return result | ({"cores_by_ranks": cores} if self.cores else {})

    def blocks(self) -> Iterator[Block]:
        yield self.runs[0].heading()
        rows = [row | {"shown": row["layout"].partition(",microbatches=")[0]} for row in self.rows]
        for row in rows:
            if (seconds := row["predicted_seconds"]) is not None:
                row["simulated"] = f"{seconds:.3f} {seconds / row['seconds'] - 1:+4.0%}"
                row["simulated_of_one"] = (
                    f"{row['predicted_of_one']:.3f} {row['predicted_of_one'] / row['of_one'] - 1:+4.0%}"
                )
        experts = self.runs[0].case.job.model.experts is not None
        yield table(rows, EP_COLUMNS if experts else COLUMNS)
        yield Text(_ep_legend(rows, bool(self.cores)) if experts else _legend(rows))
        yield from verdict(*self.runs)


def _legend(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the columns mean."""
    single = rows[0]["predicted_one_process_seconds"]
    simulated = (
        "" if single is None else f"; simulated: the simulator's step and its error; for one process: {single:.3f} s"
    )
    return f"alone: seconds of one process in the same run; stages take a sequence at a time{simulated}"


def _ep_legend(rows: Sequence[Mapping[str, Any]], with_cores: bool) -> str:
    """What the columns of `ep` mean."""
    cores = "cores that slow each other down, " if with_cores else ""
    simulated = "; simulated: the same by the simulator, and its error" if with_cores else ""
    full = "; fullest: tokens of the fullest rank over the mean, as routed" if any(r["imbalance"] for r in rows) else ""
    return (
        f"of one: step as a fraction of one process's in the same run, with the same batch{simulated}; limit: the same "
        f"if communication took no time (simulated): {cores}work that ranks repeat, the wait for the fullest{full}"
    )


def _core_figures(core: Accelerator, ranks: int) -> dict[str, float]:
    """The measured figures of a core while so many ranks are at work."""
    device, link = Device.of(core), core.inside
    alone = {
        "products": device.rate("fp32"),  # FLOP/s
        "stream": device.bandwidth,  # bytes/s
        "launch_block": device.achieved.host,  # seconds
        "update": device.achieved.update,
    }
    return alone | ({"link": link.bandwidth, "latency": link.latency} if ranks > 1 else {})


def scaling(
    changes: list[str],
    on_progress: OnProgress,
    *,
    ranks: int,
    min_ranks: int,
    rounds: int,
    batch: int | None,
    only: str,
    predict: bool,
) -> Iterator[ScalingResult]:
    """Yields a result after each number of ranks, with all comparisons so far."""
    refuse(too_small(**{"min-ranks": min_ranks}))
    check_range("--ranks", ranks, within(2, MAX_RANKS, ONE_RANK_SENTENCE))
    if not any(min_ranks <= 2**power <= ranks for power in range(1, ranks.bit_length())):
        raise UserError(
            f"--min-ranks {min_ranks} --ranks {ranks}: no power of two lies between them; nearest: --min-ranks 2",
            "option.range",
        )
    if batch is not None and (same := [change for change in changes if change.startswith("train.batch=")]):
        raise UserError(f"--batch {batch} and {same[0]} say the same thing twice; leave one out", "option.conflict")
    # Short sequences: one process takes seconds for a step of sixteen, and not minutes.
    sizes = [f"train.batch={16 if batch is None else batch}", "data.seq=128"]
    wanted = choices(only, "--only", (*AXES, EXPERTS_AXIS))
    if EXPERTS_AXIS in wanted and len(wanted) > 1:
        rest = ",".join(axis for axis in wanted if axis != EXPERTS_AXIS)
        raise UserError(
            f"--only {only}: ep has a model with experts, the others have none; nearest: --only {rest}",
            "option.conflict",
        )
    job = base_job([*sizes, *(EXPERTS_CHANGES if EXPERTS_AXIS in wanted else ()), *changes], microbatches=1)
    chosen = layouts(job, ranks, only, min_ranks=min_ranks)
    by_world: dict[int, list[str]] = {}
    for text in chosen:
        by_world.setdefault(layout_of(job, text).world, []).append(f"{OURS} {text}")
    cases = [Comparison("scaling", job, (OURS, *systems), rounds) for _, systems in sorted(by_world.items())]
    runs: list[ComparisonResult] = []
    cores: dict[int, Accelerator] = {}
    single_core: list[Any] = []  # samples of one core that works by itself, from all over the run
    for run in measure_all(cases, on_progress):
        runs.append(run)
        if predict:
            from fivefold.machines.calibrate import core_samples, usual_core

            busy = run.case.world
            on_progress(f"what a core reaches by itself, and while {busy} are at work")
            single_core += core_samples(1)
            cores |= {1: usual_core(single_core, 1), busy: usual_core(core_samples(busy), busy)}
        yield ScalingResult(chosen, tuple(runs), dict(cores))


def layouts(job: Job, most: int, only: str, *, min_ranks: int = 2) -> list[str]:
    """Powers of two of each axis alone, then of three at once, as far as the model and the batch allow.

    A rank's share of the batch is one microbatch; where there are stages, each of its sequences is one.
    """
    wanted = choices(only, "--only", (*AXES, EXPERTS_AXIS))
    sizes = [size for exponent in range(1, most.bit_length()) if min_ranks <= (size := 2**exponent) <= most]
    texts = [f"{axis}={size}" for axis in AXES[:-1] if axis in wanted for size in sizes]
    if EXPERTS_AXIS in wanted:  # also dp alone: each rank has all experts, so that gradients travel, and no tokens
        suffixes = ("", ",ep={}", ",ep={},dispatch=allgather")
        texts += [f"dp={size}{suffix.format(size)}" for size in sizes for suffix in suffixes]
    if "3d" in wanted:
        texts += [f"dp={size // 4},tp=2,pp=2" for size in sizes if size >= 8]
        texts += [f"dp=2,tp=2,pp={size // 4}" for size in sizes if size >= 16]
    fitting = []
    for text in texts:
        layout = Layout.parse(text)
        if layout.pp > 1:
            text = f"{text},microbatches={max(1, job.train.batch // layout.dp)}"
        if problems := layout_of(job, text).problems(job.model, seq=job.data.seq, batch=job.train.batch):
            warnings.warn(Note(f"{text} is left out: {problems[0]}"), stacklevel=2)
        else:
            fitting.append(text)
    if not fitting:
        ranks = f"{min_ranks} to {most}" if min_ranks > 2 else f"up to {most}"
        raise UserError(f"no layout of {', '.join(wanted)} with {ranks} ranks fits this model and batch", "search.none")
    return fitting
