"""The fifth part: the planner's best layout and two rivals are trained for a few steps, beside what was predicted."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec import structs

from fivefold.checkup.course import Course, PartEnded, failure, out_of_time
from fivefold.checkup.report import LayoutRun, LayoutStep, PartReport
from fivefold.checkup.tasks import TOKENS, TRACED_STEPS, WARM_STEPS
from fivefold.cost.moe import imbalance_for
from fivefold.cost.step import Workload
from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job
from fivefold.job.reading import read_job
from fivefold.layout.layout import Layout
from fivefold.planner.option import Option
from fivefold.planner.plan import plan_given_layout, workload_of
from fivefold.planner.search import SURVIVORS, search
from fivefold.schedules.registry import CATALOGUE
from fivefold.support.errors import UserError
from fivefold.trainer.result import TrainResult
from fivefold.verifier.cases import write_tokens

BEST, RIVAL = "the planner's best", "rival"
RIVALS = 2
COLLECTIVES = ("tp", "cp", "zero", "ep", "dp")  # causes of an estimate that are exposed communication
FEWEST_STEPS, MOST_STEPS = 3, 12
_START_S = {True: 45.0, False: 12.0}  # seconds until the first step is done, on a GPU (compilation) and on a CPU
_STEP_SHARE = 0.6  # of what is left of a layout's time, for its steps
_KEPT = 0.6  # of the time of later layouts, that a slow one may not take
_BATCHES = 4  # of random tokens


def train_layouts(course: Course, part: PartReport) -> None:
    """Plan for the calibrated machines, train the best layout and two rivals, and compare."""
    if course.cluster is None and course.catalogue is None:
        raise PartEnded("failed", "there are no figures of these machines to plan with: the calibration failed")
    job = job_of_layouts(course)
    course.report.job = job_table(job)
    cluster = course.cluster or course.catalogue
    assert cluster is not None
    options = choose(job, cluster)
    if course.model:
        write_random_tokens(course.base.folder(course.token) / TOKENS, job)
    for number, option in enumerate(options):
        role = RIVAL if number else BEST
        left = len(options) - number
        share = min(course.share / len(options), course.left / left)
        limit = course.left * (1 - _KEPT * (1 - 1 / left))
        run = LayoutRun(
            layout=str(option.layout),
            role=role,
            catalogue=predicted(job, option.layout, course.catalogue),
            calibrated=predicted(job, option.layout, course.cluster),
        )
        if limit < 1:
            _conclude(course, part)
            raise out_of_time(part, f"{role}, {option.layout}")
        course.tell(f"{role}: {option.layout}")
        course.report.runs.append(
            measure(course, run, timed_steps(share, option.seconds, on_gpu=course.devices.on_gpu), number, limit)
        )
    _conclude(course, part)


def job_of_layouts(course: Course) -> Job:
    """The job that every layout trains: the user's own, or the one for these devices."""
    if course.model is None:
        return structs.replace(course.base.job, layout=Layout())
    model, train = course.model, course.base.job.train
    return read_job(None, [
        f"model={model.preset}", f"model.layers={model.layers}", f"data.seq={model.seq}",
        f"train.batch={model.samples * course.team.size}", f"train.device={train.device}",
        f"train.dtype={'bfloat16' if course.devices.on_gpu else 'float32'}", "train.deterministic=false",
    ])  # fmt: skip


def job_table(job: Job) -> dict[str, Any]:
    """What the planner reads of a job, for the report: no path and no name of the user's."""
    train = {name: getattr(job.train, name) for name in ("batch", "dtype", "fp8", "fp8_experts", "compile")}
    return {
        "model": msgspec.to_builtins(job.model),
        "data": {"seq": job.data.seq},
        "train": train,
        "optimizer": {"name": job.optimizer.name} if hasattr(job.optimizer, "name") else {},
    }


def write_random_tokens(folder: Path, job: Job) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_tokens(folder, job.model.vocab, _BATCHES * job.train.batch * job.data.seq + 1)


def choose(job: Job, cluster: Cluster) -> list[Option]:
    """The fastest layout by the plan, and the fastest ones that divide the step in another way."""
    workload = workload_of(job, cluster)
    workload = replace(workload, layout=Layout(), imbalance=imbalance_for(workload.spec))
    options = [option for fixed in searches(cluster) for option in _found(job, workload, fixed)]
    if not options:
        raise PartEnded("failed", f"no layout of {job.model.name} fits on {cluster} that can be trained as it is")
    chosen, options = [options[0]], sorted(options, key=lambda option: option.seconds)
    for unlike in (_degrees, _kind, str):
        for option in options:
            if len(chosen) <= RIVALS and unlike(option.layout) not in map(unlike, [one.layout for one in chosen]):
                chosen.append(option)
    return chosen


def searches(cluster: Cluster) -> list[dict[str, Any]]:
    """What is fixed in each search: nothing, and then each of the axes, as the best layouts often share one."""
    degrees = sorted({2, cluster.groups[0].gpus} - {1})
    axes: list[dict[str, Any]] = [
        {axis: degree} for axis in ("tp", "pp", "cp") for degree in degrees if cluster.world % degree == 0
    ]
    return [{}, *(axes if cluster.world > 1 else [])]


