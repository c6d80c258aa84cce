"""Checks a student's answer: every case of a lab on real ranks, against one process; and what they sent.

    check_lab("linear").ok              # of linear/linear.py

The verdict is made here, from the tensors and messages that ranks return: what the answer prints does not count.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fivefold.foreign.adapter import layout_text
from fivefold.foreign.layout_proof import LayoutProof
from fivefold.foreign.verify import verify_adapter
from fivefold.labs.catalogue import lab_in
from fivefold.labs.lab import Case, FileVerdict, Lab
from fivefold.labs.messages import ANSWER, FOLDER, LabMessage, busiest, read, stuck, sums, told, wire_of
from fivefold.labs.probes import differences
from fivefold.render.blocks import Block, Result, Table, Text, mark
from fivefold.support.text import plural

TIMEOUT = 30.0  # seconds of one layout: a check has a dozen, and a minute
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


@dataclass(frozen=True)
class LabCheck(Result):
    lab: Lab
    outcomes: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return all(outcome.passed for outcome in self.outcomes)

    @property
    def summary(self) -> str:
        wrong = sum(not outcome.passed for outcome in self.outcomes)
        count = plural(len(self.outcomes), "layout")
        if wrong:
            return f"{self.lab.name}: {wrong} of {count} {'is' if wrong == 1 else 'are'} not right yet"
        worst = max((d.error for one in self.outcomes for d in one.proof.deviations), default=0.0)
        return f"{self.lab.name} is solved: {count} = one process within {worst:.1e}"

    def to_dict(self) -> dict[str, Any]:
        rows = [{"case": one.case.model, "layout": one.proof.layout, "passed": one.passed, "problems": [*one.problems],
                 "sent": {kind: {"calls": calls, "bytes": size} for kind, (calls, size) in sums(one.sent).items()}}
                for one in self.outcomes]  # fmt: skip
        return {"lab": self.lab.name, "passed": self.ok, "summary": self.summary, "layouts": rows}

    def blocks(self) -> Iterator[Block]:
        rows = [
            [one.case.about, layout_text(one.proof.layout), told(one.sent), mark(one.passed)] for one in self.outcomes
        ]
        yield Table(["~case", "layout", "~a rank sends", ""], rows, title=self.lab.title)
        said: list[str] = []
        for one in self.outcomes:
            for problem in one.problems:
                if problem not in said:  # the same in several layouts
                    yield Text(f"{one.case.model}, {layout_text(one.proof.layout)}: {problem}", "bad")
                    said.append(problem)
        yield Text(self.summary, "good" if self.ok else "bad")


def check_lab(
    answer: str | Path, *, timeout: float = TIMEOUT,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> LabCheck | FileVerdict:  # fmt: skip
    """Hold a student's answer to a lab against one process, in every layout of the lab.

    `answer` is the file, or the directory that `fivefold lab start` wrote; `timeout` is each layout's, in seconds.
    """
    lab, file = lab_in(Path(answer))
    if lab.read is not None:
        return lab.read(lab, file)
    total = sum(len(case.layouts) for case in lab.cases)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="fivefold-lab-") as home:
        for case in lab.cases:
            folder = Path(home) / case.model
            folder.mkdir()
            shown = partial(_progress, progress, len(outcomes), total)
            with answered_by(file, folder):
                check = f"{lab.home / 'check.py'}:{case.model}"
                found = verify_adapter(check, case.layouts, timeout=timeout, steps=lab.steps, progress=shown)
            outcomes += [_outcome(lab, case, proof, folder) for proof in found.proofs]
            if any(_unwritten(outcome) for outcome in outcomes):
                break  # a hole is a hole in all of them
    return LabCheck(lab, tuple(outcomes))


def _progress(show: Callable[[int, int, str], None], before: int, total: int, done: int, of: int, what: str) -> None:
    """Of one case, as a part of all."""
    show(min(before + max(0, done - 1), total), total, what)


def _unwritten(outcome: Outcome) -> bool:
    return any(problem.endswith("is not written yet") for problem in outcome.problems)


def _outcome(lab: Lab, case: Case, proof: LayoutProof, folder: Path) -> Outcome:
    layout = {key: int(value) for key, value in proof.layout.items()}
    messages = read(folder, layout_text(proof.layout), proof.world)
    sent = busiest(messages)
    # What differs first on the way forward says more than the gradients that follow from it.
    on_the_way = [_hinted(lab, text) for text in differences(folder, proof.layout, proof.world, case.probes)]
    if proof.broken:
        hang = stuck(messages) if "gave no answer" in proof.broken else ""
        problems = [hang or proof.broken, *on_the_way]
    elif not proof.passed:
        problems = on_the_way or _causes(lab, proof)
    else:
        problems = on_the_way or _too_much(sent, case.needs(layout) if case.needs else None)
        if case.judge and (text := case.judge(messages)):
            problems.append(text)
    return Outcome(case, proof, tuple(problems), sent)


def _causes(lab: Lab, proof: LayoutProof) -> list[str]:
    """Why gradients differ, in the words of the lab, or in general ones."""
    causes = [_hinted(lab, cause.text, cause.likely) for cause in proof.causes if not cause.text.startswith(_VAGUE)]
    return causes[:_SHOWN] or [str(deviation) for deviation in proof.failed[:_SHOWN]]


_VAGUE = ("before they are reduced", "forward:")  # of verify, where the frameworks' own modules are looked into


def _hinted(lab: Lab, text: str, likely: str = "") -> str:
    """A finding with what it means in this lab."""
    hint = next((hint.sentence for hint in lab.hints if all(word in text for word in hint.words)), likely)
    return f"{text}: {hint}" if hint else text


def _too_much(sent: Sequence[LabMessage], needed: Sequence[LabMessage] | None) -> list[str]:
    """Right, and dearer than it has to be."""
    if needed is None:
        return []
    own, least = wire_of(sent), wire_of(needed)
    if own > least:
        times = f"{float(own / least):.3g} x the bytes of {told(needed)}" if least else "and nothing is needed"
        return [f"the numbers are right, but a rank sends {told(sent)}, {times}"]
    if len(sent) > len(needed):
        return [f"the numbers are right, but a rank sends {told(sent)} where {told(needed)} are enough"]
    return []


@contextmanager
def answered_by(file: Path, folder: Path | None = None) -> Iterator[None]:
    """Ranks that start in here import this answer, and write what they send into the folder."""
    values = {ANSWER: str(file.resolve()), **({FOLDER: str(folder)} if folder else {})}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
