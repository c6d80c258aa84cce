"""How a benchmark is shown: progress while it measures, then its last result, which is also written to a file."""

import csv
import io
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast

import typer
from rich.console import Console

from fivefold.cli.options import command_line
from fivefold.render.blocks import Result, console_of, show

if TYPE_CHECKING:
    from fivefold.bench.harness import OnProgress

Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Changes to the model and the batch, as for train.", show_default=False
    ),
]


class TableResult(Protocol):
    """A result that can be written as CSV."""

    @property
    def rows(self) -> list[dict[str, Any]]: ...


def measure_and_show(
    measure: "Callable[[OnProgress], Iterable[Result]]", *, as_json: bool, output: Path | None = None
) -> None:
    """Measure and show the last result. Each result is written to `output`, so that stopping the command loses none.

    The status line says what is measured now; each measurement leaves a line with its seconds.
    """
    console = console_of(stderr=True)
    current: tuple[str, float] | None = None  # what is measured, and since when

    def finish_line() -> None:
        if current:
            what, start = current
            console.print(f"{what}: {time.monotonic() - start:.0f} s", style="dim", markup=False)

    def on_progress(what: str) -> None:
        nonlocal current
        finish_line()
        current = what, time.monotonic()
        status.update(what)

    with console.status("") as status:
        for result in measure(on_progress):
            written = output is None or _write(result, output)
        finish_line()
    show(result, as_json=as_json)
    if not written:
        raise typer.Exit(1)


def _write(result: Result, output: Path) -> bool:
    """Write the figures; returns False, after a sentence, if the file cannot be written."""
    try:
        if output.suffix == ".csv":
            output.write_text(_to_csv(command_line(), cast(TableResult, result).rows))
        else:
            data = result.to_dict()
            figures = data if isinstance(data, dict) else {"rows": data}
            output.write_text(json.dumps({"command": command_line()} | figures, indent=1) + "\n")
    except OSError as error:
        Console(stderr=True, soft_wrap=True).print(f"--output {output} was not written: {error.strerror}", markup=False)
        return False
    return True


def _to_csv(command: str, rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    text.write(f"# {command}\n")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
