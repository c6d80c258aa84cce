"""`fivefold doctor`: whether the machines of a job are well."""

from typing import Annotated

import typer

from fivefold.cli.job_args import RunWords, split
from fivefold.cli.train import check_ranks
from fivefold.render.blocks import show

SHORT = "Examine the machines of a job.  [dim]srun -N4 --ntasks-per-node=8 fivefold doctor job.toml[/]"


def doctor(
    job: RunWords = None,
    nproc: Annotated[
        int | None, typer.Option(help="Processes to start on this machine; default: as many as the layout has.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure every rank, node and link of a job, and name the slow or odd one.

    Start it as the job will be started: under srun or torchrun, where it joins
    the ranks that they started, or by itself on one machine. Every rank times
    matmuls in the job's dtype and collectives along each axis of the layout;
    every node's disk under run.dir, clock, versions, limits and GPUs are looked
    at. What is slow or odd is named against its peers, and against the planner's
    figures for run.cluster or the accelerator found. Nothing is trained and no
    data is read. Exit code 0 if all is well, 1 if something is odd.

    [dim]Examples:[/]

      fivefold doctor job.toml

      fivefold doctor runs/job

      srun -N4 --ntasks-per-node=8 fivefold doctor job.toml

      torchrun --nproc-per-node 8 -m fivefold doctor job.toml

      fivefold doctor layout=dp=2,tp=2 run.dir=/scratch/runs --json
    """
    from fivefold.job.config import read_job
    from fivefold.launch.world import current_world
    from fivefold.machines import doctor as room
    from fivefold.trainer.resuming import run_named, stored_job

    path, changes = split(job)
    world = current_world()
    check_ranks(nproc, world)
    directory = run_named(path)
    resolved = stored_job(directory, changes) if directory else read_job(path, changes)
    if not world.joined:
        show(room.here(resolved, nproc, job or []), as_json)
    elif found := room.join(resolved, world):
        show(found, as_json)
