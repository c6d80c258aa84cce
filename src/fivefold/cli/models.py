"""`fivefold models`: the presets, with what follows from their numbers."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fivefold.spec.hf_config import read_hf_config
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import PRESETS, preset
from fivefold.support.formatting import si

SHORT = "The presets: parameters and FLOPs per token.  [dim]fivefold models --seq 8192[/]"


def models(
    config: Annotated[str | None, typer.Argument(help="A Hugging Face config.json, or its directory, to add.")] = None,
    seq: Annotated[
        int | None, typer.Option(min=1, help="Sequence length for the FLOPs; default: each context.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """List the models that Fivefold knows by name.

    FLOPs are of one training token, forward and backward, without recomputation;
    attention is counted in full (as PaLM does) and as the causal half (as newer
    reports do).

    [dim]Examples:[/]

      fivefold models

      fivefold models --seq 8192 --json

      fivefold models path/to/config.json
    """
    specs = [preset(name) for name in PRESETS] + ([read_hf_config(config)] if config else [])
    rows = [_row(spec, seq or spec.context) for spec in specs]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    console = Console()
    wide = not console.is_terminal or console.width >= 120
    table = Table(title="Models", caption="FLOPs per training token, forward + backward, at the sequence length shown")
    shape = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab") if wide else ()
    for name in ("model", "parameters", *shape, "seq", "FLOPs/token\nfull", "FLOPs/token\ncausal"):
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    for spec, row in zip(specs, rows, strict=True):
        flops = (si(row["flops_per_token_full"]), si(row["flops_per_token_causal"]))
        numbers = (*(getattr(spec, field) for field in shape), row["seq"])
        table.add_row(spec.name, f"{spec.parameter_count:,}", *map(str, numbers), *flops)
    (console if console.is_terminal else Console(width=140)).print(table)


def _row(spec: ModelSpec, seq: int) -> dict[str, Any]:
    return {
        "model": spec.name,
        "parameters": spec.parameter_count,
        "matmul_parameters": spec.matmul_parameters,
        "seq": seq,
        "flops_per_token_full": spec.flops_per_token(seq, "full"),
        "flops_per_token_causal": spec.flops_per_token(seq, "causal"),
    }
