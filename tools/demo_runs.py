"""Three small runs for the pictures of the Run view: python tools/demo_runs.py FOLDER

A pipeline of two ranks, of which one is killed on the way and starts again; the same model with a smaller learning
rate; and a mixture of experts. On two cores they take some minutes. `python tools/screenshots.py --runs FOLDER` takes
the pictures.
"""

import argparse
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

COMMON = ("data.seq=128", "train.batch=16")
DENSE = ("train.steps=240", "train.eval_every=60", "trace.steps=2")
RUNS = {
    "pipeline": ("demo.toml", "layout=pp=2,microbatches=4", *DENSE, "checkpoint.every=50", "checkpoint.keep=10"),
    "slower-rate": ("demo.toml", "layout=dp=2,zero=1", *DENSE, "optimizer.lr=1e-3", "checkpoint.every=80"),
    "moe": ("moe.toml", "layout=dp=2,ep=2", "checkpoint.every=50", "trace.steps=2"),
}
FAULTS = {"pipeline": "kill@rank=1,step=130"}  # survived: it starts again from step 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name, (job, *changes) in RUNS.items():
        words = [
            sys.executable,
            "-m",
            "fivefold",
            "train",
            str(files("fivefold") / "examples" / job),
            *COMMON,
            *changes,
        ]
        words += [f"run.dir={folder}", f"run.name={name}", "--nproc", "2", "--restarts", "1"]
        subprocess.run(words, check=True, env=os.environ | {"FIVEFOLD_FAULT": FAULTS.get(name, "")})


if __name__ == "__main__":
    main()
