"""make recipes: dry-runs every job of recipes/, and holds it against its first comment.

    python tools/recipes.py              the first and the fullest pipeline rank of each, as the trainer would run them
    python tools/recipes.py --write      writes what the planner says now: first comments, steps between checkpoints

A recipe's first comment has what the planner expects of it: tokens/s, MFU, seconds of a step, memory of the fullest
rank. It holds if the dry run needs that memory, within TOLERANCE, and sends what was planned. tests/test_recipes.py
compares the comment with the planner in every `make test`.
"""

import re
import sys
from pathlib import Path
from typing import Literal

from msgspec import structs

from fivefold.dry.run import dryrun
from fivefold.job.config import Job
from fivefold.job.reading import read_job
from fivefold.job.toml_writer import comment
from fivefold.planner.failure_costs import failures_of
from fivefold.planner.goodput import GoodputRun
from fivefold.planner.option import Option
from fivefold.planner.plan import simulate
from fivefold.planner.training import expected_text, interval_reason

FOLDER = Path(__file__).parent.parent / "recipes"
TOLERANCE = 0.05  # of the planned memory: activations are within 3% on GPUs, within 11% on CPUs; state is exact
FIRST = re.compile(r"\A(?:#[^\n]*\n)*?#[^\n]*planned\.\n")  # the first comment, which may be several lines
SAVES = re.compile(r"(?<=\[checkpoint\]\n)(?:#[^\n]*\n)*every = [^\n]*\n")


def planned(job: Job) -> Option:
    """The job as it is, on the cluster that it names."""
    return simulate(job, job.layout).option


def first_comment(job: Job) -> str:
    return "".join(
        f"{line}\n" for line in comment(f"{job.model.name} on {job.run.cluster}: {expected_text(planned(job))}")
    )


def saves(job: Job) -> str:
    """How often it is saved, and why."""
    option = planned(job)
    run = GoodputRun(job.train.steps, option.seconds, 0, failures_of(option, timeout=job.train.timeout))
    return "".join(f"{line}\n" for line in [*comment(interval_reason(option, run)), f"every = {run.best}"])


def write(file: Path) -> None:
    job, text = read_job(file), FIRST.sub("", file.read_text())
    file.write_text(first_comment(job) + SAVES.sub(saves(job), text))


def shorter(job: Job) -> Job:
    """The same step with fewer microbatches: after two for each pipeline rank, those in flight are no more."""
    count, least = job.layout.microbatches, max(2, 2 * job.layout.pp)
    if count <= least or count % least:
        return job
    batch = job.train.batch // count * least
    layout, train = structs.replace(job.layout, microbatches=least), structs.replace(job.train, batch=batch)
    return structs.replace(job, layout=layout, train=train)


def check(file: Path) -> bool:
    """Run the code that would train, as the ranks that hold the most; whether it holds and sends what was planned."""
    job = read_job(file)
    run = shorter(job)
    option = planned(job)
    kernels: Literal["cpu", "cuda"] = "cpu" if option.workload.first_device.accelerator.is_cpu else "cuda"
    found = dryrun(run, stages=sorted({0, option.footprint.rank}), kernels=kernels)
    memory = max(one.device_bytes for one in found.ranks)
    near = abs(memory / option.footprint.total - 1) <= TOLERANCE
    agrees = all(one.traffic_agrees for one in found.ranks)
    holds = found.ok and near and agrees and file.read_text().startswith(first_comment(job))
    ranks = " and ".join(str(one.dry.rank) for one in found.ranks)
    print(f"{'ok' if holds else 'FAILS':5}  {file.stem}: {job.layout}", flush=True)
    sent = "as" if agrees else "not as"
    print(
        f"       rank {ranks} of {job.layout.world}, {run.layout.microbatches} microbatches: {memory / 1e9:.1f} GB, "
        f"planned {option.footprint.total / 1e9:.1f}{'' if near else f' (more than {TOLERANCE:.0%} off)'}; "
        f"traffic {sent} planned {found.advice}".rstrip(),
        flush=True,
    )
    return holds


def main() -> None:
    files = sorted(FOLDER.glob("*.toml"))
    if "--write" in sys.argv:
        for file in files:
            write(file)
    elif False in [check(file) for file in files]:
        sys.exit("some recipes do not hold")


if __name__ == "__main__":
    main()
