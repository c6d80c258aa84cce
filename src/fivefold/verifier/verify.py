"""Compares layouts with one process: starts the ranks, runs both, returns the verdicts. And loss curves.

    verify(layout="dp=2,tp=2,zero=3").ok

    with Judge() as judge:
        verdict = judge(job)
    verdict.passed, verdict.problems

No torch in this process: the functions that compute are named, and run in processes of their own.
"""

import math
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from fivefold.cost.collective_time import Traffic, times, total
from fivefold.cost.model_state import proof_problems, state_of
from fivefold.cost.routing import Routing, rows_of
from fivefold.cost.traffic import expected_traffic as step_traffic
from fivefold.job.config import Job
from fivefold.job.preflight import open_data, preflight
from fivefold.job.reading import read_job
from fivefold.launch import processes
from fivefold.launch.local import check_sharing
from fivefold.layout.layout import Layout
from fivefold.layout.rank_part import RankCoords
from fivefold.layout.stages import schedule_of
from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.schedules.schedule import peak_live
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError
from fivefold.support.ranges import MAX_RANKS, MAX_STEPS, MAX_TOKENS, SEQUENCES, check_range, seconds, within
from fivefold.verifier.cases import LayoutCase, all_cases, pair_coverage, pairwise, with_balance
from fivefold.verifier.compare import OPTIMIZER
from fivefold.verifier.result import VerifyResult
from fivefold.verifier.verdict import RankMeasurement, Verdict

LAYOUT_TIMEOUT = 120.0  # seconds for one layout
# Tiny presets are made narrower still, so that a layout takes a second.
_NARROW_CHANGES = ("model.hidden=64", "model.ffn=96")
_MIN_LAYERS = 2
_DEFAULT_LAYOUT = "dp=2"


