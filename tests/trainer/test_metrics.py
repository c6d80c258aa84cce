"""metrics.jsonl: what is written is read again, and no damage to it stops a run."""

import errno
import json
import os
import random
from pathlib import Path

import msgspec
import pytest

from fivefold.render.scene import Curve
from fivefold.support.errors import UserError
from fivefold.trainer.outputs import chart
from fivefold.trainer.records import (
    MAX_FILE_BYTES,
    Evaluation,
    MetricsFile,
    Step,
    from_line,
    read,
    read_recent,
    to_line,
    trim,
)
from fivefold.trainer.restart_limit import last_recorded_step
from fivefold.trainer.result import TrainResult


def step(number: int, loss: float = 5.5) -> Step:
    return Step(
        step=number, loss=loss, grad_norm=0.5, lr=3e-4, tokens=2048, loss_tokens=2000, seconds=0.25,
        tokens_per_second=8192, mfu=None, memory=3 << 29,
    )  # fmt: skip


def look(number: int) -> Evaluation:
    return Evaluation(step=number, held_out_loss=4.25, samples=8, loss_tokens=512)


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    """Of three steps and an evaluation."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(map(to_line, (step(1, 6.5), step(2), look(2), step(3)))))
    return path


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def check_flip(metrics: Path, bit: int) -> None:
    """Every record that is left is one that was written; the bit costs two lines at most, and these are counted."""
    whole = metrics.read_bytes()
    flip(metrics, bit)
    before = [step(1, 6.5), step(2), look(2), step(3)]
    result = TrainResult.read(metrics.parent)
    assert all(found in before for found in result.steps)
    assert [found.step for found in result.steps] == sorted({found.step for found in result.steps})
    assert result.evaluation in (None, look(2))
    found = len(result.steps) + (result.evaluation is not None)
    assert 4 - found <= result.damaged <= 2 or (found, result.damaged) == (2, 1)  # a newline that is none joins lines
    steps, damaged = trim(metrics, 3)
    assert (steps, damaged) == (result.steps, result.damaged)
    again = MetricsFile(metrics)
    again.on_step(step(4))
    again.close()
    assert [record for _, record in read(metrics)][-1] == step(4)
    assert None not in [record for _, record in read(metrics)]
    metrics.write_bytes(whole)


def test_metrics_reach_the_file_at_once(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.on_step(step(1, 5.5))
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()  # not closed yet
    assert json.loads(line)["loss"] == 5.5
    metrics.close()


@pytest.mark.parametrize("few", [400, pytest.param(0, marks=pytest.mark.slow)])
def test_a_flipped_bit_costs_a_line_and_no_run(metrics: Path, few: int) -> None:
    every = range(8 * metrics.stat().st_size)
    ends = [8 * at + 7 for at, byte in enumerate(metrics.read_bytes()) if byte == ord("\n")]
    for bit in [*ends, *random.Random(0).sample(every, few)] if few else every:
        check_flip(metrics, bit)


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\n",
        b'{"kind":"step"\n',
        b"[" * 100_000 + b"\n",
        b"9" * 5000 + b"\n",
        to_line(step(2)).replace(b'"step":2', b'"step":' + b"9" * 5000),
        to_line(step(2))[:40],
        b"\0" * 4096,
    ],
)
def test_a_line_that_is_no_record_is_counted_and_left_out(metrics: Path, line: bytes) -> None:
    before = metrics.read_bytes()
    metrics.write_bytes(before + line)
    steps, damaged = trim(metrics, 3)
    assert [found.step for found in steps] == [1, 2, 3]
    assert 1 <= damaged <= 1 + len(line) // 10_000
    assert metrics.read_bytes() == before


def test_lines_of_earlier_releases_and_their_absurd_numbers_are_read(metrics: Path) -> None:
    old = b"".join(line.rpartition(b',"crc"')[0] + b"}\n" for line in metrics.read_bytes().splitlines())
    metrics.write_bytes(old.replace(b"6.5", b"-1e308").replace(b"5.5", b"1e308"))
    result = TrainResult.read(metrics.parent)
    assert (result.losses, result.damaged) == ([-1e308, 1e308, 1e308], 0)
    assert len(chart(result.losses, {})) == 10
    assert result.svg() is not None


def test_records_of_later_steps_are_removed_and_a_sound_file_is_not_touched(metrics: Path) -> None:
    before = metrics.stat()
    assert [found.step for found in trim(metrics, 3)[0]] == [1, 2, 3]
    assert metrics.stat().st_ino == before.st_ino
    assert trim(metrics, 2) == ([step(1, 6.5), step(2)], 0)
    assert [record for _, record in read(metrics)] == [step(1, 6.5), step(2), look(2)]


def test_a_pipe_in_its_place_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match=r"not a regular file|No such device"):
        trim(tmp_path / "metrics.jsonl", 1)
    with pytest.raises(OSError, match=r"not a regular file|No such device"):
        MetricsFile(tmp_path / "metrics.jsonl")


class Full:
    """A file on a disk that takes so many bytes more."""

    def __init__(self, file: object, room: int):
        self.file, self.room = file, room

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        done: int = self.file.write(data[: self.room])  # type: ignore[attr-defined]
        self.room -= done
        return done


def test_records_wait_for_a_disk_with_room(metrics: Path) -> None:
    said: list[str] = []
    file = MetricsFile(metrics, said.append)
    file.file = full = Full(file.file, 100)  # type: ignore[assignment]
    for number in (4, 5, 6):
        file.on_step(step(number))
    assert said == [f"{metrics} cannot be written: No space left on device; its records wait, and training continues"]
    full.room = 10_000
    file.on_step(step(7))
    file.close()
    assert file.lost == 0
    assert [found.step for found in TrainResult.read(metrics.parent).steps] == [1, 2, 3, 4, 5, 6, 7]


def test_records_that_find_no_room_are_counted(metrics: Path) -> None:
    file = MetricsFile(metrics)
    file.file = Full(file.file, 0)  # type: ignore[assignment]
    for number in (4, 5):
        file.on_step(step(number))
    file.close()
    assert (file.lost, file.why) == (2, "No space left on device")


def test_a_metrics_file_that_is_deleted_is_begun_anew_and_its_records_are_counted_as_lost(metrics: Path) -> None:
    said: list[str] = []
    file = MetricsFile(metrics, said.append)
    file.on_step(step(4))
    metrics.rename(metrics.with_name("elsewhere"))
    file.on_step(step(5))
    file.close()
    assert said == [f"{metrics} was deleted or moved away; a new one has the records from here on"]
    assert (file.lost, file.why) == (1, "it was deleted")
    assert [record for _, record in read(metrics)] == [step(5)]


@pytest.mark.parametrize("field", ["step", "tokens", "memory", "samples"])
@pytest.mark.parametrize("number", [10**20, -(10**20), 10**400, int("9" * 4_200)])
def test_numbers_beyond_what_readers_of_json_have_are_damage(field: str, number: int) -> None:
    whole = json.loads(
        json.dumps({"kind": "step"} | {name: getattr(step(1), name) for name in step(1).__struct_fields__})
    )
    assert from_line(json.dumps(whole).encode()) == step(1)
    assert from_line(json.dumps(whole | {field: number}).encode()) is None


@pytest.mark.parametrize(
    "line", [b"9" * 5_000, b"[" * 100_000, b'{"kind":"step","step":' + b"9" * 5_000, b"\xff", b"\n"]
)
def test_a_line_that_no_decoder_takes_is_damage(line: bytes) -> None:
    assert from_line(line) is None


def test_metrics_that_are_too_long_are_refused_before_a_run_goes_on_and_its_own_are_not(metrics: Path) -> None:
    """The file has a hole: it takes no room."""
    os.truncate(metrics, MAX_FILE_BYTES + 1)
    for reads in (lambda: list(read(metrics)), lambda: trim(metrics, 3), lambda: last_recorded_step(metrics.parent)):
        with pytest.raises(UserError, match=r"metrics.jsonl has 4.00 GiB, and at most 4.00 GiB are read; move it away"):
            reads()
    assert next(read(metrics, MAX_FILE_BYTES + 1))[1] == step(1, 6.5)


def test_steps_without_a_loss_have_none_also_those_that_earlier_releases_wrote_as_zero(tmp_path: Path) -> None:
    records = [
        step(1, 4.0),
        msgspec.structs.replace(step(2, 0.0), loss_tokens=0),
        msgspec.structs.replace(step(3, 0.0), loss_tokens=0, loss=None),
        step(4, 3.0),
        step(5, 2.5),
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(map(to_line, records)))
    found = TrainResult.read(tmp_path)
    assert [one.loss for one in found.steps] == [4.0, None, None, 3.0, 2.5]
    assert found.losses == [4.0, 3.0, 2.5]
    assert found.to_dict()["steps"][2]["loss"] is None
    assert "2.5000" in str(found)
    scene = found.scene()
    assert scene is not None
    assert [len(shape.points) for shape in scene.shapes if isinstance(shape, Curve)] == [1, 2]
    last = TrainResult(tmp_path, found.steps[:2])
    assert "none" in str(last)
    assert last.scene() is None


def test_a_line_whose_sum_stands_otherwise_is_damaged(metrics: Path) -> None:
    line = to_line(step(1))
    assert from_line(line) is not None
    assert from_line(line.replace(b',"crc":', b', "crc": ').replace(b"5.5", b"1.5")) is None
    assert from_line(line.replace(b',"crc":"', b',"crc":"F')) is None


@pytest.mark.parametrize("most", [1, 100, 400, 10_000])
def test_of_a_long_file_the_newest_lines_are_shown_and_the_rest_is_named(metrics: Path, most: int) -> None:
    whole = metrics.read_bytes()
    records, left = read_recent(metrics, most)
    assert records == [from_line(line) for line in whole[left:].splitlines(keepends=True)]
    assert None not in records
    assert left == 0 or whole[left - 1 : left] == b"\n"
    assert len(whole) - left <= most


def test_a_result_says_what_it_has_not_read(metrics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TrainResult.read(metrics.parent).left_out == 0
    last = len(to_line(step(3)))
    monkeypatch.setattr(read_recent, "__defaults__", (last,))
    found = TrainResult.read(metrics.parent)
    assert [one.step for one in found.steps] == [3]
    assert found.to_dict()["left_out"] == metrics.stat().st_size - last
    assert "more before these steps, which were not read" in str(found)
