"""`fivefold models`: the presets, with what follows from their numbers."""

from typing import Annotated

import typer

SHORT = "List the presets: parameters and FLOPs per token.  [dim]fivefold models --seq 8192[/]"


def models(
    config: Annotated[str | None, typer.Argument(help="A Hugging Face config.json, or its directory, to add.")] = None,
    seq: Annotated[
        int | None, typer.Option(min=1, help="Sequence length for the FLOPs; default: each model's context.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models that Fivefold knows by name.

    FLOPs are those of one training token, forward and backward, without
    recomputation. Attention is counted in full (as PaLM does) and as the causal
    half (as newer reports do).

    [dim]Examples:[/]

      fivefold models

      fivefold models --seq 8192 --json

      fivefold models path/to/config.json
    """
    from fivefold.report import show
    from fivefold.spec import listing

    show(listing.models(config, seq=seq), as_json)
