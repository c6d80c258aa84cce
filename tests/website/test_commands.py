"""The commands of the documentation run as they are written, page by page, in a directory that has what they name.

The README, the guide, CONTRIBUTING and docs/others.md have tests of their own.
"""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner
from website.pages import DOCS, commands, fences, read, sources

from fivefold.cli import app
from fivefold.layout.layout import Layout
from fivefold.support.errors import UserError
from tests import commands as real

ELSEWHERE = {
    "README.md": "tests/test_readme.py",
    "docs/tour.md": "tests/test_readme.py",
    "docs/guide.md": "tests/test_guide.py",
    "docs/finetune.md": "tests/test_finetune.py",
    "docs/others.md": "tests/foreign/test_from_the_shell.py",
    "docs/plugins.md": "tests/plugins",  # with the packages of examples/plugins
    "docs/nccl.md": "tests/gpu",
}
PAGES = [page for page in sources() if page.startswith(DOCS) and page not in ELSEWHERE and commands(read(page))]

TEXTBOOK = "docs/learn/"  # tests/test_learn.py runs its other commands, and holds what they print
# Commands that compute at once, and start no ranks: they run in `make test`.
CHEAP = ("draw", "list", "lab", "compare schedules", "compare zero")
# What makes the others small, and leaves them the same command: the first that fits. An option comes last.
SMALLER = {
    "lab check": None,  # tests/labs
    "lab bench": None,
    "ui": None,  # tests/browser
    "bench": None,  # tests/bench
    "calibrate": None,  # tests/machines
    "accuracy --coverage --write": None,  # would change the ranges of plans
    "accuracy": ["--json"],
    "train examples": ["--check", "--fresh"],
    "train": ["--check"],
    "verify --all": ["--world", "2", "--sample", "2"],
    "verify --curve": ["train.batch=4", "data.seq=32", "train.steps=2", "model.layers=1"],
    "trace": ["train.batch=8", "data.seq=32"],
    "generate": ["-n", "4"],
}
LEFT_OUT = {
    r"s3://": "tests/extras",
    r"--submit": "tests/cluster, on a Slurm",
    r"mine\.toml": "calibrate, which measures this machine, writes it",
    r"ranks\.toml": "calibrate, which measures this machine, writes it",
    r"checkup\.(toml|json)": "checkup, which measures this machine, writes it",
    r"my-runs/": "CSV files of the reader's",
    r"runs/before": "two runs of the reader's: tests/trainer/test_compare_runs.py",
    r"Llama-3\.2-1B|runs/llama": "weights of others: tests/checkpoint/test_hf.py",
    r"\.parquet": "data of the reader's",
    r"sweep\.json": "tests/web/test_report.py",
    r"dryrun .*(405b|deepseek-v3|70b)": "a minute each: tests/dry has smaller ones",
    r"^compare cp --lengths|accuracy --sweeps|^compare mixed llama3-70b": "minutes: tests/accuracy, tests/planner",
    r"train job.toml model=tiny": "tests/clusters",
}


def kept(line: str) -> bool:
    """Whether a command is to be run here."""
    name = next((one for one in SMALLER if line.startswith(one)), "")
    left_out = any(re.search(pattern, line) for pattern in LEFT_OUT)
    return not left_out and (not name or SMALLER[name] is not None)


def lines(page: str, *, cheap: bool) -> list[list[str]]:
    found = [words for words in commands(read(page)) if kept(" ".join(words))]
    return [words for words in found if " ".join(words).startswith(CHEAP) == cheap]


def refused(page: str) -> set[str]:
    """The commands whose quoted answer is an error."""
    blocks = (fence.text for fence in fences(read(page)))
    return {line for block in blocks for line in re.findall(r"^\$ fivefold (.+)\nerror: ", block, re.M)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if lines(page, cheap=True)])
