"""Cores near a GPU: a rank stays on those of the NUMA node that its GPU hangs on.

    share(Path("/sys"), ["0000:17:00.0", "0000:ca:00.0"], rank=1, allowed={0, ..., 63})     # those of rank 1

Memory that a rank fills for its GPU then lies on that GPU's side of the machine. Hyperthreads of one core go to one
rank. Nothing is changed where there is nothing to gain (one NUMA node, or a machine that does not say which), nor for a
rank that has cores of its own already, as Slurm's --cpu-bind gives them.
"""

import os
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.launch.world import World

if TYPE_CHECKING:
    import torch


def bind(device: "torch.device", world: World) -> None:
    """This rank, and the threads that it starts from now on, to its share of the cores near its GPU."""
    import torch

    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return
    # A rank that sees one GPU of several cannot know which ones its neighbours have: it takes no part, but all.
    count = torch.cuda.device_count()
    ranks, mine = (1, 0) if count == 1 else (world.local_size, world.local_rank)
    allowed = os.sched_getaffinity(0)
    if len(allowed) <= (os.cpu_count() or 1) // max(2, world.local_size):
        return
    near = share(Path("/sys"), [pci_address(rank % count) for rank in range(ranks)], mine, allowed)
    if near:
        os.sched_setaffinity(0, near)


def pci_address(index: int) -> str:
    """Of a CUDA device, as /sys and the driver write it."""
    import torch

    found: Any = torch.cuda.get_device_properties(index)  # torch's types do not know all that it has
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def share(sys: Path, devices: list[str], rank: int, allowed: Set[int]) -> set[int]:
    """The CPUs of `rank`, among ranks that have these `devices`; none where it should stay where it is."""
    nodes = [_node(sys, address) for address in devices]
    if nodes[rank] is None or sum(1 for _ in (sys / "devices/system/node").glob("node[0-9]*")) < 2:
        return set()
    near = _cpus(sys / f"devices/system/node/node{nodes[rank]}/cpulist") & allowed
    cores = sorted({min(together): together for cpu in near if (together := core_of(sys, cpu) & near)}.items())
    neighbours = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    at, count = neighbours.index(rank), len(neighbours)
    mine = cores[at * len(cores) // count : (at + 1) * len(cores) // count]
    return {cpu for _, together in mine for cpu in together}


def _node(sys: Path, address: str) -> int | None:
    file = sys / "bus/pci/devices" / address / "numa_node"
    found = int(file.read_text()) if file.exists() else -1
    return found if found >= 0 else None


def core_of(sys: Path, cpu: int) -> set[int]:
    """The hyperthreads of the core that a CPU is one of."""
    file = sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return _cpus(file) if file.exists() else {cpu}


def _cpus(file: Path) -> set[int]:
    """'0-3,8' -> {0, 1, 2, 3, 8}."""
    ranges = [part.partition("-") for part in file.read_text().strip().split(",") if part]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}
