"""Who runs the commands of a checkup: this process for all ranks of its machine, or one process for each launched rank.

    team = Here(base, ranks=4)                       # started by hand: `fivefold train --nproc 4` starts the ranks
    team = Launched(base, world)                     # rank 0 of srun's or torchrun's; `follow` is what the others do
    team.run(Task(kind="doctor", ...), limit=60)     # how the command ended, by rank

A launched checkup is a process for each rank that only runs commands, one after the other, each with the rank's own
environment. So a command may kill a rank, hang or end as it likes: the process that started it is still there, and
starts the next. They meet at the launcher's address as ranks that train do; the commands meet at other ports.
"""

import os
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from fivefold.checkup.command import CommandEnd, fivefold_command, run_command
from fivefold.checkup.tasks import Task, TypedJob, check_task, task_env, task_words
from fivefold.launch.handshake import claim, meet
from fivefold.launch.world import LOCAL_SIZE_ENV, RESTARTS_ENV, RUN_ID_ENV, World
from fivefold.support.errors import PeerLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PURPOSE = "a checkup"
Ends = dict[int, CommandEnd]  # by rank
_MEETING_S = 300.0  # seconds for the ranks of a launcher to come
_GRACE_S = 15.0  # seconds for a rank's command after another rank's has failed
_REPLY_S = 30.0  # seconds that a rank may be late with how its command ended
_SENT, _SENT_FIGURES = 6000, 1 << 22  # last characters of an output that a rank sends to rank 0, also with figures
_NOT_A_RANK: dict[str, str | None] = dict.fromkeys(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", LOCAL_SIZE_ENV, "SLURM_STEP_ID")
)
_AGENT = {"TORCHELASTIC_USE_AGENT_STORE": None}  # torchrun's own store still has what earlier commands wrote


class Team(Protocol):
    """The ranks of a checkup."""

    base: TypedJob
    size: int
    per_node: int
    launched: bool

    def run(self, task: Task, limit: float) -> Ends:
        """Run a task; returns how it ended on each rank that ran it. Rank 0 has the whole output."""
        ...

    def close(self) -> None: ...


class Here:
    """All ranks are started by each command on this machine."""

    launched = False

    def __init__(self, base: TypedJob, ranks: int):
        self.base, self.size, self.per_node = base, ranks, ranks

    def run(self, task: Task, limit: float) -> Ends:
        task = msgspec.structs.replace(task, limit=limit)
        words = task_words(task, self.base, launched=False)
        env = {**_NOT_A_RANK, RESTARTS_ENV: str(task.start), **task_env(task)}
        return {0: run_command(fivefold_command(words), env, limit)}

    def close(self) -> None:
        pass


class Launched:
    """Rank 0 of the processes that srun or torchrun started: tells the others what is next."""

    launched = True

    def __init__(self, base: TypedJob, world: World):
        self.base, self.world, self.size, self.per_node = base, world, world.size, world.local_size
        self.store = _meet(base, world)
        self.count = 0

    def run(self, task: Task, limit: float) -> Ends:
        number, self.count = self.count, self.count + 1
        task = msgspec.structs.replace(task, limit=limit, port=free_port(self.world.meeting.address))
        self.store.set(f"task {number}", msgspec.json.encode(task).decode())
        try:
            ends = {0: _run_as(self.world, task, self.base, self.store, number)}
        finally:
            self.store.set(f"over {number}", "")  # whoever still runs it ends it within a grace
        deadline = time.monotonic() + _REPLY_S
        for rank in range(1, self.size):
            if task.by_node and rank % self.per_node:
                continue
            while not self.store.check([f"end {number} {rank}"]) and time.monotonic() < deadline:
                time.sleep(0.05)
            if self.store.check([f"end {number} {rank}"]):
                ends[rank] = msgspec.json.decode(self.store.get(f"end {number} {rank}"), type=CommandEnd)
            else:
                ends[rank] = CommandEnd(None, limit, err=f"rank {rank} has not said how its command ended")
        return ends

    def close(self) -> None:
        self.store.set("no more tasks", "")
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and self.store.add("have left", 0) < self.size - 1:
            time.sleep(0.05)  # the store ends with this process


def follow(base: TypedJob, world: World) -> None:
    """What every rank but rank 0 does: run the tasks that rank 0 tells, until there are no more."""
    store, number = _meet(base, world), 0
    try:
        while True:
            while not store.check([f"task {number}"]):
                if store.check(["no more tasks"]):
                    store.add("have left", 1)
                    return
                time.sleep(0.1)
            task = check_task(msgspec.json.decode(store.get(f"task {number}")))
            if not task.by_node or world.local_rank == 0:
                end = _run_as(world, task, base, store, number)
                store.set(
                    f"end {number} {world.rank}",
                    _said(end, task),
                )
            number += 1
    except RuntimeError as error:  # torch's errors of a store whose process has ended
        raise PeerLost(f"rank {world.rank} of the checkup has lost rank 0: {str(error).splitlines()[0]}") from None


def _meet(base: TypedJob, world: World) -> "Store":
    return meet(world.meeting, world.rank, claim(base.job, "", world, PURPOSE), _MEETING_S)


def _run_as(world: World, task: Task, base: TypedJob, store: "Store", number: int) -> CommandEnd:
    """Run a task as a rank of the launcher's world, or by itself on this node."""
    words = task_words(task, base, launched=True)
    env = {**_NOT_A_RANK, **task_env(task), **_AGENT} if task.by_node else rank_env(world, task, number)
    watched = [f"failed {number}", *([f"over {number}"] if world.rank else [])]
    deadline: list[float] = []

    def cancelled() -> bool:
        """Another rank has failed, or rank 0 has ended: this one has a grace to say what it knows. Else a rank that
        waits for a killed one over NCCL would wait until its timeout."""
        if not deadline and not task.by_node and any(store.check([key]) for key in watched):
            deadline.append(time.monotonic() + _GRACE_S)
        return bool(deadline) and time.monotonic() > deadline[0]

    end = run_command(fivefold_command(words), env, task.limit, cancelled)
    if end.code not in (0, None):
        store.set(f"failed {number}", "")
    return end


def rank_env(world: World, task: Task, number: int) -> dict[str, str | None]:
    """The environment in which a command is a rank of the launcher's world, and meets the others at the task's port."""
    ranks: Mapping[str, Any] = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        LOCAL_SIZE_ENV: world.local_size,
        "MASTER_ADDR": world.meeting.address,
        "MASTER_PORT": task.port,
        RESTARTS_ENV: task.start,
        RUN_ID_ENV: f"checkup {task.token} {task.name or number}",  # the same for all starts of a run
    }
    return {name: str(value) for name, value in ranks.items()} | _AGENT | task_env(task)


def free_port(address: str) -> int:
    """A port of this machine at which nobody listens now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _said(end: CommandEnd, task: Task) -> str:
    """How a command ended, with as much of its output as rank 0 needs."""
    most = _SENT_FIGURES if task.by_node else _SENT
    return msgspec.json.encode(msgspec.structs.replace(end, out=end.out[-most:], err=end.err[-_SENT:])).decode()


def launched_rank(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process as one of several ranks."""
    from fivefold.launch.world import current_world

    world = current_world(env)
    return world.joined and world.size > 1
