"""Which rank this process is, by the environment of its launcher (torchrun, Slurm or `--nproc N`)."""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from fivefold.launch.rendezvous import Rendezvous
from fivefold.support.errors import UserError

# Environment variables of torchrun and Slurm, and of our launcher.
RESTARTS_ENV = "TORCHELASTIC_RESTART_COUNT"  # how often the ranks have been started again
REQUEUES_ENV = "SLURM_RESTART_COUNT"  # how often Slurm has started the job again
RUN_ID_ENV = "TORCHELASTIC_RUN_ID"  # the same for all starts of a run
LOCAL_SIZE_ENV = "LOCAL_WORLD_SIZE"  # how many ranks this node has
PLANNED_ENV = "FIVEFOLD_PLANNED"  # seconds that our launcher took to find another layout
STORE_ENV = "FIVEFOLD_STORE"  # the file at which the ranks of our launcher meet
_AGENT_STORE_ENV = "TORCHELASTIC_USE_AGENT_STORE"  # set by torchrun alone; "True": its own store is at MASTER_ADDR
_PORT_RANGE = range(20_000, 32_000)  # below Linux's ephemeral ports


@dataclass(frozen=True)
class World:
    """This process's rank among the ranks of a run, and where they meet."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1  # ranks of this node
    joined: bool = False  # started by a launcher: there is a process group to join, even a group of one
    meeting: Rendezvous = field(default_factory=Rendezvous)
    run: str = ""  # the launcher's name for the run
    start: int | None = 0  # which start of the run this is; None under torchrun, whose agents count for themselves

    @property
    def apart(self) -> bool:
        """Whether ranks may be on several machines."""
        return self.joined and not self.meeting.file and not self.meeting.alone


def current_world(env: Mapping[str, str] = os.environ) -> World:
    """This process's rank and world, from the variables that its launcher has set."""
    try:
        world = _from_environment(env)
    except ValueError as error:
        names = "RANK, WORLD_SIZE, MASTER_PORT or SLURM_*"
        raise UserError(f"the launcher's environment is broken: {error} in {names}", "environment.ranks") from None
    meeting = world.meeting
    if world.joined and not meeting.file and not (meeting.address and meeting.port):
        missing = "MASTER_PORT" if meeting.address else "MASTER_ADDR"
        unset = f"RANK and WORLD_SIZE are set but {missing} is not: start with torchrun, or unset RANK"
        raise UserError(unset, "environment.ranks")
    if world.joined and not (0 <= world.rank < world.size and 0 <= meeting.port < 1 << 16):
        raise UserError(
            f"the launcher's environment is broken: rank {world.rank} of {world.size}, port {meeting.port} of 65535",
            "environment.ranks",
        )
    return world


def ranks_here(env: Mapping[str, str] = os.environ) -> int:
    """How many ranks this node has; 1 where the environment does not say."""
    try:
        return max(1, int(env.get(LOCAL_SIZE_ENV) or _from_environment(env).local_size))
    except ValueError:
        return 1


def rank_here(env: Mapping[str, str] = os.environ) -> int:
    """The rank of this process; 0 where the environment does not say."""
    try:
        return _from_environment(env).rank
    except ValueError:
        return 0


def starts_before(env: Mapping[str, str] = os.environ) -> int:
    """How often this run has been started again: by torchrun or our launcher, and by Slurm, which requeues a job."""
    return sum(int(env.get(name, 0)) for name in (RESTARTS_ENV, REQUEUES_ENV))


def _from_environment(env: Mapping[str, str]) -> World:
    if "RANK" in env and "WORLD_SIZE" in env:
        return _from_torchrun(env)
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:  # srun; the batch script itself is no rank and has no step
        return _from_slurm(env)
    return World()


def _from_torchrun(env: Mapping[str, str]) -> World:
    """From torchrun's variables, which our own launcher or a user may also have set."""
    size = int(env["WORLD_SIZE"])
    local_size, alone = int(env.get(LOCAL_SIZE_ENV, size)), env.get(LOCAL_SIZE_ENV) == env["WORLD_SIZE"]
    agent = env.get(_AGENT_STORE_ENV) == "True"
    address = env.get("MASTER_ADDR", "")
    if alone and address and not agent:
        address = "127.0.0.1"
    meeting = Rendezvous(env.get(STORE_ENV, ""), address, int(env.get("MASTER_PORT", 0)), agent, alone)
    # Each of torchrun's agents counts its own starts: one whose ranks failed counts one more than the others.
    start = None if _AGENT_STORE_ENV in env else int(env.get(RESTARTS_ENV, 0))
    return World(
        rank=int(env["RANK"]),
        size=size,
        local_rank=int(env.get("LOCAL_RANK", 0)),
        local_size=local_size,
        joined=True,
        meeting=meeting,
        run=env.get(RUN_ID_ENV, ""),
        start=start,
    )


def _from_slurm(env: Mapping[str, str]) -> World:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "localhost"
    size = int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or 1)
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(size)
    run, start = f"{env.get('SLURM_JOB_ID', '0')}.{env['SLURM_STEP_ID']}", int(env.get(REQUEUES_ENV, 0))
    # Equal on all ranks, but different for each job, each step of a job and each start.
    port = _PORT_RANGE[zlib.crc32(f"{run}.{start}".encode()) % len(_PORT_RANGE)]
    alone = first_host(nodes) == nodes
    address = "127.0.0.1" if alone else env.get("MASTER_ADDR", first_host(nodes))
    return World(
        rank=int(env["SLURM_PROCID"]),
        size=size,
        local_rank=int(env.get("SLURM_LOCALID", 0)),
        local_size=max(map(int, re.findall(r"(?:^|,)(\d+)", per_node)), default=size),  # "4(x2),2": the most
        joined=True,
        meeting=Rendezvous("", address, int(env.get("MASTER_PORT", port)), alone=alone),
        run=f"Slurm step {run}",
        start=start,
    )


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list: 'gpu[007-010,12],x1' -> 'gpu007'."""
    match = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes
