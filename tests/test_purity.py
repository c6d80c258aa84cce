"""The describing and planning side needs no torch and starts at once."""

import subprocess
import sys
import time

import pytest

from tests.layers import pure_modules


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
for line in ('--help', 'models', 'schedules', 'draw 1f1b --pp 2 -m 2', 'context --seq 4096 --cp 2', *helps):
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0, (line, result.output)
print('fine')
"""
    assert run(code).strip() == "fine"


@pytest.mark.alone
def test_help_starts_well_under_a_second() -> None:
    """The best of five, so that a busy machine does not decide; about 0.2 s of CPU on a laptop."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "fivefold", "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    assert min(times) < 1.0, times
