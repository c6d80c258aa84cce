"""`fivefold dryrun`: the code that would train, run as any rank of any world, without data and without GPUs."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fivefold.cli.job_args import whole_layout
from fivefold.cli.progress import counting_bar
from fivefold.render.blocks import check_writable, show
from fivefold.render.paint import PICTURES
from fivefold.support.errors import UserError

SHORT = (
    "Run any rank of any world without GPUs.  [dim]fivefold dryrun llama3-70b --layout dp=8,tp=8,zero=3,sp --batch 8[/]"
)


def dryrun(
    words: Annotated[list[str], typer.Argument(metavar="MODEL [KEY=VALUE ...]", help="As for `fivefold plan`.")],
    layout: Annotated[str | None, typer.Option(help="dp=128,tp=8,pp=16,...; default: the job file's.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences of a step; default: one for each microbatch.")] = None,
    seq: Annotated[
        int | None, typer.Option(help="Tokens of a sequence; default: 8192, or the model's context.")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Which rank of the world; default: 0.")] = None,
    ranks: Annotated[str, typer.Option(help="Several: 0,127,9001.")] = "",
    all_stages: Annotated[bool, typer.Option("--all-stages", help="One rank of every pipeline stage.")] = False,
    stages: Annotated[str, typer.Option(help="all: the same as --all-stages; or some: 0,3.")] = "",
    cluster: Annotated[
        str,
        typer.Option("--cluster", "-c", help="The machines, whose memory it must fit. Default: the job's, or H100s."),
    ] = "",
    kernels: Annotated[
        Literal["cuda", "cpu"], typer.Option(help="Whose memory the backward pass keeps; cpu: as train.count on CPUs.")
    ] = "cuda",
    weights: Annotated[Path | None, typer.Option(help="Check that a Hugging Face directory has every weight.")] = None,
    imbalance: Annotated[
        float | None,
        typer.Option(help="With experts: what the rank gets of the tokens, over the mean of its ep group; default: 1."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw memory through the step: .svg, .png.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run one step of one rank: the same model, layers, pipeline, FSDP2 and optimizer.

    PyTorch's fake process group gives it a world of any size, and fake tensors
    need no memory. What it counts (bytes held and sent, FLOPs, messages) is shown
    beside what the planner says, which it does not know. Exit code 1 if the step
    does not fit into a device.

    [dim]Examples:[/]

      fivefold dryrun llama3-70b --layout dp=8,tp=8,zero=3,sp --rank 9 --batch 8

      fivefold dryrun llama3-405b --rank 9001 --batch 2048
          --layout dp=128,tp=8,pp=16,zero=1,sp,schedule=interleaved,chunks=8,microbatches=16

      fivefold dryrun llama3-8b --layout dp=2,pp=4,zero=1,microbatches=8 --batch 16 --all-stages -o memory.svg

      fivefold dryrun deepseek-v3 --layout dp=128,pp=16,ep=64,zero=1,microbatches=16,recompute=full
          --batch 2048 --rank 700 --imbalance 1.2

      fivefold dryrun job.toml --json
    """
    from fivefold.dry.run import dryrun as run

    whole_layout(layout, words)
    check_writable(output, *PICTURES)
    given = {"--rank": rank is not None, "--ranks": bool(ranks), "--stages": bool(stages) or all_stages}
    if len(asked := [option for option, there in given.items() if there]) > 1:
        raise UserError(f"{' and '.join(asked)} say different things; give one of them")
    pipeline_ranks: Any = "all" if all_stages or stages == "all" else _numbers("--stages", stages, "all, or 0,3")
    with counting_bar() as progress:
        found = run(
            words[0], layout, changes=words[1:], batch=batch, seq=seq, kernels=kernels, weights=weights,
            rank=rank if rank is not None else _numbers("--ranks", ranks, "0,127,9001"), stages=pipeline_ranks,
            cluster=cluster, imbalance=imbalance, progress=progress,
        )  # fmt: skip
    show(found, as_json, output)


def _numbers(option: str, text: str, example: str) -> list[int] | None:
    if not text:
        return None
    pieces = [piece.strip() for piece in text.split(",") if piece.strip()]
    if not pieces or not all(piece.isdigit() for piece in pieces):
        raise UserError(f"{option} {text} should be numbers with commas between them, like {example}")
    return [int(piece) for piece in pieces]
