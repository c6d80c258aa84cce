"""A rank that the layout leaves out: it waits until the others are done, or its launcher starts all anew."""

import signal
import time
from contextlib import suppress
from datetime import timedelta

from fivefold.launch.ends import INTERRUPTED, STOPPING, TERMINATED
from fivefold.launch.world import World
from fivefold.support.errors import PeerLost

_DONE = "fivefold: all steps are done"
_LOOK = timedelta(seconds=10)


def wait_for_the_others(world: World, timeout: float) -> int:
    """Until they have made all their steps, or have stopped by a signal that this rank got as well; the exit code.

    PeerLost if they end otherwise. A rank that left at once would be missing in the next start of torchrun, and Slurm
    would not leave the others the time to save.
    """
    from torch.distributed import DistNetworkError, DistStoreError

    told: list[int] = []
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: told.append(number))
    try:
        store = world.meeting.store(world.rank, world.size, time.monotonic() + timeout)
        while True:
            with suppress(DistStoreError):  # not yet
                store.wait([_DONE], _LOOK)
                return 0
    except DistNetworkError:
        if told:
            return INTERRUPTED if told[0] == signal.SIGINT else TERMINATED
        raise PeerLost(f"rank {world.rank} is spare, and the others have ended before all steps were done") from None


def tell_spares() -> None:
    """By rank 0, after the last step."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    if not dist.is_initialized():
        return
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):  # of this start; spares have the store itself
        store = store.underlying_store
    with suppress(RuntimeError):  # a launcher that has ended has none waiting
        store.set(_DONE, "")
