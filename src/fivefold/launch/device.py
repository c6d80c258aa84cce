"""Which device a rank computes on, and the settings that make a run repeatable there."""

import os
import resource
import sys
import time
import warnings
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fivefold.cost.model_state import host_memory, memory_problems
from fivefold.hardware.accelerators import find_accelerator
from fivefold.job.config import Job, TrainConfig
from fivefold.launch.local import SHARED_GPU_HOST_PREFIX, owning_problem, sharing_problem
from fivefold.launch.world import World
from fivefold.support.dtypes import DTYPE_BYTES, precision_of
from fivefold.support.errors import UserError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
DEFAULT_CONFIG = TrainConfig()


def choose_device(wanted: str, local_rank: int = 0) -> torch.device:
    """The device of a rank: a GPU where there is one, unless `wanted` is "cpu". Where a node has more ranks than GPUs,
    they share its GPUs, or with "mixed" those beyond the GPUs compute on the CPU."""
    if wanted == "cuda" and not torch.cuda.is_available():
        problem = "train.device='cuda', and torch sees no GPU on this machine; nearest: train.device=cpu"
        raise UserError(problem, "train.device.gpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if wanted == "mixed" and local_rank >= torch.cuda.device_count():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def choose_backend(
    device: torch.device, local_ranks: int, config: TrainConfig = DEFAULT_CONFIG, rank: int = 0, apart: bool = False
) -> str:
    """NCCL where every rank of a node has a GPU of its own; gloo on CPUs, and where ranks share a GPU.

    `train.share_gpu=nccl` lets ranks that share a GPU use NCCL. NCCL refuses two ranks of one host on one GPU, so
    each rank gets a host ID of its own (NCCL_HOSTID), and they communicate through sockets: this runs every kernel,
    order and error path of NCCL, but says nothing about speed. `apart`: ranks may be on several machines.
    """
    gpus = torch.cuda.device_count() if device.type == "cuda" and config.device != "mixed" else 0
    if problem := sharing_problem(config, gpus, local_ranks, apart=apart):
        raise UserError(problem)
    if config.share_gpu == "nccl" and local_ranks > 1:
        # "=": this interface, and not all whose names begin so.
        os.environ.update(NCCL_HOSTID=f"{SHARED_GPU_HOST_PREFIX}{rank}", NCCL_SOCKET_IFNAME="=lo", NCCL_IB_DISABLE="1")
    elif not 0 < local_ranks <= gpus:
        return "gloo"
    # `launch.watchdog` says in a line what NCCL has not finished; a dump takes a page, and holds up the end of a rank.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    return "nccl"


def check_shared_gpu(config: TrainConfig, device: torch.device, world: World) -> None:
    """Collective, of ranks that have joined: refuse `train.share_gpu=nccl` where each of them has a GPU of its own.

    Before it joins, a rank counts the GPUs that it sees; under Slurm's --gpus-per-task=1 each rank sees another one.
    """
    if config.share_gpu != "nccl" or world.size == 1:
        return
    from torch.distributed.distributed_c10d import _get_default_store

    properties: Any = torch.cuda.get_device_properties(device)  # torch's types do not know all that it has
    gpus = gpus_of_ranks(_get_default_store(), world.rank, world.size, str(properties.uuid))
    if len(set(gpus)) == world.size:
        problem = owning_problem(world.size, world.size)
        raise UserError([problem] if world.rank == 0 else [])  # all ranks raise it: one says it


def gpus_of_ranks(store: "Store", rank: int, size: int, gpu: str) -> list[str]:
    """Collective: the GPU of each rank. Rank 0, with which the store may end, returns last."""
    store.set(f"GPU of rank {rank}", gpu)
    gpus = [store.get(f"GPU of rank {peer}").decode() for peer in range(size)]
    if store.add("GPUs are known", 1) == size:
        store.set("GPUs are known to all", "")
    if rank == 0:
        store.wait(["GPUs are known to all"])
    return gpus