def verify(
    layout: str | Layout | None = None,
    changes: Sequence[str] = (),
    *,
    model: str | ModelSpec = "tiny",
    dtype: str = "float64",
    steps: int = 3,
    seq: int = 32,
    batch: int | None = None,
    device: str = "cpu",
    everything: bool = False,
    world: int | None = None,
    sample: int | None = None,
    jobs: int = 1,
    repeat: int = 1,
    timeout: float = LAYOUT_TIMEOUT,
    hook: str = "",
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> VerifyResult:
    """Prove that a `layout`, or every legal one of `world` ranks (`everything`), computes what one process computes.

        >>> ff.verify("dp=2,zero=1").ok
        True
        >>> ff.verify(everything=True, world=2, sample=1).ok
        True

    Starts the ranks on this machine, on `device` cpu or cuda; each layout has `timeout` seconds. `changes` are settings
    of the job, KEY=VALUE; `steps` of a `batch` of so many sequences of `seq` tokens, random or from the data that the
    job names, train `model`, a preset or an object, in `dtype`. `hook` names a function that each
    rank calls first. `sample` takes so many of the layouts, chosen to meet every pair of settings; `jobs` of them run
    at a time. `repeat` proves each so often, by ranks that stay up: for what happens once in a hundred times.
    `progress` is called with how many layouts are done, of how many, and which one is next.
    """
    if isinstance(layout, Job):
        instead = "ff.verify(job.layout, changes, model=job.model), with what else is to be proven as KEY=VALUE changes"
        raise UserError(f"verify takes a layout, and not a Job: {instead}; ff.curve takes a job", "verify.layout")
    _check_options(layout, everything, world, sample, timeout)
    limits = (("steps", steps, MAX_STEPS), ("seq", seq, MAX_TOKENS), ("batch", batch, SEQUENCES))
    for name, value, limit in (*limits, ("jobs", jobs, 1000), ("repeat", repeat, 100_000)):
        check_range(name, value, within(1, limit))
    world = 4 if world is None else world
    layout_text = "dp=1" if everything else str(layout or _DEFAULT_LAYOUT)
    if isinstance(model, ModelSpec) and any(change.startswith("model") for change in changes):
        raise UserError("a ModelSpec is the whole model; change it, and leave out model settings", "change.object")
    tiny = not isinstance(model, ModelSpec) and model.startswith("tiny")
    deepen = tiny and not any(change.startswith("model.layers=") for change in changes)
    narrow = [*_NARROW_CHANGES, *([f"model.layers={_layer_count(layout_text)}"] if deepen else [])] if tiny else []
    if batch is None:
        batch = max(8, 2 * world) if everything else 8
    settings = {
        "model.preset": "tiny" if isinstance(model, ModelSpec) else model,
        "layout": layout_text,
        "data.seq": seq,
        "data.document_mask": "true",
        "train.batch": batch,
        "train.steps": steps,
        "train.dtype": dtype,
        "train.device": device,
    }
    settings |= {f"optimizer.{key}": value for key, value in _optimizer(changes).items()}
    job = read_job(None, [*(f"{key}={value}" for key, value in settings.items()), *narrow, *changes])
    if isinstance(model, ModelSpec):
        job = msgspec.structs.replace(job, model=model)
    fixed_keys = {change.partition("=")[0] for change in changes}
    job = with_balance(job, fixed_keys)
    fp8_problems = [
        f"train.{key}=true makes layouts agree as far as 8 bits do; prove train.{key}=false"
        for key in ("fp8", "fp8_experts")
        if getattr(job.train, key)
    ]
    problems = job.problems() or fp8_problems or proof_problems(job)
    if not problems and not job.data.usual:
        open_data(job, problems)
    if problems:
        raise UserError(problems, "verify.job")
    _check_sharing(job, world if everything else job.layout.world)
    all_of_them = all_cases(job, world, deepen=deepen, fixed_keys=fixed_keys) if everything else [LayoutCase(job, "")]
    cases = all_of_them if sample is None else pairwise(all_of_them, sample)
    verdicts = _judge_all(cases * repeat, jobs, timeout, hook, progress, persistent=repeat > 1 or device == "cuda")
    if len(all_of_them) == repeat == 1:
        return VerifyResult(verdicts)
    return VerifyResult(verdicts, len(all_of_them) * repeat, pair_coverage(cases, all_of_them))


def _check_sharing(job: Job, world: int) -> None:
    if (job.train.share_gpu, job.train.device) == ("nccl", "cpu"):
        forgotten = "train.share_gpu=nccl is for ranks that share a GPU, and --device is cpu; give --device cuda"
        raise UserError(forgotten, "train.share_gpu.cpu")
    check_sharing(job.train, world)


def _optimizer(changes: Sequence[str]) -> dict[str, float]:
    """Settings for a proof, as far as the optimizer that is asked for has them."""
    named = [change for change in changes if change.startswith("optimizer.name=")]
    kind = type(read_job(None, named).optimizer)
    return {key: value for key, value in OPTIMIZER.items() if key in kind.__struct_fields__}


def _judge_all(
    cases: Sequence[LayoutCase],
    jobs: int,
    timeout: float,
    hook: str,
    progress: Callable[[int, int, str], None],
    persistent: bool,
) -> list[tuple[LayoutCase, Verdict]]:
    """The verdict on each case, `jobs` at a time. `persistent`: ranks stay up for the next case."""
    if len(cases) > 1 and persistent:
        with Judge(timeout, hook) as judge:
            done = judge.with_persistent_ranks([case.job for case in cases], min(jobs, len(cases)), progress)
        return list(zip(cases, done, strict=True))
    judged = []
    with Judge(timeout, hook) as judge, ThreadPoolExecutor(jobs) as pool:
        verdicts = pool.map(lambda case: judge(case.job), cases) if jobs > 1 else (judge(case.job) for case in cases)
        try:
            for number, case in enumerate(cases):
                progress(number, len(cases), f"{case.job.layout} {case.variant}")
                judged.append((case, next(verdicts)))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C nothing new begins
    return judged


def _check_options(
    layout: str | Layout | None, everything: bool, world: int | None, sample: int | None, timeout: float
) -> None:
    """Raises UserError for options that make no sense, alone or together."""
    check_range("sample", sample, within(1, SEQUENCES))
    check_range("world", world, within(1, MAX_RANKS))
    seconds("timeout", timeout)
    if everything and layout is not None:
        raise UserError(
            f"--all takes every layout of --world ranks, and --layout {layout} names one; leave one out",
            "option.conflict",
        )
    if not everything and (world is not None or sample is not None):
        raise UserError(
            "--world and --sample belong to --all; one layout says its own number of ranks", "option.conflict"
        )


def _layer_count(layout_text: str) -> int:
    """As many layers as the layout's split has, or as it needs to fill its stages; the first and last may have none."""
    layout = Layout.parse(layout_text)
    return sum(layout.split) or max(_MIN_LAYERS, layout.stages - 2)


class Judge:
    """Judges jobs one after another; the reference of a model is computed once."""

    def __init__(self, timeout: float = LAYOUT_TIMEOUT, hook: str = ""):
        self.timeout, self.hook = timeout, hook
        self.home = tempfile.TemporaryDirectory(prefix="fivefold-verify-")
        self.references: dict[bytes, tuple[Path, list[Routing]]] = {}  # file and routing by key of `_one_process_job`
        self.lock = Lock()

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *_: Any) -> None:
        self.home.cleanup()

    def __call__(self, job: Job) -> Verdict:
        measure = "fivefold.verifier.rank:measure"
        start = time.perf_counter()
        try:
            reference, _ = self._reference(job)
            start = time.perf_counter()
            measured = processes.run(job.layout.world, measure, job, reference, self.hook, timeout=self.timeout)
        except processes.RankError as error:
            return Verdict(job, time.perf_counter() - start, broken=str(error), details=error.details)
        return self._verdict(job, measured, time.perf_counter() - start)

    def with_persistent_ranks(
        self, jobs: Sequence[Job], worlds: int, progress: Callable[[int, int, str], None]
    ) -> list[Verdict]:
        """The verdicts on jobs of one world size, `worlds` jobs at a time, each by ranks that stay up.

        On a GPU ranks take longer to start than most layouts do to prove.
        """
        progress(0, len(jobs), "one process")
        self._write_references(jobs)
        all_ranks = [_PersistentRanks(self, jobs, range(first, len(jobs), worlds), progress) for first in range(worlds)]
        if worlds == 1:
            all_ranks[0].run()
        else:
            with ThreadPoolExecutor(worlds) as pool:
                try:
                    list(pool.map(_PersistentRanks.run, all_ranks))
                finally:  # after Ctrl-C the other worlds also stop, when their ranks report next
                    for ranks in all_ranks:
                        ranks.stopped = True
        done = {number: verdict for ranks in all_ranks for number, verdict in ranks.done.items()}
        return [done[number] for number in range(len(jobs))]

    def _verdict(self, job: Job, measured: list[RankMeasurement], seconds: float) -> Verdict:
        _, routing = self._reference(job)
        compiled = bool(measured[0].graphs)  # then traffic is not counted
        traffic = [[] for _ in measured] if compiled else expected_traffic(job, routing)
        return Verdict.of(job, measured, traffic, expected_memory(job), seconds)

    def _write_references(self, jobs: Sequence[Job]) -> None:
        """Writes the references of all jobs, in one process.

        One that fails is left out: `_reference` tries it again, and then names its error.
        """
        missing = dict(_one_process_job(job) for job in jobs)
        missing = {key: plain for key, plain in missing.items() if key not in self.references}
        paths = [self._path(len(self.references) + number) for number in range(len(missing))]
        unfinished = deque(zip(missing, paths, strict=True))

        def note_finished(routing_by_rank: list[list[Routing]]) -> None:
            key, path = unfinished.popleft()
            self.references[key] = path, routing_by_rank[0]

        write, plain_jobs = "fivefold.verifier.reference:write_references", list(missing.values())
        with suppress(processes.RankError):
            processes.run(1, write, plain_jobs, paths, timeout=self.timeout, each=note_finished)

    def _path(self, number: int) -> Path:
        return Path(self.home.name, f"{number}.reference")

    def _reference(self, job: Job) -> tuple[Path, list[Routing]]:
        """The reference's file, and the experts that it sent each token to.

        Layouts of a model with the same dp, on which the data's masks depend, share one.
        """
        key, plain = _one_process_job(job)
        with self.lock:  # a second thread that needs the same reference waits
            if key not in self.references:
                path = self._path(len(self.references))
                write = "fivefold.verifier.reference:write_reference"
                [routing] = processes.run(1, write, plain, path, timeout=self.timeout)
                self.references[key] = path, routing
            return self.references[key]


