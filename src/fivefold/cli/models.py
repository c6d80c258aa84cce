"""`fivefold models`: the presets, with what follows from their numbers."""

from typing import Annotated

import typer

SHORT = "List the presets, or show a model.  [dim]fivefold models llama3-8b[/]"


def models(
    name: Annotated[
        str | None, typer.Argument(help="Show this one: a preset, a Hugging Face config.json or its directory.")
    ] = None,
    seq: Annotated[
        int | None, typer.Option(min=1, help="Sequence length for the FLOPs; default: each model's context.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models that Fivefold knows by name, or show all that follows from the numbers of one.

    FLOPs are those of one training token, forward and backward, without
    recomputation. Attention is counted in full (as PaLM does) and as the causal
    half (as newer reports do).

    [dim]Examples:[/]

      fivefold models

      fivefold models --seq 8192 --json

      fivefold models llama3-8b

      fivefold models path/to/config.json
    """
    from fivefold.render.blocks import show
    from fivefold.spec import presets

    if name is None:
        show(presets.models(seq=seq), as_json)
        return
    from fivefold.planner.training import model

    show(model(name, seq=seq), as_json)
