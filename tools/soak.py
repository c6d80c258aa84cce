"""Random faults against small runs, and one loss curve: python tools/soak.py 1-100 --jobs 4

Each seed is a script (soak_script.py): commands that train a small model on up to four ranks in changing layouts, and
what happens to them. The losses of its run are held against those of one process that nothing happened to. How far off
they may be is measured, not chosen: three times the largest difference that layouts without faults have.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from soak_script import EVERY, LAYOUTS, STEPS, Script, ranks_of, script_of

JOB = f"""
[model]
preset = "tiny"
layers = 4
hidden = 32
heads = 4
kv_heads = 2
head_dim = 8
ffn = 48
[data]
path = "PATH"
seq = 16
[optimizer]
schedule = "constant"
warmup = 4
[train]
steps = {STEPS}
batch = 24
dtype = "float64"
device = "cpu"
eval_samples = 0
timeout = 12.0
[checkpoint]
every = {EVERY}
memory_every = 2
[watch]
digests = 1
slow_every = 5
shards = 1
[elastic]
probe = 0.5
"""
LONGEST = 900  # seconds of a command
DONE, STOPPED = 0, 143
ALLOWED = 3.0  # times the control


class Played(NamedTuple):
    script: Script
    happened: list[str]
    starts: int
    apart: float  # the largest relative difference of a step's loss; not a number if steps are missing
    problem: str
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="?", default="1-5", help="such as 7, 1-100 or 3,5,8")
    parser.add_argument("--jobs", type=int, default=1, help="seeds that are played at a time")
    parser.add_argument("--keep", type=Path, help="a directory for the runs; default: one that is deleted")
    parser.add_argument("--show", action="store_true", help="print the scripts, and play nothing")
    asked = parser.parse_args()
    seeds = [seed for word in asked.seeds.split(",") for seed in _range(word)]
    if asked.show:
        for seed in seeds:
            for segment in script_of(seed).segments:
                print(f"{seed:4}  {segment.layout:<46} {'; '.join(segment.faults)}")
        return 0
    home = asked.keep or Path(tempfile.mkdtemp(prefix="fivefold-soak-"))
    home.mkdir(parents=True, exist_ok=True)
    try:
        return soak(home, seeds, asked.jobs)
    finally:
        if not asked.keep:
            shutil.rmtree(home, ignore_errors=True)


def _range(word: str) -> range:
    first, _, last = word.partition("-")
    return range(int(first), int(last or first) + 1)


def soak(home: Path, seeds: list[int], jobs: int) -> int:
    job = _prepare(home)
    whole = _curve(home, job, "dp=1", 1)
    with ThreadPoolExecutor(jobs) as pool:
        control = max(pool.map(lambda layout: _apart(_curve(home, job, layout, ranks_of(layout)), whole), LAYOUTS))
        limit = ALLOWED * control
        print(f"{len(LAYOUTS)} layouts without faults are within {control:.1e} of one process; {limit:.1e} is allowed")
        print(f"{'seed':>4} {'faults':>6} {'starts':>6} {'apart':>8} {'s':>5}  what happened")
        played = [_told(one, limit) for one in pool.map(lambda seed: play(home, job, script_of(seed), whole), seeds)]
    bad = [one for one in played if one.problem]
    faults, starts = sum(len(one.happened) for one in played), sum(one.starts for one in played)
    ended = f"{len(played) - len(bad)} ended on the curve, {len(bad)} did not"
    print(f"{len(played)} runs, {faults} faults, {starts} starts: {ended}")
    for one in bad:
        again = f"python tools/soak.py {one.script.seed} --keep DIRECTORY"
        print(f"  seed {one.script.seed}: {one.problem}; to play it again: {again}")
    return 1 if bad else 0


def _told(one: Played, limit: float) -> Played:
    """Print a line of a run that was played, and judge it."""
    kinds = " ".join(fault.partition(",")[0].replace("@at=step", "").replace("@at=", ":") for fault in one.happened)
    print(f"{one.script.seed:4} {len(one.happened):6} {one.starts:6} {one.apart:8.1e} {one.seconds:5.0f}  {kinds}")
    problem = one.problem or ("" if one.apart <= limit else f"its curve is {one.apart:.1e} off")
    if problem:
        print(f"     WRONG: {problem}")
    sys.stdout.flush()
    return one._replace(problem=problem)


def _prepare(home: Path) -> Path:
    from fivefold.data.prepare import prepare

    tokens = home / "tokens"
    if not tokens.exists():
        text = home / "text.txt"
        text.write_text("".join(f"{n} squared is {n * n}, and its half {n / 2}.\n" for n in range(3000)))
        prepare([text], tokens)
    job = home / "soak.toml"
    job.write_text(JOB.replace("PATH", str(tokens)))
    return job


def _train(home: Path, name: str, words: list[str], **env: str) -> "subprocess.CompletedProcess[bytes]":
    """One command, in a directory of its own; what it prints is kept there."""
    folder = home / name
    folder.mkdir(exist_ok=True)
    memory = {"FIVEFOLD_MEMORY": str(folder / "memory"), "FIVEFOLD_FAULTS_SEEN": str(folder / "faults")}
    command = [sys.executable, "-m", "fivefold", "train", *words, f"run.dir={folder}", "run.name=run"]
    with (folder / "output").open("ab") as output:
        output.write(f"\n==== {env.get('FIVEFOLD_FAULT', '')}\n$ {' '.join(command[1:])}\n".encode())
        output.flush()
        return subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1", **memory, **env}, stdout=output, stderr=output,
            stdin=subprocess.DEVNULL, timeout=LONGEST,
        )  # fmt: skip


def _curve(home: Path, job: Path, layout: str, ranks: int) -> dict[int, list[float]]:
    name = "whole-" + layout.replace(",", "-").replace("=", "")
    code = _train(home, name, [str(job), f"layout={layout}", "--nproc", str(ranks)]).returncode
    if code:
        raise SystemExit(
            f"the run without faults in {layout} ended with exit code {code}: see {home / name / 'output'}"
        )
    return _losses(home / name / "run")


def _losses(run: Path) -> dict[int, list[float]]:
    """By step, every loss that is recorded of it: one."""
    found: dict[int, list[float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "step":
            found.setdefault(record["step"], []).append(record["loss"])
    return found


def _apart(found: dict[int, list[float]], want: dict[int, list[float]]) -> float:
    if list(found) != list(want) or any(len(losses) != 1 for losses in found.values()):
        return float("nan")
    return max(abs(found[step][0] / want[step][0] - 1) for step in want)


def play(home: Path, job: Path, script: Script, whole: dict[int, list[float]]) -> Played:
    name, begin, problem = f"seed-{script.seed}", time.monotonic(), ""
    shutil.rmtree(home / name, ignore_errors=True)
    for segment in script.segments:
        words = [str(job), f"layout={segment.layout}", "--nproc", str(segment.ranks), "--elastic"]
        try:
            code = _train(home, name, words, FIVEFOLD_FAULT="; ".join(segment.faults)).returncode
        except subprocess.TimeoutExpired:
            problem = f"a command did not end in {LONGEST} s"
            break
        if code not in (DONE, STOPPED):
            problem = f"a command in {segment.layout} ended with exit code {code}"
            break
    else:
        if code != DONE:
            problem = f"the last command ended with exit code {code}"
    folder = home / name
    seen = (folder / "faults").read_text().splitlines() if (folder / "faults").exists() else []
    seen = list(dict.fromkeys(seen))  # what lasts for several steps is one fault
    starts = (folder / "output").read_text(errors="replace").count("fivefold 0.")
    apart = _apart(_losses(folder / "run"), whole) if (folder / "run/metrics.jsonl").exists() else float("nan")
    if not problem:
        shutil.rmtree(folder, ignore_errors=True)
    return Played(script, seen, starts, apart, problem, time.monotonic() - begin)


if __name__ == "__main__":
    sys.exit(main())
