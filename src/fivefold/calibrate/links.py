"""What collectives reach among the ranks of this machine, over sizes; one rank of it."""

import time
from statistics import median

import torch
import torch.distributed as dist

from fivefold.calibrate.clock import Clock
from fivefold.launch.device import choose_device
from fivefold.launch.ranks import Rank
from fivefold.parallel.mesh import backend

Timing = tuple[str, int, float]  # kind, payload in bytes as layout.collective_cost counts it, seconds


def run(rank: Rank, sizes: tuple[int, ...], rounds: int, wanted: str) -> list[Timing]:
    """Every collective at every size, in turns; a payload is all that the ranks end up with."""
    device = choose_device(wanted, rank.number)
    rank.join(backend(device, rank.world))
    clock, found = Clock(device, 0.0), []
    for size in sizes:
        whole = torch.ones(max(1, size // 4 // rank.world) * rank.world, device=device)
        mine = whole.chunk(rank.world)[rank.number].clone()
        times: dict[str, list[float]] = {"all-reduce": [], "all-gather": []}
        for number in range(rounds + 2):
            for kind in times:
                dist.barrier()
                clock.synchronize()
                start = time.perf_counter()
                if kind == "all-reduce":
                    dist.all_reduce(whole)
                else:
                    dist.all_gather_into_tensor(whole, mine)
                clock.synchronize()
                if number > 1:  # the first ones connect and allocate
                    times[kind].append(time.perf_counter() - start)
            whole.fill_(1.0)
        found += [(kind, whole.nbytes, median(seconds)) for kind, seconds in times.items()]
    dist.destroy_process_group()
    return found
