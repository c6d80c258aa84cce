"""`fivefold verify`: a layout, compared with one process."""

from typing import Annotated, Literal

import typer
from rich.console import Console

from fivefold.cli.job_args import whole_layout
from fivefold.cli.progress import counting_bar
from fivefold.render.blocks import show

SHORT = "Prove a layout against one process.  [dim]fivefold verify --layout dp=2,tp=2,zero=3[/]"


def verify(
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the job, as for train.", show_default=False),
    ] = None,
    layout: Annotated[str | None, typer.Option(help="The layout to prove.", show_default="dp=2")] = None,
    model: Annotated[str, typer.Option(help="A preset; tiny ones are made narrower still.")] = "tiny",
    dtype: Annotated[str, typer.Option(help="Of compute: float64, float32 or bfloat16.")] = "float64",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 3,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 32,
    batch: Annotated[
        int | None, typer.Option(help="Sequences of a global batch; default: 8, or with --all twice --world if more.")
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="On cuda, ranks may share a GPU.")] = "cpu",
    everything: Annotated[bool, typer.Option("--all", help="Every legal layout of --world ranks.")] = False,
    world: Annotated[int | None, typer.Option(help="With --all: how many ranks; default: 4.")] = None,
    sample: Annotated[
        int | None, typer.Option(help="With --all: this many, chosen to meet every pair of settings.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="With --all: layouts at a time, on a machine with cores for it.")] = 1,
    repeat: Annotated[
        int, typer.Option(help="Prove each this often, by ranks that stay up: for what seldom fails.")
    ] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds for one layout.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prove that a layout computes what one process computes, and sends what it should.

    Starts the ranks on this machine and trains both from the same weights on
    the same data, which has unequal loss masks, a rank without any, and packed
    documents. Every step's loss, gradient norm and gradients are compared, and
    the parameters at the end; of experts also which tokens they got, with the
    losses that even their load out turned on unless they are set.
    Collectives are counted and compared with closed forms. Exit code 0 if all
    hold, 1 if not.

    [dim]Examples:[/]

      fivefold verify --layout dp=2,tp=2,zero=3

      fivefold verify --layout cp=4,cp_kind=ulysses --model tiny-qwen3

      fivefold verify --layout dp=2,ep=2,zero=1 --model tiny-moe

      fivefold verify --layout dp=2,tp=2,ep=4 --model tiny-moe

      fivefold verify --layout tp=2,sp model.kv_heads=1 --dtype float32

      fivefold verify --layout dp=2,tp=2,pp=2,microbatches=4,schedule=zb-h1

      fivefold verify --all --world 4

      fivefold verify --all --world 8 --sample 30 --jobs 2 --json

      fivefold verify --layout dp=2,tp=2,zero=2 --repeat 100

    Over NCCL, on a GPU that the ranks share (no figure of speed):

      fivefold verify --all --sample 60 --device cuda train.share_gpu=nccl train.compile=off
    """
    from fivefold.verifier.verify import verify as prove

    whole_layout(layout, changes or [])

    try:
        with counting_bar() as progress:
            found = prove(
                layout, changes or [], model=model, dtype=dtype, steps=steps, seq=seq, batch=batch, device=device,
                everything=everything, world=world, sample=sample, jobs=jobs, repeat=repeat, timeout=timeout,
                progress=progress,
            )  # fmt: skip
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; nothing is proven")
        raise typer.Exit(130) from None
    show(found, as_json)
