"""What holds of every command: its help, --json, -o and --quiet; and old words are answered with the new ones."""

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fivefold.cli import app, renamed
from fivefold.support.errors import UserError
from tests.commands import fivefold

ROOT = Path(__file__).parents[2]


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield " ".join(path), command
    for name, inner in getattr(command, "commands", {}).items():
        yield from leaves(inner, (*path, name))


COMMANDS = dict(leaves(typer.main.get_command(app)))
PROJECTS = {name: importlib.import_module(f"benchmarks.{name}").app for name in renamed.MOVED_BENCHMARKS}
EVERY = COMMANDS | {name: typer.main.get_command(one) for name, one in PROJECTS.items()}


def options(command: Any) -> dict[str, Any]:
    return {name: one for one in command.params for name in one.opts if one.param_type_name == "option"}


@pytest.mark.parametrize("name", EVERY)
def test_json_output_and_quiet_are_the_same_everywhere(name: str) -> None:
    """Every command has --json and --quiet with one meaning each, and what names a file to write is -o."""
    found = options(EVERY[name])
    assert found["--json"].help == "Print JSON."
    assert found["--quiet"] is found["-q"]
    assert found["--quiet"].help == "Print only errors, and with --json the JSON."
    assert ("--output" in found) == ("-o" in found)
    if "-o" in found:
        assert found["-o"] is found["--output"]
    assert not {"--out", "--csv", "--file"} & set(found)
    if "--html" in found:
        assert found["--html"].help == "Also write a self-contained HTML page."


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_fits_80_columns(name: str) -> None:
    shown = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert shown.exit_code == 0
    assert "Example" in shown.output
    assert f"fivefold {name}" in shown.output
    assert [line for line in shown.output.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("old", [*renamed.MOVED_COMMANDS, *(f"bench {name}" for name in renamed.MOVED_BENCHMARKS)])
def test_an_old_word_is_answered_with_the_new_one(old: str) -> None:
    for more in ([], ["x", "--json"]):
        said = CliRunner().invoke(app, [*old.split(), *more])
        assert isinstance(said.exception, UserError), old
        assert str(said.exception).startswith(f"`fivefold {old}` is now `")
        for new in re.findall(r"`fivefold ([^`]*)`", str(said.exception))[1:]:
            assert any(new == name or new.startswith(f"{name} ") for name in COMMANDS), new
            own = next(one for name, one in COMMANDS.items() if new == name or new.startswith(f"{name} "))
            assert set(re.findall(r"--[a-z]+", new)) <= set(options(own)), new
        for module in re.findall(r"python -m (benchmarks\.\w+)", str(said.exception)):
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


def test_an_old_word_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = fivefold("truth", "--rows", "llama3", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: `fivefold truth` is now `fivefold accuracy`\n"
    for line, said in {
        "plan llama3-8b --inference": "`fivefold plan --inference` is now `fivefold serve`",
        "plan llama3-8b --ttft 1": "`fivefold plan --ttft` is now `fivefold serve --ttft`",
        "data prepare x --out y": "`--out` is now `--output`",
    }.items():
        assert fivefold(*line.split(), cwd=tmp_path).stderr == f"error: {said}\n"


def test_a_word_that_never_was_one_is_refused_as_before() -> None:
    said = CliRunner().invoke(app, ["nosuch"])
    assert said.exit_code == 2
    assert "No such command 'nosuch'" in said.output


def test_no_page_names_an_old_command() -> None:
    """But the changelog, which has the table of them."""
    words = [*renamed.MOVED_COMMANDS, *(f"bench {name}" for name in renamed.MOVED_BENCHMARKS)]
    old = "|".join(sorted(words, key=len, reverse=True))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md", ROOT / "Makefile"]
    pages += [path for folder in ("docs", "benchmarks", "examples", "recipes", "tools") for path in
              (ROOT / folder).glob("*.*") if path.suffix in (".md", ".toml", ".py")]  # fmt: skip
    pages += [path for path in (ROOT / "src").rglob("*.py") if path.name != "renamed.py"]
    pages += [*(ROOT / "src").rglob("*.js"), *(ROOT / "src").rglob("*.toml")]
    for page in pages:
        found = re.findall(rf"(?<!from )fivefold (?:{old})(?![\w.=/-])", page.read_text())
        assert not found, (page, found)
        assert "--inference" not in page.read_text(), page


QUICK = {
    "plan": "tiny --cluster 2xCPU --batch 8 --seq 64 --layout dp=2",
    "serve": "tiny --cluster 1xH100 --prompt 64",
    "goodput": "tiny --cluster 2xCPU --batch 8 --seq 64",
    "draw": "1f1b --pp 2 --microbatches 2",
    "compare zero": "tiny",
    "compare cp": "--seq 4096 --cp 2",
    "compare schedules": "--pp 2 --microbatches 4",
    "list models": "tiny",
    "list accelerators": "H100",
    "accuracy": "--sources",
}


@pytest.mark.parametrize("name", QUICK)
def test_quiet_prints_nothing_and_writes_all_the_same(name: str, tmp_path: Path) -> None:
    words = [*name.split(), *QUICK[name].split()]
    file = tmp_path / "x.json"
    done = CliRunner().invoke(app, [*words, "--quiet", "-o", str(file)])
    assert (done.exit_code, done.output) == (0, "")
    told = CliRunner().invoke(app, [*words, "-q", "--json"])
    written = json.loads(file.read_text())
    if name != "draw":  # whose files are schedules, which it reads again
        assert written == json.loads(told.stdout)


def test_quiet_leaves_errors_and_exit_codes(tmp_path: Path) -> None:
    large = fivefold(
        "plan", "llama3-8b", "--cluster", "A100-40", "--layout", "dp=1", "--batch", "1", "-q", cwd=tmp_path
    )
    assert (large.returncode, large.stdout, large.stderr) == (1, "", "")
    wrong = fivefold("plan", "llama4-8b", "--quiet", cwd=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: unknown model")
    note = fivefold("train", "demo", "--check", "--nproc", "8", "--quiet", cwd=tmp_path)
    assert (note.returncode, note.stdout, note.stderr) == (0, "", "")


def test_a_run_can_be_quiet_or_json(tokens: Path, tmp_path: Path) -> None:
    small = [
        f"data.path={tokens}",
        "train.steps=2",
        "train.batch=2",
        "data.seq=16",
        "train.eval_samples=0",
        "model.layers=1",
    ]
    quiet = fivefold("train", *small, "train.device=cpu", "layout=dp=2", "--nproc", "2", "--quiet", cwd=tmp_path)
    assert (quiet.returncode, quiet.stdout) == (0, ""), quiet.stderr
    on = fivefold("train", "runs/run", "train.steps=3", "--nproc", "2", "--json", cwd=tmp_path)
    assert on.returncode == 0, on.stderr
    assert [step["step"] for step in json.loads(on.stdout)["steps"]] == [1, 2, 3]
    checked = fivefold("train", "runs/run", "--nproc", "2", "--check", "--json", cwd=tmp_path)
    assert json.loads(checked.stdout)["train"]["steps"] == 3
    found = json.loads(fivefold("inspect", "runs/run", "--json", cwd=tmp_path).stdout)
    assert (len(found["run"]["steps"]), found["experts"], found["checkpoint"]["step"]) == (3, None, 3)


def test_a_layout_that_fits_nowhere_is_timed_all_the_same() -> None:
    line = "plan llama3-8b --cluster 2xA100-40 --layout pp=2,microbatches=4 --batch 8 --seq 4096"
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 1
    for words in ("it does not fit: needs", "nor does any other layout", "rank 1", "bubble", "no layout to compare"):
        assert words in result.output
    mixed = "plan mixtral-8x7b --cluster 2x8xH100+2x8xA100 --layout dp=2,tp=8,pp=2,sp,microbatches=8 --batch 64 --json"
    found = json.loads(CliRunner().invoke(app, mixed.split()).output)
    assert found["layout"]["step_seconds"] > 0


def test_a_layout_that_does_not_fit_is_shown_with_the_nearest_that_does() -> None:
    line = ["plan", "llama3.2-1b", "--cluster", "2xA100-40", "--layout", "dp=2", "--batch", "128"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 1
    assert "nearest: --layout dp=2,zero=" in " ".join(result.output.split())
    found = json.loads(CliRunner().invoke(app, [*line, "--json"]).output)["layout"]
    assert "nearest: --layout" in found["advice"]
    assert found["memory_limit_bytes"] < found["memory_bytes"]


@pytest.mark.parametrize(("option", "value"), [("--layout", "tp=2"), ("--batch", "4"), ("--tp", "2")])
def test_serve_is_not_answered_with_a_setting_that_it_would_refuse(option: str, value: str, tmp_path: Path) -> None:
    done = fivefold("serve", "llama3-8b", "--cluster", "1xH100", option, value, cwd=tmp_path)
    assert done.returncode == 2
    assert f"No such option: {option}" in done.stderr
    assert "write " not in done.stderr
