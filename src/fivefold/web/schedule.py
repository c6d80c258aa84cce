"""The Schedule view: a pipeline schedule on the clock, as in `fivefold draw` and `fivefold compare schedules`.

payload(Ask({"schedule": "zb-v", "pp": "8", "microbatches": "16", "times": "f=1,i=1,w=1,comm=0.1", "slow": "2=1.5"}))

The parameters are those of the command line. Schedules are those of the catalogue; only the command line reads files.
"""

from dataclasses import replace
from typing import Any

from fivefold.schedules.costs import Durations, parse_slow
from fivefold.schedules.palette import KIND_NAMES
from fivefold.schedules.registry import CATALOGUE
from fivefold.schedules.result import CompareResult, DrawResult, Query, figures_of
from fivefold.schedules.simulate import Simulation, dependencies
from fivefold.support.errors import UserError
from fivefold.support.ranges import check_range, within
from fivefold.support.text import did_you_mean
from fivefold.web.held import held
from fivefold.web.question import Ask

PARAMETERS = ("pp", "microbatches", "chunks", "times", "slow")
DEFAULT_SCHEDULE, DEFAULT_PP, DEFAULT_M = "1f1b", 8, 16  # what the page begins with
DEFAULT_TIMES = {"f": 1.0, "i": 1.0, "w": 1.0, "comm": 0.0, "ep": 0.0}
MAX_PASSES = 1 << 13  # pipeline ranks x microbatches that a page can draw
REFUSED = float("inf")  # the makespan by which refused schedules are sorted
TIME_STEPS = 4000  # of the makespan, in a small picture
MAX_RANKS = 256  # of a pipeline; also the most chunks of one rank
# Drawn while a slider moves; larger schedules are drawn in a process of their own.
MAX_QUICK_PASSES, MAX_QUICK_RANKS = 1024, 16
MAX_REPORT_PASSES = 256  # for which a report also holds the other schedules
SLIDER_PASSES = 2048  # pipeline ranks x microbatches that the sliders offer
SLIDER_PP = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SLIDER_M = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)


def payload(ask: Ask) -> dict[str, Any]:
    """One schedule: its figures, the timeline of every rank, what each action waits for, and the live activations.

    A schedule that is built from the durations of the stages takes longer: it is the part `made`.
    """
    ask.only("schedule", *PARAMETERS)
    name = ask.text("schedule", DEFAULT_SCHEDULE)
    query = _query(ask, name)
    asked = {"pp": str(query.pp), "microbatches": str(query.microbatches)}
    asked |= {key: ask.text(key) for key in PARAMETERS if ask.text(key)}
    drawn = {"drawn": None, "refused": None} if CATALOGUE[name].uses_stage_times else _draw_or_refuse(query, name)
    schedules = [{"name": info.name, "needs": info.needs, "made": info.uses_stage_times} for info in CATALOGUE.values()]
    return _page(query, name, schedules, asked) | drawn


def is_large(ask: Ask) -> bool:
    """Whether the schedule has many passes or many ranks."""
    query = _query(ask, ask.text("schedule", DEFAULT_SCHEDULE))
    assert query.pp is not None
    assert query.microbatches is not None
    return query.pp > MAX_QUICK_RANKS or query.pp * query.microbatches * (query.chunks or 1) > MAX_QUICK_PASSES


