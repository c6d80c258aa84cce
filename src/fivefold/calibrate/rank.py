"""One of several CPU ranks that are measured while all of them are at work."""

import torch
import torch.distributed as dist

from fivefold.calibrate.calibrate import Samples, measure
from fivefold.launch.ranks import Rank


def run(rank: Rank, rounds: int) -> list[Samples]:
    torch.set_num_threads(1)
    if rank.world > 1:
        rank.join("gloo")
        dist.barrier()
    return [measure(torch.device("cpu"), quick=True, told=lambda _: None) for _ in range(rounds)]
