"""The process group of a run: its ranks enter it, leave it, and those to spare wait beside it."""

import os
import signal
import socket
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from fivefold.launch.exits import INTERRUPTED, STOP_SIGNALS, TERMINATED, lost_peer
from fivefold.launch.handshake import Hello, meet
from fivefold.launch.rendezvous import GLOO_INTERFACE_ENV, check_interfaces, choose_interface, stay_on_this_machine
from fivefold.launch.world import World
from fivefold.support.errors import PeerLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_CONNECTING = timedelta(seconds=30)  # for gloo to connect ranks that have just met; it tries five times


def join(world: World, backend: str, timeout: float = 600.0, claim: Hello | None = None) -> None:
    """Enter the process group, if a launcher started this rank. Ranks wait for each other for `timeout` seconds.

    With a claim, the claims of all ranks are compared first; ranks that one process has started need none.
    """
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

    interface_hint = ""
    if world.apart:  # also under NCCL: copies of snapshots travel over gloo
        interface_hint = choose_interface(world.meeting, store, world.size, patience.total_seconds())
    if backend != "gloo":
        interface_hint = ""
    elif world.apart:
        patience = min(patience, _CONNECTING)
    one_gloo_worker()  # also under NCCL, for the same copies
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

    if not dist.is_gloo_available():
        return
    group: Any = dist.ProcessGroupGloo
    original_init = group.__init__

    def init_with_one_thread(
        self: Any, store: "Store", rank: int, size: int, timeout: Any = default_pg_timeout, options: Any = None
    ) -> None:
        if options is None and isinstance(timeout, timedelta):  # else the caller's options say how many threads
            options, names = (
                group._Options(),
                [name for name in os.environ.get(GLOO_INTERFACE_ENV, "").split(",") if name],
            )
            # The devices that torch would choose; both functions also read TORCH_GLOO_LAZY_INIT.
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


_DONE_KEY = "fivefold: all steps are done"
_CHECK_INTERVAL = timedelta(seconds=10)


def wait_for_the_others(world: World, timeout: float) -> int:
    """Wait until the other ranks have made all their steps, or have stopped by a signal that this rank got as well;
    returns the exit code. Raises PeerLost if they end otherwise.

    If this rank ended at once, torchrun would miss it in the next start, and Slurm would not leave the others the time
    to save.
    """
    from torch.distributed import DistNetworkError, DistStoreError

    received: list[int] = []  # signals
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: received.append(number))
    try:
        store = world.meeting.store(world.rank, world.size, time.monotonic() + timeout)
        while True:
            with suppress(DistStoreError):  # not yet
                store.wait([_DONE_KEY], _CHECK_INTERVAL)
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
    with suppress(RuntimeError):  # the store ends with the launcher, and by then its spares have ended
        store.set(_DONE_KEY, "")
