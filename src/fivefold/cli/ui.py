"""`fivefold ui`: a page to plan and to look at, served on this machine."""

from pathlib import Path
from typing import Annotated

import typer

SHORT = "Open a page to plan and look at layouts.  [dim]fivefold ui[/]"


def ui(
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: any free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page, or only print it.")] = True,
    runs: Annotated[
        list[Path] | None, typer.Option(help="A run's directory, or one with runs in it; may be given several times.")
    ] = None,
) -> None:
    """Serve a page on this machine: move sliders, and see memory, time and traffic of a layout as the planner has them.

    Only this machine can open it, and only with the address that is printed: it
    carries a random token. The page needs no network. Of the disk it reads the
    directories that --runs names, and nothing else.

    [dim]Examples:[/]

      fivefold ui

      fivefold ui --no-browser --port 8080

      fivefold ui --runs runs/demo --runs runs/other
    """
    from fivefold.web.app import ui as serve

    serve(port, runs or (), browser, typer.echo)
