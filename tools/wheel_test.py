"""make wheel-test: builds the package, installs the wheel in a clean environment without torch, runs every command.

Each command either works there or says in one sentence how to install what it needs. The wheel has nothing of the
tests, the sdist has all that git tracks, and tests run in it. pip must reach a package index.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
NEEDS = 'pip install "fivefold[train]"'

# What each command is called with. The first table's commands need no torch: they must work.
WORKS = {
    "accuracy": "",
    "checkpoint ls": "run --verify",
    "compare cp": "--seq 4096 --cp 2",
    "compare mixed": "tiny --cluster 2xCPU --slower 2 --batch 8 --seq 64 --layout pp=2,microbatches=4",
    "compare runs": "run run",
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
    "checkup": "",
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
        "lab start linear my-lab", "plan llama3-70b --cluster 8x8xH100 -o memory.svg",
        "draw zb-v --pp 4 --microbatches 8 -o zb-v.svg",
        "draw mesh --layout dp=2,tp=4 --cluster 8xH100 -o mesh.svg")  # fmt: skip
WRITTEN = ("memory.svg", "zb-v.svg", "mesh.svg", "draw.html", "plan.html", "run.html", "job.sbatch")

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


# What a type checker reads of an installed package.
TYPED = """
import fivefold as ff
reveal_type(ff.plan("tiny", "2xCPU"))
"""
# Tests that need no ranks: of what is packed, what is imported, and what the planner's data files say.
OF_THE_SDIST = (
    "tests/test_package.py",
    "tests/test_layers.py",
    "tests/test_recipes.py",
    "tests/spec",
    "tests/hardware",
)


def run(*words: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True, env=os.environ | env)


def must(*words: str | Path, cwd: Path, **env: str) -> str:
    done = run(*words, cwd=cwd, **env)
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


def contents(folder: Path) -> None:
    """What is in the wheel, and whether the sdist has all that git tracks."""
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    files = {entry.filename: entry.compress_size for entry in zipfile.ZipFile(wheel).infolist()}
    print(f"wheel {wheel.stat().st_size / 1e6:.1f} MB, {len(files)} files; sdist {sdist.stat().st_size / 1e6:.1f} MB")
    packed: Counter[str] = Counter()
    for name, size in files.items():
        packed[Path(name).suffix if name.startswith("fivefold/") else "metadata"] += size
    print("of the wheel, packed: " + ", ".join(f"{size / 1e3:.0f} kB {kind}" for kind, size in packed.most_common()))
    strange = [name for name in files if not name.startswith(("fivefold/", "fivefold-")) or "/test" in name]
    if strange or "fivefold/py.typed" not in files:
        sys.exit(f"the wheel has {strange} or lacks py.typed")
    with tarfile.open(sdist) as packed_source:
        has = {name.partition("/")[2] for name in packed_source.getnames()}
        packed_source.extractall(folder / "source", filter="data")
    tracked = must("git", "ls-files", cwd=ROOT).splitlines()
    if missing := sorted(set(tracked) - has):
        sys.exit(f"the sdist lacks {missing}")
    print(f"ok     the sdist has all {len(tracked)} files of the repository")


def tests_of_the_sdist(folder: Path) -> None:
    (source,) = (folder / "source").iterdir()
    said = must(ROOT / ".venv/bin/python", "-m", "pytest", "-p", "no:cacheprovider", *OF_THE_SDIST, cwd=source,
                PYTHONPATH=str(source / "src"))  # fmt: skip
    print(f"ok     tests of the unpacked sdist: {said.splitlines()[-1]}", flush=True)


def used_from_elsewhere(binaries: Path, where: Path) -> None:
    """As a module, from Python, by a type checker and by a shell."""
    must(binaries / "python", "-m", "fivefold", "--version", cwd=where)
    print("ok     python -m fivefold")
    must(binaries / "python", "-c", API, cwd=where)
    print("ok     import fivefold as ff")
    (where / "typed.py").write_text(TYPED)
    said = run(ROOT / ".venv/bin/mypy", "--strict", "--python-executable", binaries / "python", "typed.py", cwd=where)
    if "fivefold.planner.result.PlanResult" not in said.stdout:
        sys.exit(f"a type checker does not read the package's types:\n{said.stdout}{said.stderr}")
    print("ok     mypy --strict knows what ff.plan returns")
    tab = {"_FIVEFOLD_COMPLETE": "complete_bash", "COMP_WORDS": "fivefold plan llama3-7", "COMP_CWORD": "2"}
    if run(binaries / "fivefold", cwd=where, **tab).stdout.split() != ["llama3-70b"]:
        sys.exit("a shell is not told how `fivefold plan llama3-7` goes on")
    print("ok     Tab completes llama3-70b")


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
        contents(folder / "dist")
        tests_of_the_sdist(folder / "dist")
        installed = json.loads(must(binaries / "pip", "list", "--format", "json", cwd=folder))
        print("installed: " + ", ".join(package["name"] for package in installed))
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
        if missing := [name for name in WRITTEN if not (where / name).stat().st_size]:
            sys.exit(f"nothing was written to {', '.join(missing)}")
        used_from_elsewhere(binaries, where)
        if problems:
            sys.exit(f"{problems} commands fail in an environment without torch")


if __name__ == "__main__":
    main()
