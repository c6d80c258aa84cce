"""Snapshots in memory: which of them count, whose they are, and what their sums find. No ranks."""

import os
from pathlib import Path

import numpy as np
import pytest

from fivefold.checkpoint import memory_snapshots
from fivefold.checkpoint.checksums import checksum_of_chunks, segments
from fivefold.checkpoint.manifest import Damaged
from fivefold.checkpoint.memory_load import hashing_rank
from fivefold.checkpoint.memory_snapshots import (
    Candidate,
    NodeFiles,
    candidates,
    copy_targets,
    delete_leftovers,
    ensure_private_dir,
    existing_id,
    get_or_create_id,
    ranks_by_node,
    snapshot_dir,
)
from fivefold.checkpoint.storage import Directories

FILES = ["rank-0.tensors", "rank-1.tensors", "rank-2.tensors", "rank-3.tensors", "tensors.json"]


def held(step: int, node: int, present: list[int], seal: str = "a", nodes: int = 4) -> NodeFiles:
    """What node `node` has of a snapshot of four nodes with a rank each: the files of some ranks, and the table."""
    names = [FILES[rank] for rank in present] + ["tensors.json"]
    return NodeFiles(f"step-{step:08d}.{1000 + step}", step, 8 * step, seal, node, nodes, FILES, names)


def test_all_nodes_together_have_a_snapshot_of_which_one_node_is_lost() -> None:
    """Each has its own file and that of the node before; node 2 is gone."""
    nodes = [[held(20, 0, [0, 3])], [held(20, 1, [1, 0])], [held(20, 3, [3, 2])]]
    (one,) = candidates(nodes)
    assert not one.missing
    assert one.files["rank-2.tensors"] == [2]  # today's third node was the fourth
    assert one.files["rank-0.tensors"] == [0, 1]
    assert one.availability == "3 of 4 nodes"


def test_two_neighbours_that_are_lost_take_a_file_with_them() -> None:
    (one,) = candidates([[held(20, 0, [0, 3])], [held(20, 1, [1, 0])]])
    assert one.missing == ["rank-2.tensors"]


def test_the_newest_comes_first_and_of_equal_steps_the_one_that_was_made_last() -> None:
    again = NodeFiles("step-00000020.5000", 20, 160, "b", 0, 1, FILES, FILES)
    found = candidates([[held(16, 0, [0, 1, 2, 3]), held(20, 0, [0, 1, 2, 3]), again]])
    assert [(one.step, one.name) for one in found] == [
        (20, "step-00000020.5000"), (20, "step-00000020.1020"), (16, "step-00000016.1016")
    ]  # fmt: skip


def test_a_snapshot_of_a_way_that_the_run_has_left_does_not_count(tmp_path: Path) -> None:
    """A start keeps steps 5 and 10 on a node, which goes away; the next goes on after step 8, without it."""
    memory_snapshots.record_start(tmp_path, memory_snapshots.read_starts(tmp_path), 1000, 0)
    began = memory_snapshots.read_starts(tmp_path)
    assert not memory_snapshots.is_abandoned("step-00000010.1002", 10, began)  # its own
    memory_snapshots.record_start(tmp_path, began, 2000, 8)
    began = memory_snapshots.read_starts(tmp_path)
    assert memory_snapshots.is_abandoned("step-00000010.1002", 10, began)
    assert not memory_snapshots.is_abandoned("step-00000005.1001", 5, began)  # both ways have it
    assert not memory_snapshots.is_abandoned("step-00000010.2001", 10, began)  # of the other way
    (tmp_path / memory_snapshots.STARTS_FILE).write_text('[{"at": 1000, "step": 8}]')  # of earlier releases
    assert memory_snapshots.read_starts(tmp_path) == [memory_snapshots.RunStart(1000, 8)]


def test_no_bit_of_the_starts_changes_unnoticed(tmp_path: Path) -> None:
    memory_snapshots.record_start(tmp_path, [memory_snapshots.RunStart(1000, 0)], 2000, 8)
    whole = (tmp_path / memory_snapshots.STARTS_FILE).read_bytes()
    for bit in range(8 * len(whole.rstrip())):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / memory_snapshots.STARTS_FILE).write_bytes(flipped)
        with pytest.raises(Damaged, match=r"memory-starts.json (is damaged|cannot be read): "):
            memory_snapshots.read_starts(tmp_path)
    for text in ("?", "9" * 5000, '[{"at": ' + "9" * 5000 + ', "step": 1}]', "[" * 60_000, "\udc80"):
        (tmp_path / memory_snapshots.STARTS_FILE).write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(Damaged, match=r"memory-starts.json cannot be read: "):
            memory_snapshots.read_starts(tmp_path)
    (tmp_path / memory_snapshots.STARTS_FILE).unlink()
    os.mkfifo(tmp_path / memory_snapshots.STARTS_FILE)
    with pytest.raises(Damaged, match=r"memory-starts.json cannot be read: "):
        memory_snapshots.read_starts(tmp_path)


def test_snapshots_with_one_name_and_two_seals_never_mix() -> None:
    found = candidates([[held(20, 0, [0, 1], "a")], [held(20, 1, [2, 3], "b")]])
    assert [one.missing for one in found] == [FILES[2:4], FILES[:2]]


def test_a_copy_that_is_bad_leaves_the_other_and_then_none() -> None:
    one = Candidate("step-00000004.1", 4, 32, 2, [0, 1], {"rank-0.tensors": [0, 1], "tensors.json": [0, 1]})
    rest = one.without_damaged([(0, "rank-0.tensors")])
    assert rest.files["rank-0.tensors"] == [1]
    assert rest.without_damaged([(1, "rank-0.tensors")]).missing == ["rank-0.tensors"]
    distrusted = one.without_damaged([(0, memory_snapshots.MANIFEST)])
    assert distrusted.files["tensors.json"] == distrusted.manifest_nodes == [1]


