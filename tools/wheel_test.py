"""make wheel-test: builds the package, installs the wheel in a clean environment without torch, runs every command.

Each command either works there or says in one sentence how to install what it needs. pip must reach a package index.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
NEEDS = 'pip install "fivefold[train]"'

# What each command is called with. The first table's commands need no torch: they must work.
WORKS = {
    "accuracy": "",
    "checkpoint ls": "run --verify",
    "compare cp": "--seq 4096 --cp 2",
    "compare mixed": "tiny --cluster 2xCPU --slower 2 --batch 8 --seq 64 --layout pp=2,microbatches=4",
    "compare schedules": "--pp 2 --microbatches 4",
    "compare zero": "tiny",
    "data check": "tokens",
    "data prepare": "text.txt -o tokens",
    "draw": "1f1b --pp 2 --microbatches 2 --html draw.html",
    "goodput": "tiny --cluster 2xCPU --batch 8 --seq 64",
    "inspect": "run --html run.html",
    "lab start": "schedule my-schedule",
    "launch": "layout=dp=2 --slurm --nodes 2 -o job.sbatch",
    "list accelerators": "",
    "list models": "",
    "plan": "tiny --cluster 2xCPU --batch 8 --seq 64 --html plan.html",
    "serve": "tiny --cluster 1xH100 --prompt 64",
    "ui": "--help",
}
NEED_TORCH = {
    "bench checkpoint": "",
    "bench optimizer": "tiny",
    "bench peers": "",
    "bench train": "tiny",
    "calibrate": "",
    "checkpoint reshard": "run --layout dp=2 -o other",
    "doctor": "",
    "dryrun": "tiny --layout dp=2",
    "generate": "run --prompt word",
    "hf export": "run -o other",
    "hf import": "config -o other",
    "lab bench": "my-lab",
    "lab check": "my-lab",
    "trace": "",
    "train": "",
    "verify": "--layout dp=2",
}
ALSO = ("--help", "--version", "train demo --check --nproc 8", "plan examples/demo.toml --cluster 8xCPU",
        "lab start linear my-lab")  # fmt: skip

RUN = "train run.dir=. run.name=run train.steps=1 train.batch=2 data.seq=16 model.layers=1 train.eval_samples=0"

# The commands of the program, as paths of words.
LEAVES = """
import json
from typer.main import get_command
from fivefold.cli import app
def leaves(command, path=()):
    for name, child in getattr(command, "commands", {}).items():
        yield from leaves(child, (*path, name))
    if not hasattr(command, "commands"):
        yield " ".join(path)
print(json.dumps(sorted(leaves(get_command(app)))))
"""
API = """
import sys, fivefold as ff
for name in ff.__all__:
    getattr(ff, name)
print(ff.plan("tiny", "2xCPU", batch=8, seq=64))
print(ff.draw("1f1b", pp=2, microbatches=2))
assert "torch" not in sys.modules
"""


def run(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True)


def must(*words: str | Path, cwd: Path) -> str:
    done = run(*words, cwd=cwd)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def install(folder: Path) -> Path:
    """The wheel, built from the source and installed into an environment of its own: its bin directory."""
    must(sys.executable, "-m", "venv", folder / "builder", cwd=folder)
    must(folder / "builder/bin/pip", "install", "--quiet", "build", cwd=folder)
    must(folder / "builder/bin/python", "-m", "build", "--outdir", folder / "dist", ROOT, cwd=folder)
    must(sys.executable, "-m", "venv", folder / "clean", cwd=folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    must(folder / "clean/bin/pip", "install", "--quiet", wheel, cwd=folder)
    return folder / "clean" / "bin"


def wrong(command: str, done: subprocess.CompletedProcess[str]) -> str | None:
    """What is not as it should be about a command that ran; None where all is well."""
    if "Traceback" in done.stderr:
        return "ends in a traceback"
    if done.returncode == 0:
        return None
    if command in NEED_TORCH or command.split()[0] in NEED_TORCH:
        lines = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
        told = done.returncode == 2 and len(lines) == 1 and NEEDS in lines[0]
        return None if told else f"does not say {NEEDS} in one line, with exit code 2"
    return f"ends with exit code {done.returncode}"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        binaries = install(folder)
        where = folder / "elsewhere"  # nothing of the checkout is in reach
        where.mkdir()
        (where / "text.txt").write_text("A few words to prepare. " * 100)
        # A run to look at, made with the checkout's own environment: what only reads it needs no torch.
        must(ROOT / ".venv/bin/fivefold", *RUN.split(), cwd=where)
        (where / "config").mkdir()
        leaves = json.loads(must(binaries / "python", "-c", LEAVES, cwd=where))
        cases = WORKS | NEED_TORCH
        if sorted(cases) != leaves:
            sys.exit(f"the tables of {__file__} and the commands differ in {sorted(set(cases) ^ set(leaves))}")
        problems = 0
        for command in (*ALSO, "data prepare", *(leaf for leaf in leaves if leaf != "data prepare")):
            line = f"{command} {cases.get(command, '')}".strip()
            done = run(binaries / "fivefold", *line.split(), cwd=where)
            problem = wrong(command, done)
            says = "works" if done.returncode == 0 else "says what it needs"
            print(f"{'FAILS' if problem else 'ok':5}  fivefold {line}: {problem or says}", flush=True)
            if problem:
                problems += 1
                print("\n".join(f"       {line}" for line in (done.stdout + done.stderr).splitlines()[-8:]))
        must(binaries / "python", "-c", API, cwd=where)
        print("ok     import fivefold as ff")
        if problems:
            sys.exit(f"{problems} commands fail in an environment without torch")


if __name__ == "__main__":
    main()
