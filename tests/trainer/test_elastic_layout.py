"""Which layout a job takes on the ranks that are there."""

import msgspec
import pytest

from fivefold.job.config import Job
from fivefold.job.reading import read_job
from fivefold.layout.layout import Layout
from fivefold.support.errors import UserError
from fivefold.trainer.elastic_layout import choose


def job(*changes: str) -> Job:
    return read_job(None, ["layout=dp=2,tp=2,pp=2,microbatches=2", "train.device=cpu", "train.batch=24", *changes])


def test_all_ranks_take_the_jobs_own_layout() -> None:
    asked = job()
    choice = choose(asked, 8, 8)
    assert choice.job == asked
    assert choice.spares == []
    assert str(choice) == "layout dp=2,tp=2,pp=2,microbatches=2 on 8 of 8 ranks: the job's own"


@pytest.mark.parametrize("ranks", range(1, 8))
def test_fewer_ranks_take_a_legal_layout_and_nothing_else_changes(ranks: int) -> None:
    asked = job()
    choice = choose(asked, ranks, 8)
    layout = choice.job.layout
    assert layout.world + len(choice.spares) == ranks
    assert choice.job.problems(layout.world) == []
    assert choice.job.elastic.whole == str(asked.layout)
    again = choose(choice.job, 8, 8).job  # of a run's directory
    assert again.layout == asked.layout
    assert msgspec.structs.replace(again, elastic=asked.elastic) == asked
    assert Layout.parse(str(layout)) == layout  # as the launcher hands it on
    assert choose(asked, ranks, 8).job == choice.job  # every rank chooses for itself


def test_spares_are_named_where_no_layout_uses_every_rank() -> None:
    choice = choose(job("layout=dp=8", "train.batch=16", "elastic.fixed=pp=1,cp=1,tp=1"), 7, 8)
    assert (choice.job.layout.dp, choice.spares) == (4, [4, 5, 6])
    assert str(choice).endswith("no layout uses all of them; ranks 4, 5, 6 are spare")


def test_a_layout_of_fewer_ranks_is_taken_if_it_is_faster() -> None:
    choice = choose(job("train.batch=16"), 6, 8)  # dp=4 against pipelines of uneven stages
    assert choice.job.layout.world == 4
    assert "ms with all of them; ranks 4, 5 are spare" in str(choice)


def test_a_job_bounds_what_it_accepts() -> None:
    assert choose(job("elastic.fixed=tp=2"), 6, 8).job.layout.tp == 2


@pytest.mark.parametrize(
    ("change", "ranks", "said"),
    [
        ("elastic.least=4", 3, "3 ranks are left, and elastic.least=4 asks for more"),
        ("elastic.fixed=dp=2,pp=2", 3, "no layout of tiny runs on 3 ranks with elastic.fixed='dp=2,pp=2'"),
        ("elastic.fixed=tp=4", 8, "elastic.fixed='tp=4' is for every layout, and the job's own has tp=2"),
        ("elastic.least=9", 8, "elastic.least=9 is more than the 8 ranks of layout"),
        ("elastic.fixed=tpx=4", 8, "elastic.fixed='tpx=4': "),
        ("run.cluster=1x8xH100+1x8xA100", 6, "several kinds of devices"),  # which are not planned anew
    ],
)
def test_what_no_layout_can_be_chosen_for_is_said(change: str, ranks: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        choose(job(change), ranks, 8)


def test_whole_nodes_are_left_out_before_parts_of_them() -> None:
    asked = job("layout=dp=32", "run.cluster=4x8xH100", "elastic.fixed=pp=1,cp=1", "train.batch=32")
    choice = choose(asked, 24, 8)  # 24 does not divide 32 sequences
    assert choice.job.layout.world == 16
    assert len(choice.spares) == 8
