"""The Plan view: a layout of a model on a cluster, as `fivefold simulate` and `fivefold plan` have it.

payload(Ask({"model": "llama3-70b", "cluster": "8x8xH100", "layout": "dp=8,tp=8,zero=1,sp,microbatches=8"}))
payload(Ask({..., "move": "tp=16"}))    # one slider moved: dp follows; what cannot run comes with the nearest that can

The page names models, accelerators and schedules of the catalogues. Files belong to the command line.
"""

from functools import lru_cache
from typing import Any

from fivefold.hardware.accelerators import ACCELERATORS, PRECISIONS
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.plan.cost.footprint import footprint_of
from fivefold.plan.cost.systems import SYSTEMS
from fivefold.plan.cost.time import Case
from fivefold.plan.nearest import moved, nearest, problems, steps
from fivefold.plan.plan import option_of, plan, question
from fivefold.plan.result import PlanResult, SimulateResult, simulated
from fivefold.plan.search.explain import CAUSES, difference, nearest_fit, neighbours
from fivefold.plan.search.option import Option
from fivefold.schedule.catalogue import CATALOGUE
from fivefold.spec.presets import PRESETS, preset
from fivefold.support.errors import UserError
from fivefold.support.formatting import did_you_mean
from fivefold.ui.ask import Ask

MODEL, CLUSTER = "llama3-70b", "8x8xH100"  # what the page begins with
ASKED = ("model", "cluster", "batch", "seq", "precision", "software")
TOP = 12  # rows of the ranking
RANKS = 128  # pipeline ranks whose memory is listed


def payload(ask: Ask) -> dict[str, Any]:
    """All that the page draws while a slider moves."""
    ask.only(*ASKED, "layout", "move")
    case = _case(ask)
    wanted = _moved(case, ask)
    wrong = problems(case, wanted)
    shown = nearest(case, wanted, ask.text("move").partition("=")[0]) if wrong else wanted
    option = None if shown is None else option_of(case, shown)
    return _page(case, _software(ask), wanted, wrong, option)


def planned(found: PlanResult) -> tuple[dict[str, Any], dict[str, Any]]:
    """The payload and the parts of what `plan` has found, of whatever model and cluster it was asked for."""
    if found.chosen.case.groups:
        raise UserError(
            f"{found.case.cluster} has unlike nodes, for which the page has no view; `fivefold plan -o decision.html` "
            "writes the decision down"
        )
    option = found.explained
    page = _page(found.case, found.case.stack.name, option.layout, [], option)
    advice = SimulateResult(option, None if option.fits else nearest_fit(option)).advice
    against = None if found.given is None else difference(found.chosen, found.given)
    told = {"advice": advice or None, "neighbours": [one.to_dict() for one in found.neighbours], "against": against}
    return page, {"search": found.to_dict(), "why": told}


def _page(case: Case, software: str, wanted: Layout, wrong: list[str], option: Option | None) -> dict[str, Any]:
    """`option` is the layout that is shown: the wanted one, or the nearest that can run."""
    shown = None if option is None else option.layout
    return {
        "question": _described(case, software),
        "choices": _choices(case, software),
        "steps": steps(case, wanted),
        "wanted": _fields(wanted),
        "problems": wrong,
        "shown": None if shown is None else _fields(shown),
        "changes": [] if shown is None else _changes(wanted, shown),
        "figures": None if option is None else simulated(option),
        "ranks": [] if option is None else _ranks(option),
        "device_memory_bytes": case.memory_of(0),
        "causes": CAUSES,
        "asks": _asks(case, software, option),
    }


def _asks(case: Case, software: str, option: Option | None) -> dict[str, dict[str, str]]:
    """The words of the parts that belong to this payload."""
    words = (case.spec.name, str(case.cluster), case.batch, case.seq, case.precision, software)
    asked = dict(zip(ASKED, map(str, words), strict=True))
    return {"search": asked} | ({} if option is None else {"why": asked | {"layout": str(option.layout)}})


def search(ask: Ask) -> dict[str, Any]:
    """The ranking, as `fivefold plan --json` has it."""
    ask.only(*ASKED)
    case = _case(ask)
    found = plan(case.spec, case.cluster, batch=case.batch, seq=case.seq, precision=case.precision,
                 software=_software(ask), top=TOP)  # fmt: skip
    return found.to_dict()


def why(ask: Ask) -> dict[str, Any]:
    """What each single change of a layout would do; where it does not fit, what `simulate` advises; and how it differs
    from the layout `best`, if one is named."""
    ask.only(*ASKED, "layout", "best")
    case, best = _case(ask), ask.text("best")
    option = option_of(case, _layout(ask.text("layout", "dp=1")))
    result = SimulateResult(option, None if option.fits else nearest_fit(option))
    return {
        "advice": result.advice or None,
        "neighbours": [one.to_dict() for one in neighbours(option)],
        "against": difference(option_of(case, _layout(best)), option) if best else None,
    }


