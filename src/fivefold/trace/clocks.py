"""One clock for all ranks. Processes of one machine share theirs; another machine's is held against rank 0's.

The first rank of each other machine asks rank 0 for the time, again and again. The answer that took the shortest came
back the least disturbed: rank 0's clock stood at it half-way, give or take half of what it took.
"""

import socket
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from fivefold.parallel.mesh import Mesh

_ROUNDS = 20


def against_rank_0(
    mesh: Mesh, clock: Callable[[], float] = time.perf_counter, host: str | None = None
) -> tuple[float, float]:
    """What to add to this rank's clock, and by how many seconds that may be wrong. Every rank must ask."""
    if mesh.world.size == 1:
        return 0.0, 0.0
    hosts: list[str] = [""] * mesh.world.size
    dist.all_gather_object(hosts, host or socket.gethostname(), group=mesh.world.group)
    firsts = {name: hosts.index(name) for name in hosts}
    measured: list[tuple[float, float]] = [(0.0, 0.0)] * mesh.world.size
    mine = 0.0, 0.0
    for first in firsts.values():
        if mesh.world.rank == 0 and first:
            _answer(first, mesh, clock)
        elif mesh.world.rank == first and first:
            mine = _ask(mesh, clock)
    if len(firsts) > 1:
        dist.all_gather_object(measured, mine, group=mesh.world.group)
    return measured[firsts[hosts[mesh.world.rank]]]


def _answer(peer: int, mesh: Mesh, clock: Callable[[], float]) -> None:
    group, ping = mesh.world.group, torch.zeros(1, dtype=torch.float64, device=_place(mesh))
    for _ in range(_ROUNDS):
        dist.recv(ping, group=group, group_src=peer)
        ping.item()  # on a GPU the message has come only now
        dist.send(torch.full_like(ping, clock()), group=group, group_dst=peer)


def _ask(mesh: Mesh, clock: Callable[[], float]) -> tuple[float, float]:
    group, ping = mesh.world.group, torch.zeros(1, dtype=torch.float64, device=_place(mesh))
    answers = []
    for _ in range(_ROUNDS):
        start = clock()
        dist.send(ping, group=group, group_dst=0)
        dist.recv(ping, group=group, group_src=0)
        theirs, end = ping.item(), clock()
        answers.append(((end - start) / 2, theirs - (start + end) / 2))
    error, offset = min(answers)
    return offset, error


def _place(mesh: Mesh) -> torch.device:
    return torch.device("cpu") if mesh.world.staged else mesh.device
