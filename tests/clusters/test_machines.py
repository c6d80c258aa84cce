"""Which nodes a job is started on, and what is said where its layout does not fit them."""

from ast import literal_eval
from dataclasses import replace

import pytest

from fivefold.clusters.machines import Machines, choose_machines
from fivefold.job.reading import read_job
from fivefold.support.errors import UserError
from tests.refusals import refusal, same_words


def wanted(layout: str, own: str = "", **asked) -> Machines:
    named = choose_machines(read_job(None, [f"layout={layout}", f"run.cluster={own}", "train.batch=96"]), **asked)
    return replace(named, cluster=None)


def test_nodes_come_from_the_job_from_a_cluster_or_from_numbers() -> None:
    assert wanted("dp=16", "2x8xH100") == Machines(2, 8)
    assert wanted("dp=16", "2x8xH100", cluster="4x4xA100-80") == Machines(4, 4)
    assert wanted("dp=16", nodes=4) == wanted("dp=16", per_node=4) == Machines(4, 4)
    assert wanted("dp=16", "2x8xH100", nodes=1, per_node=16) == Machines(1, 16)
    assert wanted("dp=12", "1x8xH100+1x4xH100", nodes=3, per_node=4) == Machines(3, 4)
    assert wanted("dp=2", "2x1xCPU") == Machines(2, 1, gpus=False)


def test_a_node_keeps_the_gpus_that_the_cluster_states() -> None:
    assert wanted("dp=16", "1x8xH100", nodes=2) == wanted("dp=16", "1x8xH100", hosts=2) == Machines(2, 8)


def test_tensor_parallel_groups_that_cross_nodes_are_noted() -> None:
    (note,) = wanted("dp=2,tp=8", nodes=4).notes
    assert note.startswith("tp=8 does not divide the 4 ranks of a node")
    assert wanted("dp=4,tp=4", nodes=4).notes == ()
    assert wanted("dp=2,tp=8", nodes=1).notes == ()


def test_unlike_nodes() -> None:
    (note,) = wanted("dp=32", "2x8xH100+2x8xA100-80").notes
    assert "H100, A100-80" in note


REFUSED = {
    # the nearest machines, and no layout that would be refused
    'dp=32,tp=2 own="4x8xH100"': "launch.ranks",
    'dp=4 own="2x8xH100"': "launch.ranks",
    'dp=3,tp=8 own="2x8xH100"': "launch.ranks",
    'dp=1,tp=3 own="2x2xCPU"': "launch.ranks",
    'dp=16 own="2x8xH100" nodes=1': "launch.ranks",
    'dp=16 own="2x8xH100" hosts=1': "launch.ranks",
    'dp=32 own="4x8xH100" nodes=5': "launch.ranks",
    "dp=64 nodes=3": "launch.nodes.ranks",
    'dp=16 own="2x8xH100" hosts=2 nodes=3': "launch.nodes.hosts",
    "dp=4": "launch.cluster.missing",
    "dp=4 nodes=0": "option.range",
    'dp=4 own="4xH1000"': "cluster.accelerator",
    'dp=12 own="1x8xH100+1x4xH100"': "launch.cluster.unequal",
}


def of_words(words: str) -> UserError:
    layout, *asked = words.split()
    return refusal(lambda: wanted(layout, **{word.split("=")[0]: literal_eval(word.split("=")[1]) for word in asked}))


@pytest.mark.parametrize("words", REFUSED)
def test_a_layout_that_does_not_fit_is_refused(words: str) -> None:
    assert of_words(words).codes == [REFUSED[words]]


def test_the_words_of_refusals() -> None:
    same_words(__file__, {words: of_words(words).problems for words in REFUSED})