def _found(job: Job, workload: Workload, fixed: dict[str, Any]) -> list[Option]:
    """The layouts that a search finds and the trainer takes, the fastest first; none where nothing fits."""
    try:
        options = search(workload, top=SURVIVORS, **fixed).options
    except UserError:
        if not fixed:
            raise
        return []
    return [option for option in options if trainable(job, option.layout, workload.cluster.world)]


def _degrees(layout: Layout) -> Any:
    return layout.dp, layout.tp, layout.pp, layout.cp, layout.ep


def _kind(layout: Layout) -> Any:
    return (*_degrees(layout), layout.zero, layout.recompute)


def trainable(job: Job, layout: Layout, world: int) -> bool:
    """Whether the trainer takes the layout as it is written, and its schedule is one of the package."""
    return layout.schedule in CATALOGUE and not structs.replace(job, layout=layout).problems(world)


def predicted(job: Job, layout: Layout, cluster: Cluster | None) -> LayoutStep | None:
    """The planner's step; None without figures of the machines."""
    if cluster is None:
        return None
    with suppress(UserError):
        option = plan_given_layout(structs.replace(job, layout=layout), cluster)
        causes = option.estimate.causes
        return LayoutStep(
            seconds=option.seconds,
            exposed=sum(causes[name] for name in COLLECTIVES) if layout.world > 1 else None,
            bubble=causes["bubble"] if layout.pp > 1 else None,
            memory=option.footprint.allocated if not cluster.groups[0].accelerator.is_cpu else None,
        )
    return None


def measure(course: Course, run: LayoutRun, steps: int, number: int, limit: float) -> LayoutRun:
    """Train one layout; a run that fails is part of the result."""
    model, name = course.model, f"layout-{number + 1}"
    sizes = {} if model is None else {
        "model": model.preset, "layers": model.layers, "seq": model.seq, "batch": model.samples * course.team.size,
    }  # fmt: skip
    ends = course.run(course.task(kind="train", layout=run.layout, name=name, steps=steps, **sizes), limit)
    if ended := failure(f"training {run.layout}", ends):
        return structs.replace(run, failed=ended.sentence, out_of_time=ended.status == "out of time")
    directory = course.base.folder(course.token) / name
    try:
        measured = read_run(directory, steps, on_gpu=course.devices.on_gpu)
    except (UserError, OSError, ValueError, KeyError) as error:
        return structs.replace(run, failed=f"training {run.layout} left no figures: {error}")
    return structs.replace(run, measured=measured)


def timed_steps(share: float, seconds: float, *, on_gpu: bool) -> int:
    """How many steps of so many seconds are timed in a layout's share of the time."""
    room = _STEP_SHARE * max(0.0, share - _START_S[on_gpu]) / max(seconds, 1e-6)
    return int(max(FEWEST_STEPS, min(MOST_STEPS, room - WARM_STEPS - TRACED_STEPS)))


def read_run(directory: Path, steps: int, *, on_gpu: bool) -> LayoutStep:
    """The median of the steps between the first ones and the traced ones; what the trace says of communication."""
    records = TrainResult.read(directory).steps
    timed = records[WARM_STEPS : WARM_STEPS + steps]
    if not timed:
        raise ValueError(f"only {len(records)} steps were made, and the first {WARM_STEPS} do not count")
    summary = json.loads((directory / "trace.json").read_text())["otherData"]["summary"]
    mean = summary["mean"]
    return LayoutStep(
        seconds=median(record.seconds for record in timed),
        exposed=sum(mean["exposed"].values()) if len(summary["ranks"]) > 1 else None,
        bubble=mean["bubble"] if summary["schedule"] and "pp" in summary["layout"] else None,
        memory=float(max(record.memory for record in timed)) if on_gpu else None,
    )


def _conclude(course: Course, part: PartReport) -> None:
    """What failed, the errors of the predictions, and whether the planner's best was the fastest."""
    part.findings += [run.failed for run in course.report.runs if run.failed]
    runs = [run for run in course.report.runs if run.measured]
    part.data = {"model": course.report.job["model"].get("name", ""), "trained": len(runs)}
    if not runs:
        return
    for which, words in (("catalogue", "the catalogue's figures"), ("calibrated", "the measured figures")):
        if (errors := errors_of(runs, which)) and not (which == "catalogue" and not course.devices.on_gpu):
            mean = sum(map(abs, errors)) / len(errors)
            part.says.append(f"with {words} the predicted steps are off by {mean:.1%} in the mean")
    fastest = min(runs, key=lambda run: run.measured.seconds if run.measured else 0.0)
    best = next((run for run in runs if run.role == BEST), None)
    if best is None or best.measured is None or fastest.measured is None:
        return
    if fastest is best:
        part.says.append(f"the planner's best, {best.layout}, is the fastest of {len(runs)}")
    else:
        slower = best.measured.seconds / fastest.measured.seconds - 1
        part.says.append(
            f"{fastest.layout} is faster than the planner's best, {best.layout}, which takes {slower:.1%} longer"
        )


def errors_of(runs: Sequence[LayoutRun], which: str) -> list[float]:
    return [error for run in runs if (error := run.error(which)) is not None]
