"""One of several CPU ranks that are measured while all of them are at work."""

import torch
import torch.distributed as dist

from fivefold.prove.calibrate import Samples, measure
from fivefold.prove.ranks import Rank


def run(rank: Rank, rounds: int) -> list[Samples]:
    torch.set_num_threads(1)
    if rank.world > 1:
        rank.join("gloo")
        dist.barrier()
    return [measure(torch.device("cpu"), quick=True, told=lambda _: None) for _ in range(rounds)]
