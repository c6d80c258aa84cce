"""`fivefold ui`: serves the web UI on this machine."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.options import Json

UI = "Open the web UI: plan and explore layouts.  [dim]fivefold ui[/]"


def ui(
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 0,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open a browser, or only print the address.")
    ] = True,
    runs: Annotated[
        list[Path] | None, typer.Option(help="A run's directory, or one with runs in it; repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve the web UI on this machine: move sliders and see the memory, time and traffic that the planner predicts.

    Only this machine can open it, and only by the printed address, which has a
    random token. The page needs no network, and reads no directories but those
    that --runs names.

    [dim]Examples:[/]

      fivefold ui

      fivefold ui --no-browser --port 8080

      fivefold ui --runs runs/demo --runs runs/other
    """
    from fivefold.web.app import ui as serve

    def print_address(text: str) -> None:
        typer.echo(json.dumps({"address": text.split()[1]}) if as_json else text)

    serve(port, runs or (), browser=browser, say=print_address)
