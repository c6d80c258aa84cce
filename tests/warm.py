"""What every rank and command would do for the first time, done once in the server that forks them.

PyTorch prepares an operation when it is first called, and typer imports when it first reads an argument: a fourth of
the CPU time of ranks that live for two steps, and half of that of a command that prints a table. The server imports
this last; tests/conftest.py says so.
"""

import tempfile
from functools import cache
from pathlib import Path

import torch
import typer.main
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.launch.processes import Rank
from fivefold.launch.supervisor import forkable
from fivefold.verifier.rank import measure
from fivefold.verifier.reference import write_reference
from tests.commands import HAS_GPU
from tests.verifier.cases import job


def _two_steps(dtype: str) -> None:
    with tempfile.TemporaryDirectory() as home:
        alone, reference = Rank(0, 1, Path(home)), Path(home, "reference")
        write_reference(alone, job("dp=1", dtype=dtype), reference)
        measure(alone, job("dp=1", dtype=dtype), reference)


CliRunner().invoke(app, ["list", "models"])
typer.main.get_command = cache(typer.main.get_command)
typer.main.get_command(app)  # the tree of all commands
if not HAS_GPU:  # autograd starts a thread for each GPU, and a process with threads is not forked
    torch.set_num_threads(1)
    with torch.random.fork_rng([]):
        for dtype in ("float64", "float32", "bfloat16"):
            _two_steps(dtype)
assert forkable()
