"""Which rank this process is, by the environment of its launcher (torchrun, Slurm or `--nproc N`); joins the group."""

import os
import re
import signal
import socket
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from fivefold.launch.exits import INTERRUPTED, STOPPING, TERMINATED
from fivefold.launch.rendezvous import Rendezvous, stay_on_this_machine
from fivefold.support.errors import PeerLost, UserError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from fivefold.launch.handshake import Hello

# Environment variables of torchrun and Slurm, and of our launcher.
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # how often the ranks have been started again
REQUEUES = "SLURM_RESTART_COUNT"  # how often Slurm has started the job again
RUN = "TORCHELASTIC_RUN_ID"  # the same for all starts of a run
HERE = "LOCAL_WORLD_SIZE"  # how many ranks this node has
PLANNED = "FIVEFOLD_PLANNED"  # seconds that our launcher took to find another layout
STORE = "FIVEFOLD_STORE"  # the file at which the ranks of our launcher meet
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # set by torchrun alone; "True": its own store is at MASTER_ADDR
_CONNECTING = timedelta(seconds=30)  # for gloo to connect ranks that have just met; it tries five times
_PORTS = range(20_000, 32_000)  # below Linux's ephemeral ports


@dataclass(frozen=True)
class World:
    """This process's rank among the ranks of a run, and where they meet."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1  # ranks of this node
    joined: bool = False  # started by a launcher: there is a process group to join, even a group of one
    meeting: Rendezvous = field(default_factory=Rendezvous)
    run: str = ""  # the launcher's name for the run
    start: int | None = 0  # which start of the run this is; None under torchrun, whose agents count for themselves

    @property
    def apart(self) -> bool:
        """Whether ranks may be on several machines."""
        return self.joined and not self.meeting.file and not self.meeting.alone


def current_world(env: Mapping[str, str] = os.environ) -> World:
    """This process's rank and world, from the variables that its launcher has set."""
    try:
        world = _from_environment(env)
    except ValueError as error:
        names = "RANK, WORLD_SIZE, MASTER_PORT or SLURM_*"
        raise UserError(f"the launcher's environment is broken: {error} in {names}", "environment.ranks") from None
    meeting = world.meeting
    if world.joined and not meeting.file and not (meeting.address and meeting.port):
        missing = "MASTER_PORT" if meeting.address else "MASTER_ADDR"
        unset = f"RANK and WORLD_SIZE are set but {missing} is not: start with torchrun, or unset RANK"
        raise UserError(unset, "environment.ranks")
    if world.joined and not (0 <= world.rank < world.size and 0 <= meeting.port < 1 << 16):
        raise UserError(
            f"the launcher's environment is broken: rank {world.rank} of {world.size}, port {meeting.port} of 65535",
            "environment.ranks",
        )
    return world


def ranks_here(env: Mapping[str, str] = os.environ) -> int:
    """How many ranks this node has; 1 where the environment does not say."""
    try:
        return max(1, int(env.get(HERE) or _from_environment(env).local_size))
    except ValueError:
        return 1


def rank_here(env: Mapping[str, str] = os.environ) -> int:
    """The rank of this process; 0 where the environment does not say."""
    try:
        return _from_environment(env).rank
    except ValueError:
        return 0


def starts_before(env: Mapping[str, str] = os.environ) -> int:
    """How often this run has been started again: by torchrun or our launcher, and by Slurm, which requeues a job."""
    return sum(int(env.get(name, 0)) for name in (RESTARTS, REQUEUES))


def _from_environment(env: Mapping[str, str]) -> World:
    if "RANK" in env and "WORLD_SIZE" in env:
        return _from_torchrun(env)
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:  # srun; the batch script itself is no rank and has no step
        return _from_slurm(env)
    return World()


def _from_torchrun(env: Mapping[str, str]) -> World:
    """From torchrun's variables, which our own launcher or a user may have set, too."""
    size = int(env["WORLD_SIZE"])
    local_size, alone = int(env.get(HERE, size)), env.get(HERE) == env["WORLD_SIZE"]
    agent = env.get(_AGENT) == "True"
    address = env.get("MASTER_ADDR", "")
    if alone and address and not agent:
        address = "127.0.0.1"
    meeting = Rendezvous(env.get(STORE, ""), address, int(env.get("MASTER_PORT", 0)), agent, alone)
    # Each of torchrun's agents counts its own starts: one whose ranks failed counts one more than the others.
    start = None if _AGENT in env else int(env.get(RESTARTS, 0))
    local_rank = int(env.get("LOCAL_RANK", 0))
    return World(int(env["RANK"]), size, local_rank, local_size, True, meeting, env.get(RUN, ""), start)


