"""What would change a decision: memory, batch and links at which another layout is chosen, found by planning again."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from msgspec import structs

from fivefold.hardware.cluster import Accelerator, Cluster
from fivefold.layout.layout import Layout
from fivefold.plan.cost.time import Case
from fivefold.plan.search.explain import ALIKE, RANKS_BY, difference, simplest
from fivefold.plan.search.option import Option, evaluate
from fivefold.plan.search.search import SURVIVORS, By, search
from fivefold.support.errors import UserError

FACTORS = (0.5, 2.0)
HALVINGS = 2  # of the interval in which the choice changes
Progress = Callable[[int, int, str], None]


class Quantity(NamedTuple):
    """Something of the question that may be otherwise: `change` makes a case that has so many times as much of it, and
    `read` says how much a case has."""

    name: str
    unit: str
    read: Callable[[Case], float]
    change: Callable[[Case, float], Case]


@dataclass(frozen=True)
class Turn:
    """The choice holds up to `holds`, and is another at `turns`; None: no other up to there."""

    name: str
    unit: str
    value: float  # as it was asked
    holds: float
    turns: float | None
    choice: str = ""  # the layout there; empty: nothing fits
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("name", "unit", "value", "holds", "turns", "choice", "why")}


def quantities(case: Case) -> list[Quantity]:
    """Of unlike nodes the memory alone: which of their links would it be?"""
    found = [Quantity("memory of a device", "GB", lambda one: _card(one).memory / 1e9, _memory)]
    if not case.cluster.groups[1:]:
        where = "between nodes" if case.cluster.nodes > 1 else "within the node"
        if case.cluster.world > 1:
            found.append(Quantity(f"link {where}", "GB/s", _speed, _link))
        found.append(Quantity("batch", "sequences", lambda one: one.batch, _batch))
    return found


def _card(case: Case) -> Accelerator:
    return case.cluster.groups[0].accelerator


def _speed(case: Case) -> float:
    return float(getattr(_card(case), _which(case)).bandwidth / 1e9)


def _which(case: Case) -> str:
    """The link that is the narrowest."""
    return "across" if case.cluster.nodes > 1 else "inside"


class Asked(NamedTuple):
    """The question behind a choice: a case whose layout is open, the ranking, and choices that are not free."""

    case: Case
    by: By
    fixed: dict[str, Any]

    def choice(self, case: Case) -> Option | None:
        """As `plan` chooses; None where nothing fits."""
        try:
            found = search(case, self.by, SURVIVORS if self.by == "throughput" else 1, **self.fixed)
        except UserError:
            return None
        return simplest(found.options) if self.by == "throughput" else found.best


def turns(chosen: Option, asked: Asked, progress: Progress | None = None) -> Iterator[Turn]:
    """For half and twice as much of each quantity. Where the choice changes, about where."""
    case = asked.case
    every = [(quantity, factor) for quantity in quantities(case) for factor in FACTORS]
    for done, (quantity, factor) in enumerate(every):
        if progress:
            progress(done, len(every), f"{quantity.name} x {factor:g}")
        yield _turn(chosen, asked, quantity, factor)


def _turn(chosen: Option, asked: Asked, quantity: Quantity, factor: float) -> Turn:
    def at(factor: float) -> float:
        return quantity.read(quantity.change(asked.case, factor))

    one = asked.choice(quantity.change(asked.case, factor))
    if not _differs(chosen.layout, one):
        return Turn(quantity.name, quantity.unit, at(1.0), at(factor), None)
    holds, turned = 1.0, factor
    for _ in range(HALVINGS):
        middle = math.sqrt(holds * turned)
        there = asked.choice(quantity.change(asked.case, middle))
        if _differs(chosen.layout, there):
            turned, one = middle, there
        else:
            holds = middle
    why = "" if one is None else _compared(chosen, one)
    choice = str(one.layout) if one else ""
    return Turn(quantity.name, quantity.unit, at(1.0), at(holds), at(turned), choice, why)


def _differs(layout: Layout, other: Option | None) -> bool:
    """In more than the number of its microbatches."""
    if other is None:
        return True
    one, two = (structs.replace(each, microbatches=1) for each in (layout, other.layout))
    return one != two


def _compared(chosen: Option, other: Option) -> str:
    """How the choice of now would do there."""
    case, layout = other.case, chosen.layout
    rows = case.batch // layout.dp // chosen.case.samples  # microbatches of the size of now
    if rows and case.batch == rows * layout.dp * chosen.case.samples:
        layout = structs.replace(layout, microbatches=rows)
    if layout.problems(case.spec, world=case.cluster.world, seq=case.seq, batch=case.batch, ranks_by=RANKS_BY):
        return f"{layout} does not divide it"
    if chosen.case.groups:
        return ""
    stays = evaluate(replace(case, layout=layout))
    if not stays.fits:
        return f"{layout} does not fit there: it needs {stays.footprint.total / 1e9:.1f} GB"
    little = abs(other.seconds / stays.seconds - 1) < ALIKE
    noise = ", and so little is within the noise of measured runs" if little else ""
    return f"against staying it {difference(stays, other)}{noise}"


def _memory(case: Case, factor: float) -> Case:
    def changed(card: Accelerator) -> Accelerator:
        return structs.replace(card, memory=int(card.memory * factor))

    return _with_cards(case, changed)


def _link(case: Case, factor: float) -> Case:
    which = _which(case)

    def changed(card: Accelerator) -> Accelerator:
        link = getattr(card, which)
        return structs.replace(card, **{which: structs.replace(link, bandwidth=link.bandwidth * factor)})

    return _with_cards(case, changed)


def _batch(case: Case, factor: float) -> Case:
    """A multiple of the devices, where the batch was one."""
    unit = math.gcd(case.batch, case.cluster.world)
    return replace(case, batch=max(unit, round(case.batch * factor / unit) * unit))


def _with_cards(case: Case, changed: Callable[[Accelerator], Accelerator]) -> Case:
    groups = tuple(structs.replace(group, accelerator=changed(group.accelerator)) for group in case.cluster.groups)
    return replace(case, cluster=Cluster(groups))
