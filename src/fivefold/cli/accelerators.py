"""`fivefold accelerators`: what clusters are made of, and where the figures come from."""

from typing import Annotated

import typer

SHORT = "List the accelerators that clusters are made of.  [dim]fivefold accelerators H100[/]"


def accelerators(
    name: Annotated[str | None, typer.Argument(help="Show this one with all its figures.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the accelerators that Fivefold plans for: memory, dense rates, links, and the source of every figure.

    Another one needs no code: `fivefold calibrate -o mine.toml` measures the device
    at hand, and `--cluster 2x8xmine.toml` plans for it.

    [dim]Examples:[/]

      fivefold accelerators

      fivefold accelerators MI300X

      fivefold accelerators --json
    """
    from fivefold.hardware import cluster
    from fivefold.render.blocks import show

    show(cluster.accelerators(name), as_json)
