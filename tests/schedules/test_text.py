"""Schedules on paper: the text form, JSON, files, and what is said about broken ones."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given

from fivefold.schedules import text as text_module
from fivefold.schedules.communication import with_zero
from fivefold.schedules.registry import build
from fivefold.schedules.schedule import Schedule
from fivefold.schedules.text import load, read_json, read_text, save, to_json, to_text
from fivefold.support.errors import UserError
from tests.schedules.mutations import drop, find
from tests.schedules.strategies import schedules

SMALL = build("1f1b", 2, 2)


@given(schedules(most_ranks=4, zeros=True))
@example(with_zero(build("dualpipe-v", 2, 4), 0))
@example(with_zero(build("dualpipe-v", 2, 4), 1))
@example(with_zero(build("dualpipe-v", 2, 4), 2))
def test_text_and_json_round_trip(schedule: Schedule) -> None:
    assert read_text(to_text(schedule)).schedule == schedule
    assert read_text(to_text(schedule, implied=True)).schedule == schedule
    assert read_json(to_json(schedule)).schedule == schedule


def test_the_example_in_the_documentation_is_the_text_form() -> None:
    documented = (text_module.__doc__ or "").split("\n\n")[1]
    assert read_text(documented).schedule == SMALL


def test_implied_messages_are_only_for_schedules_that_imply_them() -> None:
    with pytest.raises(ValueError, match="do not follow"):
        to_text(drop(SMALL, *find(SMALL, "RECV_A1.1")), implied=True)


@pytest.mark.parametrize("suffix", [".txt", ".json"])
def test_files_round_trip(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"schedule{suffix}"
    save(SMALL, path)
    assert load(path) == SMALL


def broken(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "broken.txt"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load(path)
    return [problem.removeprefix(f"{tmp_path}/") for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("F1.0", "Q1.0", ", line 10: 'Q1.0' has the unknown kind 'Q'"),
        ("F1.0", "F1-0", ", line 10: 'F1-0' is not an action"),
        ("F1.0", "F1.2", ", line 10: F1.2: microbatches go from 0 to 1"),
        ("F1.0", "F4.0", ", line 10: F4.0 is of stage 4, and stages go from 0 to 1"),
        ("microbatches 2", "microbatchs 2", ", line 3: unknown key 'microbatchs'; did you mean 'microb"),
        ("microbatches 2", "microbatches two", ", line 3: microbatches: 'two' is not a whole number of 1"),
        ("microbatches 2", "microbatches 999999999999", ", line 3: there cannot be 999999999999 microbatches, with 16"),
        ("microbatches 2", "microbatches", ", line 3: microbatches needs 1, and has 0"),
        ("microbatches 2", "", ": there is no 'microbatches' line"),
        ("stages 0 1", "stages 0 2", ", line 2: stages: each rank from 0 to 2 must own at least one"),
        ("peak 2 1", "peak 2", ", line 5: peak needs 2, and has 1"),
        ("peak 2 1", "peak 2 \u00b2", ", line 5: peak: '\u00b2' is not a whole number of 0 or more"),
        ("rank 1", "rank one", ", line 9: 'rank one' should be 'rank' and one number"),
        ("rank 1", "rank 0", ", line 9: rank 0 is given for the second time"),
        ("rank 1", "rank 7", ": rank 1 owns a stage, and there is no 'rank 1' line"),
        ("buffers 2", "messages all", ", line 4: the only value of messages is 'implied'"),
        ("buffers 2", "slots 9", ", line 6: slots is given for the second time"),
        ("rank 0\n", "", ", line 7: 'F0.0' stands before any 'rank' line"),
        (" F1.1", "", ", line 9: complete: rank 1 never runs F1.1"),
        ("F0.1 SEND_A0.1", "F0.1 F0.1 SEND_A0.1", ", line 8: complete: rank 0 has F0.1 (action 3) for the"),
        ("F0.1 SEND_A0.1", "SEND_A0.1 F0.1", ", line 8: order: rank 0 has SEND_A0.1 (action 2) before"),
    ],
)
def test_what_cannot_be_read_or_does_not_hold_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, sentence: str
) -> None:
    problems = broken(tmp_path, to_text(SMALL).replace(old, new, 1))
    assert any(problem.startswith(f"broken.txt{sentence}") for problem in problems)
    assert len(problems) == 1 or "9999" not in new


def test_all_problems_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    text = to_text(SMALL).replace("F1.0", "Q1.0").replace("F0.1", "F0.9").replace("buffers 2", "bufers 2")
    assert len(broken(tmp_path, text)) == 3


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "cannot be read as JSON: .* line 1"),
        ('{\n "ranks": [[}', "cannot be read as JSON: .* line 2"),
        ('{"ranks": 3}', "'ranks', a list of lists"),
        (to_json(SMALL).replace("F1.0", "Q1.0"), r"ranks\[1\]\[2\]: 'Q1.0' has the unknown kind"),
        ("[]", "a schedule is an object with the key 'ranks'"),
        ("[" * 100_000, "cannot be read as JSON: it is nested too deeply"),
        (to_json(SMALL).replace("[2, 1]", "1" * 5000), "a number in it has thousands of digits"),
        (to_json(SMALL).replace('"1f1b"', "null"), "schedule: null should be a string"),
        (None, r"cannot read .*broken\.json: No such file"),
    ],
)
def test_json_that_is_no_schedule_is_named(tmp_path: Path, content: str | None, reason: str) -> None:
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=reason):
        load(path)


# ---- what a file may hold ------------------------------------------------------------------------------------------

IMPLIED = to_text(with_zero(SMALL, 1), implied=True)


def test_a_message_in_a_file_that_implies_them_is_named(tmp_path: Path) -> None:
    (problem,) = broken(tmp_path, IMPLIED.replace("F0.1", "F0.1 SEND_A0.1"))
    assert problem == "broken.txt, line 9: SEND_A0.1 is listed, and messages are implied; leave out one or the other"


def test_actions_are_counted_as_in_the_file_when_messages_are_implied(tmp_path: Path) -> None:
    problems = broken(tmp_path, to_text(SMALL, implied=True).replace("B0.0 B0.1", "\n  B0.1\n  B0.0"))
    sentence = "broken.txt, line 10: accumulate: rank 0 has B0.1 (action 2) before B0.0 (action 3)"
    assert any(problem.startswith(sentence) for problem in problems)


def test_a_deadlock_is_named_with_the_line_of_who_waits(tmp_path: Path) -> None:
    text = to_text(SMALL, implied=True).replace("F0.0 F0.1 B0.0 B0.1", "F0.0\n  B0.0\n  F0.1\n  B0.1")
    text = text.replace("peak 2 1\nslots 9\n", "").replace("F1.0 B1.0 F1.1", "F1.0 F1.1 B1.0")
    (problem,) = broken(tmp_path, text)
    assert problem.startswith("broken.txt, line 8: deadlock: rank 0 waits at B0.0")


@pytest.mark.parametrize("line", ["stages 0 1\n", "stages 0 1000000", "stages 0 1" + "0" * 30])
def test_without_stages_that_can_be_nothing_else_is_said(tmp_path: Path, line: str) -> None:
    new = line if "000" in line else ""
    (problem,) = broken(tmp_path, to_text(SMALL).replace("stages 0 1\n", new + "\n" * bool(new)))
    assert "stages" in problem


def test_a_flood_of_problems_in_a_file_is_cut_short(tmp_path: Path) -> None:
    problems = broken(tmp_path, to_text(SMALL) + "  F9.9" * 1000)
    assert len(problems) == 21
    assert problems[-1] == "and 1980 more problems"


def test_promises_and_buffers_may_be_as_large_as_one_likes() -> None:
    large = to_text(SMALL).replace("slots 9", "slots 99999999").replace("peak 2 1", "peak 99999999 99999999")
    schedule = read_text(large.replace("buffers 2", "buffers 99999999")).schedule
    assert schedule.promise.slots == schedule.buffers == 99_999_999


@pytest.mark.parametrize("name", ["", "a#b", "a\tb", " a", "a  b", "a\nb", "a\u2028b"])
def test_a_name_that_would_not_read_back_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="cannot name a schedule"):
        replace(SMALL, name=name)
    with pytest.raises(UserError, match=r"schedule, schedule: .* cannot name a schedule"):
        read_json(to_json(SMALL).replace('"1f1b"', json.dumps(name)))


def test_a_name_of_several_words_reads_back() -> None:
    named = replace(SMALL, name="l'été, 2 ranks")
    assert read_text(to_text(named)).schedule == read_json(to_json(named)).schedule == named


def test_a_rank_that_lists_nothing_is_named_with_its_line_where_messages_are_implied(tmp_path: Path) -> None:
    text = "schedule x\nstages 0 1\nmicrobatches 1\nmessages implied\nrank 0\n  F0.0 B0.0\nrank 1\n"
    problems = broken(tmp_path, text)
    assert any(one.startswith("broken.txt, line 7: complete: rank 1 never runs F1.0") for one in problems)
