"""`python -m benchmarks.versions OLD NEW tiny train.batch=4 -o FILE`: step times of two versions of the code, in turns.

A version is a commit, or a folder that has its `src`. Each turn is `fivefold bench train` in a process of its own with
that version's source: old, new, old, new, ... A difference counts if it is larger than the spread of a version's own
turns, which the machine makes.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from fivefold.bench.harness import RowsResult
from fivefold.cli import main, program
from fivefold.cli.options import Json, Output
from fivefold.render.blocks import show
from fivefold.support.errors import UserError

ROOT = Path(__file__).parent.parent
COLUMNS = {
    "version": "version", ">ms": "ms:.2f", ">fastest turn": "fastest:.2f", ">slowest turn": "slowest:.2f",
    ">of old": "of_old:.4f",
}  # fmt: skip


def measure(versions: dict[str, str], words: list[str], rounds: int, steps: int) -> RowsResult:
    """Medians of all steps; the fastest and the slowest turn by the median of its own."""
    turns: dict[str, list[list[float]]] = {name: [] for name in versions}
    with tempfile.TemporaryDirectory() as folder:
        sources = {name: source_of(version, Path(folder) / name) for name, version in versions.items()}
        for _ in range(rounds):
            for name, source in sources.items():
                turns[name].append(turn(source, [*words, "--rounds", "1", "--steps", str(steps)], Path(folder)))
    rows = [_row(name, versions[name], words, turns[name], turns["old"]) for name in versions]
    return RowsResult(rows, COLUMNS, f"{' '.join(words)}: {rounds} turns of {steps} steps each, old and new in turns")


def _row(name: str, version: str, words: list[str], turns: list[list[float]], old: list[list[float]]) -> dict[str, Any]:
    medians = [1e3 * median(steps) for steps in turns]
    times = {"ms": median(medians), "fastest": min(medians), "slowest": max(medians)}
    of_old = times["ms"] / (1e3 * median(median(steps) for steps in old))
    return {"version": name, "commit": version, "words": " ".join(words), **times, "of_old": of_old, "turns": turns}


def source_of(version: str, place: Path) -> Path:
    """The `src` of a folder, or of a commit, which is written out."""
    if (own := Path(version) / "src").is_dir():
        return own.absolute()
    place.mkdir()
    packed = subprocess.run(["git", "archive", version, "src"], cwd=ROOT, capture_output=True)
    if packed.returncode:
        raise UserError(f"{version} is neither a folder with a src nor a commit", "option.choice")
    subprocess.run(["tar", "-x", "-C", str(place)], input=packed.stdout, check=True)
    return place / "src"


def turn(source: Path, words: list[str], folder: Path) -> list[float]:
    """Seconds of the steps of one process with that source."""
    figures = folder / "turn.json"
    command = [sys.executable, "-m", "fivefold", "bench", "train", *words, "-o", str(figures), "--quiet"]
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(source)}, text=True, stderr=-1)
    if done.returncode:
        raise UserError(f"{source}: {done.stderr.strip()[-500:]}", "option.choice")
    [system] = json.loads(figures.read_text())["systems"]
    return [seconds for one in system["turns"] for seconds in one["seconds"]]


def versions(
    old: Annotated[str, typer.Argument(help="A commit, or a folder that has its src.")],
    new: Annotated[str, typer.Argument(help="Another one; . is this folder.")],
    words: Annotated[list[str], typer.Argument(metavar="{MODEL|JOB [KEY=VALUE]...}...", help="As for bench train.")],
    rounds: Annotated[int, typer.Option(help="Turns of each version.")] = 4,
    steps: Annotated[int, typer.Option(help="Timed steps of a turn.")] = 20,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Time the steps of two versions of the code in turns.

    [dim]Example:[/]

      python -m benchmarks.versions v1.0 . tiny train.batch=4 data.seq=256
    """
    show(measure({"old": old, "new": new}, words, rounds, steps), as_json=as_json, output=output)


app = program(versions)

if __name__ == "__main__":
    main(app)
