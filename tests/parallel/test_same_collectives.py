"""Ranks that call different collectives: an error that names both, rather than a hang or nonsense."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fivefold.job.config import Job
from fivefold.job.preflight import preflight
from fivefold.job.reading import read_job
from fivefold.layout.layout import Layout
from fivefold.parallel.collectives import all_gather, all_reduce, wait
from fivefold.parallel.control import Control
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.same_collectives import Mismatch, same_calls, same_order
from fivefold.trainer.loop import Trainer
from tests.parallel.zero.world import each
from tests.ranks import RankError, run_ranks


def call(rank: int, world: int, other: str) -> list[float]:
    mesh, x = Mesh.of(Layout(dp=world), torch.device("cpu")), torch.ones(4)
    with same_calls(mesh):
        wait(all_reduce(x, mesh.dp), mesh.dp)
        if rank == 1 and other == "shape":
            x = torch.ones(2, 3)
        if rank == 1 and other == "dtype":
            x = x.double()
        if rank == 1 and other == "op":
            return wait(all_gather(x, mesh.dp), mesh.dp).tolist()
        if rank == 1 and other == "c10d":
            dist.all_reduce(torch.ones(5), group=mesh.dp.group)
        return wait(all_reduce(x, mesh.dp), mesh.dp).tolist()


@pytest.mark.parametrize(("other", "words"), [
    ("shape", "allreduce of float32[2, 3] on rank 1"),
    ("dtype", "allreduce of float64[4] on rank 1"),
    ("op", "allgatherintotensor of float32[4] on rank 1"),
    ("c10d", "allreduce of float32[5] on rank 1"),
])  # fmt: skip
def test_of_two_that_differ_the_later_names_both(other: str, words: str) -> None:
    with pytest.raises(RankError) as failure:
        run_ranks(2, call, other, timeout=20)
    said = failure.value.error
    assert said.startswith("Mismatch: collective 2 of the ranks 0, 1 is ")
    assert {part.removeprefix("is ") for part in said.partition(" is ")[2].split(", and ")} == {
        words,
        "allreduce of float32[4] on rank 0",
    }


def test_calls_that_agree_run() -> None:
    assert run_ranks(3, call, "") == [[3.0] * 4] * 3


def tiny(tokens: Path, layout: str) -> Job:
    sizes = ["train.steps=2", "train.batch=4", "data.seq=16", "train.eval_samples=0", "checkpoint.save=false"]
    return read_job(None, [f"data.path={tokens}", f"layout={layout}", "train.device=cpu", *sizes])


def train(rank: int, world: int, job: Job, odd: bool) -> None:
    trainer = Trainer(job, preflight(job, world), Mesh.of(job.layout, torch.device("cpu"), 20.0))
    if odd and rank == 1:
        data = trainer.mesh.dp_cp
        trainer.engine._sum_losses = lambda sums: wait(all_reduce(torch.stack([sums[0], sums[0]]), data), data)[0]
    trainer.run([])


def test_a_run_compares_its_first_step(tokens: Path) -> None:
    with pytest.raises(RankError) as failure:
        run_ranks(2, train, tiny(tokens, "dp=2"), True, timeout=30)
    assert failure.value.error.startswith(Mismatch.__name__)
    assert "float32[2] on rank 1" in failure.value.error
    assert "float64[] on rank 0" in failure.value.error


@pytest.mark.parametrize(
    "layout", ["tp=2,pp=2,microbatches=2", pytest.param("dp=2,cp=2,zero=3", marks=pytest.mark.slow)]
)
def test_ranks_of_every_kind_of_group_agree(tokens: Path, layout: str) -> None:
    run_ranks(4, train, tiny(tokens, layout), False)


def planted_order(rank: int, world: int, text: str, odd: int) -> str:
    """What a rank says whose sums would come in another order than its replica's."""
    mesh = Mesh.of(Layout.parse(text), torch.device("cpu"))
    with closing(Control(mesh, 20)) as control:
        try:
            same_order(control, mesh, f"pipeline rank {mesh.pp.rank}{' swapped' * (rank == odd)}")
        except Mismatch as error:
            return str(error)
    return ""


def test_replicas_that_would_start_their_sums_in_another_order_are_named() -> None:
    fine, odd = zip(*run_ranks(4, each, planted_order, [("dp=2,pp=2", 9), ("dp=2,pp=2", 3)]), strict=True)
    assert {*fine} == {""}
    assert {*odd} == {"rank 3 would start its messages and sums in another order than rank 1 does"}
