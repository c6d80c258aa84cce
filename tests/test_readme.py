"""The commands of the README, of docs/tour.md and the small ones of docs/speed.md run as written (training is mostly
checked alone), and what the pages and the proof in docs/parallelism.md quote is what is printed."""

import gzip
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer

from fivefold.cli import app
from tests import commands

ROOT = Path(__file__).parent.parent


def blocks(page: str) -> list[str]:
    return re.findall(r"```\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


README, TOUR = blocks("README.md"), blocks("docs/tour.md")
SMALL = blocks("docs/speed.md")[1]  # benchmarks at a size for a laptop
OURS = ("fivefold ", "python -m benchmarks.")
QUOTED = [block for block in (*README, *TOUR) if block.startswith("$ fivefold ")]


def lines(*blocks: str) -> list[str]:
    return [line for block in blocks for line in block.splitlines() if line.startswith(OURS)]


def measures(line: str) -> bool:
    return line.startswith(("fivefold bench ", "python -m benchmarks."))


def fivefold(line: str, cwd: Path, *more: str) -> subprocess.CompletedProcess[str]:
    module, *words = shlex.split(line.removeprefix("python -m "))
    return commands.fivefold(*words, *more, cwd=cwd, env={"COLUMNS": "400"}, timeout=600, module=module)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A newcomer's directory: some essays, more in a compressed file, and the examples."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "essays").mkdir()
    for number in range(20):
        (folder / "essays" / f"{number}.txt").write_text(f"Essay {number}. " * 100)
    with gzip.open(folder / "more.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": f"More of {number}. " * 50}) + "\n" for number in range(50))
    return folder


PROOF = next(block for block in blocks("docs/parallelism.md") if block.startswith("dp=2,tp=2,zero=3 against"))


def numbers(proof: str) -> list[list[str]]:
    """Losses, norms and what is sent, without the errors, whose last digits are another machine's."""
    rows = [line.split() for line in proof.splitlines()]
    return [row[:5] for row in rows if row and row[0] in ("loss,", "norm,")] + [
        row[:7] for row in rows if row and row[0] in ("dp", "tp", "world")
    ]


def test_the_pages_have_commands() -> None:
    assert len(numbers(PROOF)) == 11
    assert len(lines(*README)) == 5
    assert len(lines(*TOUR)) >= 20
    assert sum(measures(line) for line in lines(SMALL)) == 4
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140
    assert len(QUOTED) == 2


def test_the_readme_s_commands_are_there_and_its_two_are_make_s() -> None:
    text = (ROOT / "README.md").read_text()
    every = typer.main.get_command(app)
    for line in re.findall(r"`(?:fivefold )?((?:plan|verify) --[^`]*|(?<=fivefold )[a-z]+[^`]*)`", text):
        name, *words = line.split()
        options = {option for parameter in every.commands[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, line
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test"} == set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)) <= set(targets)


# What makes a measurement of seconds one of an instant, and leaves it the same measurement.
SMALLER = {
    "fivefold verify --curve": "train.batch=4 data.seq=32 data.path=tokens train.steps=2 model.layers=1",
    "fivefold trace": "train.batch=4 data.seq=32 data.path=tokens",
    "python -m benchmarks.attention": "--hidden 64 --seq 16 --batch 1 --rounds 1",
    "fivefold bench checkpoint": "model.layers=1 data.seq=16 train.batch=1 --rounds 1 --steps 1",
    "fivefold bench peers --overhead": "model.hidden=64 model.heads=2 model.kv_heads=1 model.vocab=256 --rounds 1",
    "fivefold bench train": "--steps 1",
    "fivefold dryrun": "model.layers=2",
    "fivefold generate": "-n 4",
    "fivefold verify --layout pp": "--steps 1",
}


def run(found: list[str], folder: Path) -> None:
    for line in found:
        more = ["--check"] if line.startswith("fivefold train") else []
        if "run.name=essays" in line:  # those whose checkpoints the next ones read are really run, for a few steps
            more = ["data.seq=32", "train.batch=4", "train.steps=1", "model.layers=2", "train.eval_samples=0"]
        elif line.startswith("fivefold train runs/essays"):
            more = ["train.steps=2"]
        more += next((words.split() for command, words in SMALLER.items() if line.startswith(command)), [])
        done = fivefold(line, folder, *more)
        assert done.returncode == 0, line + done.stderr
        if line == "fivefold verify --layout dp=2,tp=2,zero=3":
            assert numbers(done.stdout) == numbers(PROOF)


def test_every_command_of_the_readme_runs(folder: Path) -> None:
    run(lines(*README), folder)


@pytest.mark.slow  # each of them is tested smaller elsewhere, in every `make test`
def test_every_command_of_the_tour_runs(folder: Path) -> None:
    run(lines(*TOUR), folder)


@pytest.mark.slow  # tests/bench runs the same benchmarks smaller, in every `make test`
def test_every_benchmark_runs(folder: Path) -> None:
    run(lines(SMALL), folder)


@pytest.mark.parametrize("block", QUOTED)
def test_what_is_quoted_is_what_is_printed(folder: Path, block: str) -> None:
    command, *output = block.splitlines()
    done = fivefold(command.removeprefix("$ "), folder)
    if command.startswith("$ fivefold plan"):  # of a plan, the lines that matter; spaces between columns do not
        assert {" ".join(line.split()) for line in output} <= {
            " ".join(line.split()) for line in done.stdout.splitlines()
        }
        return
    assert done.returncode == 2
    assert done.stderr.splitlines() == output


def test_the_job_behind_make_demo_is_sound(folder: Path) -> None:
    command = "fivefold train examples/demo.toml --nproc 8"
    assert command in (ROOT / "Makefile").read_text()
    assert fivefold(command, folder, "--check").returncode == 0
