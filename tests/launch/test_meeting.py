"""Ranks meet where they should: a port that others hold and a name that nobody knows are told at once, and no door is
open that need not be."""

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from fivefold.launch import rendezvous as module
from fivefold.launch.rendezvous import Rendezvous, within
from fivefold.support.errors import PeerLost
from tests.ranks import run_ranks
from tests.refusals import refusal

PATIENCE = 30.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Another process's, which takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def at(listener: socket.socket, address: str = "127.0.0.1", **more: bool) -> Rendezvous:
    return Rendezvous("", address, listener.getsockname()[1], **more)


def opened(meeting: Rendezvous, rank: int, patience: float = PATIENCE) -> dist.Store:
    return meeting.store(rank, 2, time.monotonic() + patience)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def listening(pid: int | str = "self") -> set[str]:
    """The addresses at which a process listens, as the system has them."""
    own = {
        target.removeprefix("socket:[").removesuffix("]") for target in map(_target, Path(f"/proc/{pid}/fd").iterdir())
    }
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            local, state, inode = (line.split()[at] for at in (1, 3, 9))
            if state == "0A" and inode in own:
                words = bytes.fromhex(local.partition(":")[0])  # of four bytes each, in the machine's order
                found.add(
                    socket.inet_ntop(family, b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4)))
                )
    return found


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed since
        return ""


def test_rank_0_listens_at_the_address_that_is_used_and_at_no_other() -> None:
    before = listening()
    served = opened(Rendezvous("", "127.0.0.2", port := free_port()), 0)
    assert listening() - before == {"127.0.0.2"}
    served.set("key", "value")
    assert opened(Rendezvous("", "127.0.0.2", port), 1).get("key") == b"value"


def test_a_name_that_is_loopback_here_alone_may_be_another_address_elsewhere() -> None:
    before = listening()
    served = opened(Rendezvous("", "localhost", free_port()), 0)
    assert listening() - before <= {"::", "0.0.0.0"}
    del served
    alone = opened(Rendezvous("", "localhost", free_port(), alone=True), 0)
    assert listening() - before <= {"127.0.0.1", "::1"}
    del alone


def test_a_port_that_another_process_holds_is_named_at_once(listener: socket.socket) -> None:
    error = refusal(lambda: opened(at(listener), 0))
    assert error.codes == ["meeting.taken"]
    assert re.search(r"cannot listen at 127.0.0.1:\d+: another process listens there; set MASTER_PORT", str(error))


def test_a_listener_that_never_answers_is_no_hang(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_TIMEOUT", 0.3)
    error = refusal(lambda: opened(at(listener), 1))
    assert error.codes == ["meeting.taken"]
    assert re.search(r"listens at 127.0.0.1:\d+, and does not answer as a store does", str(error))


def test_a_listener_that_answers_something_else_is_no_store(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CONNECT_TIMEOUT", 0.1)

    def serve() -> None:
        while True:
            try:
                taken, _ = listener.accept()
            except OSError:
                return
            with taken:
                taken.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    threading.Thread(target=serve, daemon=True).start()
    assert refusal(lambda: opened(at(listener), 1)).codes == ["meeting.taken"]


def test_rank_0_that_does_not_come_is_named() -> None:
    with pytest.raises(PeerLost, match=r"rank 0 has not joined within 0 s: nothing listens at 127.0.0.1:\d+"):
        opened(Rendezvous("", "127.0.0.1", free_port()), 1, 0.2)


def test_rank_0_may_come_later() -> None:
    meeting, found = Rendezvous("", "127.0.0.1", free_port()), list[dist.Store]()
    early = threading.Thread(target=lambda: found.append(opened(meeting, 1)))
    early.start()
    served = opened(meeting, 0)
    served.set("key", "value")
    early.join(PATIENCE)
    assert found[0].get("key") == b"value"


@pytest.mark.parametrize(
    ("name", "rank", "said"),
    [(name, rank, f"the address of rank 0, '{name}', ") for name in ("no-such-host.invalid", "x" * 300, "a..b")
     for rank in (0, 1)] + [("198.51.100.7", 0, "198.51.100.7 is not an address of it")],
)  # fmt: skip
def test_an_address_that_is_none_or_of_another_machine_is_named_at_once(name: str, rank: int, said: str) -> None:
    error = refusal(lambda: opened(Rendezvous("", name, free_port()), rank))
    assert (error.codes, said in str(error)) == (["meeting.address"], True)


def test_within_passes_on_what_happens_and_waits_as_long_as_something_does() -> None:
    def slow(alive) -> str:
        for _ in range(5):
            time.sleep(0.1)
            alive()
        return "done"

    assert within(0.4, slow) == "done"
    with pytest.raises(ZeroDivisionError):
        within(PATIENCE, lambda alive: 1 // 0)
    with pytest.raises(TimeoutError):
        within(0.1, lambda alive: time.sleep(0.5))


def doors(rank: int, world: int) -> set[str]:
    dist.barrier()
    return listening()


def test_ranks_of_one_call_listen_on_loopback_alone() -> None:
    outward = [name for _, name in socket.if_nameindex() if name != "lo"]
    for found in run_ranks(2, doors, env={"GLOO_SOCKET_IFNAME": outward[-1]} if outward else {}):
        assert found <= {"127.0.0.1", "::1"}
        assert found
