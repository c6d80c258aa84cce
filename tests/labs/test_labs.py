"""Each lab: its starter has a hole, its solution passes, and each typical mistake is named."""

from pathlib import Path

import pytest

from fivefold.labs.catalogue import LABS, lab_in, start_lab
from fivefold.labs.checking import LabCheck, check_lab
from fivefold.labs.lab import FileVerdict, Lab
from tests.labs.mistakes import MISTAKES, Mistake
from tests.refusals import refusal

SOLUTIONS = Path(__file__).with_name("solutions")
# Two labs in every `make test`, one mistake each; all of them in `make prove`.
QUICK = ("linear", "attention", "schedule")
EVERY = [pytest.param(lab, id=lab.name, marks=[pytest.mark.slow] * (lab.name not in QUICK)) for lab in LABS]
FIRST = {lab: next(mistake for mistake in MISTAKES if mistake.lab == lab) for lab in QUICK}


PATIENT = 60.0  # seconds of a layout: where a machine is busy, ranks that only compute need some of them


def written(mistake: Mistake, folder: Path) -> Path:
    """The solution with a mistake in it."""
    lab = next(lab for lab in LABS if lab.name == mistake.lab)
    text = (SOLUTIONS / lab.file).read_text()
    for old, new in mistake.edits:
        assert old in text
        text = text.replace(old, new, 1)
    (folder / lab.file).write_text(text)
    return folder


def said(found: LabCheck | FileVerdict) -> str:
    """All problems, line by line."""
    if isinstance(found, FileVerdict):
        return "\n".join(found.problems)
    return "\n".join(problem for outcome in found.outcomes for problem in outcome.problems)


@pytest.mark.parametrize("lab", EVERY)
def test_the_starter_says_what_is_not_written(lab: Lab, tmp_path: Path) -> None:
    start_lab(lab.name, tmp_path / "mine")
    found = check_lab(tmp_path / "mine", timeout=PATIENT)
    assert not found.ok
    if isinstance(found, LabCheck):
        assert f"({lab.file}, line" in said(found)
    assert "is not written yet" in said(found) or (lab.name == "schedule" and "it takes 33, and 1F1B 33" in said(found))


@pytest.mark.parametrize("lab", EVERY)
def test_the_solution_is_one_process_and_sends_no_more_than_it_must(lab: Lab) -> None:
    found = check_lab(SOLUTIONS / lab.file, timeout=PATIENT)
    assert found.ok, str(found)
    if isinstance(found, LabCheck):
        assert len(found.outcomes) == sum(len(case.layouts) for case in lab.cases)


@pytest.mark.parametrize("mistake", [
    pytest.param(one, id=f"{one.lab}: {one.what}", marks=[pytest.mark.slow] * (one not in FIRST.values()))
    for one in MISTAKES
])  # fmt: skip
def test_a_mistake_is_named(mistake: Mistake, tmp_path: Path) -> None:
    found = check_lab(written(mistake, tmp_path), timeout=PATIENT)
    assert not found.ok
    for words in mistake.words:
        assert words in said(found)


def test_nothing_is_replaced_and_what_is_no_lab_is_refused(tmp_path: Path) -> None:
    start_lab("linear", tmp_path)
    assert refusal(lambda: start_lab("linear", tmp_path)).codes == ["lab.exists"]
    assert refusal(lambda: start_lab("linaer", tmp_path)).codes == ["lab.unknown"]
    assert refusal(lambda: lab_in(tmp_path / "nothing")).codes == ["lab.folder"]
    assert lab_in(tmp_path)[0].name == lab_in(tmp_path / "linear.py")[0].name == "linear"
