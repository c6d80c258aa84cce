"""Starts that get nowhere are counted in the run's directory, whoever makes them."""

import os
from pathlib import Path

import pytest

from fivefold.support.errors import UserError
from fivefold.trainer.records import Step, read, to_line
from fivefold.trainer.restart_limit import MAX_STARTS_WITHOUT_STEP, PROGRESS_FILE, count_start, last_recorded_step
from fivefold.trainer.restart_time import RECOVERIES_FILE as RECOVERIES
from fivefold.trainer.restart_time import RestartTimer


def record(directory: Path, step: int) -> None:
    line = Step(step=step, loss=1.0, grad_norm=1.0, lr=1.0, tokens=1, loss_tokens=1, seconds=1.0, tokens_per_second=1.0,
                mfu=None, memory=0)  # fmt: skip
    with (directory / "metrics.jsonl").open("ab") as file:
        file.write(to_line(line))


def test_starts_without_a_new_step_end(tmp_path: Path) -> None:
    count_start(tmp_path, again=False, steps=99)
    record(tmp_path, 7)
    for _ in range(MAX_STARTS_WITHOUT_STEP):
        count_start(tmp_path, again=True, steps=99)
    with pytest.raises(UserError, match=f"{MAX_STARTS_WITHOUT_STEP} starts in a row have made no step after step 7"):
        count_start(tmp_path, again=True, steps=99)
    count_start(tmp_path, again=True, steps=99)  # by who has read that, and mended the cause
    for _ in range(2 * MAX_STARTS_WITHOUT_STEP):
        count_start(tmp_path, again=True, steps=7)  # of a run that is done


def test_a_start_by_hand_begins_the_count_anew(tmp_path: Path) -> None:
    for _ in range(3 * MAX_STARTS_WITHOUT_STEP):
        count_start(tmp_path, again=False, steps=99)


def test_a_new_step_is_progress(tmp_path: Path) -> None:
    for step in range(1, 3 * MAX_STARTS_WITHOUT_STEP):
        count_start(tmp_path, again=True, steps=99)
        record(tmp_path, step)
    assert last_recorded_step(tmp_path) == 3 * MAX_STARTS_WITHOUT_STEP - 1


def test_a_pipe_in_place_of_the_count_is_waited_for_by_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / PROGRESS_FILE)
    count_start(tmp_path, again=True, steps=99)
    assert (tmp_path / PROGRESS_FILE).is_file()


@pytest.mark.parametrize(
    "text", ["{", "9" * 5_000, '{"step": ' + "9" * 900 + "0", "[" * 500, '{"step": "\\ud800"}', "{}" * 600]
)
def test_a_count_that_cannot_be_read_begins_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / PROGRESS_FILE).write_text(text)
    count_start(tmp_path, again=True, steps=99)
    assert (tmp_path / PROGRESS_FILE).read_text() == '{"step":0,"starts":1}\n'
    assert last_recorded_step(tmp_path) == 0


def test_a_pipe_in_place_of_the_recoveries_is_a_sentence(tmp_path: Path) -> None:
    record(tmp_path, 7)
    os.mkfifo(tmp_path / RECOVERIES)
    said: list[str] = []
    found = RestartTimer.of_run(tmp_path, 0.0, replanned_here=False, say=said.append)
    assert found is not None
    record(tmp_path, 8)
    (*_, (_, last)) = read(tmp_path / "metrics.jsonl")
    assert isinstance(last, Step)
    found.on_step(last)
    assert said[-1].startswith("recoveries.jsonl cannot be written: ")
