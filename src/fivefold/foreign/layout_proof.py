"""What was found of one layout: how far off it is, why, and how that is told in a row, on a page and in a certificate.

How the values were compared is one of COMPARED: models that draw random numbers draw others in some layouts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fivefold.foreign.adapter import Layout, layout_text
from fivefold.foreign.compare import Deviation
from fivefold.foreign.evidence import Cause, ModuleRow
from fivefold.render.blocks import Block, Cell, Table, Text
from fivefold.support.text import plural

QUANTITIES = ("loss", "gradient", "norm", "parameter")
Outcome = Literal["passed", "differs", "could not run"]
Compared = Literal["values", "values without dropout, then replicas and masks", "replicas and masks"]
VALUES: Compared = "values"
STILL: Compared = "values without dropout, then replicas and masks"
REPLICAS: Compared = "replicas and masks"
_SHOWN = 3  # deviations of a failing layout that are printed


@dataclass(frozen=True)
class LayoutProof:
    layout: Layout
    world: int
    seconds: float
    deviations: Sequence[Deviation]  # the worst first
    causes: Sequence[Cause] = ()
    broken: str = ""  # why there are no numbers, or none of what came after the deviations
    ended: str = ""  # how a rank ended then: "hung", "died", "raised", or the code of what was refused
    stacks: Mapping[int, str] = field(default_factory=dict)  # of ranks that gave no answer, by rank
    details: str = ""
    compared: Compared = "values"
    unlike_masks: bool = False  # dropout's: the causes that are told of them are a difference by themselves
    modules: Sequence[ModuleRow] = ()  # of a layout that differs, where modules were seen
    remarks: Sequence[str] = ()  # worth knowing, and no difference

    @property
    def passed(self) -> bool:
        return not self.broken and not self.unlike_masks and all(deviation.passed for deviation in self.deviations)

    @property
    def outcome(self) -> Outcome:
        return "passed" if self.passed else "could not run" if self.broken and not self.failed else "differs"

    @property
    def by_value(self) -> bool:
        """Whether its values are those of one process, as far as they were compared at all."""
        return self.compared != REPLICAS

    @property
    def failed(self) -> list[Deviation]:
        return [deviation for deviation in self.deviations if not deviation.passed]

    def worst(self, quantity: str) -> Deviation | None:
        """The largest multiple of its tolerance."""
        return next((deviation for deviation in self.deviations if deviation.quantity == quantity), None)

    def to_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {"layout": self.layout, "ranks": self.world, "passed": self.passed}
        if self.broken:
            row["broken"] = self.broken
        if self.broken and not self.failed:
            return row
        row["compared"] = self.compared
        for quantity in QUANTITIES:
            if (worst := self.worst(quantity)) is not None:
                row[quantity] = {"error": _finite(worst.error), "bound": worst.tolerance, "name": worst.name}
        if not self.passed:
            row["failed"] = [_as_dict(deviation) for deviation in self.failed]
            row["causes"] = [{key: value for key, value in vars(cause).items() if value} for cause in self.causes]
            row["modules"] = [module._asdict() for module in self.modules]
        return row | ({"remarks": list(self.remarks)} if self.remarks else {})


def _as_dict(deviation: Deviation) -> dict[str, Any]:
    values = {key: value for key, value in deviation._asdict().items() if value is not None and value != ""}
    return {"text": str(deviation), **values, "error": _finite(deviation.error)}


def _finite(number: float) -> float | str:
    return number if math.isfinite(number) else "infinite"


# ---- words ----------------------------------------------------------------------------------------------------------


def proofs_table(proofs: Sequence[LayoutProof]) -> Table:
    heads = ["layout", ">ranks", *(f">{quantity}" for quantity in QUANTITIES), ""]
    return Table(heads, [_row(proof) for proof in proofs])


def _row(proof: LayoutProof) -> list[str | Cell]:
    cells = []
    for quantity in QUANTITIES:
        worst = proof.worst(quantity)
        cells.append("-" if worst is None else f"{worst.error:.1e}" if math.isfinite(worst.error) else "missing")
    good = "passed" if proof.by_value else "replicas agree"
    outcome = Cell(good, "good") if proof.passed else Cell(proof.outcome, "bad")
    return [layout_text(proof.layout), str(proof.world), *cells, outcome]


def failure(proof: LayoutProof) -> Iterator[Block]:
    """What is wrong with a layout, and why."""
    yield Text(f"{layout_text(proof.layout)}:", "bad")
    order = {quantity: place for place, quantity in enumerate(QUANTITIES)}
    failed = sorted(proof.failed, key=lambda deviation: (deviation.step, order[deviation.quantity]))  # where it begins
    for deviation in failed[:_SHOWN]:
        yield Text(f"  {deviation}")
    if len(failed) > _SHOWN:
        yield Text(f"  {len(failed) - _SHOWN} more differ; --json has them all")
    for cause in proof.causes:
        yield Text(f"  cause: {cause.text}", "bold")
        if cause.likely:
            yield Text(f"    likely: {cause.likely}")
        if cause.read:
            yield Text(f"    read: {cause.read}")
    if proof.broken:
        yield Text(f"  {'and then ' if failed else ''}{proof.broken}")
        if proof.details:
            yield Text("\n".join(f"  {line}" for line in proof.details.splitlines()[-12:]), "dim")


def failures(proofs: Sequence[LayoutProof]) -> str:
    """How many of all layouts differ, and how many could not run."""
    outcomes, all_of_them = [proof.outcome for proof in proofs], plural(len(proofs), "layout")
    differing, broken = outcomes.count("differs"), outcomes.count("could not run")
    if not differing:
        return f"{broken} of {all_of_them} could not run"
    differ = f"{differing} of {all_of_them} differ{'s' if differing == 1 else ''} from one process"
    return f"{differ}, and {broken} could not run" if broken else differ


def modules_table(proof: LayoutProof) -> Table:
    rows = [[row.module, str(row.rank), row.forward, row.backward] for row in proof.modules]
    return Table(["module", ">rank", "forward", "backward"], rows, title=layout_text(proof.layout))


def changes(stated: Mapping[str, Any], proof: LayoutProof) -> list[str]:
    """How a layout differs from what a certificate's row says of it; it is held to the row's own bounds."""
    passed, then_outcome = bool(stated.get("passed")), stated_outcome(stated)
    if then_outcome != proof.outcome:
        return [f"{then_outcome} then, {proof.outcome} now"]
    if proof.outcome == "could not run":
        return []
    if (compared := stated.get("compared", VALUES)) != proof.compared and not proof.broken:
        return [f"{compared} were compared then, {proof.compared} now"]
    found = []
    for quantity in QUANTITIES:
        then, now = stated.get(quantity), proof.worst(quantity)
        if (then is None) != (now is None):
            found.append(f"the {quantity} was {'not ' if then is None else ''}compared then")
        elif passed and then is not None and now is not None:
            bound = then.get("bound") if isinstance(then, dict) else None
            if not isinstance(bound, int | float) or not now.error <= bound:
                found.append(f"the {quantity} of {now.name or 'it'} is off by {now.error:.2g}, and {bound} was allowed")
    then_causes = [cause.get("text") for cause in stated.get("causes", ()) if isinstance(cause, dict)]
    if not passed and then_causes != [cause.text for cause in proof.causes]:
        found.append("it differs for another cause now")
    return found


def stated_outcome(stated: Mapping[str, Any]) -> Outcome:
    """The outcome in a certificate's row."""
    if stated.get("passed"):
        return "passed"
    return "could not run" if stated.get("broken") and not stated.get("failed") else "differs"
