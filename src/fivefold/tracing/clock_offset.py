"""How far the clocks of several machines are apart.

Processes of one machine share a clock. The first rank of each other machine asks rank 0 for the time several times, and
uses the answer with the shortest round trip. Rank 0's reading is assumed to be of the middle of it, so the error is at
most half of it. On a GPU both sides wait until a message has come before they read their clocks. The offset is measured
once: that clocks drift apart later is not noticed.
"""

import socket
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from fivefold.parallel.control import all_gather_values
from fivefold.parallel.mesh import Axis, Mesh

_ROUND_TRIPS = 20  # between rank 0 and each other machine


def clock_offset(
    mesh: Mesh, clock: Callable[[], float] = time.perf_counter, host: str | None = None
) -> tuple[float, float]:
    """(the offset to add to this rank's clock, the most that it may be off by), in seconds. Collective."""
    world = mesh.world
    if world.size == 1:
        return 0.0, 0.0
    hosts = all_gather_values(host or socket.gethostname(), str, world.group)
    first_rank_of = {name: hosts.index(name) for name in hosts}
    if len(first_rank_of) == 1:
        return 0.0, 0.0
    offset_and_error = (0.0, 0.0)
    ping = torch.zeros(1, dtype=torch.float64, device="cpu" if world.staged else mesh.device)
    for first in first_rank_of.values():
        if first == 0:
            continue  # the machine of rank 0
        if world.rank == 0:
            _tell_time(world, first, ping, clock)
        elif world.rank == first:
            offset_and_error = _ask_time(world, ping, clock)
    by_rank = all_gather_values(offset_and_error, tuple[float, float], world.group)
    return by_rank[first_rank_of[hosts[world.rank]]]


def _tell_time(world: Axis, asking: int, ping: torch.Tensor, clock: Callable[[], float]) -> None:
    """Rank 0 answers a rank with the time."""
    for _ in range(_ROUND_TRIPS):
        dist.recv(ping, group=world.group, group_src=asking)
        ping.item()  # on a GPU, waits for the message: the time is read after it
        dist.send(torch.full_like(ping, clock()), group=world.group, group_dst=asking)


def _ask_time(world: Axis, ping: torch.Tensor, clock: Callable[[], float]) -> tuple[float, float]:
    """Another rank asks rank 0; returns what `clock_offset` does, by the answer with the shortest round trip."""
    answers: list[tuple[float, float]] = []
    for _ in range(_ROUND_TRIPS):
        start = clock()
        dist.send(ping, group=world.group, group_dst=0)
        dist.recv(ping, group=world.group, group_src=0)
        rank_0_time, end = ping.item(), clock()  # on a GPU, `item` waits for the answer
        answers.append((rank_0_time - (start + end) / 2, (end - start) / 2))
    return min(answers, key=lambda answer: answer[1])