def check_memory(job: Job, device: torch.device, world: World) -> None:
    """Refuse a model whose weights, gradients and optimizer alone are more than the device has."""
    memory, ranks_on_it = host_memory(), world.local_size
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        ranks_on_it = -(-world.local_size // torch.cuda.device_count())
    if problems := memory_problems(job, ranks_on_it, memory, str(device)):
        raise UserError(problems, "model.memory")


def check_bfloat16(device: torch.device, dtype: str) -> str | None:
    """A warning if this CPU has no bfloat16 instructions and takes many times as long; else None.

    It replaces torch's own warning, which fills a page.
    """
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    if device.type != "cpu" or dtype != "bfloat16":
        return None
    seconds = {}
    for probe in (torch.float32, torch.bfloat16):
        x = torch.ones(128, 128, dtype=probe)
        x @ x  # the first product also chooses a kernel
        start = time.perf_counter()
        x @ x
        seconds[probe] = time.perf_counter() - start
    slower = seconds[torch.bfloat16] / seconds[torch.float32]
    if slower < 3:
        return None
    return (
        f"bfloat16 products take about {slower:.0f} times as long as float32 on this CPU; train.dtype=float32 is faster"
    )


def make_repeatable(config: TrainConfig) -> None:
    """Same run, same bits: kernels with a fixed order of addition, or an error where one has none."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when its handle is made
        if torch.cuda.is_available() or config.compile == "on":
            torch.use_deterministic_algorithms(True)  # also tells the compiler, and so imports all of it
            # By default it also fills all new memory with NaN, which takes 1% of a step. That helps to find kernels
            # that read uninitialized memory, and no kernel of ours does.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        else:
            torch.set_deterministic_debug_mode("error")


def compiles(config: TrainConfig, device: torch.device) -> bool:
    """Whether blocks and the loss are compiled on this device."""
    return {"on": True, "off": False, "auto": device.type == "cuda"}[config.compile]


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """The device's peak for matmuls of `dtype`, where the catalogue knows it; a CPU's is not known."""
    if device.type != "cuda":
        return None
    try:
        accelerator = find_accelerator(torch.cuda.get_device_name(device))
    except UserError:
        return None
    return accelerator.rate(matmul_precision(dtype, device))


def matmul_precision(dtype: str, device: torch.device) -> str:
    """The accelerator catalogue's name for the precision of matmuls of `dtype` on the device: "bf16", "tf32"."""
    tf32 = dtype == "float32" and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if tf32 else precision_of(dtype)


def peak_memory(device: torch.device) -> int:
    """Bytes: the allocator's peak on a GPU, the process's largest resident size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts in bytes, Linux in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# ---- numa -----------------------------------------------------------------------------------------------------------
# Cores near a GPU: a rank stays on the cores of its GPU's NUMA node.
#
#     cpus_of_rank(Path("/sys"), ["0000:17:00.0", "0000:ca:00.0"], rank=1, allowed={0, ..., 63})
#
# Memory that a rank fills for its GPU then lies on that GPU's side of the machine. Hyperthreads of one core go to one
# rank. Nothing is changed where there is nothing to gain (one NUMA node, or a machine that does not say which), nor
# for a rank that has cores of its own already, as Slurm's --cpu-bind gives them.


def bind(device: torch.device, world: World) -> None:
    """Bind this rank, and the threads that it starts from now on, to its share of the cores near its GPU."""
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return
    # A rank that sees one GPU of several cannot know which ones its neighbours have: it takes all cores near its own.
    count = torch.cuda.device_count()
    ranks, rank = (1, 0) if count == 1 else (world.local_size, world.local_rank)
    allowed = os.sched_getaffinity(0)
    if len(allowed) <= (os.cpu_count() or 1) // max(2, world.local_size):
        return
    addresses = [pci_address(local_rank % count) for local_rank in range(ranks)]
    if cpus := cpus_of_rank(Path("/sys"), addresses, rank, allowed):
        os.sched_setaffinity(0, cpus)


def pci_address(index: int) -> str:
    """The PCI address of a CUDA device, as /sys and the driver write it."""
    properties: Any = torch.cuda.get_device_properties(index)  # torch's types do not know all that it has
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def cpus_of_rank(sys: Path, addresses: list[str], rank: int, allowed: Set[int]) -> set[int]:
    """The CPUs that `rank` should be bound to, among ranks whose GPUs have these PCI `addresses`; empty if it should
    not be bound. Ranks of one NUMA node share its cores evenly."""
    nodes = [_numa_node(sys, address) for address in addresses]
    if nodes[rank] is None or sum(1 for _ in (sys / "devices/system/node").glob("node[0-9]*")) < 2:
        return set()
    near = _cpus(sys / f"devices/system/node/node{nodes[rank]}/cpulist") & allowed
    threads_by_core = {min(threads): threads for cpu in near if (threads := core_of(sys, cpu) & near)}
    cores = [threads for _, threads in sorted(threads_by_core.items())]
    neighbours = [neighbour for neighbour, node in enumerate(nodes) if node == nodes[rank]]
    part, parts = neighbours.index(rank), len(neighbours)
    own = cores[part * len(cores) // parts : (part + 1) * len(cores) // parts]
    return {cpu for threads in own for cpu in threads}


def _numa_node(sys: Path, address: str) -> int | None:
    """The NUMA node of a PCI device; None if the machine does not say."""
    file = sys / "bus/pci/devices" / address / "numa_node"
    node = int(file.read_text()) if file.exists() else -1
    return node if node >= 0 else None


def core_of(sys: Path, cpu: int) -> set[int]:
    """All hyperthreads of the core that has this CPU as one of them."""
    file = sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return _cpus(file) if file.exists() else {cpu}


def _cpus(file: Path) -> set[int]:
    """The CPUs that a file of /sys lists: '0-3,8' -> {0, 1, 2, 3, 8}."""
    ranges = [part.partition("-") for part in file.read_text().strip().split(",") if part]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}
