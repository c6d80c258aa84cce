"""One rank of `fivefold bench optimizer`: every optimizer updates the same masters by the same gradients, in turns."""

from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.bench.floor import bandwidth
from fivefold.bench.harness import RoundTimes, turns
from fivefold.bench.optimizer import Paces, Updates
from fivefold.bench.rank_timing import machine
from fivefold.bench.train import CPU
from fivefold.job.config import Job
from fivefold.launch.device import TORCH_DTYPES, choose_backend, choose_device, make_repeatable
from fivefold.launch.processes import Rank
from fivefold.machines.clock import Clock
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.optimizer import Optimizer
from fivefold.trainer.engine import RankModel

_WARM_UP_ROUNDS = 2  # rounds before the timed ones: kernels are chosen, ranks connect, memory is allocated
_LEARNING_RATE = 1e-6  # of learning: masters stay what they are, nearly
_MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}  # of the product whose pace is taken
_MIN_PACE_S = 0.05  # seconds that a pace is taken for


def run(rank: Rank, jobs: dict[str, Job], rounds: int) -> Updates:
    job = next(iter(jobs.values()))
    device = choose_device(job.train.device, rank.number)
    if rank.world > 1:
        rank.join(choose_backend(device, rank.world, job.train, rank.number))
    make_repeatable(job.train)
    compute, clock = TORCH_DTYPES[job.train.dtype], Clock(device, _MIN_PACE_S)
    whole = any(one.optimizer.unit == "matrix" for one in jobs.values())
    mesh = Mesh.of(job.layout, device, spec=job.model, whole_matrices=whole)
    weights = RankModel(job, mesh).weights
    generator = torch.Generator(device).manual_seed(rank.number)
    for master in weights.masters.values():
        master.grad = torch.empty_like(master).normal_(0.0, 1e-3, generator=generator)
    optimizers = {name: Optimizer(weights, job.model, one.optimizer, mesh, compute) for name, one in jobs.items()}
    norm = torch.zeros((), dtype=torch.float64, device=device)  # nothing is clipped, and clipping costs what it does
    times, paces = RoundTimes({name: [] for name in optimizers}), list[Paces]()
    for number, name in turns([*optimizers, ""], _WARM_UP_ROUNDS + rounds):  # the paces have a turn, too
        if not name:
            paces.append(_measure_paces(clock, compute))
        elif number < _WARM_UP_ROUNDS:
            optimizers[name].update(_LEARNING_RATE, norm)
        else:
            times[name].append(_time_update(optimizers[name], norm, clock))
    on_gpu = device.type == "cuda"
    described = torch.cuda.get_device_name(device) if on_gpu else f"{CPU}, threads: {torch.get_num_threads()}"
    return Updates(times, Paces(*map(median, zip(*paces, strict=True))), machine(), described)


def _time_update(optimizer: Optimizer, norm: Tensor, clock: Clock) -> float:
    """Seconds of an update that all ranks begin together."""
    _meet()
    clock.synchronize()
    start = clock.now()
    optimizer.update(_LEARNING_RATE, norm)
    return clock.between(start, clock.now())


def _measure_paces(clock: Clock, compute: torch.dtype) -> Paces:
    """Of this rank, while the others do the same."""
    size, device = _MATMUL_SIZE[clock.device.type], clock.device
    a, b, c = (torch.ones(size, size, dtype=compute, device=device) for _ in range(3))
    _meet()
    stream = bandwidth(device)
    _meet()
    return Paces(stream, 2 * size**3 / clock.seconds(lambda: torch.mm(a, b, out=c)))


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()