class _PersistentRanks:
    """Measures a share of the jobs, one after the other, by ranks that stay up.

    After a job that breaks them, new ranks go on with the next one.
    """

    def __init__(self, judge: Judge, jobs: Sequence[Job], share: range, progress: Callable[[int, int, str], None]):
        self.judge, self.jobs, self.left, self.progress = judge, jobs, deque(share), progress
        self.done: dict[int, Verdict] = {}
        self.start, self.stopped = 0.0, False

    def run(self) -> None:
        measure = "fivefold.verifier.rank:measure_each"
        while self.left:
            jobs, self.start = [self.jobs[number] for number in self.left], time.perf_counter()
            try:
                references = [self.judge._reference(job)[0] for job in jobs]
                world, timeout = jobs[0].layout.world, self.judge.timeout
                processes.run(
                    world, measure, jobs, references, self.judge.hook, timeout=timeout, each=self._add_measured
                )
            except processes.RankError as error:
                if not self.left:
                    raise
                seconds = time.perf_counter() - self.start
                self._add(Verdict(self.jobs[self.left[0]], seconds, broken=str(error), details=error.details))

    def _add_measured(self, measured: list[RankMeasurement]) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        seconds, self.start = time.perf_counter() - self.start, time.perf_counter()
        self._add(self.judge._verdict(self.jobs[self.left[0]], measured, seconds))

    def _add(self, verdict: Verdict) -> None:
        self.done[self.left.popleft()] = verdict
        next_layout = str(self.jobs[self.left[0]].layout) if self.left else ""
        self.progress(len(self.jobs) - len(self.left), len(self.jobs), next_layout)


