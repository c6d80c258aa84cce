"""The Plan view: a layout of a model on a cluster, as in `fivefold plan`.

payload(Ask({"model": "llama3-70b", "cluster": "8x8xH100", "layout": "dp=8,tp=8,zero=1,sp,microbatches=8"}))
payload(Ask({..., "move": "tp=16"}))    # one slider moved: dp follows; a layout that cannot run comes with the nearest
"""

from typing import Any

from fivefold.cost.peak_memory import footprint_of
from fivefold.cost.step import Workload
from fivefold.layout.layout import Layout
from fivefold.planner.explain import CAUSE_NAMES, difference, nearest_fit, neighbours
from fivefold.planner.nearest import nearest, problems, steps
from fivefold.planner.option import Option
from fivefold.planner.plan import option_of, plan
from fivefold.planner.result import PlanResult, SimulateResult, simulation_figures
from fivefold.schedules.registry import CATALOGUE
from fivefold.support.errors import UserError
from fivefold.web.held import held
from fivefold.web.question import (
    QUESTION_PARAMETERS,
    Ask,
    choices,
    describe_question,
    fields_of,
    layout_of,
    query_for,
    requested_layout,
    requested_software,
    without_option_dashes,
    workload_of,
)

RANKED_LAYOUTS = 12
MAX_QUICK_PASSES = 4096  # of a pipeline that is simulated while a slider moves
MAX_LISTED_RANKS = 128  # pipeline ranks whose memory is listed


def payload(ask: Ask) -> dict[str, Any]:
    """All that the page draws while a slider moves."""
    ask.only(*QUESTION_PARAMETERS, "layout", "move")
    workload = workload_of(ask)
    wanted = requested_layout(workload, ask)
    found = problems(workload, wanted)
    shown = nearest(workload, wanted, ask.text("move").partition("=")[0]) if found else wanted
    option = None if shown is None else option_of(workload, shown)
    return _page(workload, requested_software(ask), wanted, found, option)


def is_large(ask: Ask) -> bool:
    """Whether the layout's schedule has many passes, or is built by a search."""
    layout = requested_layout(workload_of(ask), ask)
    searched = layout.schedule in CATALOGUE and CATALOGUE[layout.schedule].uses_stage_times
    return searched or layout.pp * layout.chunks * layout.microbatches > MAX_QUICK_PASSES


def plan_view(result: PlanResult) -> tuple[dict[str, Any], dict[str, Any]]:
    """The payload of a plan, and its parts by name, for a report; its model and cluster may come from files."""
    if result.chosen.workload.groups:
        raise UserError(
            f"{result.workload.cluster} is heterogeneous, which has no view; `fivefold plan -o "
            "decision.html` writes a design document",
            "page.cluster",
        )
    option = result.explained
    page = _page(result.workload, result.workload.software.name, option.layout, [], option)
    advice = SimulateResult(option, None if option.fits else nearest_fit(option)).advice
    against = None if result.given is None else difference(result.chosen, result.given)
    reasons = {
        "advice": without_option_dashes(advice) or None,
        "neighbours": [neighbour.to_dict() for neighbour in result.neighbours],
        "against": against,
    }
    return page, {"search": result.to_dict(), "why": reasons}


def others(result: PlanResult) -> dict[str, Any] | None:
    """What the report of a plan holds besides: the layouts of the ranking, and those one change away that fit."""
    software, own = result.workload.software.name, result.explained.layout
    near = [neighbour.layout for neighbour in result.neighbours if neighbour.slower is not None]
    answers: dict[str, dict[str, Any]] = {}
    for layout in dict.fromkeys((*(option.layout for option in result.options), result.chosen.layout, *near)):
        if layout == own or layout.pp * layout.chunks * layout.microbatches > MAX_QUICK_PASSES:
            continue
        option = option_of(result.workload, layout)
        reasons: dict[str, Any] = {
            "advice": None,
            "neighbours": [neighbour.to_dict() for neighbour in neighbours(option)],
        }
        reasons["against"] = None if layout == result.chosen.layout else difference(result.chosen, option)
        page = _page(result.workload, software, layout, [], option)
        answers[str(layout)] = {"payload": page, "parts": {"why": reasons}}
    return held(("layout",), answers, str(own)) if answers else None


def _page(workload: Workload, software: str, wanted: Layout, found: list[str], option: Option | None) -> dict[str, Any]:
    """`option` is the layout that is shown: the wanted one, or the nearest that can run."""
    shown = None if option is None else option.layout
    return {
        "question": describe_question(workload, software),
        "choices": choices(workload, software),
        "steps": steps(workload, wanted),
        "wanted": fields_of(wanted),
        "problems": [without_option_dashes(problem) for problem in found],
        "shown": None if shown is None else fields_of(shown),
        "changes": [] if shown is None else _changes(wanted, shown),
        "figures": None if option is None else simulation_figures(option),
        "ranks": [] if option is None else _ranks(option),
        "device_memory_bytes": workload.device_memory_of(0),
        "causes": CAUSE_NAMES,
        "asks": _asks(workload, software, option),
    }


def _asks(workload: Workload, software: str, option: Option | None) -> dict[str, dict[str, str]]:
    """The query parameters of the parts that belong to this payload."""
    query = query_for(workload, software)
    return {"search": query} | ({} if option is None else {"why": query | {"layout": str(option.layout)}})


def search(ask: Ask) -> dict[str, Any]:
    """The ranking, as in `fivefold plan --json`."""
    ask.only(*QUESTION_PARAMETERS)
    workload = workload_of(ask)
    result = plan(workload.spec, workload.cluster, batch=workload.batch, seq=workload.seq, precision=workload.precision,
                 software=requested_software(ask), top=RANKED_LAYOUTS)  # fmt: skip
    return result.to_dict()


def why(ask: Ask) -> dict[str, Any]:
    """The effect of each single change of a layout; advice if the layout does not fit; and how it differs from the
    layout `best`, if one is named."""
    ask.only(*QUESTION_PARAMETERS, "layout", "best")
    workload, best = workload_of(ask), ask.text("best")
    option = option_of(workload, layout_of(ask.text("layout", "dp=1")))
    result = SimulateResult(option, None if option.fits else nearest_fit(option))
    return {
        "advice": without_option_dashes(result.advice) or None,
        "neighbours": [neighbour.to_dict() for neighbour in neighbours(option)],
        "against": difference(option_of(workload, layout_of(best)), option) if best else None,
    }


def _changes(before: Layout, after: Layout) -> list[str]:
    """'tp 16 → 8' for every field that differs."""
    fields = [name for name in before.__struct_fields__ if getattr(before, name) != getattr(after, name)]
    return [f"{name} {getattr(before, name)} → {getattr(after, name)}" for name in fields]


def _ranks(option: Option) -> list[dict[str, float]]:
    """The bytes by component of every pipeline rank."""
    return [footprint_of(option.workload, rank).parts for rank in range(min(MAX_LISTED_RANKS, option.layout.pp))]
