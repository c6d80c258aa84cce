"""A rank that dies, stalls or fails in the middle of a step: the others end in time, and say who they waited for."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch.distributed.distributed_c10d import _get_default_store

from fivefold.data.prepare import prepare
from fivefold.data.shards import TokenShards
from fivefold.job.config import Job, TrainConfig
from fivefold.launch.exits import End
from fivefold.launch.processes import RankError
from fivefold.layout.layout import Layout
from fivefold.parallel.mesh import Mesh
from fivefold.schedules.actions import Action
from fivefold.schedules.registry import build
from fivefold.spec.blocks import Experts
from fivefold.spec.model import ModelSpec
from fivefold.trainer.engine import Engine
from fivefold.verifier.cases import make_batch
from tests.commands import start
from tests.ranks import run_ranks

TIMEOUT = 1.5  # of messages and collectives, where a rank stalls
PATIENCE = 30.0  # and where one ends: its connections close, and no timeout passes
SPEC = ModelSpec(layers=8, hidden=16, heads=2, ffn=16, vocab=32)
SENTENCE = re.compile(
    r"PeerLost: rank (?P<rank>\d+) \((?P<place>[^)]+)\): (?P<what>.+?) (?:waited (?P<seconds>[\d.]+) s for|found) "
    r"(?P<whom>.+): (?P<why>the connection is closed|it gave no sign)"
)
PEERS = re.compile(r"\(rank (\d+)\)|for ranks? ([\d, ]+) \(")


def step(rank: int, world: int, layout: str, victim: int, moment: str, how: str, after: str) -> None:
    """One step in which rank `victim` is lost when it comes to the action `moment`, and a peer has done `after`."""
    done = _get_default_store()

    @contextmanager
    def watch(action: Action) -> Iterator[None]:
        if rank == victim and str(action) == moment:
            if how == "raise":
                raise ValueError("a broken stage")
            if after:  # what the victim has sent has arrived: a stopped process sends nothing more
                done.wait([after], timedelta(seconds=PATIENCE))
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stall": signal.SIGSTOP}[how])
        yield
        if str(action) == after:
            done.set(after, "done")

    parsed = Layout.parse(layout)
    batch = 2 * parsed.dp * parsed.microbatches
    job = Job(model=SPEC, layout=parsed, data=TokenShards(seq=8), train=TrainConfig(batch=batch, device="cpu"))
    engine = Engine(job, Mesh.of(parsed, torch.device("cpu"), TIMEOUT if how == "stall" else PATIENCE), watch)
    engine.forward_backward(make_batch(job, 0))


def nothing(rank: int, world: int) -> None:
    pass


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """Its start takes seconds, which are nobody's waiting."""
    run_ranks(1, nothing)


def lose(layout: str, victim: int, moment: str, how: str, after: str = "") -> RankError:
    """What became of the ranks."""
    world = Layout.parse(layout).world
    grace = PATIENCE
    if how == "stall":  # a rank that is stalled does not end
        grace = 0.1 if world == 2 else TIMEOUT + 1
    with pytest.raises(RankError) as failure:
        run_ranks(world, step, layout, victim, moment, how, after, timeout=60, grace=grace)
    return failure.value


def middle(schedule: str, p: int, m: int, rank: int, kind: str) -> str:
    """An action of the kind in the middle of a rank's order."""
    found = [str(action) for action in build(schedule, p, m).compute(rank) if action.kind == kind]
    return found[len(found) // 2]


def waited_for(end: End) -> set[int]:
    """The ranks that a survivor's sentence names, which must be its own and whole."""
    said = SENTENCE.fullmatch(end.error)
    assert said is not None, f"rank {end.rank} {end.kind}: {end.error}\n{end.stack}"
    assert int(said["rank"]) == end.rank
    assert said["seconds"] is None or float(said["seconds"]) < TIMEOUT + 1
    return {int(rank) for one, several in PEERS.findall(end.error) for rank in (one or several).split(",")}


def survivors_point_at(victim: int, failure: RankError) -> None:
    """All others ended by themselves; each names a rank that it waited for, and so on to the one that was lost."""
    names = {end.rank: waited_for(end) for end in failure.ends if end.rank != victim}
    assert any(victim in peers for peers in names.values())
    for rank in names:
        reached, new = {rank}, {rank}
        while new:
            new = {peer for one in new for peer in names.get(one, set())} - reached
            reached |= new
        assert victim in reached, f"rank {rank} does not lead to {victim}: {names}"


SCHEDULES = {"1f1b": "B", "zb-v": "I"}


@pytest.mark.parametrize(("schedule", "p", "victim"), [
    ("1f1b", 2, 0), ("zb-v", 4, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("zb-v", 2, 1), ("1f1b", 4, 2)])])  # fmt: skip
def test_a_killed_rank_is_named_by_those_who_waited_for_it(schedule: str, p: int, victim: int) -> None:
    moment = middle(schedule, p, 8, victim, SCHEDULES[schedule])
    failure = lose(f"pp={p},schedule={schedule},microbatches=8", victim, moment, "kill")
    assert (failure.rank, failure.kind, failure.error) == (victim, "died", "SIGKILL")
    survivors_point_at(victim, failure)
    for end in failure.ends:  # a closed connection is seen at once; no timeout has to pass
        assert end.rank == victim or end.error.endswith(": the connection is closed")


@pytest.mark.waits
@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "zb-v"])
def test_a_stalled_rank_is_named_within_the_timeout(schedule: str) -> None:
    victim, moment = 2, middle(schedule, 4, 8, 2, "F")
    failure = lose(f"pp=4,schedule={schedule},microbatches=8", victim, moment, "stall")
    assert failure.ends[victim].kind == "stopped"  # it never came back; the others have raised
    survivors_point_at(victim, failure)
    assert any("it gave no sign" in end.error for end in failure.ends)
    assert failure.rank == victim


