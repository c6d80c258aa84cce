"""Peers that died or fell silent: what torch says of them, in words that name who waited, in what, and for whom."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fivefold.launch.ends import lost_peer
from fivefold.parallel.mesh import Axis, Mesh
from fivefold.support.errors import PeerLost


def who(mesh: Mesh) -> str:
    """This rank, and where it stands in the mesh: 'rank 5 (dp 1, pp 0)'."""
    place = mesh.layout.place(mesh.world.rank)
    return f"rank {mesh.world.rank} ({place})" if place else "rank 0"


def others(*axes: Axis) -> str:
    """The other ranks of some axes, by their numbers in the world: 'ranks 0, 3 (dp, ends)'."""
    wide = [axis for axis in axes if axis.size > 1]
    ranks = sorted({rank for axis in wide for rank in axis.ranks} - {dist.get_rank()})
    names = ", ".join(dict.fromkeys(axis.name for axis in wide))
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))} ({names})"


@contextmanager
def waiting(what: str, mesh: Mesh, *axes: Axis) -> Iterator[None]:
    """Around collectives over some axes: if one fails for want of a peer, the error says what waited for whom."""
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if (why := lost_peer(error)) is None:
            raise
        waited = f"waited {time.monotonic() - start:.1f} s for {others(*axes)}"
        raise PeerLost(f"{who(mesh)}: {what} {waited}: {why}") from error
