"""A rank's cores are those near its GPU, over /sys trees of machines that are not here."""

from pathlib import Path

import pytest

from fivefold.launch.device import cpus_of_rank

GPUS = ["0000:17:00.0", "0000:3d:00.0", "0000:97:00.0", "0000:bd:00.0"]


@pytest.fixture
def sockets(tmp_path: Path) -> Path:
    """Two sockets of four cores with two hyperthreads each, and two GPUs at each socket."""
    for node, cpus in enumerate(("0-3,8-11", "4-7,12-15")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    for cpu in range(16):
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    for at, address in enumerate(GPUS):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{at // 2}\n")
    return tmp_path


def test_ranks_of_a_socket_divide_its_cores_with_both_threads(sockets: Path) -> None:
    shares = [cpus_of_rank(sockets, GPUS, rank, set(range(16))) for rank in range(4)]
    assert shares == [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]


def test_a_rank_alone_has_its_socket_and_three_share_one_unevenly(sockets: Path) -> None:
    assert cpus_of_rank(sockets, GPUS[2:3], 0, set(range(16))) == {4, 5, 6, 7, 12, 13, 14, 15}
    three = [cpus_of_rank(sockets, [GPUS[0]] * 3, rank, set(range(16))) for rank in range(3)]
    assert [len(one) for one in three] == [2, 2, 4]
    assert set.union(*three) == {0, 1, 2, 3, 8, 9, 10, 11}


def test_only_what_is_allowed_is_given(sockets: Path) -> None:
    assert cpus_of_rank(sockets, GPUS[:2], 1, {0, 1, 2, 8, 9, 10}) == {1, 2, 9, 10}
    assert cpus_of_rank(sockets, GPUS[:1], 0, {4, 5}) == set()  # none of them is near: it stays where it is


def test_nothing_is_changed_where_nothing_is_known_or_gained(sockets: Path) -> None:
    assert cpus_of_rank(sockets, ["0000:ff:00.0"], 0, set(range(16))) == set()  # no such device
    (sockets / "bus/pci/devices" / GPUS[0] / "numa_node").write_text("-1\n")  # as virtual machines say
    assert cpus_of_rank(sockets, GPUS, 0, set(range(16))) == set()
    (sockets / "devices/system/node/node1/cpulist").unlink()
    (sockets / "devices/system/node/node1").rmdir()
    assert cpus_of_rank(sockets, GPUS, 1, set(range(16))) == set()  # one socket
