"""`fivefold bench overhead | peers | scaling | train`: this code's speed, beside others' and beside its limits."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from fivefold.support.errors import UserError
from fivefold.support.formatting import counted

if TYPE_CHECKING:
    from fivefold.bench.comparison import Contest, Result
    from fivefold.calibrate.calibrate import Samples
    from fivefold.hardware.accelerators import Accelerator

Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Changes to the model and the batch, as for train.", show_default=False
    ),
]
Rounds = Annotated[int, typer.Option(help="Steps of each; medians are shown.")]
AsJson = Annotated[bool, typer.Option("--json", help="For scripts.")]


def _writable(path: Path | None) -> Path | None:
    """Said before anything is measured."""
    if path is None:
        return None
    if not path.parent.is_dir():
        raise UserError(f"--output {path}: there is no directory {path.parent}")
    new = not path.exists()
    try:
        path.open("a").close()  # to look whether it may be written is not enough, under /proc for one
        if new:
            path.unlink()
    except OSError as error:
        raise UserError(f"--output {path}: {(error.strerror or str(error)).lower()}; name a file") from None
    return path


def _words(text: str) -> list[str]:
    """Of a list with commas, each once."""
    if not (found := list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))):
        raise UserError("--only names nothing; leave it out for all")
    return found


Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Keep the figures here, as JSON.", callback=_writable)
]


def overhead(changes: Changes = None, rounds: Rounds = 7, output: Output = None, as_json: AsJson = False) -> None:
    """One process: Fivefold, a bare PyTorch loop around the same model, and Hugging Face's, in turns.

    [dim]Examples:[/]

      fivefold bench overhead

      fivefold bench overhead model.layers=2 model.hidden=256 --rounds 11
    """
    from fivefold.bench.comparison import ALONE, OURS, Contest, base_job

    contest = Contest(base_job(changes or []), (ALONE[0], OURS, ALONE[1]), rounds)
    _compare(contest, output, as_json, "overhead")


def peers(
    changes: Changes = None,
    ranks: Annotated[int, typer.Option(help="Of every system that has several.")] = 2,
    rounds: Rounds = 5,
    only: Annotated[str, typer.Option(help="Some of dp,tp,pp,cp,zero, with commas.")] = "dp,tp,pp,cp,zero",
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """The same training step on CPU ranks: Fivefold, DDP, DTensor, FSDP2 and torch.distributed.pipelining, in turns.

    Every system is held against its own step in one process, and its first loss
    against the others'. One thread a rank.

    [dim]Examples:[/]

      fivefold bench peers

      fivefold bench peers --only tp,pp model.layers=4
    """
    from fivefold.bench.comparison import ALONE, OURS, PEERS, Contest, base_job

    if ranks < 2:
        raise UserError(f"--ranks {ranks} is no company; nearest: --ranks 2")
    ours = {
        "dp": [f"dp={ranks}"],
        "tp": [f"tp={ranks}"],
        "pp": [f"pp={ranks}", f"pp={ranks},schedule=zb-h1"],
        "cp": [f"cp={ranks}"],
        "zero": [f"dp={ranks},zero=3"],
    }
    wanted = _words(only)
    if unknown := [one for one in wanted if one not in ours]:
        raise UserError(f"--only {unknown[0]} is not a choice; known: {', '.join(ours)}")
    systems = [ALONE[0], OURS]
    for one in wanted:
        systems += [f"{OURS} {layout}" for layout in ours[one]]
        if one in PEERS:
            systems.append(f"{PEERS[one]} {ours[one][0]}")
    contest = Contest(base_job(changes or []), tuple(systems), rounds)
    _compare(contest, output, as_json, "peers")


def scaling(
    changes: Changes = None,
    ranks: Annotated[int, typer.Option(help="The most; smaller powers of two are measured, too.")] = 2,
    least: Annotated[int, typer.Option(help="And the fewest.")] = 2,
    rounds: Rounds = 3,
    batch: Annotated[
        int | None, typer.Option(help="Sequences of a step, whatever the number of ranks; 16.", show_default=False)
    ] = None,
    only: Annotated[str, typer.Option(help="Some of dp,tp,pp,cp,3d, with commas.")] = "dp,tp,pp,cp,3d",
    predict: Annotated[
        bool, typer.Option("--predict", help="Measure this machine's cores, too, and show what the simulator says.")
    ] = False,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Speed-up and efficiency of tp, dp, pp, cp and 3D layouts from one rank to many; the same batch for all.

    A rank's share of the batch is one microbatch; stages take it a sequence at a time.
    With --predict the simulator's word stands beside each: from what a core
    and its links reach while as many of them are at work.

    [dim]Examples:[/]

      fivefold bench scaling --ranks 2

      fivefold bench scaling --ranks 16 --predict
    """
    from fivefold.bench import comparison_report as contest_report
    from fivefold.bench.comparison import base_job
    from fivefold.bench.scaling import contests, layouts, rows

    if ranks < 2:
        raise UserError(f"--ranks {ranks} leaves nothing to compare; nearest: --ranks 2")
    if not any(least <= 2**power <= ranks for power in range(1, ranks.bit_length())):
        raise UserError(f"--least {least} --ranks {ranks}: no power of two is among them; nearest: --least 2")
    if batch is not None and (told := [one for one in changes or [] if one.startswith("train.batch=")]):
        raise UserError(f"--batch {batch} and {told[0]} say the same thing twice; leave one out")
    # Short sequences: one process takes seconds for a step of sixteen, and not minutes.
    sizes = [f"train.batch={16 if batch is None else batch}", "data.seq=128"]
    job = base_job([*sizes, *(changes or [])], microbatches=1)
    chosen = layouts(job, ranks, _words(only), least)
    cores: dict[int, Accelerator] = {}
    lone: list[Samples] = []  # of one core, from all over the run
    found: list[tuple[Contest, Result]] = []
    for pair in _measured(*contests(job, chosen, rounds)):
        found.append(pair)
        if predict:
            cores |= _cores(lone, pair[0].world)
        lines = rows(found, chosen, cores)
        shown = {"bench": "scaling"} | contest_report.scaling_json(found, lines, cores)
        kept = _keep(shown, output)  # after each number of ranks: who stops in the middle has what was measured
    agree = all(result.agree for _, result in found)
    _end(shown, as_json, lambda console: contest_report.report_scaling(console, found, lines), kept and agree)


