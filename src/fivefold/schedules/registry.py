"""Every schedule by name; `build` makes one from numbers, and `record_of` also knows schedules in files, and of
modules of a user's own: layout.schedule=my_package.eager:EAGER_1F1B is a `ScheduleInfo` there."""

import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fivefold.schedules.auto import AUTO
from fivefold.schedules.classic import BREADTH_FIRST, GPIPE, INTERLEAVED, NAIVE, ONE_F_ONE_B
from fivefold.schedules.info import ScheduleInfo, ScheduleRequest
from fivefold.schedules.plugin_schedule import check_plugin_record
from fivefold.schedules.schedule import Schedule, peak_live
from fivefold.schedules.text import FILE_SUFFIXES, load
from fivefold.schedules.v_half_min import V_HALF, V_MIN
from fivefold.schedules.zero_bubble import ZB_H1, ZB_H2
from fivefold.schedules.zero_bubble_v import DUALPIPE_V, ZB_V
from fivefold.support.errors import Problem, UserError
from fivefold.support.parsing import path_of
from fivefold.support.plugins import find_value, is_plugin
from fivefold.support.text import did_you_mean, either, plural

RECORDS = (
    NAIVE,
    GPIPE,
    ONE_F_ONE_B,
    INTERLEAVED,
    BREADTH_FIRST,
    ZB_H1,
    ZB_H2,
    ZB_V,
    V_HALF,
    V_MIN,
    DUALPIPE_V,
    AUTO,
)
MAX_SIZE = 1 << 18  # stages x microbatches; to build and to prove a schedule takes some 50 us for each
CATALOGUE: dict[str, ScheduleInfo] = {record.name: record for record in RECORDS}


def record_of(name: str) -> ScheduleInfo:
    """The schedule of that name or in that file, which is proven; else what is wrong with it."""
    if record := CATALOGUE.get(name):
        return record
    if is_file(name):
        path = path_of(name)
        try:
            stat = path.stat()
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}", "file.read") from None
        return _record_of_file(name, path, stat.st_mtime_ns, stat.st_size)
    if is_plugin(name):  # a layout may be stored: whoever reads the job imports what it names, before it makes one
        return check_plugin_record(name, find_value("layout.schedule", name, ScheduleInfo, trusted=False))
    raise UserError(f"unknown schedule {name!r}; {did_you_mean(name, list(CATALOGUE))}", "layout.schedule.unknown")


def is_file(name: str) -> bool:
    """Whether a schedule's name is a file name."""
    return name not in CATALOGUE and (Path(name).suffix.lower() in FILE_SUFFIXES or "/" in name or os.path.isfile(name))


@lru_cache(maxsize=64)
def _record_of_file(name: str, path: Path, changed: int, size: int) -> ScheduleInfo:
    """The facts of the schedule in a file. `changed` and `size` are in the cache's key: a new file is read again."""
    schedule = load(path)
    chunks = schedule.placement.chunks
    most = max(map(peak_live, schedule.ranks)) / chunks
    return ScheduleInfo(
        name,
        lambda request: schedule,
        lambda p, chunks: schedule.placement,
        chunks=chunks,
        splits=schedule.splits,
        joins=any(action.joined for order in schedule.ranks for action in order),
        schedule=schedule,
        live=lambda p, m, v: most,
        planned=(chunks,),
    )


def build(schedule: str | ScheduleInfo, p: int, m: int, **options: Any) -> Schedule:
    """A schedule for p ranks and m microbatches; what cannot be is refused with the reason. `options` are the other
    fields of a `ScheduleRequest`."""
    record = record_of(schedule) if isinstance(schedule, str) else schedule
    request = ScheduleRequest(p, m, **options)
    if problems := _problems(record, request):
        raise UserError(problems)
    return record.build(replace(request, chunks=request.chunks or record.chunks))


def size_problem(stages: int, m: int) -> Problem | None:
    """Why a schedule is too large to be built; None when it is not."""
    if stages * m <= MAX_SIZE:
        return None
    return Problem(
        "layout.schedule.size",
        f"{stages} stages x {m} microbatches are more than the {MAX_SIZE} that a schedule can have",
    )


def _problems(record: ScheduleInfo, request: ScheduleRequest) -> list[Problem]:
    p, m = request.p, request.m
    chunks = record.chunks if request.chunks is None else request.chunks
    problems = [
        Problem("schedule.numbers", f"{what} is {value}, and must be at least 1")
        for what, value in (("the number of ranks", p), ("the number of microbatches", m), ("chunks", chunks))
        if value < 1
    ]
    if problem := size_problem(p * chunks, m):
        problems.append(problem)
    if (fixed := record.schedule) and (p, m) != (fixed.p, fixed.m):
        problems.append(
            Problem(
                "layout.schedule.degree",
                f"{record.name} is a schedule for p={fixed.p} and m={fixed.m}, not p={p} and m={m}",
            )
        )
    if chunks != record.chunks and not record.any_chunks:
        tunable = either([other.name for other in RECORDS if other.any_chunks])
        has = plural(record.chunks, "chunk")
        problems.append(
            Problem(
                "layout.chunks.schedule",
                f"{record.name} has {has} per rank, not {chunks}; leave it out, or use {tunable}",
            )
        )
    if request.group is not None and not record.takes("group"):
        problems.append(
            Problem("schedule.group", f"{record.name} has no group size N; leave it out, or use interleaved")
        )
    if request.memory is not None and not record.takes("memory"):
        problems.append(Problem("schedule.limit", f"{record.name} takes no memory limit; leave it out, or use auto"))
    return problems
