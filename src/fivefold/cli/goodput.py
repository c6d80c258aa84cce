"""`fivefold goodput`: days to train with failures, how often to save, and what slow ranks cost."""

from typing import Annotated

import typer

from fivefold.cli.job_args import whole_layout
from fivefold.cli.plan import Batch, ClusterText, Json, Precision, Seq, Software, Words

SHORT = "Days to train, with failures.  [dim]fivefold goodput llama3-405b --cluster 2048x8xH100 --tokens 15.6T[/]"


def goodput(
    words: Words,
    cluster: ClusterText = None,
    tokens: Annotated[
        str | None, typer.Option(help="Length of the run: 1.4T, 300B; default: the job's, or 20 per parameter.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="This layout, instead of the planner's choice.")] = None,
    fix: Annotated[str, typer.Option(help="Choices of a layout to keep: tp=8,zero=1.")] = "",
    batch: Batch = None,
    seq: Seq = None,
    precision: Precision = "",
    software: Software = "fivefold",
    every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints; default: the job's, or those of the shortest run.")
    ] = None,
    mtbf: Annotated[
        float | None, typer.Option(help="Hours between failures of one GPU; default: Llama 3's, 50,677.")
    ] = None,
    detect: Annotated[
        float | None, typer.Option(help="Seconds to notice a failure; default: a tenth of train.timeout.")
    ] = None,
    restart: Annotated[float | None, typer.Option(help="Seconds to start again after one; default: 600.")] = None,
    storage: Annotated[
        float | None, typer.Option(help="GB/s of all nodes together; default: 2.08 a node, at most 95.")
    ] = None,
    save: Annotated[float | None, typer.Option(help="Seconds that a save blocks steps; default: 0.59.")] = None,
    jitter: Annotated[
        float | None, typer.Option(help="Deviation of a rank's step, as a share of its mean; default: 0.0072.")
    ] = None,
    runs: Annotated[int, typer.Option(help="Simulated runs.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the simulation: the same seed draws the same failures.")] = 0,
    as_json: Json = False,
) -> None:
    """Say how long a planned run takes with failures, and how often to save it.

    Failures are random, at a rate that others have published or that you know of
    your cluster. Each costs the time to notice it, to start again, to load the last
    checkpoint and to make the steps since then again. The expected time is exact;
    p10, median and p90 come from simulated runs. What uneven ranks cost is printed
    beside it, and is part of no figure above.

    [dim]Examples:[/]

      fivefold goodput llama3-405b --cluster 2048x8xH100 --tokens 15.6T

      fivefold goodput llama3-70b --cluster 128x8xH100 --tokens 15T --every 500

      fivefold goodput llama3-8b --cluster 128x8xA100 --mtbf 8090 --restart 900 --storage 40

      fivefold goodput recipes/llama3-8b-8xH100.toml --json
    """
    from fivefold.planner import goodput_result as room
    from fivefold.render.blocks import show

    whole_layout(layout or fix, words, "--layout" if layout else "--fix")
    found = room.goodput(
        words[0], cluster, changes=words[1:], batch=batch, seq=seq, tokens=tokens, layout=layout, fix=fix,
        precision=precision, software=software, every=every, mtbf=mtbf, detect=detect, restart=restart,
        storage=storage, save=save, jitter=jitter, runs=runs, seed=seed,
    )  # fmt: skip
    show(found, as_json)
