"""A command within its limit: nothing of it is left."""

import sys
import time
from pathlib import Path

import pytest

from fivefold.checkup.command import run_command, session_members


def test_what_it_printed_and_how_it_ended_is_told() -> None:
    code = "import os, sys; print(os.environ['SOME'], 'HOME' in os.environ); print('no', file=sys.stderr); sys.exit(3)"
    end = run_command([sys.executable, "-c", code], {"SOME": "thing", "HOME": None}, limit=60)
    assert (end.code, end.out, end.err, end.in_time) == (3, "thing False\n", "no\n", True)


@pytest.mark.parametrize("stubborn", [False, True])
def test_at_its_limit_all_of_its_processes_end(tmp_path: Path, stubborn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.checkup.command._GRACE_S", 0.2)
    ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if stubborn else "pass"
    # The child leads a process group of its own, as ranks do.
    code = f"""
import os, pathlib, signal, time
{ignores}
if not os.fork():
    os.setpgid(0, 0)
pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()
time.sleep(600)
"""
    end = run_command([sys.executable, "-c", code], {}, limit=600, cancelled=lambda: len(list(tmp_path.iterdir())) == 2)
    assert end.code is None
    assert not end.in_time
    pids = [int(file.name) for file in tmp_path.iterdir()]
    deadline = time.monotonic() + 30
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(") ")[2][:1] != "Z"
    except OSError:
        return False


def test_members_of_a_session_are_read_from_proc(tmp_path: Path) -> None:
    for pid, line in {"7": "7 (a b) c) S 1 7 9 0", "8": "8 (x) Z 1 7 9 0", "9": "9 (x) S 1 9 1 0", "10": "no"}.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "stat").write_text(line)
    assert session_members(9, tmp_path) == [7]