def lost_in_a_dispatch(rank: int, world: int, what: str) -> None:
    """One step in which rank 1 dies on the way of tokens to experts, or back."""
    layout = Layout.parse("dp=4,ep=2")
    model = replace(SPEC, layers=2, experts=Experts(count=4, top_k=2, ffn=16))
    job = Job(model=model, layout=layout, data=TokenShards(seq=8), train=TrainConfig(batch=4, device="cpu"))
    engine = Engine(job, Mesh.of(layout, torch.device("cpu"), PATIENCE, spec=model))

    def watch(name: str) -> AbstractContextManager[None]:
        if rank == 1 and name == what:
            os.kill(os.getpid(), signal.SIGKILL)
        return nullcontext()

    engine.ops.dispatch.watch = watch
    engine.forward_backward(make_batch(job, 0))


@pytest.mark.parametrize("what", ["dispatch", "combine"])
def test_a_rank_that_tokens_were_sent_to_is_named(what: str) -> None:
    """By rank 0, with which it has the experts; ranks 2 and 3 have copies, and ask neither."""
    with pytest.raises(RankError) as failure:
        run_ranks(4, lost_in_a_dispatch, what, timeout=60, grace=PATIENCE)
    assert (failure.value.rank, failure.value.error) == (1, "SIGKILL")
    assert re.fullmatch(
        rf"PeerLost: rank 0 \(dp 0\): {what} waited [\d.]+ s for rank 1 \(ep\): the connection is closed",
        failure.value.ends[0].error,
    )
    survivors_point_at(1, failure.value)


def test_an_exception_keeps_its_type_and_says_in_which_action_it_came() -> None:
    moment = middle("1f1b", 4, 8, 2, "F")
    failure = lose("pp=4,microbatches=8", 2, moment, "raise")
    assert (failure.rank, failure.error) == (2, "ValueError: a broken stage")
    assert f"rank 2 (pp 2) was at {moment}" in failure.stack
    survivors_point_at(2, failure)


@pytest.mark.waits
@pytest.mark.parametrize(
    ("layout", "victim", "moment", "after", "said"),
    [
        ("pp=2,microbatches=4", 0, "F0.2", "F1.1", "F1.2 waited T s for its activation from"),
        ("pp=2,microbatches=4", 1, "F1.2", "B0.1", "B0.2 waited T s for its gradient from"),
        ("pp=2,schedule=gpipe,microbatches=8", 1, "F1.0", "",
         "SEND_A0.4 waited T s for pipeline rank 1 (rank 1) to take the activation of SEND_A0.2"),  # a full channel
        ("pp=2,schedule=gpipe,microbatches=3", 0, "B0.0", "F1.2",
         "the end of the step waited T s for pipeline rank 0 (rank 0) to take the gradient of SEND_G1.2"),
        ("pp=2,microbatches=2", 0, "B0.1", "F1.1", "the sum of losses waited T s for rank 0 (pp)"),
        ("pp=2,tp=2,microbatches=2", 2, "F1.0", "", "F1.0 waited T s for rank 2 (tp)"),  # inside an action
    ],
)  # fmt: skip
def test_every_kind_of_wait_has_its_sentence(layout: str, victim: int, moment: str, after: str, said: str) -> None:
    failure = lose(layout, victim, moment, "stall", after)
    sentences = [re.sub(r"[\d.]+ s for", "T s for", end.error) for end in failure.ends if end.rank != victim]
    assert any(said in sentence for sentence in sentences), sentences
    survivors_point_at(victim, failure)


def test_a_peer_is_named_by_its_number_in_the_world() -> None:
    failure = lose("dp=2,pp=2,microbatches=4", 3, "F1.1", "kill")
    assert "pipeline rank 1 (rank 3)" in failure.ends[2].error
    survivors_point_at(3, failure)


@pytest.mark.waits
@pytest.mark.parametrize(("how", "least"), [(signal.SIGKILL, 0.0), (signal.SIGSTOP, 2.0)])
def test_a_training_run_ends_and_says_which_rank_it_lost(tmp_path: Path, how: signal.Signals, least: float) -> None:
    (tmp_path / "text.txt").write_text("a text to learn by heart\n" * 200)
    prepare([tmp_path / "text.txt"], tmp_path / "tokens")
    words = f"data.path={tmp_path / 'tokens'} data.seq=16 train.steps=100000 train.eval_samples=0 train.timeout=2"
    pipeline = ["train", "--nproc", "2", "layout=pp=2,microbatches=4"]
    with start(*pipeline, *words.split(), cwd=tmp_path) as run:
        run.until((tmp_path / "runs/run/metrics.jsonl").exists)
        ranks = run.children
        begin = time.monotonic()
        os.kill(ranks[1], how)
        assert run.wait() == 1
        assert least <= time.monotonic() - begin < 30
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    said = run.stderr
    waited = re.search(r"error: step \d+: rank 0 \(pp 0\): .+? (waited [\d.]+ s for|found) .*rank 1\b", said)
    assert waited, said
    last = said.splitlines()[-1]
    ends = {signal.SIGKILL: "was ended by SIGKILL", signal.SIGSTOP: "did not end with the others"}
    assert last.startswith(f"rank 1 (pp 1) {ends[how]}"), said
    assert last.endswith("SIGSTOP or a debugger held it") == (how == signal.SIGSTOP)
    assert "Traceback" not in said
