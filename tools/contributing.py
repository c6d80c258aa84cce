"""make contributing: follows every recipe of CONTRIBUTING.md on a scratch copy of the last commit.

A recipe is a section `### Add ...`. Its diff blocks are applied, its sh blocks are run, and the files that it changes
must be those that it lists under "Files:". So a recipe that has become wrong is found, and one that takes more files.
`python tools/contributing.py "Add a schedule"` follows that one alone.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "CONTRIBUTING.md"


def sections(text: str) -> dict[str, str]:
    """Title -> body of every recipe."""
    found = re.split(r"^### (Add .*)\n", text, flags=re.M)[1:]
    return {title: re.split(r"^##? ", body, flags=re.M)[0] for title, body in zip(found[::2], found[1::2], strict=True)}


def listed(body: str) -> list[str]:
    """The files that a recipe says it touches."""
    line = re.search(r"^Files: (.*?)\n\n", body, re.M | re.S)
    return sorted(re.findall(r"`([^`]+)`", line[1])) if line else []


def run(words: list[str] | str, cwd: Path, given: str | None = None) -> str:
    """The output of a command, or of a line of shell; the program ends where one fails."""
    env = os.environ | {"PYTHONPATH": str(cwd / "src"), "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"}
    shell = isinstance(words, str)
    done = subprocess.run(words, cwd=cwd, env=env, input=given, shell=shell, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{words} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def follow(title: str, body: str, copy: Path) -> None:
    print(f"\n{title}", flush=True)
    for kind, block in re.findall(r"^```(diff|sh)\n(.*?)^```$", body, re.M | re.S):
        if kind == "diff":
            run(["git", "apply", "--recount", "--unidiff-zero", "-"], copy, block)
            continue
        for line in block.splitlines():
            out = run(line, copy).splitlines()
            print(f"  $ {line}\n    {out[-1] if out else ''}", flush=True)
    run(["git", "add", "--all"], copy)
    touched = sorted(run(["git", "diff", "--cached", "--name-only"], copy).splitlines())
    print("  files: " + ", ".join(touched))
    if touched != listed(body):
        sys.exit(f"{title} lists {listed(body)}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        run(["git", "worktree", "add", "--quiet", "--detach", str(copy), "HEAD"], ROOT)
        try:
            recipes = sections(GUIDE.read_text())
            for title in sys.argv[1:] or recipes:
                follow(title, recipes[title], copy)
                run(["git", "reset", "--quiet", "--hard", "HEAD"], copy)
        finally:
            run(["git", "worktree", "remove", "--force", str(copy)], ROOT)


if __name__ == "__main__":
    main()