def _one_process_job(job: Job) -> tuple[bytes, Job]:
    """A key for the job of one process, and that job."""
    plain = msgspec.structs.replace(job, layout=Layout(dp=job.layout.size("batch")))
    return msgspec.json.encode(plain), plain


def expected_traffic(job: Job, routing: Sequence[Routing] = ()) -> list[list[Traffic]]:
    """The traffic of each rank in all steps, by formula; with experts by the `routing` of each step's tokens."""
    train, layout, seq = job.train, job.layout, job.data.seq
    all_coords = [RankCoords.of(layout, rank) for rank in range(layout.world)]
    traffic_of = partial(
        step_traffic, job.model, layout, seq, train.batch, train.dtype,
        loss_sums=job.loss.reduced, balance_loss=train.balance_loss > 0, optimizer=job.optimizer,
    )  # fmt: skip
    # Only matrices that are brought together for an optimizer make more of a rank's place than its coordinates.
    alike = job.optimizer.unit == "element"
    if alike:
        all_coords = [coords._replace(stage=0) for coords in all_coords]
    if job.model.experts is None:
        traffic = {coords: traffic_of(coords=coords) for coords in set(all_coords)}
        return [[times(row, train.steps) for row in traffic[coords]] for coords in all_coords]
    traffic_by_rank = []
    for rank, coords in enumerate(all_coords):
        routed_rows = [rows_of(job.model, layout, rank, seq, train.batch, step_routing) for step_routing in routing]
        steps = (traffic_of(coords=coords, routed_rows=rows) for rows in routed_rows)
        traffic_by_rank.append(total(row for step in steps for row in step))
    return traffic_by_rank


def expected_memory(job: Job) -> list[dict[str, float]]:
    """The bytes of each rank when gradients are complete, and its microbatches in flight, by formula."""
    all_coords = [RankCoords.of(job.layout, rank)._replace(stage=0) for rank in range(job.layout.world)]
    schedule = schedule_of(job.model, job.layout, job.data.seq)
    in_flight = [peak_live(schedule.compute(rank)) for rank in range(job.layout.pp)]
    memory = {}
    for coords in set(all_coords):
        state = state_of(
            job.model, job.layout, job.train.dtype, job.optimizer, coords,
            seq=job.data.seq, narrow=job.train.device == "cuda",
        )  # fmt: skip
        sizes = {"parameters": state.parameters, "gradients": state.gradients, "optimizer": state.optimizer}
        memory[coords] = sizes | {"microbatches in flight": in_flight[coords.pp]}
    return [memory[coords] for coords in all_coords]


# ---- curve ----------------------------------------------------------------------------------------------------------
# A run's loss curve under a layout, compared with the same run in one process.
#
# Two runs that add the same numbers in another order drift apart, and in float32 the drift grows from step to step. A
# third run measures that noise: the single process again, with the samples of every batch in another order, which
# changes nothing but the order of additions. A layout may differ `NOISE_FACTOR` times as much as that control. It may
# always differ by a few roundings of the loss itself, since the control of a short run can happen to agree to the bit.