def test_a_leftover_that_cannot_be_deleted_leaves_no_other_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    halves = [tmp_path / f"step-{step:08d}.1" for step in (1, 2, 3)]
    for half in halves:
        half.mkdir()
    (tmp_path / "rank-0.0.slot").touch()
    delete = Directories.delete

    def refuse(self: Directories, folder: Path) -> None:
        if folder == halves[1]:
            raise OSError("busy")
        delete(self, folder)

    monkeypatch.setattr(Directories, "delete", refuse)
    delete_leftovers(tmp_path)
    assert [*tmp_path.iterdir()] == [halves[1]]


def test_a_node_is_a_host_and_a_place_and_copies_go_to_the_next_one() -> None:
    ranks = [("a", "x"), ("a", "x"), ("b", "x"), ("b", "y"), ("a", "x"), ("b", "x")]
    nodes = ranks_by_node(ranks)
    assert nodes == [[0, 1, 4], [2, 5], [3]]
    assert copy_targets(nodes) == {0: 2, 1: 5, 4: 2, 2: 3, 5: 3, 3: 0}
    assert copy_targets([[0, 1]]) == {}


def test_who_wrote_a_file_hashes_it_if_it_is_there() -> None:
    assert hashing_rank("rank-5.tensors", [4, 5]) == 5
    assert hashing_rank("rank-7.tensors", [4, 5]) == 5
    assert hashing_rank("rank-6.tensors", [4, 5]) == 4


def test_a_run_keeps_its_id_and_a_copy_of_its_directory_gets_another(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    run.mkdir()
    assert existing_id(run) == ""
    name = get_or_create_id(run)
    assert get_or_create_id(run) == existing_id(run) == name
    assert len(name) == 32
    copy.mkdir()
    (copy / memory_snapshots.ID_FILE).write_bytes((run / memory_snapshots.ID_FILE).read_bytes())
    assert existing_id(copy) == ""
    assert get_or_create_id(copy) != name
    run.rename(tmp_path / "moved")
    assert existing_id(tmp_path / "moved") == name
    (tmp_path / "moved" / memory_snapshots.ID_FILE).write_text('{"id": "../../etc", "inode": 1}')
    assert existing_id(tmp_path / "moved") == ""


def test_memory_is_of_this_user_alone_and_no_link_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "memory"
    monkeypatch.setenv(memory_snapshots.MEMORY_DIR_ENV, str(place))
    with pytest.raises(FileNotFoundError):
        snapshot_dir("a" * 32)
    assert snapshot_dir("a" * 32, make=True) == place / ("a" * 32)
    assert (place.stat().st_mode & 0o777, (place / ("a" * 32)).stat().st_mode & 0o777) == (0o700, 0o700)
    (place / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match="is not a directory"):
        ensure_private_dir(place / "link", make=True)
    place.chmod(0o755)
    with pytest.raises(OSError, match="is not this user's alone"):
        snapshot_dir("a" * 32, make=True)
    place.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(OSError, match="is not this user's alone"):
        snapshot_dir("a" * 32)


def summed(data: bytearray, chunks: list[tuple[int, int]]) -> str:
    return checksum_of_chunks(chunks, lambda start, size: memoryview(data)[start : start + size])


def test_every_flipped_bit_of_a_chunk_changes_the_sum() -> None:
    data = bytearray(np.random.default_rng(0).bytes(300))
    chunks = [(0, 100), (104, 196)]
    whole = summed(data, chunks)
    inside = [byte for start, size in chunks for byte in range(start, start + size)]
    for byte in inside:
        for bit in range(8):
            data[byte] ^= 1 << bit
            assert summed(data, chunks) != whole
            data[byte] ^= 1 << bit
    data[102] ^= 1  # between chunks nothing lies
    assert summed(data, chunks) == whole


def test_sums_of_large_chunks_find_flips_moved_pages_and_bursts() -> None:
    size = (1 << 24) + 12345
    data = bytearray(np.random.default_rng(1).bytes(size))
    chunks = [(0, 1 << 20), (1 << 20, size - (1 << 20))]
    parts = segments(chunks)
    assert sum(length for part in parts for _, length in part) == size
    assert len(parts) == 2
    whole = summed(data, chunks)
    for first in (0, (1 << 20) - 1, size // 2, size - 1):
        data[first] ^= 128
        assert summed(data, chunks) != whole
        data[first] ^= 128
    page = bytes(data[4096:8192])
    for other in (8192, 1 << 16, 1 << 20, 1 << 23):  # two pages change places
        data[4096:8192], data[other : other + 4096] = data[other : other + 4096], page
        assert summed(data, chunks) != whole
        data[other : other + 4096], data[4096:8192] = data[4096:8192], page
    for length in (64, 4096, 65528):  # zeros, as a page that was lost
        kept = bytes(data[5000 : 5000 + length])
        data[5000 : 5000 + length] = bytes(length)
        assert summed(data, chunks) != whole
        data[5000 : 5000 + length] = kept
    for far in (1 << 13, 1 << 16, 1 << 20, 1 << 22):  # the same bit twice, at powers of two
        data[7] ^= 128
        data[7 + far] ^= 128
        assert summed(data, chunks) != whole
        data[7] ^= 128
        data[7 + far] ^= 128
    assert summed(data, chunks) == whole


def test_the_room_is_that_of_the_machine_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "MemTotal:       1600 kB\nMemFree: 10 kB\nMemAvailable:    700 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda self: told)
    assert memory_snapshots.free_bytes(tmp_path) == (700 - 100) * 1024
