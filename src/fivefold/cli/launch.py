"""`fivefold launch`: what a cluster runs, written from a job."""

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.job_args import JobWords, split

SHORT = "Write what a cluster runs.  [dim]fivefold launch job.toml --slurm[/]"


def launch(
    job: JobWords = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="An sbatch file.")] = False,
    torchrun: Annotated[bool, typer.Option("--torchrun", help="The line to type on each node.")] = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="A Kubernetes Job.")] = False,
    trainjob: Annotated[bool, typer.Option("--trainjob", help="A TrainJob of Kubeflow Trainer.")] = False,
    ssh: Annotated[Path | None, typer.Option("--ssh", help="A script for the hosts of this file.")] = None,
    submit: Annotated[bool, typer.Option("--submit", help="With --slurm: submit it.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file to write.")] = None,
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="Nodes x GPUs per node x accelerator; default: the job's own.")
    ] = "",
    nodes: Annotated[int | None, typer.Option(help="Nodes; default: the cluster's.")] = None,
    per_node: Annotated[
        int | None, typer.Option(help="Ranks per node; default: the cluster's, or ranks / nodes.")
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            help="How often it is started again after failures in a row; default: 3, with --elastic 10.",
            show_default=False,
        ),
    ] = None,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic", help="Slurm, torchrun: go on when nodes are lost, with those left, and grow when they return."
        ),
    ] = False,
    account: Annotated[str | None, typer.Option(help="Slurm's account.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    time: Annotated[str | None, typer.Option(help="Slurm's time limit of one start; default: 24:00:00.")] = None,
    host: Annotated[str | None, typer.Option(help="torchrun: the node at which the others meet.")] = None,
    container: Annotated[str | None, typer.Option(help="Slurm with pyxis, Kubernetes: an image with Fivefold.")] = None,
    claim: Annotated[str | None, typer.Option(help="Kubernetes: the claim of a volume that all pods share.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write what a cluster runs, and say how to start it.

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
    from fivefold.clusters.deployment import Options
    from fivefold.clusters.write import launch
    from fivefold.render.blocks import show

    kinds = {"slurm": slurm, "torchrun": torchrun, "kubernetes": kubernetes, "trainjob": trainjob, "ssh": ssh}
    options = Options(
        account=account, partition=partition, time=time, host=host, container=container, claim=claim,
        hosts=ssh, restarts=restarts if restarts is not None else 10 if elastic else 3, submit=submit, elastic=elastic,
    )  # fmt: skip
    file, changes = split(job)
    asked = [kind for kind, wanted in kinds.items() if wanted]
    show(launch(asked, file, changes, output, options, cluster=cluster, nodes=nodes, per_node=per_node), as_json)
