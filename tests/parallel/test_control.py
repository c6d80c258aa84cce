"""Values that ranks exchange beside the step: who is missing is named, and who moves is waited for."""

import os
import signal
import threading
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from fivefold.launch import heartbeat
from fivefold.launch.heartbeat import RankSeen
from fivefold.layout.layout import Layout
from fivefold.parallel.control import Control, FolderStore, RemoteStore, unpacked
from fivefold.parallel.mesh import Mesh
from fivefold.support.errors import PeerLost
from tests.ranks import RankError, run_ranks

_TIMEOUT = 1.0


def control(world: int) -> Control:
    return Control(Mesh.of(Layout(dp=world), torch.device("cpu")), _TIMEOUT)


def exchange(rank: int, world: int) -> tuple[object, ...]:
    with closing(control(world)) as ranks:
        first = ranks.broadcast_value(Path(f"of-{rank}"), Path)
        lengths = [len(text) for text in ranks.all_gather_values("x" * (1000 * rank + 1), str)]
        for _ in range(3):
            ranks.broadcast_value(0, int)  # rank 0 runs ahead of those who listen
        found = first, lengths, ranks.gather_values(rank, int)
        assert not isinstance(ranks.store, FolderStore) or rank or len(list(ranks.store.path.glob("[0-9]*"))) == 0
        return found


def test_every_rank_gets_what_it_should_and_nothing_is_left() -> None:
    lengths = [1, 1001, 2001]
    assert run_ranks(3, exchange) == [
        (Path("of-0"), lengths, [0, 1, 2]),
        (Path("of-0"), lengths, []),
        (Path("of-0"), lengths, []),
    ]


def test_a_store_carries_what_is_larger_than_it_takes() -> None:
    post = RemoteStore(TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20)))
    data = os.urandom(9 << 20)
    post.put("a", data)
    assert post.has(["a"])
    assert post.get("a") == data
    post.delete("a")
    assert not post.has(["a"])
    assert not post.has(["a.1"])


def meet(rank: int, world: int, stopped: int) -> str:
    """One rank stops before it answers; what the others say."""
    ranks = control(world)
    ranks.all_gather_values(None, None)
    heartbeat.enter(f"the checkpoint of step {rank}")
    ranks.all_gather_values(None, None)
    if rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(PeerLost) as lost:
        ranks.all_gather_values(rank, int)
    return str(lost.value)


@pytest.mark.waits
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_silent_rank_is_named_with_its_place(stopped: int) -> None:
    with pytest.raises(RankError) as failure:
        run_ranks(3, meet, stopped, timeout=_TIMEOUT * 4)
    said = {end.rank: end.value for end in failure.value.ends if end.kind == "returned"}
    assert said.keys() == {0, 1, 2} - {stopped}
    for rank, text in said.items():
        assert text.startswith(f"rank {rank} (dp {rank})")
        assert f"for rank {stopped}, which has not moved for " in text
        assert text.endswith(f"s, and was last seen in the checkpoint of step {stopped}")


class SlowStore:
    """Keeps what was put last, and takes the first value only when it is let go."""

    def __init__(self) -> None:
        self.begun, self.go, self.last = threading.Event(), threading.Event(), b""

    def put(self, key: str, value: bytes) -> None:
        if not self.begun.is_set():
            self.begun.set()
            assert self.go.wait(20)
        self.last = value


def test_a_place_is_not_overwritten_by_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reporter looked up where the rank was; its message is under way when the rank calls from elsewhere."""
    monkeypatch.setattr(heartbeat, "_hearts", [heartbeat.Heart(memoryview(bytearray(heartbeat._SLOT.size)))])
    ranks, store = Control(Mesh.of(Layout(), torch.device("cpu")), _TIMEOUT), SlowStore()
    ranks.store = store  # type: ignore[assignment]
    reporter = threading.Thread(target=ranks._publish, args=[store])
    reporter.start()
    assert store.begun.wait(20)
    heartbeat.enter("step 7")
    caller = threading.Thread(target=ranks._call)
    caller.start()
    caller.join(0.2)  # it may wait for the reporter, whose message it then replaces
    store.go.set()
    for thread in (reporter, caller):
        thread.join(20)
    assert unpacked(store.last, RankSeen).place == "step 7"


def take_long(rank: int, world: int) -> float:
    ranks, start = control(world), time.monotonic()
    ranks.all_gather_values(None, None)
    while rank == 1 and time.monotonic() - start < 3 * _TIMEOUT:
        heartbeat.beat()
        time.sleep(0.05)
    ranks.all_gather_values(rank, int)
    return time.monotonic() - start


@pytest.mark.waits
def test_who_moves_is_waited_for() -> None:
    assert min(run_ranks(3, take_long)) > 2 * _TIMEOUT


def leave_early(rank: int, world: int) -> tuple[str, float]:
    ranks = Control(Mesh.of(Layout(dp=world), torch.device("cpu")), timeout=8.0)
    ranks.all_gather_values(None, None)
    start = time.monotonic()
    if rank == 1:
        heartbeat.enter("step 7")
        ranks.close()
        return "", 0.0
    with pytest.raises(PeerLost) as lost:
        ranks.gather_values(rank, int)
    return str(lost.value), time.monotonic() - start


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    said, seconds = run_ranks(2, leave_early)[0]
    assert said.endswith("for rank 1, which has ended in step 7")
    assert seconds < 8
