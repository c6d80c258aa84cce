"""What becomes a part of a script: words that stay words, and what is refused because no script can hold it."""

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.clusters.launch_files import launch
from fivefold.clusters.options import LaunchOptions
from fivefold.clusters.quoting import comment_lines, quote, quote_command, quote_path
from fivefold.support.errors import UserError
from tests.refusals import refusal

JOB = '[model]\npreset = "tiny"\n[layout]\ndp = 4\n[run]\ncluster = "2x2xH100"\n'
SCRIPTS = ["slurm", "torchrun", "ssh"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    Path("hosts").write_text("node1\nnode2\n")
    return tmp_path


def written(kind: str, *changes: str, file: str = "job.toml", output: str = "out", **options: str) -> str:
    hosts = Path("hosts") if kind == "ssh" else None
    return launch(kind, file, changes, Path(output), LaunchOptions(hostfile=hosts, **options)).file_text  # type: ignore[arg-type]


def refused(kind: str, *changes: str, **options: str) -> list[str]:
    error = refusal(lambda: written(kind, *changes, **options))
    assert not Path("out").exists()
    return error.codes


@pytest.mark.parametrize("kind", SCRIPTS)
@pytest.mark.parametrize("end", ["\n", "\r", "\nEND\n", "\x1b", "\x85", "\u2028", "\u2029", "\t", "\x7f"])
def test_no_setting_ends_a_line_of_a_script(kind: str, end: str) -> None:
    assert refused(kind, f"model.name=x{end}touch y #") == ["launch.characters"]


@pytest.mark.parametrize("kind", SCRIPTS)
def test_the_job_file_may_hold_what_a_script_cannot(kind: str) -> None:
    Path("job.toml").write_text(JOB.replace("[layout]", 'name = "x\\ntouch y\\u2028z"\n[layout]'))
    text = written(kind)
    assert [line for line in text.splitlines() if "touch y" in line] == [
        line for line in text.split("\n") if line.startswith("# x touch y z, ")
    ]


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_file_or_directory_is_never_taken_for_an_option(kind: str) -> None:
    Path("-x.toml").write_text(JOB)
    text = written(kind, "run.dir=-r", file="-x.toml")
    assert "fivefold train ./-x.toml run.dir=-r" in text
    assert kind == "torchrun" or "logs=./-r/" in text
    assert (quote_command(["bash"], "-c"), quote_path("-c"), quote_path("~/-c")) == ("bash ./-c", "./-c", '"$HOME"/-c')


def test_a_run_whose_name_begins_with_a_hyphen() -> None:
    assert "--job-name=x\n" in written("slurm", "run.name=--x")
    assert "--job-name=run\n" in written("slurm", "run.name=-")


def test_a_job_file_that_train_would_take_for_a_setting_is_refused() -> None:
    Path("a=b.toml").write_text(JOB)
    assert refused("slurm", file="a=b.toml") == ["launch.file.name"]


@pytest.mark.parametrize("file", [".", "/", ".."])
def test_a_directory_is_no_job_file(file: str) -> None:
    assert refusal(lambda: launch("slurm", file)).codes == ["file.read"]


@pytest.mark.parametrize("output", ["a" * 300, "a\0", "a\nb", "\udcff"])
def test_files_that_cannot_be_named_are_refused(output: str) -> None:
    with pytest.raises(UserError):
        written("slurm", output=output)


def test_names_that_slurm_and_its_containers_read_otherwise() -> None:
    assert '--output="${logs//%/%%}/rank-%t.log"' in written("slurm", "run.dir=50%t")
    Path("out").unlink()
    assert "fivefold train job.toml data.path=/a:b &" in written("slurm", "data.path=/a:b")


def test_a_command_is_no_longer_than_a_host_can_take() -> None:
    assert refused("ssh", f"model.name={'é' * 13_000}") == ["launch.command.length"]
    written("ssh", f"model.name={'é' * 10_000}")


def test_words_are_quoted_and_comments_are_printable() -> None:
    assert shlex.split(quote("it's $(x) \\ `y`")) == ["it's $(x) \\ `y`"]
    assert comment_lines("a\x85b\u2028c\x1bd\ne") == ["# a b c?d e"]


def test_lines_that_are_typed_are_not_broken_by_a_narrow_terminal() -> None:
    long = "long " * 30
    shown = CliRunner().invoke(app, ["launch", "job.toml", f"model.name={long}", "--torchrun"], env={"COLUMNS": "60"})
    assert f"  -m fivefold train job.toml 'model.name={long}'\n" in shown.output
    shown = CliRunner().invoke(app, ["launch", "job.toml", "--slurm", "-o", f"{long}x"], env={"COLUMNS": "60"})
    assert f"  sbatch '{long}x'\n" in shown.output


def test_no_name_speaks_to_the_terminal() -> None:
    Path("job.toml").write_text(JOB.replace("[layout]", 'name = "x\\u001b]0;y\\u0007"\n[layout]'))
    shown = CliRunner().invoke(app, ["launch", "job.toml", "--slurm"]).output
    assert "x\\x1b]0;y\\x07, " in shown
    assert "\x1b" not in shown