def test_commands_without_ranks_run_as_a_page_has_them(page: str, folder: Path) -> None:
    runner = CliRunner()
    runner.invoke(app, shlex.split("draw 1f1b --pp 2 -m 2 -o tiny.txt"))
    runner.invoke(app, shlex.split("draw 1f1b --pp 4 -m 8 -o mine.txt"))
    for words in lines(page, cheap=True):
        done = runner.invoke(app, words)
        assert done.exit_code == 0, (words, done.output, done.exception)


@pytest.mark.parametrize("page", PAGES)
def test_errors_are_those_that_a_page_quotes(page: str, folder: Path) -> None:
    for fence in fences(read(page)):
        for line, said in re.findall(r"^\$ fivefold (.+)\n((?:error: .+\n)+)", fence.text, re.M):
            if line.startswith("train runs/"):
                continue  # of a run that has been resumed: tests/job/test_continuing.py
            done = CliRunner().invoke(app, shlex.split(line))
            assert isinstance(done.exception, UserError), line
            assert [f"error: {problem}" for problem in done.exception.problems] == said.splitlines()


def test_what_is_left_out_is_there() -> None:
    """A reason without a command would hide the next one that fits it."""
    every = [" ".join(words) for page in PAGES for words in commands(read(page))]
    assert [pattern for pattern in LEFT_OUT if not any(re.search(pattern, line) for line in every)] == []
    assert [name for name in SMALLER if not any(line.startswith(name) for line in every)] == []


JOB = "model=tiny data.seq=32 train.batch=8 train.steps=8 train.eval_samples=0 checkpoint.every=1"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a job, two runs, a schedule and some text."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "examples").symlink_to(Path(__file__).parents[2] / "examples")
    (folder / "essays").mkdir()
    (folder / "essays" / "one.txt").write_text("An essay of a few words. " * 400)
    for name, more in (("demo", ""), ("job", ""), ("moe", "model=tiny-moe")):
        line = f"train {JOB} run.name={name} {more}"
        done = real.fivefold(*line.split(), cwd=folder, timeout=300)
        assert done.returncode == 0, done.stderr
    (folder / "job.toml").write_text((folder / "runs" / "job" / "job.toml").read_text())
    real.fivefold(*["draw", "1f1b", "--pp", "2", "-m", "2", "-o", "tiny.txt"], cwd=folder)
    real.fivefold(*["draw", "1f1b", "--pp", "4", "-m", "8", "-o", "mine.txt"], cwd=folder)
    return folder


def whole(words: list[str]) -> list[str]:
    """A command for a job that fits: its layout has the ranks of --nproc, or --nproc those of the layout."""
    words = [word for word in words if word != "..."]
    layouts = [word.removeprefix("layout=") for word in words if word.startswith("layout=")]
    if words[0] == "launch":  # the job of several nodes
        return [*words, "layout=dp=64", "train.batch=64", "run.cluster=8x8xH100"]
    if words[0] != "train" or "examples/demo.toml" in words or "examples/moe.toml" in words:
        return words
    if "--nproc" in words and not layouts:
        tp = 2 if any("fixed=tp=2" in word for word in words) else 1
        return [*words, f"layout=dp={int(words[words.index('--nproc') + 1]) // tp},tp={tp}"]
    if layouts and "--nproc" not in words:
        return [*words, "--nproc", str(Layout.parse(layouts[-1]).world)]
    return [*words, "train.steps=200"] if any(word.startswith("trace.") for word in words) else words


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if lines(page, cheap=False) and not page.startswith(TEXTBOOK)])
def test_every_command_of_a_page_runs(page: str, workplace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"  # what a page writes is not there for the next
    shutil.copytree(workplace, folder, symlinks=True)
    for words in lines(page, cheap=False):
        line = " ".join(words)
        if line in refused(page):
            continue  # the test above
        more = next((given for name, given in SMALLER.items() if line.startswith(name) and given), [])
        done = real.fivefold(*whole(words), *more, cwd=folder, timeout=600)
        wanted = int("does not fit: rank" in done.stdout)  # which a dry run may find
        assert done.returncode == wanted, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
