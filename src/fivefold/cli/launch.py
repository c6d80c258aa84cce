"""`fivefold launch`: what a cluster runs, written from a job."""

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.job_args import JobWords, split
from fivefold.support.errors import UserError

SHORT = "Write what a cluster runs.  [dim]fivefold launch job.toml --slurm[/]"


def launch(
    job: JobWords = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="An sbatch file.")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="With --slurm: submit it.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file to write.")] = None,
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="Nodes x GPUs per node x accelerator; default: the job's own.")
    ] = "",
    nodes: Annotated[int | None, typer.Option(help="Nodes, instead of a cluster.")] = None,
    per_node: Annotated[int | None, typer.Option(help="Ranks per node; default: the layout's ranks / nodes.")] = None,
    restarts: Annotated[int, typer.Option(help="Failures in a row after which it is started again.")] = 3,
    account: Annotated[str | None, typer.Option(help="Slurm's account.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    time: Annotated[str, typer.Option(help="Slurm's time limit of one start.")] = "24:00:00",
    container: Annotated[str, typer.Option(help="An image that has Fivefold: pyxis and enroot run it.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write what a cluster runs, and say how to start it.

    The job is checked as `train --check` does, as far as this machine can, and its
    layout against the nodes: those of run.cluster, which `plan -o` writes, or of
    --cluster, or --nodes.

    [dim]Examples:[/]

      fivefold launch job.toml --slurm -o job.sbatch

      fivefold launch job.toml --slurm --account lab --partition gpu --time 2-00:00:00 --submit

      fivefold launch job.toml train.steps=1000 --slurm --nodes 2 --container ghcr.io/lab/fivefold:1
    """
    from fivefold.deploy.launch import deployment, launch_slurm
    from fivefold.deploy.slurm import SlurmOptions
    from fivefold.report.show import check_writable, show

    file, changes = split(job)
    if not slurm:
        raise UserError("launch needs to know for what: --slurm")
    if output is None:
        output = Path(Path(file).with_suffix(".sbatch").name if file else "job.sbatch")
    check_writable(output)
    checked = deployment(file, changes, cluster, nodes, per_node)
    options = SlurmOptions(account, partition, time, restarts, container)
    show(launch_slurm(checked, output, options, submit), as_json)
