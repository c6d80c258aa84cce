"""Schedules on paper: the text form, JSON, files, and what is said about broken ones."""

from pathlib import Path

import pytest
from hypothesis import given, settings

from fivefold.errors import UserError
from fivefold.schedule import Schedule, build, from_json, from_text, load, save, to_json, to_text, with_zero
from fivefold.schedule import text as text_module
from tests.schedule.mutations import drop, find
from tests.schedule.strategies import schedules

SMALL = build("1f1b", 2, 2)


@given(schedules(most_ranks=4))
@settings(max_examples=60, deadline=None)
def test_text_and_json_round_trip(schedule: Schedule) -> None:
    assert from_text(to_text(schedule)) == schedule
    assert from_text(to_text(schedule, implied=True)) == schedule
    assert from_json(to_json(schedule)) == schedule


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_collectives_round_trip(zero: int) -> None:
    schedule = with_zero(build("dualpipe-v", 2, 4), zero)
    assert from_text(to_text(schedule)) == schedule


def test_the_example_in_the_documentation_is_the_text_form() -> None:
    documented = (text_module.__doc__ or "").split("\n\n")[1]
    assert from_text(documented) == SMALL


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
        ("F1.0", "Q1.0", "broken.txt, line 10: 'Q1.0' has the unknown kind 'Q'"),
        ("F1.0", "F1-0", "broken.txt, line 10: 'F1-0' is not an action"),
        ("F1.0", "F1.2", "broken.txt, line 10: F1.2: microbatches go from 0 to 1"),
        ("F1.0", "F4.0", "broken.txt, line 10: F4.0 is of stage 4, and stages go from 0 to 1"),
        ("microbatches 2", "microbatchs 2", "broken.txt, line 3: unknown key 'microbatchs'; did you mean 'microb"),
        ("microbatches 2", "microbatches two", "broken.txt, line 3: microbatches: 'two' is not a whole number of 1"),
        ("microbatches 2", "microbatches", "broken.txt, line 3: microbatches needs 1, and has 0"),
        ("microbatches 2", "", "broken.txt: there is no 'microbatches' line"),
        ("stages 0 1", "stages 0 2", "broken.txt, line 2: stages: each rank from 0 to 2 must own at least one"),
        ("peak 2 1", "peak 2", "broken.txt, line 5: peak needs 2, and has 1"),
        ("rank 1", "rank one", "broken.txt, line 9: 'rank one' should be 'rank' and one number"),
        ("rank 1", "rank 0", "broken.txt, line 9: rank 0 is given for the second time"),
        ("rank 1", "rank 7", "broken.txt: rank 1 owns a stage, and there is no 'rank 1' line"),
        ("buffers 2", "messages all", "broken.txt, line 4: the only value of messages is 'implied'"),
        ("buffers 2", "slots 9", "broken.txt, line 6: slots is given for the second time"),
        ("rank 0\n", "", "broken.txt, line 7: 'RECV_G0.0' stands before any 'rank' line"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    assert any(problem.startswith(sentence) for problem in broken(tmp_path, to_text(SMALL).replace(old, new, 1)))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (" F1.1", "", "broken.txt, line 9: complete: rank 1 never runs F1.1"),
        ("F0.1 SEND_A0.1", "F0.1 F0.1 SEND_A0.1", "broken.txt, line 8: complete: rank 0 has F0.1 (action 5) for the"),
        ("F0.1 SEND_A0.1", "SEND_A0.1 F0.1", "broken.txt, line 8: order: rank 0 has SEND_A0.1 (action 4) before"),
    ],
)
def test_a_schedule_that_does_not_hold_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, sentence: str
) -> None:
    assert broken(tmp_path, to_text(SMALL).replace(old, new, 1))[0].startswith(sentence)


def test_all_problems_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    text = to_text(SMALL).replace("F1.0", "Q1.0").replace("F0.1", "F0.9").replace("buffers 2", "bufers 2")
    assert len(broken(tmp_path, text)) == 3


def test_broken_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    for content, reason in (
        ('{\n "ranks": [[}', "line 2: this is not JSON"),
        ('{"ranks": 3}', "'ranks', a list of lists"),
        (to_json(SMALL).replace("F1.0", "Q1.0"), r"ranks\[1\]\[2\]: 'Q1.0' has the unknown kind"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=reason):
            load(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.txt cannot be read: No such file"):
        load(tmp_path / "none.txt")
