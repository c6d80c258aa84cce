"""Which rank this process is, and how ranks come to be: torchrun, Slurm, or `--nproc N` on this machine."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fivefold.support.errors import UserError

# torchrun's words, and our launcher's.
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # how often the ranks have been started again
RUN = "TORCHELASTIC_RUN_ID"  # of all starts of a run
HERE = "LOCAL_WORLD_SIZE"  # ranks of this node


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1  # ranks of this node
    joined: bool = False  # started by a launcher: there is a process group to join, even a group of one
    address: str = ""  # of rank 0, where the launcher does not set MASTER_ADDR itself
    port: int = 0
    store: str = ""  # the file at which ranks of one machine meet, where no port is needed


def current_world(env: Mapping[str, str] = os.environ) -> World:
    """This process's place, from what its launcher put into the environment."""
    try:
        world = _from_environment(env)
    except ValueError as error:
        raise UserError(f"the launcher's environment is broken: {error} in RANK, WORLD_SIZE or SLURM_*") from None
    if world.joined and not world.address and "MASTER_ADDR" not in env:
        raise UserError("RANK and WORLD_SIZE are set but MASTER_ADDR is not: start with torchrun, or unset RANK")
    return world


def ranks_here(env: Mapping[str, str] = os.environ) -> int:
    """Of this node; one where the environment does not say."""
    try:
        return max(1, int(env.get(HERE) or _from_environment(env).local_size))
    except ValueError:
        return 1


def _from_environment(env: Mapping[str, str]) -> World:
    if "RANK" in env and "WORLD_SIZE" in env:  # torchrun
        size = int(env["WORLD_SIZE"])
        local = int(env.get(HERE, size))
        return World(int(env["RANK"]), size, int(env.get("LOCAL_RANK", 0)), local, joined=True)
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:  # srun; the batch script itself is no rank and has no step
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "localhost"
        size = int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or 1)
        per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(size)
        return World(
            rank=int(env["SLURM_PROCID"]),
            size=size,
            local_rank=int(env.get("SLURM_LOCALID", 0)),
            local_size=max(map(int, re.findall(r"(?:^|,)(\d+)", per_node)), default=size),  # "4(x2),2": the most
            joined=True,
            address=first_host(nodes),
            port=20_000 + int(env.get("SLURM_JOB_ID", 0)) % 20_000,  # equal on all ranks, apart between jobs
        )
    return World()


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list: 'gpu[007-010,12],x1' -> 'gpu007'."""
    match = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


def join(world: World, backend: str, timeout: float = 600.0) -> None:
    """Enter the process group, where a launcher made one; `timeout` is the seconds that ranks wait for each other."""
    from datetime import timedelta

    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

    if not world.joined:
        return
    if world.address:
        os.environ.setdefault("MASTER_ADDR", world.address)
        os.environ.setdefault("MASTER_PORT", str(world.port))
    patience = timedelta(seconds=timeout)
    store: Store | None = FileStore(world.store, world.size) if world.store else None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun keeps its store when it starts ranks again, with the addresses of those that died in it.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        kept = TCPStore(address, port, world.size, is_master=False, timeout=patience)
        store = PrefixStore(f"start {os.environ.get(RESTARTS, '0')}", kept)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=patience)
    if world.store and store:
        if store.add("connected", 1) == world.size:
            store.set("all connected", "")
        store.wait(["all connected"], patience)  # else a rank that fails at once fails peers that still connect


def leave(world: World) -> None:
    import torch.distributed as dist

    if world.joined and dist.is_initialized():
        dist.destroy_process_group()
