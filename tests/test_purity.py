"""The describing and planning side needs no torch and starts at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold import cli
from fivefold.spec.hf import to_hf_config
from fivefold.spec.presets import preset
from tests.layers import pure_modules
from tests.web.a_run import a_run


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_descriptions_does_not_import_torch() -> None:
    """As the layers' table says, now for real: other packages could bring torch along, too.

    All modules in one process, one after the other: the first that does is named."""
    code = f"""
import importlib, sys
for name in {pure_modules()!r}:
    importlib.import_module(name)
    brought = [m for m in ('torch', 'transformers') if m in sys.modules]
    assert not brought, (name, brought)
print('fine')
"""
    assert run(code).strip() == "fine"


def test_descriptions_work_where_torch_is_not_installed() -> None:
    """A finder that refuses torch stands in for an environment without it."""
    code = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('torch', 'tokenizers', 'safetensors', 'transformers'):
            raise ImportError(name)
sys.meta_path.insert(0, NoTorch())
from typer.testing import CliRunner
from fivefold.cli import app
helps = ('train --help', 'verify --help', 'data prepare --help')
for line in ('--help', 'list models', 'compare schedules', 'draw 1f1b --pp 2 -m 2', *helps):
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0, (line, result.output)
print('fine')
"""
    assert run(code).strip() == "fine"


SENTENCE = 'error: this needs PyTorch: pip install "fivefold[train]"\n'
# Every command, with words that bring it to what it needs; {} is a directory. What needs no torch ends with 0.
NEED_TORCH = {
    "dryrun": "tiny --layout dp=2", "train": "run.dir={}/runs", "verify": "--layout dp=2", "doctor": "run.dir={}/runs",
    "trace": "run.dir={}/runs -o {}/trace.json", "generate": "{}/hf --tokens 1,2", "calibrate": "",
    "checkpoint reshard": "{} --layout tp=2 -o {}/x", "hf import": "{}/hf -o {}/x", "hf export": "{} -o {}/x",
    "bench checkpoint": "", "bench optimizer": "tiny", "bench peers": "", "bench train": "tiny",
}  # fmt: skip
NEED_NOTHING = {
    "plan": "tiny --cluster 2xCPU --batch 8 --seq 64 --layout dp=2 --html {}/plan.html", "serve": "tiny --prompt 64",
    "goodput": "tiny", "accuracy": "--sources", "launch": "layout=dp=2 --slurm --nodes 2 -o {}/job.sbatch",
    "list models": "", "list accelerators": "", "draw": "1f1b --pp 2 -m 2 --html {}/s.html",
    "compare schedules": "", "compare zero": "tiny", "compare cp": "--seq 4096 --cp 2", "compare mixed": "--help",
    "data prepare": "{}/text.txt -o {}/tokens", "data check": "{}/tokens", "checkpoint ls": "{}/empty",
    "inspect": "{}/a-run -o {}/loss.svg --html {}/run.html", "ui": "--help",
}  # fmt: skip
ALSO_NEED_TORCH = ("verify --curve run.dir={}/runs", "bench peers --overhead", "bench peers --scaling",
                   "bench checkpoint --recovery", "bench train --cases llama3-8b")  # fmt: skip


def test_a_command_works_without_torch_or_says_in_a_sentence_that_it_needs_it(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(to_hf_config(preset("tiny"), "float32")))
    (tmp_path / "text.txt").write_text("a few words " * 100)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    lines = {**NEED_NOTHING, **NEED_TORCH}
    asked = {f"{name} {words}".replace("{}", str(tmp_path)): name in NEED_TORCH for name, words in lines.items()}
    asked |= dict.fromkeys((line.replace("{}", str(tmp_path)) for line in ALSO_NEED_TORCH), True)
    a_run(tmp_path / "a-run")
    code = f"""
import contextlib, io, sys, typer
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('torch', 'tokenizers', 'safetensors', 'transformers'):
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, NoTorch())
from fivefold import cli
def walk(group, path=()):
    for name, command in group.commands.items():
        yield from walk(command, (*path, name)) if hasattr(command, 'commands') else [' '.join((*path, name))]
assert set(walk(typer.main.get_command(cli.app))) == set({list(lines)!r})
wrong = []
for line, needs_torch in {asked!r}.items():
    sys.argv = ['fivefold', *line.split()]
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as end:
        code = end.code or 0
    said = err.getvalue()
    if code != (2 if needs_torch else 0) or (needs_torch and said != {SENTENCE!r}):
        wrong.append((line, code, said or out.getvalue()[-200:]))
print(*(wrong or ['fine']), sep='\\n')
"""
    assert run(code).strip() == "fine"


def test_an_import_that_is_a_bug_stays_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ModuleNotFoundError("No module named 'torch.nothing'", name="torch.nothing"), ImportError("torch")):

        def broken(error: ImportError = error) -> None:
            raise error

        monkeypatch.setattr(cli, "app", broken)
        with pytest.raises(ImportError) as raised:
            cli.main()
        assert raised.value is error


@pytest.mark.alone
def test_help_starts_well_under_a_second() -> None:
    """By the processor's time, the best of five, so that a busy machine does not decide; about 0.2 s on a laptop."""
    times = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, "-m", "fivefold", "--help"], check=True, capture_output=True)
        after = os.times()
        times.append(sum(after[2:4]) - sum(before[2:4]))  # of children, in user and system
    assert min(times) < 1.0, times
