"""What the other tests lean on: ranks compute, fail, hang and vanish as tests/ranks.py says."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fivefold.launch.exits import End
from fivefold.launch.local import Arrangement, Launcher
from fivefold.launch.processes import RankError
from fivefold.launch.supervisor import Supervisor
from fivefold.support.errors import PeerLost
from tests.launch import orphans
from tests.launch.orphans import note_pids
from tests.ranks import run_ranks


def summed(rank: int, world: int, scale: float = 1.0) -> float:
    x = torch.tensor([rank * scale], dtype=torch.float64)
    dist.all_reduce(x)
    return x.item()


def echo(rank: int, world: int, *args):
    return rank, args


def look(rank: int, world: int):
    """What a rank sees of its world."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "COLOUR", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    return {
        **{name: os.environ.get(name) for name in names},
        "cwd": os.getcwd(),
        "threads": torch.get_num_threads(),
        "threads of the server": len(os.listdir(f"/proc/{os.getppid()}/task")),
        "cuda": torch.cuda.is_initialized(),
        "bad fork": torch.cuda._is_in_bad_fork(),
    }


def talk(rank: int, world: int) -> None:
    print(f"hello from {rank}")
    os.write(2, b"raw bytes to stderr\n")


def collect(rank: int, world: int, folder: Path, act, culprit: int) -> float:
    """The culprit acts while the others wait for it in a collective."""
    note_pids(folder, rank)
    dist.barrier()
    if rank == culprit:
        act()
    return summed(rank, world)


def nothing() -> None: ...


def boom() -> None:
    raise ValueError("boom\nwith a second line")


def leave_then_boom() -> None:
    """The peers see the closed connection well before this rank's own exception."""
    try:
        boom()
    finally:
        dist.destroy_process_group()
        time.sleep(0.3)


def segfault() -> None:
    ctypes.string_at(0)


def sleep() -> None:
    time.sleep(600)


kill = partial(signal.raise_signal, signal.SIGKILL)
freeze = partial(signal.raise_signal, signal.SIGSTOP)


def notice(rank: int, world: int) -> str:
    if rank == 1:
        kill()
    try:
        dist.barrier()
    except RuntimeError:
        time.sleep(0.5)  # saves its work, say
    return f"{rank} survived"


def complain(rank: int, world: int) -> None:
    raise ValueError(f"tp=3 does not divide {rank}")


def sleep_or_boom(rank: int, world: int) -> None:
    boom() if rank else sleep()


def hang(rank: int, world: int, folder: Path) -> None:
    """Rank 0 leaves a collective out, 1 is frozen, 2 waits for the others, 3 sleeps."""
    note_pids(folder, rank)
    [lambda: None, freeze, dist.barrier, sleep][rank]()


def unpicklable(rank: int, world: int):
    return lambda: None


def on_cuda(rank: int, world: int):
    x = torch.full((3,), float(rank), device="cuda")
    dist.all_reduce(x)
    return x


def pids_in(folder: Path, count: int) -> list[int]:
    patience = time.monotonic() + 120
    while time.monotonic() < patience:
        texts = [file.read_text().split() for file in folder.iterdir()]
        if len(texts) == count and all(len(text) == 2 for text in texts):
            return [int(pid) for text in texts for pid in text]
        time.sleep(0.01)
    raise TimeoutError(f"fewer than {count} ranks started")


def alive(pids: list[int]) -> list[int]:
    """Those that still run; a zombie nobody has collected yet does not."""

    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False

    patience = time.monotonic() + 60  # a killed process may take a moment to vanish
    while any(map(runs, pids)) and time.monotonic() < patience:
        time.sleep(0.01)
    return [pid for pid in pids if runs(pid)]


def test_ranks_sum_and_start_fast():
    assert run_ranks(1, summed) == [0.0]  # one rank is a world; and the server imports torch first
    begin = time.monotonic()
    assert run_ranks(8, summed, 10.0) == [280.0] * 8
    assert time.monotonic() - begin < 10


