"""`fivefold zero`: what ZeRO leaves of parameters, gradients and optimizer state, by two accountings."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fivefold.support.errors import UserError
from fivefold.support.formatting import si

SHORT = "Bytes by ZeRO stage, the paper's and ours.  [dim]fivefold zero 7.5e9 --ranks 64[/]"


def zero(
    model: Annotated[str, typer.Argument(help="A model's name, or a number of parameters: 7.5e9.")],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks to shard over (dp x cp).")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Bytes of a rank between steps, by ZeRO stage.

    The paper (arXiv 1910.02054) keeps gradients in two bytes; this code adds them
    up in float32. People quote the former and run out of memory with the latter.

    [dim]Examples:[/]

      fivefold zero 7.5e9 --ranks 64

      fivefold zero llama3-8b --ranks 8
    """
    from fivefold.plan.cost.memory import OURS, PAPER

    count = parameters_of(model)
    rows = [
        {
            "stage": stage,
            "paper": PAPER.state(count, count / ranks, stage, ranks).total,
            "parameters": ours.parameters,
            "gradients": ours.gradients,
            "optimizer": ours.optimizer,
            "total": ours.total,
        }
        for stage in range(4)
        for ours in [OURS.state(count, count / ranks, stage, ranks)]
    ]
    if as_json:
        typer.echo(json.dumps({"parameters": count, "ranks": ranks, "stages": rows}))
        return
    table = Table(title=f"{si(count)} parameters over {ranks} ranks: GB of a rank")
    for name in ("stage", "the paper's", "this code's", "parameters", "gradients", "optimizer"):
        table.add_column(name, justify="right")
    for row in rows:
        sizes = (row["paper"], row["total"], row["parameters"], row["gradients"], row["optimizer"])
        table.add_row(str(row["stage"]), *(f"{size / 1e9:.4g}" for size in sizes))
    Console(highlight=False).print(table)


def parameters_of(text: str) -> float:
    """A number, or a model's."""
    from fivefold.spec.presets import preset

    try:
        count = float(text)
    except ValueError:
        return float(preset(text).parameter_count)
    if not 1 <= count < 1e18:
        raise UserError(f"{text} parameters cannot be; give a number like 7.5e9, or a model's name")
    return count