def train(
    words: Annotated[list[str], typer.Argument(metavar="MODEL|JOB [KEY=VALUE]...", help="As for train.")],
    against: Annotated[
        str,
        typer.Option(
            help="Some of hf (Hugging Face transformers, compiled), fp8 (with 8-bit products), deterministic (the same "
            "bits every time), eager (not compiled), with commas."
        ),
    ] = "none",
    steps: Annotated[int, typer.Option(help="Timed steps of a turn; medians are shown.")] = 10,
    rounds: Annotated[int | None, typer.Option(help="Turns of each system; 2, or 1 if there is one only.")] = None,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Save one beside the steps, too, and show what they lose to it.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show where a step's time goes, by kind of kernel.")
    ] = False,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time the trainer's own steps on this device: tokens/s, MFU (attention counted full), peak memory.

    Tokens are made up; the rest is `fivefold train`, data, metrics and all.
    Systems take turns, each turn in a process of its own, from the same weights:
    their first losses stand beside their times.
    train.deterministic=false unless it is asked for.

    [dim]Examples:[/]

      fivefold bench train llama3-8b model.layers=12 train.batch=2 data.seq=8192 --against hf,fp8

      fivefold bench train llama3.2-3b train.batch=4 data.seq=8192 --checkpoint --profile

      fivefold bench train job.toml --json
    """
    from fivefold.bench import train as bench_train

    job = bench_train.job_of(words)
    contestants = bench_train.systems(job, against)
    turns = (2 if len(contestants) > 1 else 1) if rounds is None else rounds
    for name, number in (("steps", steps), ("rounds", turns)):
        if number < 1:
            raise UserError(f"--{name} {number} must be at least 1")
    more = bench_train.More(checkpoint, profile)
    with Console(stderr=True, highlight=False).status("") as status:
        result = bench_train.measure(contestants, steps, turns, more, status.update)
    shown = bench_train.as_json(result)
    _end(shown, as_json, lambda console: bench_train.report(console, result, profile), _keep(shown, output))


# ---- measuring and showing -------------------------------------------------------------------------------------------


def _measured(*contests: "Contest") -> "Iterator[tuple[Contest, Result]]":
    from fivefold.bench.comparison import check, measure

    for contest in contests:  # all of them before the first process starts
        check(contest)
    console = Console(stderr=True, highlight=False)
    with console.status("") as status:
        for contest in contests:
            rounds = counted(contest.rounds, "round")
            what = f"{len(contest.systems)} systems, {rounds} in turns, up to {counted(contest.world, 'rank')}"
            status.update(what)
            start = time.monotonic()
            result = measure(contest)
            console.print(f"[dim]{what}: {time.monotonic() - start:.0f} s[/]")
            yield contest, result


def _cores(lone: "list[Samples]", busy: int) -> "dict[int, Accelerator]":
    """What one reaches by itself, to which this adds a moment, and while so many are at work."""
    from fivefold.calibrate.calibrate import core_samples, usual_core

    lone += core_samples(1)
    return {1: usual_core(lone, 1), busy: usual_core(core_samples(busy), busy)}


def _compare(contest: "Contest", output: Path | None, as_json: bool, name: str) -> None:
    from fivefold.bench import comparison_report as contest_report

    ((_, result),) = _measured(contest)
    shown = {"bench": name} | contest_report.as_json(contest, result)
    fine = _keep(shown, output) and result.agree  # who computes something else is not faster
    _end(shown, as_json, lambda console: contest_report.report(console, contest, result), fine)


def _end(shown: dict[str, Any], as_json: bool, report: Callable[[Console], None], fine: bool) -> NoReturn:
    """Scripts are told, or people; then the command is over."""
    if as_json:
        typer.echo(json.dumps(shown))
    else:
        report(Console(highlight=False))
    raise typer.Exit(0 if fine else 1)


def _keep(shown: dict[str, Any], output: Path | None) -> bool:
    """Whether it is in the file that was wished for. If not, what was measured is still told."""
    if output is None:
        return True
    command = shlex.join(["fivefold", *sys.argv[1:]])
    try:
        output.write_text(json.dumps({"command": command} | shown, indent=1) + "\n")
    except OSError as error:
        Console(stderr=True).print(f"--output {output} was not written: {error.strerror}", markup=False)
        return False
    return True


COMMANDS = (
    (overhead, "What Fivefold adds to a bare loop.  [dim]fivefold bench overhead[/]"),
    (peers, "Against torch's own parallelisms.  [dim]fivefold bench peers --ranks 2[/]"),
    (scaling, "One rank to many.  [dim]fivefold bench scaling --ranks 4[/]"),
    (train, "Step time, MFU and memory of a job.  [dim]fivefold bench train llama3-8b[/]"),
)