def test_tensors_go_and_come_by_value():
    dtypes = [torch.float64, torch.bfloat16, torch.int64, torch.bool]
    every = [torch.arange(-6, 6).reshape(3, 4).to(dtype) for dtype in dtypes]
    for rank, (got_rank, args) in enumerate(run_ranks(2, echo, *((one, {"column": [one[:, 1]]}) for one in every))):
        assert got_rank == rank
        for sent, (got, nested) in zip(every, args, strict=True):
            assert got.dtype == sent.dtype
            assert not got.is_shared()
            assert torch.equal(got, sent)
            assert torch.equal(nested["column"][0], sent[:, 1])


def test_a_caller_that_has_run_openmp_is_no_danger():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    x = torch.randn(512, 512)
    (x @ x).exp().sum().item()
    torch.set_num_threads(threads)
    assert run_ranks(4, summed) == [6.0] * 4


def test_a_rank_has_one_thread_and_a_parent_that_has_only_imported():
    for seen in run_ranks(2, look):
        assert (seen["OMP_NUM_THREADS"], seen["threads"]) == ("1", 1)
        assert seen["threads of the server"] == 1
        assert not seen["cuda"]
        assert not seen["bad fork"]
        assert seen["GLOO_SOCKET_IFNAME"] == "lo"


