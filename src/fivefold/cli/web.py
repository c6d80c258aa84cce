"""`fivefold ui`: serves the web UI on this machine."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.options import Json

UI = "Open the web UI: plan and explore layouts.  [dim]fivefold ui[/]"


def ui(
    port: Annotated[int, typer.Option(help="The port; 0: any free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page, or only print it.")] = True,
    runs: Annotated[
        list[Path] | None, typer.Option(help="A run's directory, or one with runs in it; may be given several times.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve the web UI on this machine: move sliders, and see the memory, time and traffic that the planner predicts.

    Only this machine can open it, and only with the address that is printed: it
    carries a random token. The page needs no network. From the disk it reads only
    the directories that --runs names.

    [dim]Examples:[/]

      fivefold ui

      fivefold ui --no-browser --port 8080

      fivefold ui --runs runs/demo --runs runs/other
    """
    from fivefold.web.app import ui as serve

    def print_address(text: str) -> None:
        typer.echo(json.dumps({"address": text.split()[1]}) if as_json else text)

    serve(port, runs or (), browser, print_address)
