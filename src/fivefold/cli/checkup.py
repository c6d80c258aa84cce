"""`fivefold checkup`: prove and measure machines in a first hour."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.options import RunWords, command_line, split_job_and_changes
from fivefold.render.blocks import check_writable, console_of, show
from fivefold.support.errors import UserError
from fivefold.support.files import write

if TYPE_CHECKING:
    from fivefold.checkup.parts import Budget
    from fivefold.checkup.run import Done
    from fivefold.checkup.tasks import TypedJob
    from fivefold.launch.world import World

CHECKUP = "Prove and measure your machines in a first hour.  [dim]fivefold checkup -o checkup[/]"
_Minutes = Annotated[float, typer.Option(help="Minutes for the whole; every part has a share of it.")]
_Nproc = Annotated[int | None, typer.Option(help="Ranks to start on this machine; default: one for each GPU.")]
_Skip = Annotated[str, typer.Option(help="Parts to leave out: machines,proofs,lost-rank,calibration,layouts.")]
_Output = Annotated[
    Path,
    typer.Option("--output", "-o", help="Name of the files: NAME.json, NAME.html, and NAME.toml, the cluster."),
]


def checkup(
    job: RunWords = None,
    minutes: _Minutes = 10.0,
    nproc: _Nproc = None,
    skip: _Skip = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the parts and their time limits.")] = False,
    names: Annotated[bool, typer.Option("--names", help="Keep the names of hosts and users in the files.")] = False,
    output: _Output = Path("checkup"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Examine machines, prove layouts, kill a rank on purpose, calibrate, and train what the planner chooses.

    Start it as a job will be started: under srun or torchrun, where it joins the
    ranks that they started, or by itself on one machine; on a laptop it is a
    rehearsal over gloo. It runs doctor, verify, train and calibrate one after the
    other, each within its share of --minutes. A part that fails or runs out of
    time is reported, and the next one begins. Predicted steps, memory and exposed
    communication are shown beside the measured ones, before and after the
    calibration.

    It writes NAME.json, which `fivefold accuracy --data` reads, NAME.html, one
    page to send to others, and NAME.toml, the calibrated cluster for the planner.
    Host names, user names and folders are left out of them. Settings are those of
    a job: train.share_gpu=nccl lets ranks share a GPU over NCCL; a model in them
    is what the layouts train. Exit code 0 if everything passed, 1 if something
    was found.

    [dim]Examples:[/]

      fivefold checkup --dry-run

      fivefold checkup -o laptop --minutes 5

      fivefold checkup --nproc 4 train.share_gpu=nccl -o h200

      srun -N2 --ntasks-per-node=8 fivefold checkup run.dir=/shared/runs -o checkup

      torchrun --nproc-per-node 8 -m fivefold checkup job.toml

      fivefold accuracy --data checkup.json
    """
    from fivefold.checkup.parts import Budget, check_minutes, chosen_parts
    from fivefold.checkup.tasks import TypedJob
    from fivefold.job.reading import read_job
    from fivefold.launch.world import current_world
    from fivefold.trainer.start import check_ranks

    budget = Budget(check_minutes(minutes), chosen_parts(skip))
    world = current_world()
    check_ranks(nproc, world)
    path, changes = split_job_and_changes(job)
    read = read_job(path, changes)
    own_model = bool(path) or any(change.startswith("model") for change in changes)
    base = TypedJob(read, tuple(job or ()), own_model)
    if world.joined and world.size > 1 and world.rank:
        if not dry_run:
            from fivefold.checkup.run import Stopping, stopping_signals
            from fivefold.checkup.team import follow

            try:
                with stopping_signals():  # the command under way ends with its rank
                    follow(base, world)
            except Stopping as stop:
                raise typer.Exit(stop.code) from None
        return
    files = _files(output)
    done = _checkup(base, budget, world, nproc, files[".toml"].name, dry_run=dry_run, names=names, as_json=as_json)
    if done is None:
        return
    _write(done, files, as_json=as_json)
    if done.code:
        raise typer.Exit(done.code)
    if not done.report.ok:
        raise typer.Exit(1)


def _files(output: Path) -> dict[str, Path]:
    """The files of -o, which is a name without a suffix, or with one of theirs."""
    suffixes = (".json", ".html", ".toml")
    if output.suffix and output.suffix not in suffixes:
        raise UserError(f"-o {output} is a name for {', '.join(suffixes)}; nearest: -o {output.stem}", "output.kind")
    stem = output.with_suffix("") if output.suffix else output
    files = {suffix: stem.with_name(stem.name + suffix) for suffix in suffixes}
    for suffix, file in files.items():
        check_writable(file, suffix)
    return files


def _checkup(
    base: "TypedJob", budget: "Budget", world: "World", nproc: int | None, cluster_file: str, *,
    dry_run: bool, names: bool, as_json: bool,
) -> "Done | None":  # fmt: skip
    """Run it, or list what it would do."""
    from fivefold.checkup.devices import Devices, look_at_devices, ranks_here
    from fivefold.checkup.result import CheckupPlan
    from fivefold.checkup.run import run_checkup
    from fivefold.checkup.team import Here, Launched, Team
    from fivefold.launch import processes
    from fivefold.launch.local import check_sharing

    console = console_of(stderr=True)
    devices: Devices
    [devices] = processes.run(1, f"{look_at_devices.__module__}:look_at_devices", base.job.train.device, timeout=120)
    launched = world.joined and world.size > 1
    ranks = world.size if launched else nproc or ranks_here(devices)
    if not launched:
        check_sharing(base.job.train, ranks)
    plan = CheckupPlan(budget, f"{ranks} rank{'s' * (ranks != 1)} on {devices.name}")
    if dry_run:
        show(plan, as_json=as_json)
        return None
    if not as_json:
        for line in str(plan).splitlines():
            console.print(line, markup=False)
    budget.start = budget.clock()
    team: Team = Launched(base, world) if launched else Here(base, ranks)
    tell = lambda line: console.print(line, markup=False, style="dim")  # noqa: E731 - passed on
    return run_checkup(team, base, devices, budget, command_line(), tell, names=names, cluster_file=cluster_file)


def _write(done: "Done", files: dict[str, Path], *, as_json: bool) -> None:
    """Write the three files, and print the result."""
    from fivefold.checkup.page import to_page
    from fivefold.checkup.result import CheckupResult, report_table
    from fivefold.machines.result import speeds_to_toml
    from fivefold.render.blocks import render, width_of

    table = report_table(done.report)
    contents = {".json": json.dumps(table, indent=1) + "\n", ".html": to_page(done.report)}
    if done.cluster:
        comments = [f"Made by: {command_line()}", f"the slowest of the measured ranks; {done.report.day}"]
        contents[".toml"] = speeds_to_toml(done.cluster, comments)
    for suffix, content in contents.items():
        write(files[suffix], content)
    result = CheckupResult(done.report, tuple(f"written: {files[suffix]}" for suffix in contents))
    if as_json:
        sys.stdout.write(json.dumps(table) + "\n")
        return
    console = console_of()
    render(result.blocks(), console, width_of(console))
