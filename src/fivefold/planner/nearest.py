"""Finds the nearest layout that can run: changes degrees, microbatches and, if need be, other choices.

nearest(workload, layout, keep="tp")        # a layout without problems; None where nothing near has none
steps(workload, layout)["tp"]               # the values of one field that a model and a number of GPUs allow
with_field(workload, layout, "tp", "16")    # one field set, and what follows it: dp takes the difference

A workload's own layout is not read.
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, get_args

from msgspec import structs

from fivefold.cost.step import Workload
from fivefold.layout.layout import ContextKind, Dispatch, Layout, Recompute
from fivefold.layout.rules import Given, legal, most_stages
from fivefold.planner.explain import RANKS_BY
from fivefold.schedules.registry import CATALOGUE
from fivefold.support.text import divisors

MAX_VALUES = 6  # values of a degree that are tried, the nearest first
MAX_LAYOUTS = 400  # layouts that are held against the rules, for each set of other choices
KEPT_FIELD_WEIGHT = 6.0  # how much further away a change of the field is that is to be kept
FIELD_WEIGHTS = {"tp": 1.0, "pp": 1.1, "cp": 1.2, "ep": 0.8, "microbatches": 0.5}  # of a doubling
# Other choices that may stand in the way, each with a value that never does.
SIMPLER_CHOICES: tuple[dict[str, Any], ...] = (
    {}, {"sp": False}, {"replicate": 1}, {"split": ()}, {"schedule": "1f1b", "chunks": 0}, {"cp_kind": "ring"},
    {"zero": 1, "replicate": 1},
    {"sp": False, "replicate": 1, "split": (), "schedule": "1f1b", "chunks": 0, "cp_kind": "ring", "zero": 1},
)  # fmt: skip


def problems(workload: Workload, layout: Layout) -> list[str]:
    """Why a layout cannot run, as `simulate` would say it."""
    return layout.problems(
        workload.spec, world=workload.cluster.world, seq=workload.seq, batch=workload.batch, ranks_by=RANKS_BY
    )


def steps(workload: Workload, layout: Layout) -> dict[str, list[Any]]:
    """The values that each field may take: of degrees those that the model and the number of GPUs allow by themselves;
    of microbatches and ep those that go with the layout's own degrees."""
    spec, ways = workload.spec, divisors(workload.cluster.world)
    share = workload.batch // layout.dp if workload.batch % layout.dp == 0 else workload.batch
    stage = max(1, layout.dp // layout.replicate * layout.cp * layout.tp)
    record = CATALOGUE.get(layout.schedule)
    most = most_stages(spec) // layout.pp

    def allowed(**degrees: Any) -> bool:
        return bool(legal(Layout(**degrees), Given(spec, seq=workload.seq)))

    return {
        "dp": ways,
        "tp": [n for n in ways if allowed(tp=n)],
        "pp": [n for n in ways if allowed(pp=n)],
        "cp": [n for n in ways if allowed(cp=n)],
        "ep": [n for n in divisors(stage) if allowed(dp=stage, ep=n)],
        "microbatches": divisors(share),
        "zero": [0, 1, 2, 3],
        "replicate": divisors(layout.dp),
        "chunks": list(range(1, max(1, most) + 1)) if record and record.any_chunks else [layout.chunks],
        "recompute": list(get_args(Recompute)),
        "schedule": list(CATALOGUE),
        "cp_kind": list(get_args(ContextKind)),
        "dispatch": list(get_args(Dispatch)),
        "sp": [False, True],
    }


def with_field(workload: Workload, layout: Layout, field: str, value: str) -> Layout:
    """The layout with one field set. dp takes the difference in ranks, microbatches stay as large as they are; the
    split of the layers and the chunks of a schedule belong to what they were made for."""
    changes = structs.asdict(layout) | {field: value}
    if field in ("pp", "chunks", "schedule"):
        changes["split"] = ()
    if field == "schedule":
        changes["chunks"] = 0
    if field == "tp":
        changes["sp"] = layout.sp or layout.tp == 1
    if field == "zero" and value != "3":
        changes["replicate"] = 1
    chosen = Layout.from_dict({key: value for key, value in changes.items() if not (key == "chunks" and not value)})
    if chosen.tp == 1 and field != "sp":
        chosen = structs.replace(chosen, sp=False)
    if field in ("tp", "pp", "cp"):
        chosen = _following(workload, layout, chosen)
    if field == "dp" and (other := nearest(workload, chosen, "dp")) is not None and other.dp == chosen.dp:
        return other
    return chosen


def _following(workload: Workload, before: Layout, layout: Layout) -> Layout:
    inner = layout.world // layout.dp
    dp = workload.cluster.world // inner
    if dp * inner != workload.cluster.world:
        return layout
    changes: dict[str, Any] = {"dp": dp}
    if before.dp * before.microbatches % dp == 0:
        changes["microbatches"] = before.dp * before.microbatches // dp
    if dp % layout.replicate:
        changes["replicate"] = 1
    shared = dp // changes.get("replicate", layout.replicate) * layout.cp * layout.tp
    return structs.replace(layout, **changes, ep=math.gcd(layout.ep, shared))


def nearest(workload: Workload, layout: Layout, keep: str = "") -> Layout | None:
    """The nearest layout without problems; the field `keep` changes only where it must."""
    for plain in SIMPLER_CHOICES:
        start = structs.replace(layout, **plain)
        around = sorted(_nearby_degrees(workload, start, keep), key=lambda change: change[0])
        for _, changes in around[:MAX_LAYOUTS]:
            candidate = structs.replace(start, **changes)
            if not problems(workload, candidate):
                return candidate
    return None


def _nearby_degrees(workload: Workload, layout: Layout, keep: str) -> Iterator[tuple[float, dict[str, Any]]]:
    """Degrees and microbatches nearby, each with how far away it is."""
    world, fitting, total = workload.cluster.world, steps(workload, layout), layout.dp * layout.microbatches

    def far(field: str, value: int, of: int) -> float:
        return (
            abs(math.log2(value / of)) * FIELD_WEIGHTS.get(field, 0.0) * (KEPT_FIELD_WEIGHT if field == keep else 1.0)
        )

    near = {
        axis: sorted(fitting[axis], key=lambda n: abs(math.log2(n / getattr(layout, axis))))[:MAX_VALUES]
        for axis in ("tp", "pp", "cp")
    }
    for tp, pp, cp in product(*near.values()):
        inner = tp * pp * cp
        if world % inner or workload.batch % (dp := world // inner):
            continue
        wanted = layout.microbatches if keep == "microbatches" else max(1, round(total / dp))
        counts = sorted(divisors(workload.batch // dp), key=lambda n: abs(math.log2(n / wanted)))[:4]
        distance = far("tp", tp, layout.tp) + far("pp", pp, layout.pp) + far("cp", cp, layout.cp)
        distance += abs(math.log2(dp / layout.dp)) * (KEPT_FIELD_WEIGHT if keep == "dp" else 0.0)
        base = {"tp": tp, "pp": pp, "cp": cp, "dp": dp}
        shared = divisors(max(1, dp // layout.replicate) * cp * tp)
        for count in {*counts, *(n for n in divisors(workload.batch // dp) if n >= 2 * pp and n < 4 * pp)}:
            for ep in sorted(shared, key=lambda n: abs(math.log2(n / layout.ep)))[:2] if layout.ep > 1 else (1,):
                more = far("microbatches", count, wanted) + far("ep", ep, layout.ep)
                yield distance + more, base | {"microbatches": count, "ep": ep}