def _from_slurm(env: Mapping[str, str]) -> World:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "localhost"
    size = int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or 1)
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(size)
    run, start = f"{env.get('SLURM_JOB_ID', '0')}.{env['SLURM_STEP_ID']}", int(env.get(REQUEUES, 0))
    # Equal on all ranks, but different for each job, each step of a job and each start.
    port = _PORTS[zlib.crc32(f"{run}.{start}".encode()) % len(_PORTS)]
    alone = first_host(nodes) == nodes
    address = "127.0.0.1" if alone else env.get("MASTER_ADDR", first_host(nodes))
    return World(
        rank=int(env["SLURM_PROCID"]),
        size=size,
        local_rank=int(env.get("SLURM_LOCALID", 0)),
        local_size=max(map(int, re.findall(r"(?:^|,)(\d+)", per_node)), default=size),  # "4(x2),2": the most
        joined=True,
        meeting=Rendezvous("", address, int(env.get("MASTER_PORT", port)), alone=alone),
        run=f"Slurm step {run}",
        start=start,
    )


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list: 'gpu[007-010,12],x1' -> 'gpu007'."""
    match = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


def join(world: World, backend: str, timeout: float = 600.0, claim: "Hello | None" = None) -> None:
    """Enter the process group, if a launcher started this rank. Ranks wait for each other for `timeout` seconds.

    With a claim, the claims of all ranks are compared first; ranks that one process has started need none.
    """
    from fivefold.launch.handshake import meet
    from fivefold.launch.rendezvous import check_interfaces

    if not world.joined:
        return
    if world.meeting.alone:
        stay_on_this_machine()
    if world.apart and backend == "gloo":
        check_interfaces(world.meeting)
    patience = timedelta(seconds=timeout)
    if claim:
        store = meet(world.meeting, world.rank, claim, timeout)
    else:
        store = world.meeting.store(world.rank, world.size, time.monotonic() + timeout)
    store.set_timeout(patience)
    _connect(world, backend, store, patience)
    if world.meeting.file:
        if store.add("connected", 1) == world.size:
            store.set("all connected", "")
        store.wait(["all connected"], patience)  # else a rank that fails at once fails peers that still connect


def _connect(world: World, backend: str, store: "Store", patience: timedelta) -> None:
    """Create the process group; if gloo cannot connect its ranks, say over which interface it tried."""
    import torch.distributed as dist

    from fivefold.launch.exits import lost_peer
    from fivefold.launch.rendezvous import choose_interface

    interface_hint = ""
    if world.apart:  # under NCCL, too: copies of snapshots travel over gloo
        interface_hint = choose_interface(world.meeting, store, world.size, patience.total_seconds())
    if backend != "gloo":
        interface_hint = ""
    elif world.apart:
        patience = min(patience, _CONNECTING)
    one_gloo_worker()  # under NCCL, too, for the same copies
    try:
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=patience)
    except RuntimeError as error:
        if not interface_hint or lost_peer(error) is None:
            raise
        met = f"rank {world.rank} on {socket.gethostname()} has met the others at {world.meeting}"
        raise PeerLost(f"{met}, and then could not connect to all of them: {interface_hint}") from error


@cache
def one_gloo_worker() -> None:
    """Give every gloo group that this process makes from now on one worker thread for its collectives; torch gives two.

    Two can kill the process: each, having run a collective, writes the collective's name into a string of the group
    without a lock, and two such writes at once corrupt the heap (docs/gloo-race.md; `python tools/gloo_race.py` says
    whether the installed torch still does it). torch has no setting for this, as it ignores `pg_options` of a gloo
    group, so this replaces the constructor of its class. The class itself stays: torch checks for instances of it.

    One thread cannot deadlock where two did not. It runs the collectives of its group in the order in which they were
    started, and that order is the same on all ranks, as a group's collectives are matched by their number. Other groups
    have threads of their own, and sends and receives need none.
    """
    import torch.distributed as dist
    from torch.distributed.constants import default_pg_timeout

    from fivefold.launch.rendezvous import GLOO

    if not dist.is_gloo_available():
        return
    group: Any = dist.ProcessGroupGloo
    original_init = group.__init__

    def init_with_one_thread(
        self: Any, store: "Store", rank: int, size: int, timeout: Any = default_pg_timeout, options: Any = None
    ) -> None:
        if options is None and isinstance(timeout, timedelta):  # else the caller's options say how many threads
            options, names = group._Options(), [name for name in os.environ.get(GLOO, "").split(",") if name]
            # The devices that torch would choose; both functions read TORCH_GLOO_LAZY_INIT, too.
            devices = [group.create_device(interface=name) for name in names] or [group.create_default_device()]
            options._devices, options._timeout, options._threads = devices, timeout, 1
        original_init(self, store, rank, size, options or timeout)

    group.__init__ = init_with_one_thread


def leave(world: World) -> None:
    """Destroy the process group, if there is one."""
    import torch.distributed as dist

    if world.joined and dist.is_initialized():
        dist.destroy_process_group()


# ---- spare ----------------------------------------------------------------------------------------------------------
# A spare rank is one that the layout leaves out: it waits until the others are done, or its launcher starts all again.


_DONE = "fivefold: all steps are done"
_LOOK = timedelta(seconds=10)


def wait_for_the_others(world: World, timeout: float) -> int:
    """Wait until the other ranks have made all their steps, or have stopped by a signal that this rank got as well;
    returns the exit code. Raises PeerLost if they end otherwise.

    If this rank ended at once, torchrun would miss it in the next start, and Slurm would not leave the others the time
    to save.
    """
    from torch.distributed import DistNetworkError, DistStoreError

    received: list[int] = []  # signals
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: received.append(number))
    try:
        store = world.meeting.store(world.rank, world.size, time.monotonic() + timeout)
        while True:
            with suppress(DistStoreError):  # not yet
                store.wait([_DONE], _LOOK)
                return 0
    except DistNetworkError:
        if received:
            return INTERRUPTED if received[0] == signal.SIGINT else TERMINATED
        raise PeerLost(f"rank {world.rank} is spare, and the others have ended before all steps were done") from None


def tell_spares() -> None:
    """Called by rank 0 after the last step: let the spare ranks end."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    if not dist.is_initialized():
        return
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):  # the group's prefix, which spares do not know
        store = store.underlying_store
    with suppress(RuntimeError):  # the store ends with the launcher, whose spares have ended then, too
        store.set(_DONE, "")
