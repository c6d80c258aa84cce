"""Each lab: its starter has a hole, its solution passes, and each typical mistake is named."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fivefold.labs.catalogue import LABS, lab_in, other_statement, start_lab
from fivefold.labs.checking import LabCheck, check_lab
from fivefold.labs.lab import FileVerdict, Lab
from fivefold.labs.scaling import bench_lab
from fivefold.schedules.registry import build
from fivefold.schedules.text import save
from fivefold.support.errors import TrainingError, UserError
from fivefold.version import __version__
from tests.labs.mistakes import MISTAKES, Mistake
from tests.refusals import refusal

SOLUTIONS = Path(__file__).with_name("solutions")
# Two labs in every `make test`, one mistake each; all of them in `make labs-test`.
QUICK = ("linear", "schedule")
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
    found = check_lab(written(mistake, tmp_path), timeout=PATIENT, first=True)
    assert not found.ok
    for words in mistake.words:
        assert words in said(found)


def test_a_schedule_may_not_hold_more_than_1f1b(tmp_path: Path) -> None:
    save(build("gpipe", 4, 8), tmp_path / "schedule.txt")
    assert "rank 0 holds 8 activations, and 4 are allowed" in said(check_lab(tmp_path))


def test_nothing_is_replaced_and_what_is_no_lab_is_refused(tmp_path: Path) -> None:
    start_lab("linear", tmp_path)
    (tmp_path / "file").write_text("")
    for folder in (tmp_path, tmp_path / "file"):
        assert refusal(lambda folder=folder: start_lab("linear", folder)).codes == ["lab.exists"]  # type: ignore[misc]
    assert refusal(lambda: start_lab("linear", tmp_path / "file" / "mine")).codes == ["lab.write"]
    assert refusal(lambda: start_lab("linaer", tmp_path)).codes == ["lab.unknown"]
    for path in (tmp_path / "nothing", tmp_path / "file", tmp_path / "README.md", tmp_path / "nothing" / "linear.py"):
        assert refusal(lambda path=path: lab_in(path)).codes == ["lab.folder"]  # type: ignore[misc]
    assert lab_in(tmp_path)[0].name == lab_in(tmp_path / "linear.py")[0].name == "linear"
    (tmp_path / "ring.py").write_text("")
    assert "name the file to check" in str(refusal(lambda: lab_in(tmp_path)))


def test_a_statement_of_another_version_is_told(tmp_path: Path) -> None:
    lab = LABS[0]
    start_lab(lab.name, tmp_path)
    file, written_now = tmp_path / lab.file, (tmp_path / "README.md").read_text()
    assert [*other_statement(lab, file)] == []
    older = written_now.replace(f"Fivefold {__version__}.", "Fivefold 0.0.1.")
    for text, count in ((older, 0), (older.replace("two", "three"), 1), ("notes of mine", 0)):
        (tmp_path / "README.md").write_text(text)
        assert len([*other_statement(lab, file)]) == count
    (tmp_path / "README.md").write_text(older.replace("two", "three"))
    assert "the statement of Fivefold 0.0.1" in next(other_statement(lab, file))


BENCHED = [lab for lab in LABS if lab.bench]


@pytest.mark.parametrize("lab", [
    pytest.param(lab, id=lab.name, marks=[pytest.mark.slow] * (lab.name != "data_parallel")) for lab in BENCHED
])  # fmt: skip
def test_bench_says_what_each_rank_adds_and_when_it_waits(lab: Lab) -> None:
    found = bench_lab(SOLUTIONS / lab.file, rounds=1, ranks=(1, 2) if lab.name == "data_parallel" else (1, 2, 4))
    assert not found.timed[1][0].waits
    for world, ranks in found.timed.items():
        assert len(ranks) == world
        for rank in ranks:
            spans = [*rank.waits, *rank.travels]
            assert bool(spans) == (world > 1)
            assert all(0 <= start <= end for start, end in spans)
    travels = any(rank.travels for rank in found.timed[2])
    assert travels == (lab.name in ("data_parallel", "pipeline", "ring"))  # all others wait where they send
    assert ("computes while a message travels" in str(found)) == travels
    assert ("simulated bubble" in str(found)) == (lab.name == "pipeline")
    assert found.scene().shapes


UNTIMED = {
    "forward (linear.py, line 22) raised ValueError: no": (
        "        x = x.clone()\n",
        "        raise ValueError('no')\n",
    ),
    "failed with exit code 0 in the middle of the step": (
        "        x = x.clone()\n",
        "        import os; os._exit(0)\n",
    ),
    "failed with exit code 0 while linear.py was imported": ("import torch\n", "import os; os._exit(0)\n"),
}


@pytest.mark.parametrize("words", UNTIMED)
def test_bench_says_why_nothing_is_timed(words: str, tmp_path: Path) -> None:
    edit = UNTIMED[words]
    folder = written(Mistake("linear", "", (edit,), ()), tmp_path)
    with pytest.raises((UserError, TrainingError)) as found:
        bench_lab(folder, rounds=1, ranks=(2,))
    assert words in str(found.value)
    assert f"nothing is timed: run `fivefold lab check {folder}` first" in str(found.value)


@pytest.mark.parametrize("command", ["check", "bench"])
def test_ctrl_c_is_one_line_and_leaves_nothing(command: str, tmp_path: Path) -> None:
    """While the server imports torch, which takes seconds, and no rank has started."""
    (tmp_path / "linear.py").write_text((SOLUTIONS / "linear.py").read_text())
    words = [sys.executable, "-m", "fivefold", "lab", command, str(tmp_path)]
    # A session of its own is what a terminal signals; a shell's background jobs ignore Ctrl-C.
    restore = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    running = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=restore)
    deadline = time.monotonic() + PATIENT
    while not servers_of(running.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert servers_of(running.pid)
    os.killpg(running.pid, signal.SIGINT)
    line = {"check": "stopped; nothing is checked", "bench": "stopped; nothing is timed"}[command]
    assert running.communicate(timeout=PATIENT)[1].split() == line.split()
    assert running.returncode == 130
    while servers_of(running.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not servers_of(running.pid)


def servers_of(session: int) -> list[int]:
    """The processes of a session that fork ranks."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if b"forkserver" in Path(f"/proc/{entry}/cmdline").read_bytes() and os.getsid(int(entry)) == session:
                found.append(int(entry))
    return found


def test_the_labs_that_run_on_ranks_are_timed() -> None:
    assert [lab.name for lab in LABS if not lab.bench] == ["schedule", "decision"]
    assert refusal(lambda: bench_lab(SOLUTIONS / "schedule.txt")).codes == ["lab.bench"]


def test_every_lab_has_ten_planted_mistakes() -> None:
    assert all(sum(mistake.lab == lab.name for mistake in MISTAKES) >= 10 for lab in LABS)


@pytest.mark.slow
@pytest.mark.parametrize("bubble", [3 / 67, 0.0765], ids=["by the formula", "with unequal stages"])
def test_a_decision_with_a_pipeline_states_its_bubble_by_the_formula_or_by_the_planner(
    bubble: float, tmp_path: Path
) -> None:
    text = (SOLUTIONS / "decision.toml").read_text()
    for old, new in (
        ("dp=128,zero=3,microbatches=2,recompute=full", "dp=8,tp=4,pp=4,zero=1,sp,microbatches=64,recompute=selective"),
        ("state_gb = 8.8", "state_gb = 34.1"),
        ("bubble = 0", f"bubble = {bubble}"),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "decision.toml").write_text(text)
    found = check_lab(tmp_path)
    assert found.ok, str(found)
