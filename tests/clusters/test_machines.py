"""Which nodes a job is started on, and what is said where its layout does not fit them."""

from dataclasses import replace

import pytest

from fivefold.clusters.deployment import Machines, machines
from fivefold.job.config import read_job
from fivefold.support.errors import UserError


def found(layout: str, own: str = "", **asked) -> Machines:
    found = machines(read_job(None, [f"layout={layout}", f"run.cluster={own}", "train.batch=96"]), **asked)
    return replace(found, cluster=None)


def refused(layout: str, own: str = "", **asked) -> str:
    with pytest.raises(UserError) as error:
        found(layout, own, **asked)
    return str(error.value)


def test_nodes_come_from_the_job_from_a_cluster_or_from_numbers() -> None:
    assert found("dp=16", "2x8xH100") == Machines(2, 8)
    assert found("dp=16", "2x8xH100", cluster="4x4xA100-80") == Machines(4, 4)
    assert found("dp=16", nodes=4) == found("dp=16", per_node=4) == Machines(4, 4)
    assert found("dp=16", "2x8xH100", nodes=1, per_node=16) == Machines(1, 16)
    assert found("dp=12", "1x8xH100+1x4xH100", nodes=3, per_node=4) == Machines(3, 4)
    assert found("dp=2", "2x1xCPU") == Machines(2, 1, gpus=False)


def test_a_layout_of_another_size_is_refused_with_the_nearest() -> None:
    assert refused("dp=32,tp=2", "4x8xH100") == (
        "the layout dp=32,tp=2 has 64 ranks, and 4 nodes x 8 GPUs are 32; nearest: --nodes 8 or layout.dp=16"
    )
    assert "nearest: --nodes 1 --per-node 4 or layout.dp=16" in refused("dp=4", "2x8xH100")
    assert "nearest: --nodes 3" in refused("dp=3,tp=8", "2x8xH100")
    assert "plan it again" in refused("dp=1,tp=3", "2x2xCPU")


def test_a_node_keeps_the_gpus_that_the_cluster_states() -> None:
    assert found("dp=16", "1x8xH100", nodes=2) == found("dp=16", "1x8xH100", hosts=2) == Machines(2, 8)
    sentence = "the layout dp=16 has 16 ranks, and 1 node x 8 GPUs are 8; nearest: "
    assert refused("dp=16", "2x8xH100", nodes=1) == f"{sentence}--nodes 2 or layout.dp=8"
    assert refused("dp=16", "2x8xH100", hosts=1) == f"{sentence}a file of 2 hosts or layout.dp=8"
    assert "leave --nodes out" in refused("dp=16", "2x8xH100", hosts=2, nodes=3)


def test_no_layout_is_advised_that_would_be_refused() -> None:
    assert refused("dp=32", "4x8xH100", nodes=5).endswith("5 nodes x 8 GPUs are 40; nearest: --nodes 4")
    assert refused("dp=64", nodes=3) == "the layout's 64 ranks do not divide over 3 nodes; nearest: --nodes 2 or 4"


def test_machines_that_nobody_named_are_asked_for() -> None:
    assert refused("dp=4") == (
        "the job does not say for which machines it is (run.cluster is empty); give --cluster 8x8xH100, or --nodes N "
        "for its 4 ranks"
    )
    assert refused("dp=4", nodes=0) == "--nodes 0 must be at least 1"
    assert refused("dp=4", "4xH1000").startswith("run.cluster: '4xH1000': ")


def test_tensor_parallel_groups_that_cross_nodes_are_noted() -> None:
    (note,) = found("dp=2,tp=8", nodes=4).notes
    assert note.startswith("tp=8 does not divide the 4 ranks of a node")
    assert found("dp=4,tp=4", nodes=4).notes == ()
    assert found("dp=2,tp=8", nodes=1).notes == ()


def test_unlike_nodes() -> None:
    (note,) = found("dp=32", "2x8xH100+2x8xA100-80").notes
    assert "H100, A100-80" in note
    assert "has nodes of 4 or 8 GPUs" in refused("dp=12", "1x8xH100+1x4xH100")
