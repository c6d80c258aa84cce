"""`fivefold bench overhead | peers | scaling | train`: this code's speed, beside others' and beside its limits."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fivefold.errors import UserError

if TYPE_CHECKING:
    from fivefold.prove.contest import Contest, Result

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
    if path is not None and not path.parent.is_dir():
        raise UserError(f"--output {path}: there is no directory {path.parent}")
    return path


Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Keep the figures here, as JSON.", callback=_writable)
]


def overhead(changes: Changes = None, rounds: Rounds = 7, output: Output = None, as_json: AsJson = False) -> None:
    """One process: Fivefold, a bare PyTorch loop around the same model, and Hugging Face's, in turns.

    [dim]Examples:[/]

      fivefold bench overhead

      fivefold bench overhead model.layers=2 model.hidden=256 --rounds 11
    """
    from fivefold.prove.contest import ALONE, OURS, Contest, base_job

    contest = Contest(base_job(changes or []), (ALONE[0], OURS, ALONE[1]), rounds)
    _tell(contest, _measured(contest), output, as_json, "overhead")


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
    from fivefold.prove.contest import ALONE, OURS, PEERS, Contest, base_job

    if ranks < 2:
        raise UserError(f"--ranks {ranks} is no company; nearest: --ranks 2")
    ours = {
        "dp": [f"dp={ranks}"],
        "tp": [f"tp={ranks}"],
        "pp": [f"pp={ranks}", f"pp={ranks},schedule=zb-h1"],
        "cp": [f"cp={ranks}"],
        "zero": [f"dp={ranks},zero=3"],
    }
    wanted = [one.strip() for one in only.split(",") if one.strip()]
    if unknown := [one for one in wanted if one not in ours]:
        raise UserError(f"--only {unknown[0]} is not a choice; known: {', '.join(ours)}")
    systems = [ALONE[0], OURS]
    for one in wanted:
        systems += [f"{OURS} {layout}" for layout in ours[one]]
        if one in PEERS:
            systems.append(f"{PEERS[one]} {ours[one][0]}")
    contest = Contest(base_job(changes or []), tuple(systems), rounds)
    _tell(contest, _measured(contest), output, as_json, "peers")


def scaling(
    changes: Changes = None,
    ranks: Annotated[int, typer.Option(help="The most; halves of it are measured, too.")] = 2,
    rounds: Rounds = 3,
    batch: Annotated[int, typer.Option(help="Sequences of a step, whatever the number of ranks.")] = 16,
    only: Annotated[str, typer.Option(help="Some of dp,tp,pp,cp,3d, with commas.")] = "dp,tp,pp,cp,3d",
    accelerator: Annotated[
        str | None, typer.Option(help="Predict for this one: a file of `fivefold calibrate --device cpu`.")
    ] = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Speed-up and efficiency of tp, dp, pp, cp and 3D layouts from one rank to many; the same batch for all.

    Beside each the simulator's word, for the machine that --accelerator describes.

    [dim]Examples:[/]

      fivefold bench scaling --ranks 2

      fivefold calibrate --device cpu -o cpu.toml && fivefold bench scaling --ranks 16 --accelerator cpu.toml
    """
    from fivefold.prove.contest import OURS, Contest, base_job
    from fivefold.prove.scaling import layouts, predicted

    if ranks < 2:
        raise UserError(f"--ranks {ranks} leaves nothing to compare; nearest: --ranks 2")
    job = base_job([f"train.batch={batch}", *(changes or [])], microbatches=batch)
    chosen = layouts(job, ranks, [one.strip() for one in only.split(",") if one.strip()])
    words = predicted(job, chosen, accelerator) if accelerator else {}
    # Each beside one process, in a run of its own: the groups of a world are made by all of its ranks.
    found = [(contest := Contest(job, (OURS, f"{OURS} {one}"), rounds), _measured(contest)) for one in chosen]
    _tell_scaling(found, words, output, as_json)