def _case(ask: Ask) -> Case:
    """The question, of names alone."""
    model, cluster = ask.text("model", MODEL), ask.text("cluster", CLUSTER)
    if model not in PRESETS:
        raise UserError(f"unknown model {model[:60]!r}; {did_you_mean(model[:60], list(PRESETS))}")
    if ".toml" in cluster.lower() or "/" in cluster:
        raise UserError(f"cluster={cluster[:60]!r} is a file, and the page reads none; `fivefold plan --cluster` does")
    if "+" in cluster:
        raise UserError(
            f"cluster={cluster[:60]!r} has unlike nodes, for which there are no sliders; `fivefold plan` has them"
        )
    return _question(
        model, cluster, ask.whole("batch"), ask.whole("seq"), ask.text("precision"), _software(ask)
    )  # fmt: skip


@lru_cache(maxsize=64)
def _question(model: str, cluster: str, batch: int | None, seq: int | None, precision: str, software: str) -> Case:
    return question(preset(model), Cluster.parse(cluster), (), batch, seq, precision, software)


def _software(ask: Ask) -> str:
    return ask.text("software", "fivefold")


def _layout(text: str) -> Layout:
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key == "schedule" and value not in CATALOGUE:  # a layout may name a file, and a page must not
            raise UserError(f"unknown schedule {value[:60]!r}; {did_you_mean(value[:60], list(CATALOGUE))}")
    return Layout.parse(text)


def _moved(case: Case, ask: Ask) -> Layout:
    """The layout that is asked for; without one, plain data parallelism with everything sharded, or what is near it."""
    if not ask.text("layout"):
        start = Layout(dp=case.cluster.world, zero=3, microbatches=max(1, case.batch // case.cluster.world))
        layout = nearest(case, start) or start
    else:
        layout = _layout(ask.text("layout"))
    field, equals, value = ask.text("move").partition("=")
    if not field:
        return layout
    if not equals or field not in Layout.__struct_fields__ or field == "split":
        raise UserError(f"move={ask.text('move')[:60]!r} is no field of a layout and its value; write move=tp=8")
    if field == "schedule":
        _layout(f"schedule={value}")
    return moved(case, layout, field, value)


def _fields(layout: Layout) -> dict[str, Any]:
    fields = {name: getattr(layout, name) for name in layout.__struct_fields__}
    return {"text": str(layout), "world": layout.world, "fields": fields}


def _changes(before: Layout, after: Layout) -> list[str]:
    """'tp 16 → 8', of every field that differs."""
    fields = [name for name in before.__struct_fields__ if getattr(before, name) != getattr(after, name)]
    return [f"{name} {getattr(before, name)} → {getattr(after, name)}" for name in fields]


def _ranks(option: Option) -> list[dict[str, float]]:
    """Bytes by component, of every pipeline rank."""
    return [footprint_of(option.case, rank).parts for rank in range(min(RANKS, option.layout.pp))]


def _described(case: Case, software: str) -> dict[str, Any]:
    spec, group = case.spec, case.cluster.groups[0]
    links = {name: {"name": link.name, "bytes_per_second": link.bandwidth} for name, link in
             (("inside", group.accelerator.inside), ("across", group.accelerator.across))}  # fmt: skip
    return {
        "model": spec.name, "parameters": spec.parameter_count, "active_parameters": spec.active_parameters,
        "layers": spec.layers, "heads": spec.heads, "context": spec.context,
        "experts": None if spec.experts is None else spec.experts.count,
        "cluster": str(case.cluster), "nodes": group.nodes, "gpus": group.gpus, "world": group.world,
        "accelerator": group.accelerator.name, "links": links,
        "batch": case.batch, "seq": case.seq, "precision": case.precision, "software": software,
    }  # fmt: skip


def _choices(case: Case, software: str) -> dict[str, Any]:
    """What the page's lists offer; what a file described is one more choice."""
    device, spec = case.cluster.groups[0].accelerator, case.spec
    others = [] if spec.name in PRESETS else [{"name": spec.name, "parameters": spec.parameter_count}]
    devices = {device.name: device} | ACCELERATORS if device.name not in ACCELERATORS else ACCELERATORS
    return {
        "models": [*_models(), *others],
        "accelerators": [{"name": one.name, "memory_bytes": one.memory} for one in devices.values()],
        "precisions": [name for name in PRECISIONS if getattr(device.peak, name) is not None],
        "software": list(dict.fromkeys((*SYSTEMS, software))),
        "schedules": [{"name": one.name, "needs": one.needs} for one in CATALOGUE.values()],
    }


@lru_cache(maxsize=1)
def _models() -> list[dict[str, Any]]:
    specs = [preset(name) for name in PRESETS]
    return [{"name": spec.name, "parameters": spec.parameter_count} for spec in specs]
