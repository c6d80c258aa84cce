"""The scripts of examples/ run as they are, in an empty directory, and stay short."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import fivefold as ff
from fivefold.job.reading import EXAMPLES_DIR as JOBS
from fivefold.job.reading import read_job
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


# Smaller models for those that start ranks or PyTorch: what is run as written is left to `make prove`.
SMALLER: dict[str, dict[str, dict[str, object]]] = {
    "dryrun.py": {"dryrun": {"changes": ["model.layers=2"]}},
    "verify.py": {"verify": {"changes": ["model.layers=2"], "steps": 1}},
}


def prepared(python: str, smaller: dict[str, dict[str, object]]) -> None:
    """Of the process that becomes the script: ff.train starts ranks without their imports."""
    sys.executable = python
    for name, given in smaller.items():
        setattr(ff, name, smaller_of(getattr(ff, name), given))


def smaller_of(function: Callable[..., object], given: dict[str, object]) -> Callable[..., object]:
    return lambda *args, **more: function(*args, **(more | given))


def test_each_example_says_what_must_be_seen() -> None:
    assert [script.name for script in SCRIPTS] == sorted(PRINTS)


@pytest.mark.parametrize(
    ("script", "smaller"),
    [
        *(pytest.param(script, SMALLER.get(script.name, {}), id=script.name) for script in SCRIPTS),
        *(pytest.param(EXAMPLES / name, {}, id=f"{name} as written", marks=pytest.mark.slow) for name in SMALLER),
    ],
)
def test_an_example_runs(script: Path, smaller: dict[str, dict[str, object]], tmp_path: Path) -> None:
    before = partial(prepared, executable(tmp_path), smaller)
    done = fivefold(module=str(script), cwd=tmp_path, timeout=600, before=before)
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
    assert (EXAMPLES / f"{name}.toml").read_text() == (JOBS / f"{name}.toml").read_text()
    assert f"--nproc {ranks}\n" in (EXAMPLES / f"{name}.toml").read_text()
    assert read_job(EXAMPLES / f"{name}.toml").problems(ranks) == []
