"""python tools/keep.py NAME COMMAND...: runs a command and keeps its transcript in proofs/NAME.txt.

A transcript says what was run, when, on which commit and machine, what it printed, how long it took and how it ended. A
run that fails leaves proofs/NAME.failed.txt, which git ignores, and does not replace the last transcript that holds.
"""

import os
import platform
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "proofs"


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def head(command: list[str]) -> str:
    """What a reader needs to run it again, and to judge whether it still says something of today's code."""
    system = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
    changed = " and changes that were not committed" if git("status", "--porcelain", "--", "src", "tests") else ""
    lines = {
        "command": shlex.join(command),
        "date": datetime.now(UTC).isoformat(" ", "seconds"),
        "commit": (git("rev-parse", "HEAD") or "none") + changed,
        "machine": f"{system}, Python {platform.python_version()}",
    }
    return "".join(f"{name}: {value}\n" for name, value in lines.items()) + "\n"


def keep(name: str, command: list[str], folder: Path = FOLDER) -> int:
    """Run, show and keep; the command's exit code."""
    folder.mkdir(exist_ok=True)
    failed, held = folder / f"{name}.failed.txt", folder / f"{name}.txt"
    start = time.monotonic()
    with failed.open("w") as file:
        file.write(head(command))
        # Piped, so that nothing is cut to a terminal's width.
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            file.write(line)
        code = process.wait()
        file.write(f"\nexit code {code} after {time.monotonic() - start:.0f} s\n")
    if code == 0:
        failed.replace(held)
    return code


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(keep(sys.argv[1], sys.argv[2:]))
