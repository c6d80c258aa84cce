"""Runs on two hosts: how ranks reach each other, what they say if they cannot, and what they must share."""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.conftest import FAST, losses
from tests.cluster.hosts import Host, Hosts, Task
from tests.commands import fivefold

SECRET = {"FIVEFOLD_SECRET": "which both hosts are told"}


class Pair:
    """Two hosts, and a job with a rank on each."""

    def __init__(self, tokens: Path, folder: Path, stack: ExitStack):
        self.tokens, self.folder, self.stack = tokens, folder, stack
        self.runs = folder / "runs"
        self.runs.mkdir()

    def hosts(self, **more: str) -> list[Host]:
        return self.stack.enter_context(Hosts("n1", "n2", **more))

    @property
    def words(self) -> list[str]:
        paths = [f"data.path={self.tokens}", f"run.dir={self.runs}"]
        return ["train", *paths, *FAST, "layout=dp=2", "train.steps=6", "train.timeout=10"]

    def start(self, hosts: list[Host], *words: str, env: Mapping[str, str] | None = None) -> list[Task]:
        meeting = {"MASTER_ADDR": "n1", "MASTER_PORT": "29511", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        every = {**meeting, "LOCAL_RANK": "0", **(env or {})}
        return [
            self.stack.enter_context(
                host.start("fivefold", *self.words, *words, cwd=self.folder, env={**every, "RANK": str(rank)})
            )
            for rank, host in enumerate(hosts)
        ]

    def ends(self, ranks: list[Task]) -> list[tuple[int, str]]:
        """Exit codes, and the sentences that ranks ended with."""
        return [
            (rank.wait(), " ".join(line for line in rank.output.splitlines() if line.startswith("error: ")))
            for rank in ranks
        ]

    def alone(self) -> dict[int, float]:
        done = fivefold(*self.words, "layout=dp=1", "run.name=alone", cwd=self.folder)
        assert done.returncode == 0, done.stderr
        return losses(self.runs / "alone")


@pytest.fixture
def pair(tokens: Path, tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(tokens, tmp_path, stack)


def test_torchrun_over_a_slow_link_has_the_losses_of_one_process(pair: Pair) -> None:
    hosts = pair.hosts()
    for host in hosts:
        host.rate("20mbit")
    words = ["torchrun", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=n1:29400"]
    words += ["--rdzv-id=7", "--no-python", "fivefold", *pair.words, "train.timeout=60"]
    agents = [pair.stack.enter_context(host.start(*words, cwd=pair.folder)) for host in hosts]
    assert [agent.wait() for agent in agents] == [0, 0], agents[0].output
    assert losses(pair.runs / "run") == pytest.approx(pair.alone(), rel=1e-4)


def test_hosts_that_know_their_own_name_as_loopback_train_together(pair: Pair) -> None:
    """As Debian's do. gloo by itself would have each rank wait at 127.0.1.1."""
    assert [code for code, _ in pair.ends(pair.start(pair.hosts(itself="127.0.1.1")))] == [0, 0]
    assert losses(pair.runs / "run") == pytest.approx(pair.alone(), rel=1e-4)


@pytest.mark.parametrize(
    ("interface", "why"),
    [
        ("lo", "no other machine can reach a loopback interface; nearest: unset GLOO_SOCKET_IFNAME"),
        ("ib0", "has no such interface, only lo, eth0, docker0; nearest: unset GLOO_SOCKET_IFNAME"),
    ],
)
def test_an_interface_that_cannot_work_is_refused(pair: Pair, interface: str, why: str) -> None:
    hosts = with_docker(pair)
    for code, said in pair.ends(pair.start(hosts, env={"GLOO_SOCKET_IFNAME": interface})):
        assert (code, f"GLOO_SOCKET_IFNAME={interface}: " in said, why in said) == (2, True, True), said
        assert "or GLOO_SOCKET_IFNAME=eth0: n1 is reached over it" in said


def test_an_interface_that_leads_nowhere_is_explained(pair: Pair) -> None:
    ranks = pair.ends(pair.start(with_docker(pair), env={"GLOO_SOCKET_IFNAME": "docker0"}))
    for rank, (code, said) in enumerate(ranks):
        assert code == 3
        assert f"rank {rank} on n{rank + 1} has met the others at n1:29511, and then could not connect" in said
        assert "this rank uses docker0, as GLOO_SOCKET_IFNAME says, but n1 is reached over eth0" in said


def with_docker(pair: Pair) -> list[Host]:
    """Hosts that both have an interface of the same address, as docker makes it."""
    hosts = pair.hosts()
    for host in hosts:
        for line in ("link add docker0 type bridge", "addr add 172.17.0.1/16 dev docker0", "link set docker0 up"):
            host.run("ip", *line.split())
    return hosts


def test_a_name_that_does_not_resolve_is_told_at_once(pair: Pair) -> None:
    start = time.monotonic()
    ranks = pair.ends(pair.start(pair.hosts(), env={"MASTER_ADDR": "nosuchhost"}))
    for rank, (code, said) in enumerate(ranks):
        assert code == 2
        assert f"rank {rank} on n{rank + 1}: the address of rank 0, 'nosuchhost', cannot be resolved on" in said
    assert time.monotonic() - start < 30


def test_a_link_that_is_cut_in_mid_step_is_told_to_both_ends(pair: Pair) -> None:
    hosts = pair.hosts()
    ranks = pair.start(hosts, "train.steps=1000000", "checkpoint.save=false")
    ranks[0].until(" 20/1000000")
    start = time.monotonic()
    hosts[1].cut()
    (first, said), (second, told) = pair.ends(ranks)
    assert (first, second) == (3, 3)
    assert "rank 0 (dp 0): the " in said
    assert re.search(r"waited 1\d\.\d s for rank 1", said), said
    assert re.search(r"waited 1\d\.\d s for rank 0", told), told
    assert 10 < time.monotonic() - start < 90


def test_a_host_that_does_not_see_the_runs_directory_is_named_before_the_first_step(pair: Pair) -> None:
    hosts = pair.hosts()
    hosts[1].hide(pair.runs)
    (first, said), (second, told) = pair.ends(pair.start(hosts, env=SECRET))
    assert (first, second) == (2, 2)
    for text in (said, told):
        assert "n1 (rank 0) has made the run's directory, and n2 (rank 1) does not see it at" in text
        assert "set run.dir to a directory of a file system that all nodes share" in text
    assert not list(pair.runs.glob("*/metrics.jsonl"))
    assert not list(pair.runs.glob("*/.seen*"))


def test_without_a_shared_directory_or_secret_the_stranger_is_named(pair: Pair) -> None:
    hosts = pair.hosts()
    hosts[1].hide(pair.runs)
    (first, said), (second, _) = pair.ends(pair.start(hosts))
    assert (first, second) == (2, 2)
    assert "a process that says it is rank 1 on n2" in said
    assert f"its secret is from {pair.runs / '.secret'} on n2, and rank 0's from {pair.runs / '.secret'} on n1" in said


def test_without_a_shared_directory_a_run_that_saves_nothing_trains(pair: Pair) -> None:
    hosts = pair.hosts()
    hosts[1].hide(pair.runs)
    assert [code for code, _ in pair.ends(pair.start(hosts, "checkpoint.save=false", env=SECRET))] == [0, 0]


def test_a_host_that_does_not_see_the_data_is_named(pair: Pair) -> None:
    hosts = pair.hosts()
    hosts[1].hide(pair.tokens.parent)
    (first, said), (second, told) = pair.ends(pair.start(hosts))
    assert (first, second) == (3, 2)
    assert "rank 1 has not joined within 10 s; 1 of 2 is here" in said
    assert told.startswith("error: rank 1 on n2: ")
    assert str(pair.tokens) in told