def schedule_views(result: DrawResult) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The name, the payload and the parts of every schedule of a `draw`, for a report: several schedules are compared
    with each other, a single one with the catalogue."""
    query, first = result.query, result.simulations[0].schedule
    asked = query or Query((), first.p, first.m)
    if (passes := max(simulation.schedule.p * simulation.schedule.m for simulation in result.simulations)) > MAX_PASSES:
        raise UserError(
            f"{passes} passes of a pipeline, but a page draws at most {MAX_PASSES}; -o draws a picture", "page.size"
        )
    if len(result.simulations) > 1:
        *others, last = result.simulations
        parts = {
            "every": {"schedules": [_row(simulation) for simulation in others], "fine": TIME_STEPS, "these": True},
            "made": _made(last),
        }
    else:  # for a large schedule the catalogue would take minutes to draw, and be too large for a mail
        parts = _with_catalogue(asked, result.simulations[0]) if passes <= SLIDER_PASSES else {}
    pages = []
    for simulation in result.simulations:
        schedule = simulation.schedule
        name, own_query = schedule.name, replace(asked, pp=schedule.p, microbatches=schedule.m)
        schedules = [{"name": name, "needs": CATALOGUE[name].needs if name in CATALOGUE else "", "made": False}]
        page = _page(own_query, name, schedules, {}) | {"drawn": _draw(simulation), "refused": None}
        pages.append((name, page, parts))
    return pages


def others(result: DrawResult) -> dict[str, Any] | None:
    """What the report of a single schedule holds besides: the whole catalogue, also with half and twice as many
    microbatches. None for a schedule of a file, and for a large one."""
    (simulation,) = result.simulations
    schedule, asked = simulation.schedule, result.query
    counts = [
        m for m in (schedule.m // 2, schedule.m, 2 * schedule.m) if m >= 1 and schedule.p * m <= MAX_REPORT_PASSES
    ]
    if asked is None or schedule.name not in CATALOGUE or schedule.m not in counts:
        return None
    answers: dict[str, dict[str, Any]] = {}
    listed = [{"name": info.name, "needs": info.needs, "made": False} for info in CATALOGUE.values()]
    for m in counts:
        query = replace(asked, pp=schedule.p, microbatches=m, memory=None, group=None)
        for name in CATALOGUE:
            words = {} if m == schedule.m else {"schedule": schedule.name, "microbatches": str(m)}
            page = _page(query, name, listed, words) | _draw_or_refuse(query, name)
            answers[f"{name} {m}"] = {"payload": page, "parts": {}}
        mine = answers[f"{schedule.name} {m}"]
        if m != schedule.m and mine["payload"]["drawn"]:
            mine["parts"] = _with_catalogue(query, query.simulate(schedule.name))
    del answers[own := f"{schedule.name} {schedule.m}"]
    steps = {"pp": [schedule.p], "microbatches": counts, "chunks": [asked.chunks] if asked.chunks else []}
    offers = {"schedules": listed, "steps": _steps(replace(asked, pp=schedule.p, microbatches=schedule.m)) | steps}
    return held(("schedule", "microbatches"), answers, own, offers | {"fixed": True})


def step_view(simulation: Simulation, microbatches: int) -> dict[str, Any] | None:
    """The payload of a step of `microbatches` that the planner has simulated, perhaps with fewer of them, in seconds.
    None if it is too large for a report."""
    name, p, m = simulation.schedule.name, simulation.schedule.p, simulation.schedule.m
    if p * m * max(1, len(simulation.schedule.placement.owner) // p) > SLIDER_PASSES:
        return None
    schedules = [{"name": name, "needs": CATALOGUE[name].needs if name in CATALOGUE else "", "made": False}]
    page = _page(Query((), p, m), name, schedules, {})
    return page | {"drawn": _draw(simulation), "refused": None, "clock": "s", "microbatches": microbatches}


def _with_catalogue(query: Query, simulation: Simulation) -> dict[str, Any]:
    """The parts of a single schedule: the catalogue for the same numbers, with the schedule itself if it is from a
    file; and the schedule that is built from durations."""
    name, p, m = simulation.schedule.name, simulation.schedule.p, simulation.schedule.m
    asked = replace(query, names=tuple(CATALOGUE), pp=p, microbatches=m)
    (maker,) = (name for name, record in CATALOGUE.items() if record.uses_stage_times)
    listed = replace(asked, names=tuple(name for name in CATALOGUE if name != maker), memory=None)
    rows = [*_rows(listed), *([] if name in CATALOGUE else [_row(simulation)])]
    made = (
        _made(simulation)
        if name == maker
        else {"schedule": maker} | _draw_or_refuse(replace(asked, chunks=None, group=None), maker)
    )
    return {
        "every": {"schedules": sorted(rows, key=lambda row: row.get("makespan", REFUSED)), "fine": TIME_STEPS},
        "made": made,
    }


def _made(simulation: Simulation) -> dict[str, Any]:
    return {"schedule": simulation.schedule.name, "drawn": _draw(simulation), "refused": None}


def _row(simulation: Simulation) -> dict[str, Any]:
    return figures_of(simulation) | {"needs": "", "lanes": _draw_small(simulation)}


def _page(query: Query, name: str, schedules: list[dict[str, Any]], asked: dict[str, str]) -> dict[str, Any]:
    return {
        "asked": _asked(query, name),
        "steps": _steps(query),
        "schedules": schedules,
        "kinds": {str(kind): name for kind, name in KIND_NAMES.items()},
        "asks": {"every": asked, "made": asked},
    }


def every(ask: Ask) -> dict[str, Any]:
    """The schedules of the catalogue for the same numbers, the fastest first: a small picture of each, or why it is
    refused."""
    ask.only(*PARAMETERS)
    query = _query(ask, *(name for name, info in CATALOGUE.items() if not info.uses_stage_times))
    return {"schedules": sorted(_rows(query), key=lambda row: row.get("makespan", REFUSED)), "fine": TIME_STEPS}


def made(ask: Ask) -> dict[str, Any]:
    """The schedule that is built from the durations, as `payload` has others."""
    ask.only(*PARAMETERS)
    (name,) = (name for name, info in CATALOGUE.items() if info.uses_stage_times)
    return {"schedule": name} | _draw_or_refuse(_query(ask, name), name)


def _draw_or_refuse(query: Query, name: str) -> dict[str, Any]:
    try:
        return {"drawn": _draw(query.simulate(name)), "refused": None}
    except UserError as error:
        return {"drawn": None, "refused": str(error)}


def _rows(query: Query) -> list[dict[str, Any]]:
    """The rows of `fivefold compare schedules --json`, each with its small picture."""
    results: dict[str, Simulation | UserError] = {}
    for name in query.names:
        try:
            results[name] = query.simulate(name)
        except UserError as error:
            results[name] = error
    rows = CompareResult(query, results).to_dict()["schedules"]
    drawn = {name: _draw_small(result) if isinstance(result, Simulation) else [] for name, result in results.items()}
    return [row | {"lanes": drawn[row["schedule"]]} for row in rows]


def _query(ask: Ask, *names: str) -> Query:
    """The query of a page for these schedules, with limits on its size."""
    if unknown := [name for name in names if name not in CATALOGUE]:  # it may name a file, and a page reads none
        raise UserError(
            f"unknown schedule {unknown[0][:60]!r}; {did_you_mean(unknown[0][:60], list(CATALOGUE))}",
            "layout.schedule.unknown",
        )
    pp, m = _integer(ask, "pp", DEFAULT_PP, MAX_RANKS), _integer(ask, "microbatches", DEFAULT_M, MAX_PASSES)
    chunks = ask.integer("chunks") if any(CATALOGUE[name].any_chunks for name in names) else None
    check_range("chunks", chunks, within(1, MAX_RANKS))
    most, by_chunks = (MAX_PASSES, "") if chunks is None else (4 * MAX_PASSES, f" x chunks={chunks}")
    if pp * m * (chunks or 1) > most:
        raise UserError(
            f"pp={pp} x microbatches={m}{by_chunks} is more than the {most} that a page draws; use `fivefold draw`",
            "page.size",
        )
    slow = parse_slow(ask.text("slow"))
    if absent := next((rank for rank in slow if rank >= pp), None):
        raise UserError(f"slow names rank {absent}, but pp={pp} has the ranks 0 to {pp - 1}", "schedule.slow")
    return Query(names, pp, m, chunks, times=Durations(Durations.parse(ask.text("times")).values, slow))


def _integer(ask: Ask, name: str, default: int, most: int) -> int:
    """A number from 1 to `most`; `default` if it is absent."""
    number = check_range(name, ask.integer(name), within(1, most))
    return default if number is None else int(number)


def _asked(query: Query, name: str) -> dict[str, Any]:
    """The values of the controls."""
    values = query.times.values
    times = {key: values[key][0] if key in values else default for key, default in DEFAULT_TIMES.items()}
    slow_rank, factor = next(iter(query.times.slow.items()), (None, 1.5))
    return {
        "schedule": name, "pp": query.pp, "microbatches": query.microbatches, "chunks": query.chunks,
        "times": times, "slow": slow_rank, "factor": factor, "said": str(query.times),
        "takes_chunks": name in CATALOGUE and CATALOGUE[name].any_chunks,
        "usual_chunks": CATALOGUE[name].chunks if name in CATALOGUE else 1,
    }  # fmt: skip


def _steps(query: Query) -> dict[str, list[Any]]:
    """The values that the sliders offer. `ep`, a part of F and of I, is at most the shorter of them."""
    assert query.pp is not None
    assert query.microbatches is not None
    values = query.times.values
    shortest = min(min(values.get(key, (1.0,))) for key in ("f", "i"))
    tenths = [n / 10 for n in range(1, 31)]
    return {
        "pp": sorted({query.pp, *(n for n in SLIDER_PP if n * query.microbatches <= SLIDER_PASSES)}),
        "microbatches": sorted({query.microbatches, *(n for n in SLIDER_M if n * query.pp <= SLIDER_PASSES)}),
        "chunks": [2, 3, 4, 6, 8],
        "f": tenths,
        "i": tenths,
        "w": tenths,
        "comm": [n / 20 for n in range(21)],
        "ep": [n / 20 for n in range(61) if n / 20 <= shortest],
        "slow": list(range(query.pp)),
        "factor": [n / 20 for n in range(21, 61)],
    }


def _draw(simulation: Simulation) -> dict[str, Any]:
    schedule = simulation.schedule
    lanes = [list(simulation.drawn(rank)) for rank in range(schedule.p)]
    return {
        "figures": figures_of(simulation),
        "ranks": [rank._asdict() for rank in simulation.ranks],
        "owner": schedule.placement.owner,
        "chunk": schedule.placement.chunk,
        # By rank, its boxes: [kind, stage, microbatch, start, end], and for a pair kind, stage and microbatch of its B.
        "lanes": [
            [(*box.action[:3], box.start, box.end, *(box.beside[:3] if box.beside else ())) for box in lane]
            for lane in lanes
        ],
        "needs": dependencies(schedule, lanes),
        "memory": simulation.memory,
    }


def _draw_small(simulation: Simulation) -> list[dict[str, Any]]:
    """By rank: the kinds and chunks of its boxes, and their starts and ends in TIME_STEPS of the makespan."""
    chunk, scale = simulation.schedule.placement.chunk, TIME_STEPS / simulation.makespan
    ranks = []
    for rank in range(simulation.schedule.p):
        boxes = list(simulation.drawn(rank))
        kinds = "".join("P" if box.beside else box.action.kind[0] for box in boxes)
        ends = [round(scale * time) for box in boxes for time in (box.start, box.end)]
        ranks.append({"kinds": kinds, "chunks": [chunk[box.action.stage] for box in boxes], "ends": ends})
    return ranks
