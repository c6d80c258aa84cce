"""The scripts of examples/ run as they are, in an empty directory, and stay short."""

from functools import partial
from pathlib import Path

import pytest

from fivefold.job.config import EXAMPLES as JOBS
from fivefold.job.config import read_job
from tests.commands import executable, fivefold

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))

# What a script must print, besides running.
PRINTS = {
    "draw.py": ("rank 3 ", "auto   bubble ", "F0"),
    "dryrun.py": ("GPUs of 80 GB", "fits"),
    "plan.py": ("8x8xH100: ", "tp=", "MFU"),
    "simulate.py": ("1f1b   ", "zb-v   ", "bubble"),
    "train.py": ("held-out loss", "the two curves differ by at most"),
    "verify.py": ("dp=2,tp=2,zero=3: holds", "pp=2,schedule=zb-h1,microbatches=4: holds"),
}


def test_each_example_says_what_must_be_seen() -> None:
    assert [script.name for script in SCRIPTS] == sorted(PRINTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_an_example_runs(script: Path, tmp_path: Path) -> None:
    quick = f"import sys; sys.executable = {executable(tmp_path)!r}"  # what ff.train starts, without its imports
    done = fivefold(module=str(script), cwd=tmp_path, timeout=600, before=partial(exec, quick, {}))
    assert done.returncode == 0, done.stderr
    for part in PRINTS[script.name]:
        assert part in done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_an_example_is_short_and_uses_the_public_names_only(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) <= 30
    assert text.startswith('"""')
    assert "import fivefold as ff\n" in text
    assert "from fivefold" not in text


@pytest.mark.parametrize(("name", "ranks"), [("demo", 8), ("moe", 4)])
def test_a_job_is_installed_and_legal_on_its_ranks(name: str, ranks: int) -> None:
    assert (EXAMPLES / f"{name}.toml").resolve() == JOBS / f"{name}.toml"
    assert f"--nproc {ranks}\n" in (EXAMPLES / f"{name}.toml").read_text()
    assert read_job(EXAMPLES / f"{name}.toml").problems(ranks) == []
