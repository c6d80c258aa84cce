"""The end of every command: its result on the terminal or as JSON, its picture in a file, its exit code."""

import json
from pathlib import Path

import typer

from fivefold.report.blocks import Result, Text
from fivefold.report.paint import save
from fivefold.report.terminal import console_of, render, width_of
from fivefold.support.documents import path_of
from fivefold.support.errors import UserError


def show(result: Result, as_json: bool = False, picture: Path | None = None) -> None:
    """Print a result, and write its picture; one that is not ok ends the command with exit code 1."""
    if picture is not None:
        scene = result.scene()
        if scene is None:
            raise UserError(f"there is nothing to draw in {picture}")
        save(scene, picture)
    if as_json:
        typer.echo(json.dumps(result.to_dict()))
    else:
        console = console_of()
        render(result.blocks(), console, width_of(console))
        if picture is not None:
            render([Text(f"written to {picture}")], console, None)
    if not result.ok:
        raise typer.Exit(1)


def check_writable(path: Path | None, *suffixes: str) -> None:
    """Refuse a file that could not be written, before the work that it is for."""
    if path is None:
        return
    if suffixes and path.suffix.lower() not in suffixes:
        raise UserError(f"{path} should end in {' or '.join(suffixes)}")
    path_of(path)  # refuses what no file can be named
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no directory {path.parent}")
    new = not path.exists()
    try:
        path.open("a").close()  # to look whether it may be written is not enough, under /proc for one
        if new:
            path.unlink()
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
