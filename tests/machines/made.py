"""Reports as ranks would make them, without ranks: nodes of two H100, dp over nodes and tp inside. And ranks that
measure themselves with little to compute."""

from typing import Any

import msgspec

from fivefold.cost.kernels import Device
from fivefold.hardware.accelerators import ACCELERATORS
from fivefold.job.config import Job
from fivefold.job.reading import read_job
from fivefold.launch.processes import Rank
from fivefold.machines import calibrate, clock, kernels
from fivefold.machines.judge import Disk, Gpu, RankReport, RingReport, Send
from fivefold.machines.result import RankSpeed

H100 = Device.of(ACCELERATORS["H100"])
WELL = H100.rate("bf16")


def examined_job(nodes: int, *changes: str) -> Job:
    return read_job(None, [f"layout=dp={nodes},tp=2", "train.dtype=bfloat16", *changes])


def reports(nodes: int = 3, slow: int | None = None) -> list[RankReport]:
    """All well, but for matmuls and clock of rank `slow`."""
    made = []
    for rank in range(2 * nodes):
        ranks = (rank, (rank + 2) % (2 * nodes))
        gpu = Gpu(1755, 1980, 61, 690.0, 700.0, ["the power limit"], 0)
        held = Gpu(900, 1980, 92, 400.0, 700.0, ["heat"], 1)
        made.append(RankReport(
            rank=rank, node=f"gpu-{rank // 2:03}.cluster", cpu=False, device="NVIDIA H100 80GB HBM3", precision="bf16",
            rate=WELL * (0.3 if rank == slow else 1.0),
            versions={"fivefold": "0.1.0 (0123abcd)", "python": "3.12.3", "torch": "2.13.0", "NCCL": "2.27.3"},
            amounts={"memory": 2.0**40, "cores": 104, "open files": 1 << 20, "locked memory": float("inf"),
                     "/dev/shm": 2.0**39, "GPU memory": 2.0**36},
            ahead=0.0002, unsure=0.0001,
            disk=None if rank % 2 else Disk(2e9, 3e9, 0.002, 10**13), gpu=held if rank == slow else gpu,
            rings=[
                *([RingReport("tp", [rank, rank + 1], 3e-5, 4e11, 4e11, [("all-reduce", 8, 3e-5)])] * (rank % 2 == 0)),
                *([RingReport("dp", list(range(rank, 2 * nodes, 2)), 5e-5, 4.5e10, 4.5e10, [])] if rank < 2 else []),
            ],
            sends=[Send("dp", ranks, 4e10), *([] if rank % 2 else [Send("tp", (rank, rank + 1), 4e11)])],
        ))  # fmt: skip
    return made


def but(reports: list[RankReport], rank: int, **changes: Any) -> list[RankReport]:
    """With other figures of one rank."""
    return [msgspec.structs.replace(one, **changes) if one.rank == rank else one for one in reports]


def little_rank_speed(rank: Rank, device: str, quick: bool) -> RankSpeed:
    """As `calibrate.local_rank_speed`, with small kernels and short rounds."""
    kernels.SIZES["cpu", True] = kernels.Sizes((32,), (64,), (64, 64), 0.02, ((1, 4, 32, 16),), 1 << 16, 50)
    calibrate._PACE["cpu"], clock.CACHE = 0.1, 1 << 20
    return calibrate.local_rank_speed(rank, device, quick)
