"""The odd rank, node or link is named against its peers and the planner; of two, neither."""

import re
from pathlib import Path

import msgspec
import pytest

from fivefold.machines.doctor import DoctorResult
from fivefold.machines.judge import Disk, Examination, Gpu, RankReport, Send, below_peers, findings
from tests.machines.made import WELL, but, examined_job, reports


def found(reports: list[RankReport], *changes: str) -> list[str]:
    return findings(Examination(examined_job(len(reports) // 2, *changes), reports))


def test_equal_nodes_are_well() -> None:
    assert found(reports(), "run.cluster=3x2xH100") == []
    assert DoctorResult(Examination(examined_job(3), reports()), 1.0).ok


def test_the_odd_one_is_below_a_share_of_the_median_of_its_peers() -> None:
    assert below_peers({"a": 1.0, "b": 1.0, "c": 0.69}, 0.7) == {"c": 1.0}
    assert below_peers({"a": 1.0, "b": 1.0, "c": 0.71}, 0.7) == {}
    assert below_peers({"a": 9.0, "b": 1.0, "c": 1.0, "d": 1.1}, 0.7) == {}  # one that is faster makes nobody odd
    assert below_peers({"a": 1.0}, 0.7) == {}


def test_a_slow_rank_is_named_with_its_node() -> None:
    said = found(but(reports(), 3, rate=0.6 * WELL))
    assert len(said) == 2  # against its peers, and against the planner
    assert "rank 3 on gpu-001.cluster" in said[0]
    assert "60% of the median of the others" in said[0]
    assert "the planner expects" in said[1]


def test_cores_may_differ_more_than_gpus() -> None:
    cores = [msgspec.structs.replace(one, cpu=True, device="a CPU", gpu=None) for one in reports()]
    assert found(but(cores, 3, rate=0.6 * WELL)) == []
    (said,) = found(but(cores, 3, rate=0.4 * WELL))
    assert said.endswith("(outlier below 50%)")


def test_a_node_whose_ranks_are_all_slow_is_named() -> None:
    slow = but(but(reports(4), 2, rate=0.5 * WELL), 3, rate=0.6 * WELL)
    assert "node gpu-001.cluster (ranks 2, 3) reach as little as" in found(slow)[0]


def test_all_that_are_slow_alike_are_slow_for_the_planner_alone() -> None:
    slow = [msgspec.structs.replace(one, rate=0.5 * WELL) for one in reports()]
    (said,) = found(slow)
    assert "the planner expects" in said
    assert all(f"gpu-00{node}.cluster" in said for node in range(3))


def test_ranks_that_share_a_gpu_are_not_held_to_the_planner() -> None:
    slow = [msgspec.structs.replace(one, rate=0.5 * WELL, gpu_id="GPU-0") for one in reports(1)]
    assert found(slow) == []
    assert "ranks 0, 1 on gpu-000.cluster share a GPU" in str(DoctorResult(Examination(examined_job(1), slow), 1.0))
    apart = [msgspec.structs.replace(one, gpu_id=f"GPU-{one.rank}") for one in slow]
    assert found(apart)
    assert all("the planner expects" in said for said in found(apart))


def test_of_two_neither_is_the_odd_one() -> None:
    two = [msgspec.structs.replace(one, rings=[], sends=[], disk=None) for one in reports()[:2]]
    (said,) = [one for one in found(but(two, 1, rate=0.6 * WELL)) if "planner" not in one]
    assert "with only two, the outlier cannot be determined" in said
    (said,) = found(but(two, 1, versions=two[0].versions | {"torch": "2.11.0"}))
    assert said == (
        "versions: torch is 2.13.0 on rank 0 on gpu-000.cluster and 2.11.0 on rank 1 on gpu-000.cluster; with "
        "two equal groups, the outlier cannot be determined"
    )


def test_a_version_that_differs_is_named() -> None:
    exam = reports()
    (said,) = found(but(exam, 4, versions=exam[4].versions | {"NCCL": "2.21.5"}))
    assert said == "versions: NCCL is 2.21.5 on rank 4 on gpu-002.cluster, and 2.27.3 on most"


def test_a_clock_is_judged_beyond_its_error() -> None:
    assert found(but(reports(), 2, ahead=-1.5, unsure=0.6)) == []
    (said,) = found(but(reports(), 2, ahead=-1.5, unsure=0.1))
    assert said.startswith("clocks: that of node gpu-001.cluster is 1.500 s behind that of rank 0 on gpu-000.cluster")


def test_a_slow_disk_and_one_that_cannot_be_written() -> None:
    (said,) = found(but(reports(), 2, disk=Disk(5e8, 3e9, 0.002, 10**13)))
    assert said.startswith("disk: writes to run.dir: rank 2 on gpu-001.cluster reaches 500 MB/s, 25% of")
    (said,) = found(but(reports(), 2, disk=Disk(error="Read-only file system")))
    assert said == "disk: run.dir=runs cannot be written on rank 2 on gpu-001.cluster: Read-only file system"


def test_a_disk_without_room_for_checkpoints() -> None:
    full = but(reports(), 2, disk=Disk(2e9, 3e9, 0.002, 1 << 30))
    (said,) = found(full, "model=llama3.2-1b", "model.vocab=128256", "checkpoint.keep=3")
    assert said.startswith("disk: 1.00 GiB are free under run.dir=runs, and checkpoint.keep=3 with the one being")
    assert found(full, "model=llama3.2-1b", "checkpoint.save=false") == []


def test_a_slow_group_and_a_late_one() -> None:
    exam = reports()
    ring = exam[2].rings[0]
    said = found(but(exam, 2, rings=[msgspec.structs.replace(ring, reduce=1e11, latency=2e-3)]))
    assert re.match(r"tp: all-reduces among node gpu-001\S+ \(ranks 2, 3\) reach 100 GB/s, and 400 GB/s", said[0])
    assert "takes 2000 us, and 30 us" in said[1]
    assert "planner expects" in said[2]


def test_a_rank_whose_links_are_all_slow_is_the_cause_and_else_the_link() -> None:
    exam = reports(6)

    def slowed(*pairs: tuple[int, int]) -> list[RankReport]:
        return [
            msgspec.structs.replace(
                one, sends=[Send(s.axis, s.ranks, 1e9 if s.ranks in pairs else s.bandwidth) for s in one.sends]
            )
            for one in exam
        ]

    (said,) = found(slowed((2, 4), (4, 6)))
    assert said.startswith("dp: messages with rank 4 on gpu-002.cluster reach 1 GB/s, and 40 GB/s")
    (said,) = found(slowed((2, 4)))
    assert "between rank 2 on gpu-001.cluster, rank 4 on gpu-002.cluster" in said


def test_a_gpu_that_is_hot_or_has_errors_and_limits() -> None:
    exam = but(reports(), 5, gpu=Gpu(900, 1980, 95, 300.0, 700.0, ["heat", "the power limit"], 3))
    said = found(but(exam, 0, amounts=exam[0].amounts | {"open files": 16, "/dev/shm": 2.0**26}))
    assert said[0] == "GPU of rank 5 on gpu-002.cluster: its clock is held back by heat"
    assert said[1].endswith("3 memory errors that ECC could not correct")
    assert "allows 16 open files, and 6 ranks may want 48" in said[2]
    assert "/dev/shm of node gpu-000.cluster has 64.00 MiB" in said[3]
    rdma = [msgspec.structs.replace(one, versions=one.versions | {"RDMA adapters": "8"}) for one in reports()]
    assert found(rdma) == []
    (said_of_pins,) = found(but(rdma, 2, amounts=rdma[2].amounts | {"locked memory": 65536}))
    assert said_of_pins.startswith("limits: node gpu-001.cluster allows 64.00 KiB of locked memory")


@pytest.mark.parametrize(
    ("cluster", "sentence"),
    [("8x2xH100", "nodes x ranks = 3 x 2"), ("3x2xA100-80", "have NVIDIA H100 80GB HBM3, and the job was planned for")],
)
def test_another_cluster_than_the_planned_one_is_said(cluster: str, sentence: str) -> None:
    assert any(sentence in said for said in found(reports(), f"run.cluster={cluster}"))


def test_ranks_on_another_kind_of_device_are_named_together() -> None:
    cores = [msgspec.structs.replace(one, cpu=True, device="a CPU, 1 thread", gpu=None, rate=1e9) for one in reports()]
    (said,) = found(cores, "run.cluster=3x2xH100")
    assert said.count("node gpu-00") == 3
    assert said.endswith("have a CPU, and the job was planned for H100")
    (said,) = found(reports(), "run.cluster=3x2xCPU")
    assert said.endswith("have NVIDIA H100 80GB HBM3, and the job was planned for CPU")


def test_memory_and_cores_are_shown_and_not_judged_as_the_documents_say() -> None:
    few = [msgspec.structs.replace(one, amounts=one.amounts | {"memory": 1.0, "cores": 1}) for one in reports()]
    assert found(few) == []
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    assert [line for line in page.splitlines() if re.match(r"\| node \|.*\bcores\b", line)] == [
        "| node | memory, cores | shown only |"
    ]