def train(
    words: Annotated[list[str], typer.Argument(metavar="MODEL|JOB [KEY=VALUE]...", help="As for train.")],
    against: Annotated[
        str, typer.Option(help="hf: Hugging Face transformers, compiled, in the same precision; none.")
    ] = "none",
    steps: Annotated[int, typer.Option(help="Timed steps; medians are shown.")] = 10,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time the trainer's own steps on this device: tokens/s, MFU (attention counted full), peak memory.

    Tokens are made up; everything else is a training step, metrics and all.
    train.deterministic=false unless it is asked for.

    [dim]Examples:[/]

      fivefold bench train llama3-8b model.layers=12 train.batch=2 data.seq=8192 --against hf

      fivefold bench train llama3.2-3b train.batch=4 data.seq=8192 train.fp8=true

      fivefold bench train job.toml --json
    """
    from fivefold.prove import bench_train
    from fivefold.prove.contest import llama

    if against not in ("none", "hf"):
        raise UserError(f"--against {against} is not a choice; known: none, hf")
    if steps < 1:
        raise UserError(f"--steps {steps} must be at least 1")
    job = bench_train.job_of(words)
    if against == "hf" and not llama(job):
        raise UserError(f"--against hf: Hugging Face's Llama is another model than {job.model.name}")
    systems = ["fivefold", *(["Hugging Face"] if against == "hf" else [])]
    with Console(stderr=True, highlight=False).status("") as status:
        timed = []
        for system in systems:
            status.update(f"{system}: compiles, warms up, and takes {steps} steps")
            timed.append(bench_train.measure(job, system, steps))
    shown = bench_train.as_json(job, timed)
    _keep(output, shown)
    if as_json:
        typer.echo(json.dumps(shown))
        return
    bench_train.report(Console(highlight=False), job, timed)


# ---- showing -----------------------------------------------------------------------------------------------------


def _measured(contest: "Contest") -> "Result":
    from fivefold.prove.contest import check, measure

    check(contest)
    with Console(stderr=True, highlight=False).status(
        f"{len(contest.systems)} systems, {contest.rounds} rounds in turns, up to {contest.world} ranks"
    ):
        return measure(contest)


def _tell(contest: "Contest", result: "Result", output: Path | None, as_json: bool, name: str) -> None:
    from fivefold.prove.contest import rows

    lines = rows(result)
    shown = _head(contest, result) | {"bench": name, "agree": result.agree, "systems": lines}
    _keep(output, shown)
    if as_json:
        typer.echo(json.dumps(shown))
        return
    console = Console(highlight=False)
    console.print(_words(contest, result))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("system", "step", "fastest", "slowest", "of its single", "of the bare loop", "first loss"):
        table.add_column(heading, justify="left" if heading == "system" else "right")
    for line in lines:
        times = (f"{line[key]:.3f} s" for key in ("seconds", "fastest", "slowest"))
        ratios = ("" if line[key] is None else f"{line[key]:.3f}" for key in ("of_its_single", "of_bare"))
        table.add_row(line["system"], *times, *ratios, f"{line['losses'][0]:.4f}")
    console.print(table)
    _end(console, contest, result)


def _tell_scaling(
    found: "list[tuple[Contest, Result]]", words: dict[str, float], output: Path | None, as_json: bool
) -> None:
    from fivefold.prove.contest import OURS

    contest, first = found[0]
    lines: list[dict[str, Any]] = []
    for one, result in found:
        text, ratio = one.systems[1].removeprefix(OURS).strip(), result.ratio(one.systems[1], OURS)
        lines.append(
            {
                "layout": text,
                "ranks": one.world,
                "one_process_seconds": result.median(OURS),
                "seconds": result.median(one.systems[1]),
                "speed_up": 1 / ratio,
                "efficiency": 1 / ratio / one.world,
                "predicted_speed_up": words.get(text),
                "agree": result.agree,
                "rounds": result.seconds,
            }
        )
    shown = _head(contest, first) | {"bench": "scaling", "layouts": lines}
    _keep(output, shown)
    if as_json:
        typer.echo(json.dumps(shown))
        return
    console = Console(highlight=False)
    console.print(_words(contest, first))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in (
        "layout",
        "ranks",
        "one process",
        "step",
        "speed-up",
        "efficiency",
        *(["simulated"] if words else []),
    ):
        table.add_column(heading, justify="left" if heading == "layout" else "right")
    for line in lines:
        said = line["predicted_speed_up"]
        cells = [f"{line[key]:.3f} s" for key in ("one_process_seconds", "seconds")]
        cells += [f"{line['speed_up']:.2f}", f"{line['efficiency']:.0%}"]
        cells += [] if not words else ["" if said is None else f"{said:.2f}"]
        table.add_row(str(line["layout"]), str(line["ranks"]), *cells)
    console.print(table)
    for one, result in found:
        if not result.agree or one.world > result.cores:
            _end(console, one, result)


def _head(contest: "Contest", result: "Result") -> dict[str, Any]:
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
        "seconds": result.seconds,
    }


def _words(contest: "Contest", result: "Result") -> str:
    job = contest.job
    size = f"{job.model.layers} layers of {job.model.hidden}, {job.model.parameter_count / 1e6:.1f}M parameters"
    batch = f"{job.layout.microbatches} microbatches of {job.train.batch // job.layout.microbatches} x {job.data.seq}"
    machine = f"torch {result.version}, {result.cores} cores of {result.machine}, {contest.threads} thread a rank"
    return f"{size}; {batch} tokens, {job.train.dtype}, AdamW\n{machine}; {contest.rounds} rounds in turns, medians"


def _end(console: Console, contest: "Contest", result: "Result") -> None:
    how = "[green]agree[/]" if result.agree else "[bold red]differ[/]"
    spread = max(result.spread(system) for system in contest.systems)
    noise = f"the slowest round of a system takes up to {spread:.2f} times its fastest"
    console.print(f"the losses of the first two steps {how}; {noise}")
    if contest.world > result.cores:
        console.print(f"{contest.world} ranks share {result.cores} cores: no speed-up beyond that can be seen here")


def _keep(output: Path | None, shown: dict[str, Any]) -> None:
    import sys

    if output is None:
        return
    command = " ".join(["fivefold", *sys.argv[1:]])
    output.write_text(json.dumps({"command": command} | shown, indent=1) + "\n")


COMMANDS = (
    (overhead, "What Fivefold adds to a bare loop.  [dim]fivefold bench overhead[/]"),
    (peers, "Against torch's own parallelisms.  [dim]fivefold bench peers --ranks 2[/]"),
    (scaling, "One rank to many.  [dim]fivefold bench scaling --ranks 4[/]"),
    (train, "Step time, MFU and memory of a job.  [dim]fivefold bench train llama3-8b[/]"),
)
