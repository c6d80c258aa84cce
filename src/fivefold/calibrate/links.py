"""What collectives reach among the ranks of this machine, over sizes; one rank of it."""

import time
from statistics import median

import torch
import torch.distributed as dist

from fivefold.launch.device import choose_device
from fivefold.launch.ranks import Rank
from fivefold.parallel.mesh import backend

Timing = tuple[str, int, float]  # kind, payload in bytes as wire.py counts it, seconds


def run(rank: Rank, sizes: tuple[int, ...], rounds: int, wanted: str) -> list[Timing]:
    """Every collective at every size, in turns; a payload is all that the ranks end up with."""
    device = choose_device(wanted, rank.number)
    rank.join(backend(device, rank.world))
    found = []
    for size in sizes:
        whole = torch.ones(max(1, size // 4 // rank.world) * rank.world, device=device)
        mine = whole.chunk(rank.world)[rank.number].clone()
        times: dict[str, list[float]] = {"all-reduce": [], "all-gather": []}
        for number in range(rounds + 2):
            for kind in times:
                dist.barrier()
                _wait(device)
                start = time.perf_counter()
                if kind == "all-reduce":
                    dist.all_reduce(whole)
                else:
                    dist.all_gather_into_tensor(whole, mine)
                _wait(device)
                if number > 1:  # the first ones connect and allocate
                    times[kind].append(time.perf_counter() - start)
            whole.fill_(1.0)
        found += [(kind, whole.nbytes, median(seconds)) for kind, seconds in times.items()]
    dist.destroy_process_group()
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
