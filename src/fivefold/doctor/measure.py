"""What a rank measures: its matmuls, and the links of every axis of its mesh."""

import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
import torch.distributed as dist

from fivefold.calibrate.clock import Clock, timed_collectives
from fivefold.doctor.reports import Ring, Send
from fivefold.launch import faults
from fivefold.layout.collective_cost import Kind, wire
from fivefold.parallel.mesh import Axis

_WIDTH = {"cuda": 4096, "cpu": 384}  # of square matrices
_AT_ONCE = {"cuda": 8, "cpu": 1}  # matmuls that are timed together: about 2 ms of a datacenter GPU, and of a core
_LEAST = 10  # rounds
_ROUNDS = 5  # of messages
_SIZES = {"cuda": (1 << 10, 1 << 20, 1 << 27), "cpu": (1 << 10, 1 << 20, 1 << 23)}  # bytes


def usual(device: torch.device) -> Callable[[list[float]], float]:
    """Which of several times counts. A CPU has other work in between, and its best round was not disturbed; a GPU is
    the rank's own, and one that is hot is slower later."""
    return median if device.type == "cuda" else min


def matmul_rate(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """FLOP/s of matmuls that go on for so long."""
    width, count, clock, times = _WIDTH[device.type], _AT_ONCE[device.type], Clock(device, 0.0), list[float]()
    generator = torch.Generator(device).manual_seed(0)  # not zeros, which draw less power; not the run's own numbers
    a, b = (torch.randn(width, width, device=device, generator=generator).to(dtype) for _ in range(2))
    out = a @ b
    clock.synchronize()
    end = time.perf_counter() + seconds
    while len(times) < _LEAST or time.perf_counter() < end:
        start = time.perf_counter()
        faults.strike("matmul")
        for _ in range(count):
            torch.mm(a, b, out=out)
        clock.synchronize()
        times.append(time.perf_counter() - start)
    return 2.0 * width**3 * count / usual(device)(times[len(times) // 2 :] if device.type == "cuda" else times)


def ring(axis: Axis, device: torch.device) -> Ring:
    """Collectives among the ranks of this rank's group. All of them call it."""
    found = timed_collectives(device, _SIZES[device.type], _ROUNDS, axis.group, usual(device))

    def carried(kind: Kind) -> float:
        _, payload, seconds = max(one for one in found if one[0] == kind)
        return float(wire(kind, payload, axis.size)) / seconds

    latency = min(seconds for kind, _, seconds in found if kind == "all-reduce")
    return Ring(axis.name, axis.ranks, latency, carried("all-reduce"), carried("all-gather"), found)


def sends(axis: Axis, device: torch.device) -> list[Send]:
    """From this rank to the next of its group and back, so that a node which is slow in one direction has two slow
    links. All of the group call it."""
    found = []
    payload = torch.ones(_SIZES[device.type][-1] // 4, device=device)
    for turn in turns(axis.size):
        dist.barrier(axis.group)
        for here, there in turn:
            if axis.rank not in (here, there):
                continue
            times = []
            for _ in range(_ROUNDS + 1):
                start = time.perf_counter()
                faults.strike("link")
                if axis.rank == here:
                    dist.send(payload, group=axis.group, group_dst=there)
                    dist.recv(payload, group=axis.group, group_src=there)
                else:
                    dist.recv(payload, group=axis.group, group_src=here)
                    dist.send(payload, group=axis.group, group_dst=here)
                payload[0].item()  # on a GPU the message has come only now
                times.append(time.perf_counter() - start)
            if axis.rank == here:
                pair = axis.ranks[here], axis.ranks[there]
                found.append(Send(axis.name, pair, 2 * payload.nbytes / usual(device)(times[1:])))
    return found


def turns(size: int) -> Iterator[list[tuple[int, int]]]:
    """The neighbours around a ring, in turns in which no rank has two partners."""
    pairs = [(at, (at + 1) % size) for at in range(size if size > 2 else size - 1)]
    last = [pairs.pop()] if size % 2 and size > 2 else []
    for turn in (pairs[::2], pairs[1::2], last):
        if turn:
            yield turn
