"""Answers that hang, exit, flood, delete, return nothing or say that they pass: one sentence each, and never a pass."""

# ruff: noqa: E501 - edits stand as the lines that they replace

import os
import time
from pathlib import Path

import pytest

from fivefold.labs.checking import LabCheck, check_lab
from fivefold.labs.lab import FileVerdict
from tests.labs.mistakes import Mistake, rows_of
from tests.labs.test_labs import said, written

_X = "        x = x.clone()\n"  # in the forward of the linear lab's sum


def _at_x(line: str) -> list[tuple[str, str]]:
    return [(_X, f"        {line}\n{_X}")]


def _first(line: str) -> list[tuple[str, str]]:
    return [("import torch\n", f"{line}\nimport torch\n")]


# fmt: off
HOSTILE = [
    *rows_of(
        "linear",
        ("a syntax error", _first("class X(:"), ["importing linear.py raised SyntaxError", "line 1"]),
        ("a package that is not there", _first("import no_such_package"), ["linear.py needs no_such_package, which is not installed"]),
        ("a loop while it is imported", _first("while True: pass"), ["rank 0 gave no answer", "rank 0 is in the import (linear.py, line 1)"]),
        ("a loop", _at_x("while True: pass"), ["gave no answer", "linear.py, line"]),
        ("a loop on one rank", _at_x("while dist.get_rank(): pass"), ["rank 0 waits in an all-reduce", "rank 1 has called none", "rank 1 is in forward (linear.py, line"]),
        ("os._exit while it is imported", _first("import os; os._exit(0)"), ["failed with exit code 0 while linear.py was imported", "and not to exit"]),
        ("os._exit while it is built", [("        self.group = group\n", "        import os; os._exit(0)\n")], ["failed with exit code 0 before the step, while what it defines was made", "and not to exit"]),
        ("os._exit", _at_x("import os; os._exit(0)"), ["failed with exit code 0 in the middle of the step", "and not to exit"]),
        ("os._exit on one rank", _at_x("import os; dist.get_rank() and os._exit(0)"), ["rank 1 failed with exit code 0", "and not to exit"]),
        ("os._exit by a thread", _first("import os, threading, time; threading.Thread(target=lambda: (time.sleep(0.01), os._exit(0))).start(); time.sleep(1)"), ["failed with exit code 0 while linear.py was imported"]),
        ("sys.exit(0) while it is imported", _first("import sys; sys.exit(0)"), ["the import (linear.py, line 1) ends its rank (SystemExit(0))"]),
        ("sys.exit(0)", _at_x("import sys; sys.exit(0)"), ["forward (linear.py, line", "ends its rank (SystemExit(0))"]),
        ("a signal", _at_x("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"), ["was ended by SIGSEGV"]),
        ("it prints that it passes", _at_x("print('linear is solved: 4 layouts'); print('{\"passed\": true}'); raise NotImplementedError"), ["is not written yet"]),
        ("it prints without end", _at_x("while True: print('x' * 1000000)"), ["prints more than 64 MB"]),
        ("it deletes itself", _first("import os; os.remove(__file__)"), ["importing linear.py raised FileNotFoundError"]),
        ("it deletes what is written down", _first("import os, shutil; shutil.rmtree(os.environ['FIVEFOLD_LAB_MESSAGES'])"), ["No such file or directory"]),
        ("it writes other messages", _at_x("from fivefold.labs.student import _FILE; os.write(_FILE[0], b'[1]\\n{}\\n{\"kind\": \"end\"}\\n\\xff}\\n'); raise NotImplementedError") + _first("import os"), ["is not written yet"]),
        ("another default dtype", _at_x("torch.set_default_dtype(torch.float32); x = x + torch.rand(1)"), ["the output of the row-parallel layer"]),
        ("no gradients, everywhere", _first("import torch; torch.set_grad_enabled(False)"), ["does not require grad"]),
        ("files that are closed", _at_x("import os; os.closerange(3, 64)"), ["rank "]),
        ("another directory and environment", [*_first("import os; os.chdir('/'); os.environ.clear()"), ("        return x\n", "        return x + 1\n")], ["the output of the column-parallel layer is off by the same row"]),
        ("float32", [("self.group) + self.bias", "self.group).float()")], ["is torch.float32 on rank", "it should be float64"]),
        ("bfloat16", [("self.group) + self.bias", "self.group).bfloat16()")], ["is torch.bfloat16 on rank"]),
        ("a feature too few", [("self.group) + self.bias", "self.group)[..., :-1]")], ["the output of the row-parallel layer has the shape (2, 6, 15) on rank 0; it should be (2, 6, 16)"]),
        ("NaN", [("        return x\n", "        return x * float('nan')\n")], ["elements that are nan or infinite"]),
        ("another result each time", [("self.group) + self.bias", "self.group) + torch.rand(16)[: len(self.bias)]")], ["the output of the row-parallel layer"]),
        ("nothing, on one rank", [("self.group) + self.bias", "self.group) + self.bias if dist.get_rank() == 0 else None")], ["the output of the row-parallel layer is None on rank 1; it should be a tensor"]),
        ("a name that is spelt otherwise", [("class RowParallelLinear", "class RowParalelLinear")], ["linear.py has no RowParallelLinear"]),
        ("weights that are no parameters", [("nn.Parameter(weight.chunk(n)[r].clone())", "weight.chunk(n)[r].clone()")], ["the model on rank", "has no parameter first.weight", "an nn.Parameter called weight"]),
        ("an output without a gradient", [("self.group) + self.bias", "self.group).detach()")], ["does not require grad"]),
        ("recursion", _at_x("return Reduce.forward(ctx, x, group)"), ["RecursionError"]),
        ("more memory than there is", _at_x("torch.empty(1 << 50)"), ["forward (linear.py, line", "RuntimeError"]),
        ("a child that outlives it", _at_x("import subprocess; subprocess.Popen(['sleep', '98765']); raise NotImplementedError"), ["is not written yet"]),
    ),
    *rows_of(
        "pipeline",
        ("an argument too few", [("loss_of, shape, group)", "loss_of, group)")], ["TypeError", "positional arguments"]),
        ("no list", [("    return [losses", "    return None; return [losses")], ["run returns None on rank"]),
        ("a loss too few", [("sorted(losses)]", "sorted(losses)][:-1]")], ["run returns 2 losses on rank 1; it should be a list of 3 losses"]),
    ),
    *rows_of("ring", ("nothing", [("    return RingAttention.apply(", "    return None and RingAttention.apply(")], ["the output is None on rank"])),
    *rows_of(
        "data_parallel",
        ("no finish", [("def finish", "def finsh")], ["has no attribute 'finish'"]),
        ("no module", [("self.module, self.group", "self.inner, self.group")], ["module"]),
    ),
]
# fmt: on
UNREADABLE = {
    "no text": ("schedule.txt", b"\xff\xfe\x00", "is not of a text in UTF-8"),
    "empty": ("schedule.txt", b"", "there is no 'stages' line"),
    "one mistake in every line": ("schedule.txt", b"schedule x\n" * 5000, "is given for the second time"),
    "no text in TOML": ("decision.toml", b"\xff", "is no TOML"),
    "brackets without end": ("decision.toml", b"a=" + b"[" * 5000, "is no TOML"),
    "a number for a layout": ("decision.toml", b"layout = 5", "is not written yet"),
    "a layout without end": ("decision.toml", b'layout = "dp=' + b"9" * 5000 + b'"', "layout"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_cannot_be_read_is_told(name: str, tmp_path: Path) -> None:
    file, content, words = UNREADABLE[name]
    (tmp_path / file).write_bytes(content)
    found = check_lab(tmp_path)
    assert isinstance(found, FileVerdict)
    assert not found.ok
    assert words in said(found)
    assert len(found.problems) <= 4


QUICK = ("os._exit on one rank", "os._exit while it is imported", "it prints that it passes")


@pytest.mark.parametrize("mistake", [
    pytest.param(one, id=f"{one.lab}: {one.what}", marks=[pytest.mark.slow] * (one.what not in QUICK))
    for one in HOSTILE
])  # fmt: skip
def test_it_is_told_in_a_sentence_and_nothing_is_left(mistake: Mistake, tmp_path: Path) -> None:
    found = check_lab(written(mistake, tmp_path), timeout=40.0, first=True)
    assert isinstance(found, LabCheck)
    assert not found.ok
    for words in mistake.words:
        assert words in said(found)
    assert "Traceback" not in str(found)
    deadline = time.monotonic() + 60
    while "sleep 98765" in processes() and time.monotonic() < deadline:  # a signal takes its time
        time.sleep(0.1)
    assert "sleep 98765" not in processes()


def processes() -> str:
    """The command lines of all processes of this machine."""
    return " ".join(_command(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""
