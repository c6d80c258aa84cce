"""Before the first step of several ranks: the part of an examination that costs next to nothing.

Each rank times a few matmuls and reads its clock; values travel through the store, and no collective is called. Rank 0
gets a sentence for each rank that is much slower than its peers, for each node whose clock is off, and for an
NCCL_HOSTID that would turn off NVLink.
"""

import time

import torch

from fivefold.doctor.examination import Examination
from fivefold.doctor.judge import clocks, host_ids, slow_ranks
from fivefold.doctor.machine import host_id, node_name
from fivefold.doctor.measure import matmul_rate
from fivefold.doctor.reports import RankReport
from fivefold.job.config import Job
from fivefold.launch.device import DTYPES
from fivefold.parallel.control import Control
from fivefold.parallel.mesh import Mesh

_SECONDS = 0.03  # of matmuls
_LOOKS = 2  # at the clocks: the nearer one counts


def before_step_1(job: Job, mesh: Mesh, control: Control) -> list[str]:
    """What is odd, on rank 0. All ranks call it."""
    if mesh.world.size == 1:
        return []
    rate = matmul_rate(mesh.device, DTYPES[job.train.dtype], _SECONDS)
    if mesh.device.type == "cuda":  # the peaks that a run reports are its own
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(mesh.device)
    times = []
    for _ in range(_LOOKS):
        control.from_all(0, int)  # which all ranks leave at almost the same moment
        times.append(time.time())
    named = host_id() if mesh.device.type == "cuda" else ""
    found = control.to_first((node_name(), rate, times, named), tuple[str, float, list[float], str])
    reports, cpu = [], mesh.device.type == "cpu"
    for rank, (node, reached, theirs, named) in enumerate(found):
        ahead = min((there - here for there, here in zip(theirs, times, strict=True)), key=abs)
        reports.append(RankReport(rank, node, cpu, "", "", reached, {}, {}, ahead, 2 * control.pause, host_id=named))
    examination = Examination(job, reports)
    return [*slow_ranks(examination), *clocks(examination), *host_ids(examination)] if reports else []
