"""Contests of speed, for people and for scripts."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fivefold.bench.comparison import Contest, Result, layout_of, rows
from fivefold.bench.scaling import limit
from fivefold.hardware.accelerators import Accelerator
from fivefold.plan.cost.kernels import Device
from fivefold.support.formatting import counted


def columns(headings: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> Table:
    """A plain table; the first `left` columns are words, the others numbers. Columns that say nothing are left out."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    told = [number for number in range(len(headings)) if any(line[number] for line in lines)]
    for number in told:
        table.add_column(headings[number], justify="left" if number < left else "right", no_wrap=True)
    for line in lines:
        table.add_row(*(line[number] for number in told))
    return table


def as_json(contest: Contest, result: Result) -> dict[str, Any]:
    return _machine(contest, result) | {
        "agree": result.agree,
        "seconds": result.seconds,
        "systems": _lines(contest, result),
    }


def _lines(contest: Contest, result: Result) -> list[dict[str, Any]]:
    """With what a system of several ranks could take of its single step at best."""
    worlds = {system: layout_of(contest.job, system).world for system in contest.systems}
    limits = {system: limit(contest.job, system) if world > 1 else None for system, world in worlds.items()}
    return [line | {"limit": limits[line["system"]]} for line in rows(result)]


def report(console: Console, contest: Contest, result: Result) -> None:
    console.print(_words(contest, result))
    headings = ("system", "s/step", "slowest", "of single", "limit", "of bare", "loss")
    lines = [
        (
            line["system"],
            f"{line['seconds']:.3f}",
            f"{line['slowest']:.3f}",
            *("" if line[key] is None else f"{line[key]:.3f}" for key in ("of_its_single", "limit", "of_bare")),
            f"{line['losses'][0]:.4f}",
        )
        for line in _lines(contest, result)
    ]
    console.print(columns(headings, lines))
    bound = "; limit: that, if nothing that is sent took time (simulated)" if contest.world > 1 else ""
    console.print(
        f"of single: of its own step in one process, PyTorch's being the bare loop{bound}; of bare: of the bare loop; "
        "loss: the first"
    )
    _end(console, (contest, result))


def scaling_json(
    found: Sequence[tuple[Contest, Result]], lines: list[dict[str, Any]], cores: Mapping[int, Accelerator]
) -> dict[str, Any]:
    runs = [{"ranks": one.world, "agree": result.agree, "seconds": result.seconds} for one, result in found]
    reached = {ranks: _reached(core, ranks) for ranks, core in sorted(cores.items())}
    return _machine(*found[0]) | {"layouts": lines, "runs": runs} | ({"cores_by_ranks": reached} if cores else {})


def _reached(core: Accelerator, ranks: int) -> dict[str, float]:
    """What the simulator knows of a core that has company."""
    device, link = Device.of(core), core.inside
    alone = {
        "products": device.rate("fp32"),  # FLOP/s
        "stream": device.bandwidth,  # bytes/s
        "launch_block": device.reached.host,  # seconds
        "update": device.reached.update,
    }
    return alone | ({"link": link.bandwidth, "latency": link.latency} if ranks > 1 else {})


def report_scaling(console: Console, found: Sequence[tuple[Contest, Result]], lines: list[dict[str, Any]]) -> None:
    console.print(_words(*found[0]))
    headings = ("layout", "ranks", "alone", "step", "speed-up", "efficiency", "simulated")
    cells = [
        (
            line["layout"].partition(",microbatches=")[0],  # which the number of stages decides
            str(line["ranks"]),
            *(f"{line[key]:.3f}" for key in ("one_process_seconds", "seconds")),
            f"{line['speed_up']:.2f}",
            f"{line['efficiency']:.0%}",
            _simulated(line),
        )
        for line in lines
    ]
    console.print(columns(headings, cells))
    one = lines[0]["predicted_one_process_seconds"]
    also = "" if one is None else f"; simulated: the simulator's step, and how far off; alone it says {one:.3f}"
    console.print(f"alone: seconds of one process beside them; stages take a sequence at a time{also}")
    _end(console, *found)


def _simulated(line: dict[str, Any]) -> str:
    seconds = line["predicted_seconds"]
    return "" if seconds is None else f"{seconds:.3f} {seconds / line['seconds'] - 1:+4.0%}"


def _machine(contest: Contest, result: Result) -> dict[str, Any]:
    job = contest.job
    return {
        "parameters": job.model.parameter_count,
        "seq": job.data.seq,
        "batch": job.train.batch,
        "microbatches": job.layout.microbatches,
        "dtype": job.train.dtype,
        "rounds": contest.rounds,
        "threads_per_rank": contest.threads,
        "cores": result.cores,
        "machine": result.machine,
        "torch": result.version,
    }


def _words(contest: Contest, result: Result) -> str:
    job = contest.job
    size = f"{job.model.layers} layers of {job.model.hidden}, {job.model.parameter_count / 1e6:.1f}M parameters"
    m, size_of_one = job.layout.microbatches, job.train.batch // job.layout.microbatches
    batch = f"{f'{m} microbatches of ' if m > 1 else ''}{size_of_one} x {job.data.seq}"
    machine = f"torch {result.version}, {result.cores} cores of {result.machine}, {contest.threads} thread a rank"
    how = f"{machine}; {counted(contest.rounds, 'round')} in turns, medians"
    return f"{size}; {batch} tokens, {job.train.dtype}, AdamW\n{how}"


def _end(console: Console, *found: tuple[Contest, Result]) -> None:
    agree = all(result.agree for _, result in found)
    how = "[green]agree[/]" if agree else "[bold red]differ[/]"
    spread = max(result.spread(system) for contest, result in found for system in contest.systems)
    console.print(f"the losses of the first two steps {how}")
    if found[0][0].rounds > 1:
        console.print(f"the slowest round of a system takes up to {spread:.2f} times its fastest")
    most, cores = max(contest.world for contest, _ in found), found[0][1].cores
    if most > cores:
        console.print(f"{most} ranks share {cores} cores: no speed-up beyond that can be seen here")
