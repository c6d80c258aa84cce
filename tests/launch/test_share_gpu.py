"""Ranks that share a GPU over NCCL: where that is refused, and what `doctor` says of an inherited NCCL_HOSTID."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore
from typer.testing import CliRunner

import fivefold as ff
from fivefold.cli import app
from fivefold.job.config import TrainConfig
from fivefold.job.reading import read_job
from fivefold.launch.device import check_shared_gpu
from fivefold.launch.local import SHARED_GPU_HOST_PREFIX, sharing_problem, visible_gpus
from fivefold.launch.world import World
from fivefold.machines.judge import Examination, RankReport, host_ids
from fivefold.machines.node import host_id
from fivefold.support.errors import UserError
from tests.commands import executable

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
        (1, 1, True, "train.share_gpu.machines"),  # nodes of one rank each
    ],
)
def test_nccl_on_a_shared_gpu_is_refused_where_it_would_slow_ranks_down(
    gpus: int, ranks: int, apart: bool, code: str | None
) -> None:
    assert getattr(sharing_problem(SHARED, gpus, ranks, apart=apart), "code", None) == code
    assert sharing_problem(TrainConfig(), gpus, ranks, apart=apart) is None


def refused(*words: str) -> UserError:
    result = CliRunner().invoke(app, [*words, "train.share_gpu=nccl"])
    assert isinstance(result.exception, UserError), result.output
    return result.exception


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_it_is_refused_before_a_process_starts(device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "executable", executable(tmp_path))  # what asks torch for its GPUs
    for last in ([], ["--check"]):
        error = refused("train", "--nproc", "2", "layout=dp=2", f"train.device={device}", *last)
        assert error.codes == ["train.share_gpu.cpu"]


def test_a_mixed_run_is_told_what_is_in_the_way() -> None:
    problem = sharing_problem(TrainConfig(share_gpu="nccl", device="mixed"), 1, 4)
    assert problem is not None
    assert problem.code == "train.share_gpu.mixed"
    assert problem.endswith("nearest: train.device=cuda")


@pytest.mark.parametrize(("layout", "code"), [("dp=16", "train.share_gpu.machines"), ("dp=8", "train.share_gpu.own")])
def test_a_job_for_a_cluster_is_refused_as_its_ranks_would_be(layout: str, code: str, tmp_path: Path) -> None:
    job, script = ("model=tiny", f"layout={layout}", "train.batch=16"), tmp_path / "x.sbatch"
    checked = refused("train", *job, "run.cluster=2x8xH100", "--check")
    assert checked.codes == [code]
    cluster = {"dp=16": "2x8xH100", "dp=8": "8xH100"}[layout]
    written = refused("launch", *job, "--slurm", "--cluster", cluster, "-o", str(script))
    assert written.problems == checked.problems
    assert not script.exists()


def test_a_forgotten_device_is_named_before_ranks_start() -> None:
    error = refused("verify", "--layout", "dp=2,pp=2")
    assert error.problems[0].endswith("give --device cuda")


def test_a_refusal_of_a_rank_is_that_of_its_caller(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        ff.trace(None, ["layout=dp=2", "train.device=cpu", "train.share_gpu=nccl"], output=tmp_path / "trace.json")
    assert error.value.codes == ["train.share_gpu.cpu"]


@pytest.mark.parametrize("gpus", [["GPU-a", "GPU-b", "GPU-c"], ["GPU-a", "GPU-b", "GPU-a"]])
def test_ranks_that_each_see_one_gpu_say_which(gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Slurm's --gpus-per-task=1 each rank counts one. Threads stand in for the ranks, and names for the GPUs."""
    store = HashStore()
    of_thread = dict[int, str]()
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: store)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(uuid=of_thread[get_ident()]))

    def join(rank: int) -> list[str] | None:
        of_thread[get_ident()] = gpus[rank]
        try:
            check_shared_gpu(SHARED, torch.device("cuda", 0), World(rank, 3, rank, 3, joined=True))
        except UserError as error:
            return error.codes
        return None

    with ThreadPoolExecutor(3) as ranks:
        ends = list(ranks.map(join, range(3)))
    assert ends == ([["train.share_gpu.own"], [], []] if len(set(gpus)) == 3 else [None] * 3)


def test_the_gpus_that_count_are_those_that_cuda_shows() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,3"}, gpus=8) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, gpus=1) == 1
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, gpus=8) == 0
    assert visible_gpus({}, gpus=8) == 8
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-5e3a,GPU-77f0"}, gpus=8) == 2
    for none in ("-1", "NoDevFiles", "0,0", "8", "-1,0"):  # torch counts alike
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": none}, gpus=8) == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,-1,0"}, gpus=8) == 1


def test_doctor_names_an_inherited_host_id() -> None:
    assert host_id({"NCCL_HOSTID": "left-over"}) == "left-over"
    assert host_id({"NCCL_HOSTID": f"{SHARED_GPU_HOST_PREFIX}3"}) == host_id({}) == ""
    reports = [
        RankReport(rank, "node", False, "", "", 1.0, {}, {}, host_id="left-over" * (rank > 1)) for rank in range(4)
    ]
    (sentence,) = host_ids(Examination(read_job(None, ["layout=dp=4"]), reports))
    assert sentence.startswith("NCCL_HOSTID is set (left-over) on ranks 2, 3")
    assert sentence.endswith("and nodes that share it are taken for one; unset it")
    assert not list(host_ids(Examination(read_job(None, ["layout=dp=4"]), reports[:2])))
