"""Ranks that share a GPU over NCCL: where that is refused, and what `doctor` says of an inherited NCCL_HOSTID."""

import pytest
from typer.testing import CliRunner

import fivefold as ff
from fivefold.cli import app
from fivefold.job.config import TrainConfig, read_job
from fivefold.launch.local import SHARING, sharing_problem, visible_gpus
from fivefold.machines.judge import Examination, RankReport, host_ids
from fivefold.machines.node import host_id
from fivefold.support.errors import UserError

SHARED = TrainConfig(share_gpu="nccl")


@pytest.mark.parametrize(
    ("gpus", "ranks", "apart", "code"),
    [
        (1, 4, False, None),
        (2, 8, False, None),
        (1, 1, False, None),  # alone, it has nobody to talk to
        (0, 2, False, "train.share_gpu.cpu"),
        (8, 8, False, "train.share_gpu.own"),
        (8, 2, False, "train.share_gpu.own"),
        (1, 4, True, "train.share_gpu.machines"),
    ],
)
def test_nccl_on_a_shared_gpu_is_refused_where_it_would_slow_ranks_down(
    gpus: int, ranks: int, apart: bool, code: str | None
) -> None:
    assert getattr(sharing_problem(SHARED, gpus, ranks, apart), "code", None) == code
    assert sharing_problem(TrainConfig(), gpus, ranks, apart) is None


def test_it_is_refused_before_a_process_starts() -> None:
    words = ["train", "--nproc", "2", "layout=dp=2", "train.device=cpu", "train.share_gpu=nccl"]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, UserError)
    assert result.exception.codes == ["train.share_gpu.cpu"]


def test_a_refusal_of_a_rank_is_that_of_its_caller() -> None:
    with pytest.raises(UserError) as refused:
        ff.verify(layout="dp=2", changes=["train.share_gpu=nccl"], device="cpu")
    assert refused.value.codes == ["train.share_gpu.cpu"]


def test_the_gpus_that_count_are_those_that_cuda_shows() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,3"}, gpus=8) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, gpus=1) == 1
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, gpus=8) == 0
    assert visible_gpus({}, gpus=8) == 8


def test_doctor_names_an_inherited_host_id() -> None:
    assert host_id({"NCCL_HOSTID": "left-over"}) == "left-over"
    assert host_id({"NCCL_HOSTID": f"{SHARING}3"}) == host_id({}) == ""
    reports = [
        RankReport(rank, "node", False, "", "", 1.0, {}, {}, host_id="left-over" * (rank > 1)) for rank in range(4)
    ]
    (sentence,) = host_ids(Examination(read_job(None, ["layout=dp=4"]), reports))
    assert sentence.startswith("NCCL_HOSTID is set (left-over) on ranks 2, 3")
    assert sentence.endswith("and nodes that share it are taken for one; unset it")
    assert not list(host_ids(Examination(read_job(None, ["layout=dp=4"]), reports[:2])))
