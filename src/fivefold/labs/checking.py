"""Checks a student's answer: every case of a lab on real ranks, against one process; and what they sent.

    check_lab("linear").ok              # of linear/linear.py

The verdict is made here, from the tensors and messages that ranks return: what the answer prints does not count.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fivefold.foreign.adapter import AdapterFile, layout_text, parse_layout
from fivefold.foreign.evidence import listed
from fivefold.foreign.gradient_causes import OTHER_TOKENS
from fivefold.foreign.layout_proof import LayoutProof
from fivefold.foreign.measurement import Settings
from fivefold.foreign.verify import AdapterProof
from fivefold.labs.catalogue import lab_in, other_statement
from fivefold.labs.ends import FINAL, broken_proof, ended
from fivefold.labs.groups import ADVICE as GROUP_ADVICE
from fivefold.labs.groups import GROUPS, groups_of, inside, strangers
from fivefold.labs.lab import Case, FileVerdict, Lab
from fivefold.labs.messages import (
    ANSWER,
    BARRIER,
    FOLDER,
    PROGRESS,
    LabMessage,
    busiest,
    read,
    sums,
    told,
    unwritten,
    wire_of,
)
from fivefold.labs.probes import ROUNDED, SMALL, differences
from fivefold.render.blocks import Block, Result, Table, Text, mark
from fivefold.support.ranges import seconds
from fivefold.support.text import plural

TIMEOUT = 30.0  # seconds of one layout, of which a check has up to eight; each takes about one
_SHOWN = 3  # differences that are told of a layout


@dataclass(frozen=True)
class Outcome:
    """One layout of one case."""

    case: Case
    proof: LayoutProof
    problems: tuple[str, ...]
    sent: Sequence[LabMessage]  # by the rank that sends most, in one step

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def final(self) -> bool:
        """Whether there is no use in running the other layouts."""
        return self.proof.ended in FINAL


@dataclass(frozen=True)
class LabCheck(Result):
    lab: Lab
    outcomes: tuple[Outcome, ...]
    remarks: tuple[str, ...] = ()

    @property
    def left(self) -> int:
        """Layouts that were not run, because one before them could not end."""
        return self.lab.layouts - len(self.outcomes)

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return not self.left and all(outcome.passed for outcome in self.outcomes)

    @property
    def summary(self) -> str:
        wrong = sum(not outcome.passed for outcome in self.outcomes)
        count = plural(len(self.outcomes), "layout")
        if wrong:
            left = f"; {plural(self.left, 'other')} {'was' if self.left == 1 else 'were'} not run" if self.left else ""
            return f"{self.lab.name}: {wrong} of {count} {'is' if wrong == 1 else 'are'} not right yet{left}"
        worst = max((d.error for one in self.outcomes for d in one.proof.deviations), default=0.0)
        return f"{self.lab.name} is solved: {count} = one process within {worst:.1e}"

    def to_dict(self) -> dict[str, Any]:
        rows = [{"case": one.case.model, "layout": one.proof.layout, "passed": one.passed, "problems": [*one.problems],
                 "sent": {kind: {"calls": calls, "bytes": size} for kind, (calls, size) in sums(one.sent).items()}}
                for one in self.outcomes]  # fmt: skip
        head = {"lab": self.lab.name, "passed": self.ok, "summary": self.summary}
        return {**head, "layouts": rows, "remarks": [*self.remarks]}

    def blocks(self) -> Iterator[Block]:
        rows = [
            [one.case.about, layout_text(one.proof.layout), told(one.sent), mark(one.passed)] for one in self.outcomes
        ]
        yield Table(["~case", "layout", "~a rank sends", ""], rows, title=self.lab.title)
        said: list[str] = []
        for one in self.outcomes:
            new = [problem for problem in one.problems if problem not in said]  # and not the same in several layouts
            if new:
                yield Text(f"{one.case.about} ({layout_text(one.proof.layout)})")
            for problem in new:
                yield Text(problem, "bad")
            said += new
        for remark in self.remarks:
            yield Text(remark)
        yield Text(self.summary, "good" if self.ok else "bad")


def check_lab(
    answer: str | Path, *, timeout: float = TIMEOUT, first: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> LabCheck | FileVerdict:  # fmt: skip
    """Hold a student's answer to a lab against one process, in every layout of the lab.

    `answer` is the file, or the directory that `fivefold lab start` wrote; `timeout` is each layout's, in seconds.
    `first` ends the check at the first layout that is wrong.
    """
    seconds("--timeout", timeout)
    lab, file = lab_in(Path(answer))
    if lab.read is not None:
        return lab.read(lab, file)
    outcomes: list[Outcome] = []
    remarks = tuple(other_statement(lab, file))
    with tempfile.TemporaryDirectory(prefix="fivefold-lab-", ignore_cleanup_errors=True) as home:
        for case in lab.cases:
            folder = Path(home) / case.model
            folder.mkdir()
            with answered_by(file, folder) as at:
                for outcome in _of_case(
                    lab, case, folder, at, timeout, lambda what: progress(len(outcomes), lab.layouts, what)
                ):
                    outcomes.append(_of_a_part(outcome, outcomes))
                    if outcome.final or (first and not outcome.passed):
                        return LabCheck(lab, tuple(outcomes), remarks)
    return LabCheck(lab, tuple(outcomes), remarks)


def _of_case(
    lab: Lab, case: Case, folder: Path, at: Path, timeout: float, before: Callable[[str], None]
) -> Iterator[Outcome]:  # fmt: skip
    """Each layout of a case, against one process that is run once."""
    place = AdapterFile(lab.home / "check.py", case.model)
    before("one process")
    proof = AdapterProof(place, Settings(lab.steps, "cpu"), timeout, folder)
    described = proof.describe([parse_layout(layout) for layout in case.layouts])
    proof.refer()
    for layout, world, known in described.cases:
        before(layout_text(layout))
        yield _outcome(lab, case, proof.prove(layout, world, known), folder, at)


def _of_a_part(outcome: Outcome, before: Sequence[Outcome]) -> Outcome:
    """Says so where nothing but the group is new."""
    layout = outcome.proof.layout
    told_already = any(GROUP_ADVICE in problem for problem in outcome.problems)
    if outcome.passed or told_already or GROUPS not in layout or not all(one.passed for one in before):
        return outcome
    here = " and ".join(f"[{', '.join(map(str, group))}]" for group in groups_of(layout, outcome.proof.world))
    new = f"what is new in this layout is `group`, which had all ranks before: here there are two, {here}"
    return replace(outcome, problems=(*outcome.problems, f"{new}; {GROUP_ADVICE}"))


def _outcome(lab: Lab, case: Case, proof: LayoutProof, folder: Path, at: Path) -> Outcome:
    layout = {key: int(value) for key, value in proof.layout.items()}
    messages = read(folder, layout_text(proof.layout), proof.world)
    sent = busiest(messages)
    # What differs first on the way forward says more than the gradients that follow from it.
    on_the_way = [_hinted(lab, case, text) for text in differences(folder, proof.layout, proof.world, case.probes)]
    if odd := strangers(proof.layout, messages):
        problems = [odd]
    elif proof.broken:
        problems = [_hinted(lab, case, ended(broken_proof(proof), lab.file, at, messages)), *on_the_way]
    elif not proof.passed:
        problems = on_the_way or _causes(lab, case, proof, messages)
    elif lost := unwritten(messages):
        problems = [lost]
    else:
        problems = on_the_way or _too_much(sent, case.needs(layout) if case.needs else None)
        for group in groups_of(proof.layout, proof.world) if case.judge else ():
            if case.judge and (text := case.judge([inside(messages[rank], group) for rank in group])):
                problems.append(text)
                break
    return Outcome(case, proof, tuple(problems), sent)


def _causes(lab: Lab, case: Case, proof: LayoutProof, messages: Sequence[Sequence[LabMessage]]) -> list[str]:
    """Why gradients differ, in the words of the lab, or in general ones."""
    if case.diagnose and (text := case.diagnose(proof.failed, messages)):
        return [_hinted(lab, case, text)]
    if (worst := max(one.error for one in proof.failed)) <= SMALL:
        names = listed([one.name or one.quantity for one in proof.failed])
        return [f"the {proof.failed[0].quantity} of {names} is off by {worst:.1e} of its largest element: {ROUNDED}"]
    causes = [
        _hinted(lab, case, cause.text, cause.likely) for cause in proof.causes if not cause.text.startswith(_VAGUE)
    ]
    return causes[:_SHOWN] or [_hinted(lab, case, str(deviation)) for deviation in proof.failed[:_SHOWN]]


_VAGUE = ("before they are reduced", "forward:")  # of verify, where the frameworks' own modules are looked into


def _hinted(lab: Lab, case: Case, text: str, likely: str = "") -> str:
    """A finding with what it means in this lab."""
    likely = "" if likely == OTHER_TOKENS else likely  # of whole models; a lab that has it in mind says it itself
    hints = (*case.hints, *lab.hints)
    hint = next((hint.sentence for hint in hints if all(word in text for word in hint.words)), likely)
    if ": " not in text:
        return f"{text}: {hint}" if hint else text
    return f"{text}. {hint[:1].upper()}{hint[1:]}" if hint else text  # and not a third part after a second colon


def _too_much(sent: Sequence[LabMessage], needed: Sequence[LabMessage] | None) -> list[str]:
    """Right, and dearer than it has to be."""
    if barriers := [one for one in sent if one.kind == BARRIER]:
        return [f"the numbers are right, but a rank calls {told(barriers)}: all wait there, and no message needs it"]
    if needed is None:
        return []
    own, least = wire_of(sent), wire_of(needed)
    if own > least:
        times = f"{float(own / least):.3g} x the bytes of {told(needed)}" if least else "and nothing is needed"
        return [f"the numbers are right, but a rank sends {told(sent)}, {times}{_half(sent, needed)}"]
    if len(sent) > len(needed):
        return [f"the numbers are right, but a rank sends {told(sent)} where {told(needed)} are enough"]
    return []


def _half(sent: Sequence[LabMessage], needed: Sequence[LabMessage]) -> str:
    """What to call in place of an all-reduce of which a part is used."""
    more, fewer = (
        sum(one.kind == kind for one in sent) - sum(one.kind == kind for one in needed)
        for kind in ("all-reduce", "reduce-scatter")
    )
    return ": a reduce-scatter is enough here, since each rank uses its part of the sum" if more > 0 > fewer else ""


@contextmanager
def answered_by(file: Path, folder: Path | None = None) -> Iterator[Path]:
    """Ranks that start in here import this answer, and write what they send into the folder. Gives the directory in
    which each says what it is at."""
    with tempfile.TemporaryDirectory(prefix="fivefold-lab-", ignore_cleanup_errors=True) as at:
        values = {ANSWER: str(file.resolve()), PROGRESS: at, **({FOLDER: str(folder)} if folder else {})}
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield Path(at)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
