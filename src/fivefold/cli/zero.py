"""`fivefold zero`: bytes of parameters, gradients and optimizer state by ZeRO stage."""

from typing import Annotated

import typer

from fivefold.render.blocks import show

SHORT = "Bytes by ZeRO stage, the paper's and ours.  [dim]fivefold zero 7.5e9 --ranks 64[/]"


def zero(
    model: Annotated[str, typer.Argument(help="A model's name, or a number of parameters: 7.5e9.")],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks to shard over (dp x cp).")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Bytes of a rank between steps, by ZeRO stage.

    The paper (arXiv 1910.02054) keeps gradients in two bytes; this code adds them
    up in float32, so that the paper's figures are too low for it.

    [dim]Examples:[/]

      fivefold zero 7.5e9 --ranks 64

      fivefold zero llama3-8b --ranks 8
    """
    from fivefold.planner.textbook import zero

    show(zero(model, ranks), as_json)