NOISE_FACTOR = 3.0


@dataclass(frozen=True)
class CurveResult(Result):
    """Losses by step; None where no target carries loss, alike in all three."""

    layout: Layout
    alone: list[float | None]
    control: list[float | None]
    in_layout: list[float | None]
    same_start: bool  # the layout's initial weights equal the single process's, bit for bit
    rounding: float  # of the dtype: the distance from 1 to the next number

    @property
    def noise(self) -> float:
        return _max_distance(self.alone, self.control)

    @property
    def distance(self) -> float:
        return _max_distance(self.alone, self.in_layout)

    @property
    def tolerance(self) -> float:
        return NOISE_FACTOR * max(self.noise, 4 * self.rounding * max(abs(loss or 0.0) for loss in self.alone))

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return self.same_start and self.distance <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.ok,
            "layout": str(self.layout),
            "same_start": self.same_start,
            "noise": self.noise,
            "distance": self.distance,
            "allowed": self.tolerance,
            "losses": {"alone": self.alone, "control": self.control, "layout": self.in_layout},
        }

    def blocks(self) -> Iterator[Block]:
        steps = len(self.alone)
        rows = []
        for step in sorted({1, steps, *range(10, steps, max(1, steps // 10))}):
            a, b, c = (losses[step - 1] for losses in (self.alone, self.control, self.in_layout))
            if a is None or b is None or c is None:
                rows.append([str(step), *("none" if loss is None else f"{loss:.6f}" for loss in (a, b, c)), "", ""])
                continue
            rows.append([str(step), f"{a:.6f}", f"{b:.6f}", f"{c:.6f}", f"{abs(b - a):.1e}", f"{abs(c - a):.1e}"])
        heads = [">step", ">one process", ">control", ">layout", ">|control - one|", ">|layout - one|"]
        yield Table(heads, rows, title=f"loss of {self.layout}")
        yield Text(f"initial weights: {'' if self.same_start else 'not '}the same bits in both")
        yield Text(
            f"largest distance over {steps} steps: control {self.noise:.1e}, layout {self.distance:.1e}, "
            f"tolerance {self.tolerance:.1e}: {'passed' if self.ok else 'fails'}",
            "good" if self.ok else "bad",
        )


def _max_distance(losses: Sequence[float | None], others: Sequence[float | None]) -> float:
    """The largest distance of two curves; infinite where one has a loss and the other has none."""

    def distance(a: float | None, b: float | None) -> float:
        if a is None or b is None:
            return 0.0 if a is b else math.inf
        return abs(a - b)

    return max(distance(a, b) for a, b in zip(losses, others, strict=True))


def curve(job: str | Path | Job | None = None, changes: Sequence[str] = (), *, timeout: float = 3600.0) -> CurveResult:
    """Trains a `job`, a file or an object, under its layout and in one process, and compares the losses.

    `changes` are KEY=VALUE, and each run has `timeout` seconds.

    >>> ff.curve(None, ["layout=dp=2", "data.seq=32", "train.steps=2"]).ok
    True
    """
    resolved = job if isinstance(job, Job) else read_job(job and str(job), list(changes))
    preflight(resolved, resolved.layout.world)
    if problems := proof_problems(resolved):
        raise UserError(problems, "verify.job")
    return compare_curves(resolved, timeout)


def compare_curves(job: Job, timeout: float) -> CurveResult:
    """Runs the job three times, one after the other: in one process, as its control, and in the job's own layout."""
    layout = job.layout
    alone = Layout(microbatches=layout.size("batch") * layout.microbatches, recompute=layout.recompute)
    single = msgspec.structs.replace(job, layout=alone)

    def run(job: Job, *, shuffled: bool) -> tuple[list[float | None], set[tuple[str, str]]]:
        """The losses, and (weight, digest) of the initial weights of all ranks."""
        results = processes.run(job.layout.world, "fivefold.verifier.rank:curve", job, shuffled, timeout=timeout)
        losses, _ = results[0]  # the same on all ranks
        return losses, {item for _, digests in results for item in digests.items()}

    losses, start = run(single, shuffled=False)
    control, _ = run(single, shuffled=True)
    in_layout, layout_start = run(job, shuffled=False)
    rounding = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}[job.train.dtype]
    return CurveResult(layout, losses, control, in_layout, same_start=start == layout_start, rounding=rounding)
