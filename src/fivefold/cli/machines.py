"""`fivefold launch`, `fivefold doctor` and `fivefold calibrate`: start a job on machines, check and measure them."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from fivefold.cli.options import JobWords, Json, Output, RunWords, command_line, counting_bar, split_job_and_changes
from fivefold.render.blocks import show
from fivefold.support.errors import UserError
from fivefold.support.files import write

LAUNCH = "Generate Slurm/torchrun/Kubernetes launch files.  [dim]fivefold launch job.toml --slurm[/]"
DOCTOR = "Health-check the machines of a job.  [dim]srun -N4 --ntasks-per-node=8 fivefold doctor job.toml[/]"
CALIBRATE = "Measure this device for the planner.  [dim]fivefold calibrate -o mine.toml[/]"


_Cluster = Annotated[
    str, typer.Option("--cluster", "-c", help="Nodes x GPUs per node x accelerator; default: the job's own.")
]
_PerNode = Annotated[int | None, typer.Option(help="Ranks per node; default: the cluster's, or ranks / nodes.")]
_Restarts = Annotated[
    int | None,
    typer.Option(
        help="Restarts after consecutive failures; default: 3, with --elastic 10.",
        show_default=False,
    ),
]
_Elastic = Annotated[
    bool,
    typer.Option(
        "--elastic",
        help="Slurm, torchrun: continue on the remaining nodes when some are lost; scale up when they return.",
    ),
]


def launch(
    job: JobWords = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Write an sbatch file.")] = False,
    torchrun: Annotated[bool, typer.Option("--torchrun", help="Write the torchrun command for each node.")] = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="Write a Kubernetes Job.")] = False,
    trainjob: Annotated[bool, typer.Option("--trainjob", help="Write a Kubeflow Trainer TrainJob.")] = False,
    ssh: Annotated[
        Path | None,
        typer.Option("--ssh", help="Write a script that starts the job over ssh on the hosts in this file."),
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="With --slurm: also submit it.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write.")] = None,
    cluster: _Cluster = "",
    nodes: Annotated[int | None, typer.Option(help="Nodes; default: the cluster's.")] = None,
    per_node: _PerNode = None,
    restarts: _Restarts = None,
    elastic: _Elastic = False,
    account: Annotated[str | None, typer.Option(help="Slurm's account.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    time: Annotated[str | None, typer.Option(help="Slurm's time limit of one start; default: 24:00:00.")] = None,
    host: Annotated[str | None, typer.Option(help="torchrun: the rendezvous host.")] = None,
    container: Annotated[str | None, typer.Option(help="Slurm with pyxis, Kubernetes: an image with Fivefold.")] = None,
    claim: Annotated[str | None, typer.Option(help="Kubernetes: the PersistentVolumeClaim shared by all pods.")] = None,
    as_json: Json = False,
) -> None:
    """Generate launch files for Slurm, torchrun, Kubernetes or ssh, and say how to start them.

    The job is checked as `train --check` does, as far as this machine can, and its
    layout against the nodes: those of run.cluster, which `plan -o` writes, of
    --cluster or of --nodes.

    [dim]Examples:[/]

      fivefold launch job.toml --slurm -o job.sbatch

      fivefold launch job.toml --slurm --account lab --partition gpu --time 2-00:00:00 --submit

      fivefold launch job.toml train.steps=1000 --slurm --container lab/fivefold:1

      fivefold launch job.toml --torchrun --host node1

      fivefold launch job.toml --slurm --elastic elastic.least=48

      fivefold launch job.toml --kubernetes --container lab/fivefold:1 --claim shared

      fivefold launch job.toml --trainjob -o trainjob.yaml

      fivefold launch job.toml --ssh hosts.txt -o start.sh
    """
    from fivefold.clusters.launch_files import launch
    from fivefold.clusters.options import LaunchOptions, one_launcher

    flags = {"slurm": slurm, "torchrun": torchrun, "kubernetes": kubernetes, "trainjob": trainjob, "ssh": ssh}
    kind = one_launcher([kind for kind, given in flags.items() if given])
    options = LaunchOptions(
        account=account, partition=partition, time=time, host=host, container=container, claim=claim,
        hostfile=ssh, restarts=restarts if restarts is not None else 10 if elastic else 3,
        submit=submit, elastic=elastic,
    )  # fmt: skip
    file, changes = split_job_and_changes(job)
    show(launch(kind, file, changes, output, options, cluster=cluster, nodes=nodes, per_node=per_node), as_json=as_json)


_Nproc = Annotated[
    int | None, typer.Option(help="Processes to start on this machine; default: as many as the layout has.")
]


def doctor(
    job: RunWords = None,
    nproc: _Nproc = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure every rank, node and link of a job, and report outliers.

    Start it as the job will be started: under srun or torchrun, where it joins
    the ranks that they started, or by itself on one machine. Every rank times
    matmuls in the job's dtype and collectives along each axis of the layout;
    every node's disk under run.dir, clock, versions, limits and GPUs are checked.
    Outliers are found by comparison with peers, and with the planner's
    figures for run.cluster or the accelerator found. Nothing is trained and no
    data is read. Exit code 0 if all is well, 1 if there are outliers.

    [dim]Examples:[/]

      fivefold doctor job.toml

      fivefold doctor runs/job

      srun -N4 --ntasks-per-node=8 fivefold doctor job.toml

      torchrun --nproc-per-node 8 -m fivefold doctor job.toml

      fivefold doctor layout=dp=2,tp=2 run.dir=/scratch/runs --json
    """
    from fivefold.launch.world import current_world
    from fivefold.machines import doctor as examination
    from fivefold.trainer.start import check_ranks, job_and_start

    path, changes = split_job_and_changes(job)
    world = current_world()
    check_ranks(nproc, world)
    resolved, _ = job_and_start(path, changes, fresh=True)
    if not world.joined:
        show(examination.examine_here(resolved, nproc, job or []), as_json=as_json, output=output)
    elif result := examination.examine_launched_ranks(resolved, world):
        show(result, as_json=as_json, output=output)


_Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write an accelerator (.toml), with --ranks a cluster.")
]
_Each = Annotated[bool, typer.Option("--ranks", help="Measure every rank's own speed, while all of them run.")]
_CalibrateNproc = Annotated[
    int | None,
    typer.Option(help="With --ranks: processes to start on this machine; default: one for each GPU, or core."),
]
_ShareGpu = Annotated[
    Literal["gloo", "nccl"], typer.Option(help="With --ranks: backend of ranks that share a GPU, as train.share_gpu.")
]


def calibrate(
    output: _Output = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes, less accurate.")] = False,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="What to measure.")] = "auto",
    each: _Each = False,
    nproc: _CalibrateNproc = None,
    share_gpu: _ShareGpu = "gloo",
    as_json: Json = False,
) -> None:
    """Measure what kernels and collectives reach here, as fractions of the vendor's peak figures.

    Matmuls in the three layouts of training, attention, element-wise kernels,
    launches, and collectives between the devices of this machine. The constants
    are fitted so that the planner's formulas reproduce the measured times; the
    last two columns show how well they do. A cluster can then name the file like a device.

    With --ranks, all ranks are measured at once, by themselves or as torchrun
    or srun started them. Ranks whose speeds agree within the noise form a
    group, the slow ones are named, and the file is a cluster of these groups.

    [dim]Examples:[/]

      fivefold calibrate

      fivefold calibrate -o mine.toml

      fivefold calibrate --quick --json

      fivefold calibrate --ranks --nproc 4 -o ranks.toml

      srun -N4 --ntasks-per-node=8 fivefold calibrate --ranks -o ranks.toml
    """
    if each:
        _calibrate_ranks(output, device, nproc, share_gpu, quick=quick, as_json=as_json)
        return
    if share_gpu != "gloo":
        raise UserError(f"--share-gpu {share_gpu} is for --ranks; without it each GPU has one rank", "option.conflict")
    if nproc is not None:
        raise UserError(f"--nproc {nproc} is for --ranks; without it calibrate starts its own ranks", "option.conflict")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "calibrate starts its own ranks, one for each GPU of this machine; run it without a launcher, or with "
            "--ranks to measure each of the launcher's",
            "option.conflict",
        )
    from fivefold.machines.calibrate import calibrate as measure
    from fivefold.machines.result import to_toml

    with counting_bar() as progress:
        result = measure(device, quick, progress)
    if output is not None:
        host = f"host: {result.host * 1e3:.3f} ms to launch one block's forward pass"
        write(output, to_toml(result.accelerator, [_made_by(), host]))
    show(result, as_json=as_json)
    if output is not None and not as_json:
        typer.echo(f"written to {output}; a cluster of them is for example 8x{output}")


def _calibrate_ranks(
    output: Path | None, device: str, nproc: int | None, share_gpu: str, *, quick: bool, as_json: bool
) -> None:
    """Measure all ranks of this machine, or those of the launcher that started this one; rank 0 prints and writes."""
    from fivefold.launch.world import current_world
    from fivefold.trainer.start import check_ranks

    world = current_world()
    check_ranks(nproc, world)
    from fivefold.machines.calibrate import calibrate_launched_ranks, calibrate_ranks
    from fivefold.machines.result import speeds_to_toml

    if world.joined:
        result = calibrate_launched_ranks(world, device, quick, share_gpu)
    else:
        result = calibrate_ranks(device, nproc, quick, share_gpu)
    if result is None:
        return
    if output is not None:
        write(output, speeds_to_toml(result.cluster, [_made_by(), result.sentence]))
    show(result, as_json=as_json)
    if output is not None and not as_json:
        typer.echo(f"written to {output}; plan for it with: fivefold plan MODEL --cluster {output}")


def _made_by() -> str:
    return f"Made by: {command_line()}"
