"""Contests of speed, for people and for scripts."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fivefold.plan.kernels import Device
from fivefold.prove.contest import Contest, Result, rows
from fivefold.prove.scaling import Core


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
        "systems": rows(result),
    }


def report(console: Console, contest: Contest, result: Result) -> None:
    console.print(_words(contest, result))
    headings = ("system", "s/step", "range", "of single", "of bare", "loss")
    lines = [
        (
            line["system"],
            f"{line['seconds']:.3f}",
            f"{line['fastest']:.3f}-{line['slowest']:.3f}",
            *("" if line[key] is None else f"{line[key]:.3f}" for key in ("of_its_single", "of_bare")),
            f"{line['losses'][0]:.4f}",
        )
        for line in rows(result)
    ]
    console.print(columns(headings, lines))
    console.print("of single: of the same system's step in one process; of bare: of the bare loop's; loss: the first")
    _end(console, contest, result)


def scaling_json(
    found: Sequence[tuple[Contest, Result]], lines: list[dict[str, Any]], cores: Mapping[int, Core]
) -> dict[str, Any]:
    runs = [{"ranks": one.world, "agree": result.agree, "seconds": result.seconds} for one, result in found]
    reached = {ranks: _reached(core) for ranks, core in sorted(cores.items())}
    return _machine(*found[0]) | {"layouts": lines, "runs": runs} | ({"cores_by_ranks": reached} if cores else {})


def _reached(core: Core) -> dict[str, float]:
    """What the simulator knows of a core that has company."""
    device = Device.of(core.accelerator)
    link = core.accelerator.inside
    return {
        "products": device.rate("fp32"),  # FLOP/s
        "stream": device.bandwidth,  # bytes/s
        "link": link.bandwidth,
        "latency": link.latency,  # seconds
        "launch_block": core.host,
    }


def report_scaling(
    console: Console, found: Sequence[tuple[Contest, Result]], lines: list[dict[str, Any]], simulates: bool
) -> None:
    console.print(_words(*found[0]))
    headings = ("layout", "ranks", "one process", "step", "speed-up", "efficiency")
    cells = [
        (
            line["layout"],
            str(line["ranks"]),
            *(f"{line[key]:.3f} s" for key in ("one_process_seconds", "seconds")),
            f"{line['speed_up']:.2f}",
            f"{line['efficiency']:.0%}",
            *([f"{line['predicted_seconds']:.3f} s", f"{line['predicted_speed_up']:.2f}"] if simulates else []),
        )
        for line in lines
    ]
    console.print(columns((*headings, *(["simulated", "speed-up"] if simulates else [])), cells))
    _end(console, *max(found, key=lambda one: (not one[1].agree, one[0].world)))


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
    return f"{size}; {batch} tokens, {job.train.dtype}, AdamW\n{machine}; {contest.rounds} rounds in turns, medians"


def _end(console: Console, contest: Contest, result: Result) -> None:
    how = "[green]agree[/]" if result.agree else "[bold red]differ[/]"
    spread = max(result.spread(system) for system in contest.systems)
    noise = f"the slowest round of a system takes up to {spread:.2f} times its fastest"
    console.print(f"the losses of the first two steps {how}; {noise}")
    if contest.world > result.cores:
        console.print(f"{contest.world} ranks share {result.cores} cores: no speed-up beyond that can be seen here")