def test_environment_and_directory_are_the_callers(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLOUR", "red")
    red = run_ranks(2, look)
    blue = run_ranks(2, look, env={"COLOUR": "blue"})
    assert [seen["COLOUR"] for seen in red + blue] == ["red", "red", "blue", "blue"]
    assert [seen["cwd"] for seen in red] == [str(tmp_path)] * 2
    assert [(seen["RANK"], seen["LOCAL_RANK"]) for seen in red] == [("0", "0"), ("1", "1")]
    assert {(seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"]) for seen in red} == {("2", "2")}
    monkeypatch.delenv("COLOUR")
    assert run_ranks(1, look)[0]["COLOUR"] is None


def test_what_ranks_print_comes_labelled_and_in_order(capfd):
    run_ranks(2, talk)
    said = "".join(f"[rank {rank}] hello from {rank}\n[rank {rank}] raw bytes to stderr\n" for rank in range(2))
    assert capfd.readouterr() == (said, "")


def test_a_function_without_a_name_is_refused():
    def nested(rank: int, world: int) -> None: ...

    main = partial(echo)
    main.__module__, main.__qualname__ = "__main__", "main"
    for function in (lambda rank, world: None, nested, main):
        with pytest.raises(TypeError, match="must be a def at the top level of an imported module"):
            run_ranks(1, function)


@pytest.mark.parametrize("act", [boom, leave_then_boom])
def test_the_first_exception_is_told_and_its_echoes_are_folded(act, tmp_path):
    with pytest.raises(RankError) as caught:
        run_ranks(4, collect, tmp_path, act, 2, grace=30)  # they all end; on a busy machine not within a second
    failure = caught.value
    assert (failure.rank, failure.kind, failure.ranks) == (2, "raised", [2])
    assert failure.error == "ValueError: boom\nwith a second line"
    assert "in boom\n" in failure.stack
    assert str(failure) == "rank 2 failed with ValueError: boom\nwith a second line"
    first, *folded = failure.__notes__
    assert first == f"{failure}\n{failure.stack}"
    assert sorted(line[:18] for line in folded) == [f"rank {rank} failed with" for rank in (0, 1, 3)]
    assert not any("\n" in line for line in folded)
    assert alive(pids_in(tmp_path, 4)) == []


def test_all_ranks_that_raise_on_their_own_are_listed():
    with pytest.raises(RankError, match=r"^rank \d failed with ValueError: tp=3 does not divide") as caught:
        run_ranks(3, complain)
    assert caught.value.ranks == [0, 1, 2]


def test_a_value_that_cannot_be_pickled_is_an_exception_of_its_rank():
    with pytest.raises(RankError, match="lambda") as caught:
        run_ranks(1, unpicklable)
    assert (caught.value.rank, caught.value.kind) == (0, "raised")


@pytest.mark.parametrize(
    ("act", "how", "error", "in_stack"),
    [
        (kill, "was ended by", "SIGKILL", ""),
        (segfault, "was ended by", "SIGSEGV", "in segfault"),
        (partial(os._exit, 3), "failed with", "exit code 3", ""),
    ],
)
def test_a_death_is_named_and_the_others_stop_at_once(act, how, error, in_stack, tmp_path):
    begin = time.monotonic()
    with pytest.raises(RankError, match=f"^rank 1 {how} {error}") as caught:
        run_ranks(4, collect, tmp_path, act, 1)
    failure = caught.value
    assert time.monotonic() - begin < 10
    assert (failure.rank, failure.kind, failure.error, failure.ranks) == (1, "died", error, [1])
    assert in_stack in failure.stack
    assert alive(pids_in(tmp_path, 4)) == []


def test_survivors_may_take_their_time_and_their_values_are_kept():
    with pytest.raises(RankError) as caught:
        run_ranks(3, notice, grace=20)
    assert [(end.kind, end.value) for end in caught.value.ends] == [
        ("returned", "0 survived"),
        ("died", None),
        ("returned", "2 survived"),
    ]


def test_a_hang_is_named_with_every_stack(tmp_path):
    with pytest.raises(
        RankError,
        match=r"^rank 1 gave no answer within 2 s; it is in .*test_ranks.py, line \d+; SIGSTOP .* hang 2, 3\n",
    ) as caught:
        run_ranks(4, hang, tmp_path, timeout=2)
    failure = caught.value
    assert (failure.rank, failure.kind, failure.ranks) == (1, "hung", [1])  # 2 and 3 may wait for it
    for end, frame in zip(failure.ends[1:], ["in hang", "in barrier", "in sleep"], strict=True):
        assert f"{frame}\n" in end.stack
    assert all(any(end.stack in note for note in failure.__notes__) for end in failure.ends)
    assert failure.__notes__[-1] == "rank 0 returned"
    assert [end.kind for end in failure.ends] == ["returned", "hung", "hung", "hung"]
    assert alive(pids_in(tmp_path, 4)) == []


def test_a_rank_stuck_outside_gloo_is_stopped_after_the_grace():
    with pytest.raises(RankError) as caught:
        run_ranks(2, sleep_or_boom, grace=0.5)
    assert re.match(r"rank 0 did not end with the others; it is in .*, line \d+$", caught.value.__notes__[-1])
    assert caught.value.ends[0].kind == "stopped"
    assert "in sleep\n" in caught.value.ends[0].stack
    assert (caught.value.rank, caught.value.kind) == (1, "raised")


def test_a_success_leaves_no_process_either(tmp_path):
    assert run_ranks(2, collect, tmp_path, nothing, 0) == [1.0, 1.0]
    assert alive(pids_in(tmp_path, 2)) == []


def test_blame():
    def blamed(*ends: tuple[str, str, float] | tuple[str, str, float, str]) -> int:
        return RankError([End(rank, kind, error, *stack, when) if stack else End(rank, kind, error, "", when)
                          for rank, (kind, error, when, *stack) in enumerate(ends)]).rank  # fmt: skip

    closed = "RuntimeError: [pair.cc:553] Connection closed by peer"
    silent = "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 1500ms for recv operation to complete"
    lost = "PeerLost: rank 1 (dp 1): the sum waited 2.0 s for rank 0: the connection is closed"
    waits = '(most recent call first):\n  File "/x/torch/distributed/distributed_c10d.py", line 3 in barrier\n'
    works = '(most recent call first):\n  File "/x/of/mine.py", line 3 in f\n'
    assert blamed(("returned", "", 0), ("raised", closed, 1), ("raised", "ValueError", 2)) == 2
    assert blamed(("raised", "ValueError", 2), ("raised", "KeyError", 1)) == 1
    assert blamed(("raised", lost, 1), ("died", "SIGKILL", 0)) == 1
    assert blamed(("raised", lost, 1), ("raised", silent, 1), ("raised", "ValueError", 2)) == 2
    assert blamed(("died", "SIGABRT", 0), ("raised", "ValueError", 1)) == 1
    assert blamed(("died", "SIGABRT", 0), ("stopped", "", 0, works)) == 0
    assert blamed(("stopped", "", 0, waits), ("raised", closed, 2)) == 1
    assert blamed(("raised", closed, 2), ("stopped", "", 0, works)) == 1  # its peers lost it, and it never came back
    assert blamed(("hung", "", 0, waits), ("hung", "", 0, works)) == 1
    held = [End(0, "died", "exit code 3", code=PeerLost.code), End(1, "stopped", stack=waits, paused=True)]
    assert RankError(held).rank == 1  # wherever SIGSTOP caught it


def test_a_launcher_blames_by_exit_codes():
    def blamed(*codes: int | None) -> int:
        ends = [End(rank, "died" if code else "returned", "SIGKILL" if code and code < 0 else "", code=code)
                if code is not None else End(rank, "stopped") for rank, code in enumerate(codes)]  # fmt: skip
        return min(ends, key=lambda end: end.blame).rank

    assert blamed(0, 1, -9) == 2  # ended from outside
    assert blamed(PeerLost.code, 1) == 1
    assert blamed(PeerLost.code, None) == 1
    assert blamed(None, 1) == 1
    assert blamed(0, PeerLost.code) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ranks_share_a_gpu():
    for x in run_ranks(2, on_cuda):
        assert x.device.type == "cpu"
        assert x.tolist() == [1.0, 1.0, 1.0]


def test_an_interrupted_caller_leaves_no_process(tmp_path):
    def interrupt() -> None:
        pids_in(tmp_path, 4)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(4, collect, tmp_path, sleep, 0)
    thread.join()
    signal.signal(signal.SIGINT, before)
    assert alive(pids_in(tmp_path, 4)) == []
    assert run_ranks(2, summed) == [1.0, 1.0]


def test_a_killed_caller_leaves_no_process(tmp_path):
    """Not even the server."""
    (tmp_path / "ranks").mkdir()
    caller = subprocess.Popen([sys.executable, "-m", "tests.launch.orphans", tmp_path])
    pids = pids_in(tmp_path / "ranks", 2)
    caller.kill()
    caller.wait()
    assert alive([int((tmp_path / "server").read_text()), *pids[::2]]) == []
    for child in pids[1::2]:  # a rank's own children outlive it in this case alone
        os.kill(child, signal.SIGKILL)


def test_a_killed_server_takes_its_ranks_along(tmp_path, monkeypatch):
    own = forkserver.ForkServer()  # other tests use the other one
    own.set_forkserver_preload([orphans.__name__])
    monkeypatch.setattr(forkserver, "connect_to_new_process", own.connect_to_new_process)

    def murder() -> None:
        pids_in(tmp_path, 2)
        os.kill(serving, signal.SIGKILL)

    [alone] = orphans.call(1, "server")
    serving = alone.value
    thread = threading.Thread(target=murder)
    thread.start()
    assert [end.error for end in orphans.call(2, "sleep", tmp_path)] == ["exit code 255"] * 2
    thread.join()
    assert alive(pids_in(tmp_path, 2)) == []
    assert orphans.call(1, "server")[0].value != serving  # a new one


def leave(rank: int, world: int, at_once: bool) -> None:
    (os._exit if at_once else sys.exit)(0)


@pytest.mark.parametrize("at_once", [False, True])
def test_an_exit_code_of_zero_is_a_success_only_of_a_rank_that_came_to_its_end(at_once: bool, tmp_path: Path) -> None:
    """os._exit(0), in whatever step, ends a process with the same code as sys.exit()."""
    supervisor = Supervisor(1, tmp_path, attached=True)
    try:
        supervisor.start(f"{__name__}:leave", at_once, env=os.environ, threads=1)
        [end] = supervisor.watch(lambda end: 1.0, 60)
    finally:
        supervisor.kill()
    assert (end.kind, end.error) == (("died", "exit code 0") if at_once else ("returned", ""))
    told: list[str] = []
    code, _ = Launcher("os:getpid", Arrangement(1), "", say=told.append)._outcome([end])
    assert (code, told) == ((1, ["rank 0 failed with exit code 0"]) if at_once else (0, []))
