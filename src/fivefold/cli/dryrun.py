"""`fivefold dryrun`: the code that would train, run as any rank of any world, without data and without GPUs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fivefold.support.errors import UserError
from fivefold.support.formatting import bytes_text

if TYPE_CHECKING:
    from fivefold.dryrun.world import Kernels
    from fivefold.hardware.cluster import Cluster
    from fivefold.job.config import Job
    from fivefold.verify.dry_vs_plan import Against

_TRIED = 3  # changes that are run before none is said to do
SHORT = "Run any rank of any world, dry.  [dim]fivefold dryrun llama3-70b --layout dp=8,tp=8,zero=3,sp --batch 8[/]"


def dryrun(
    words: Annotated[list[str], typer.Argument(metavar="MODEL [KEY=VALUE ...]", help="As for `fivefold plan`.")],
    layout: Annotated[str | None, typer.Option(help="dp=128,tp=8,pp=16,...; default: the job file's.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences of a step; default: one for each microbatch.")] = None,
    seq: Annotated[
        int | None, typer.Option(help="Tokens of a sequence; default: 8192, or the model's context.")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Which rank of the world; default: 0.")] = None,
    ranks: Annotated[str, typer.Option(help="Several: 0,127,9001.")] = "",
    all_stages: Annotated[bool, typer.Option("--all-stages", help="One rank of every pipeline stage.")] = False,
    stages: Annotated[str, typer.Option(help="all: the same as --all-stages; or some: 0,3.")] = "",
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="The machines; their memory is what it must fit. Default: H100s.")
    ] = "",
    kernels: Annotated[
        Literal["cuda", "cpu"], typer.Option(help="Whose memory the backward pass keeps; cpu: as train.count on CPUs.")
    ] = "cuda",
    weights: Annotated[Path | None, typer.Option(help="A Hugging Face directory: are all weights there?")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help=".svg: memory through the step.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Run one step of one rank: the same model, layers, pipeline, FSDP2 and optimizer.

    PyTorch's fake process group gives it a world of any size, fake tensors need no
    memory. What it counts (bytes held and sent, FLOPs, messages) stands beside
    what the planner says, which it does not know.

    [dim]Examples:[/]

      fivefold dryrun llama3-70b --layout dp=8,tp=8,zero=3,sp --rank 9 --batch 8

      fivefold dryrun llama3-405b --rank 9001 --batch 2048
          --layout dp=128,tp=8,pp=16,zero=1,sp,schedule=interleaved,chunks=8,microbatches=16

      fivefold dryrun llama3-8b --layout dp=2,pp=4,zero=1,microbatches=8 --batch 16 --all-stages -o memory.svg

      fivefold dryrun job.toml --json
    """
    if output is not None and (output.suffix.lower() != ".svg" or not output.parent.is_dir()):
        raise UserError(f"{output} should be a .svg in a directory that is there")
    job = _job(words, layout, batch, seq)
    machines = _machines(cluster, job.layout.world)
    chosen = _ranks(job, rank, ranks, "all" if all_stages else stages)
    if weights is not None:
        _check_weights(job, weights)
    found = _run_all(job, chosen, machines, quiet=as_json, kernels=kernels)
    if output is not None:
        from fivefold.dryrun.picture import curve

        output.write_text(curve([one.dry for one in found], machines.groups[0].accelerator.memory))
    advice = _advice(job, found, machines)
    if as_json:
        shown = {"model": job.model.name, "layout": str(job.layout), "batch": job.train.batch, "seq": job.data.seq}
        typer.echo(json.dumps(shown | {"ranks": [one.to_dict() for one in found], "advice": advice or None}))
    else:
        _show(job, found, machines, advice, output)
    if advice:
        raise typer.Exit(1)


# ---- reading -----------------------------------------------------------------------------------------------------


def _job(words: list[str], layout: str | None, batch: int | None, seq: int | None) -> "Job":
    from msgspec import structs

    from fivefold.job.from_model import job_of
    from fivefold.layout.layout import Layout

    job, named = job_of(words[0], words[1:])
    chosen = Layout.parse(layout) if layout is not None else job.layout
    length = seq if seq is not None else (job.data.seq if "data.seq" in named else min(job.model.context, 8192))
    least = chosen.size("batch") * chosen.microbatches
    size = batch if batch is not None else job.train.batch if "train.batch" in named else least
    dtype = job.train.dtype if "train.dtype" in named or words[0].endswith(".toml") else "bfloat16"
    job = structs.replace(
        job,
        layout=chosen,
        data=structs.replace(job.data, seq=length),
        train=structs.replace(job.train, batch=size, dtype=dtype),
    )
    problems = job.problems(world=chosen.world)
    if problems:
        raise UserError(problems)
    return job


def _machines(text: str, world: int) -> "Cluster":
    from fivefold.hardware.cluster import Cluster

    machines = Cluster.read(text or (f"{world}xH100" if world <= 8 else f"{-(-world // 8)}x8xH100"))
    if text and machines.world != world:
        raise UserError(f"the layout has {world} ranks, and {machines} has {machines.world} GPUs")
    return machines


def _ranks(job: "Job", rank: int | None, ranks: str, stages: str) -> list[int]:
    """The ranks that are asked for; of pipeline ranks, the first of each."""
    given = {"--rank": rank is not None, "--ranks": bool(ranks), "--stages": bool(stages)}
    asked = [option for option, there in given.items() if there]
    if len(asked) > 1:
        raise UserError(f"{' and '.join(asked)} say different things; give one of them")
    layout = job.layout
    if stages:
        wanted = range(layout.pp) if stages == "all" else _numbers("--stages", stages, "all, or 0,3")
        outside = [stage for stage in wanted if stage >= layout.pp]
        if outside:
            raise UserError(f"--stages {outside[0]}: the pipeline ranks of {layout} are 0 to {layout.pp - 1}")
        return [layout.rank(pp=stage) for stage in wanted]
    chosen = list(dict.fromkeys(_numbers("--ranks", ranks, "0,127,9001"))) if ranks else [rank or 0]
    outside = [one for one in chosen if not 0 <= one < layout.world]
    if outside:
        raise UserError(f"rank {outside[0]} is outside of {layout}; its ranks are 0 to {layout.world - 1}")
    return chosen


def _numbers(option: str, text: str, example: str) -> list[int]:
    pieces = [piece.strip() for piece in text.split(",") if piece.strip()]
    if not pieces or not all(piece.isdigit() for piece in pieces):
        raise UserError(f"{option} {text} should be numbers with commas between them, like {example}")
    return [int(piece) for piece in pieces]


def _check_weights(job: "Job", directory: Path) -> None:
    """Every parameter of the model is in the directory, in its shape; else one sentence for all that are not."""
    import msgspec

    from fivefold.checkpoint.hf import HuggingFace

    found = HuggingFace(directory)  # names what is missing or misshapen
    theirs, mine = (msgspec.to_builtins(spec) for spec in (found.spec, job.model))
    shape = [key for key in mine if key not in ("name", "context", "init_std", "dropout")]
    others = [f"{key} {theirs[key]} instead of {mine[key]}" for key in shape if theirs[key] != mine[key]]
    if others:
        raise UserError(f"{directory} holds another model than {job.model.name}: {', '.join(others)}")


# ---- running -----------------------------------------------------------------------------------------------------


def _run_all(job: "Job", chosen: list[int], machines: "Cluster", quiet: bool, kernels: "Kernels") -> "list[Against]":
    from fivefold.dryrun.run import dry_run
    from fivefold.verify.dry_vs_plan import against

    console = Console(stderr=True)
    found = []
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("dry run", total=len(chosen))
        for rank in chosen:
            progress.update(task, description=f"rank {rank} of {job.layout.world}")
            found.append(against(job, dry_run(job, rank, kernels), machines))
            progress.advance(task)
    return found


def _advice(job: "Job", found: "list[Against]", machines: "Cluster") -> str:
    """Where it does not fit: which component, where, by how much, and the cheapest change that would do."""
    memory = min(group.accelerator.memory for group in machines.groups)
    worst = max(found, key=lambda one: one.device_bytes)
    if worst.device_bytes <= memory:
        return ""
    from msgspec import structs

    from fivefold.dryrun.run import dry_run
    from fivefold.plan.search.explain import neighbours
    from fivefold.plan.search.search import evaluate
    from fivefold.verify.dry_vs_plan import against, case_of

    largest = max(worst.room.parts.items(), key=lambda part: part[1])
    stage = worst.dry.place["pp"]
    sentence = (
        f"it does not fit: rank {worst.dry.rank} (pipeline rank {stage}) needs {worst.device_bytes / 1e9:.1f} GB at "
        f"{worst.dry.peak_moment}, {(worst.device_bytes - memory) / 1e9:.1f} GB more than a device has; most of it, "
        f"{largest[1] / 1e9:.1f} GB, is {largest[0]}"
    )
    fitting = [one for one in neighbours(evaluate(case_of(job, machines))) if one.slower is not None]
    # What the planner says would fit is run, too, before it is advised.
    for one in sorted(fitting, key=lambda one: one.slower or 0.0)[:_TRIED]:
        other = structs.replace(job, layout=one.layout)
        if other.problems(world=other.layout.world):
            continue
        rank = other.layout.rank(pp=min(stage, other.layout.pp - 1))
        if against(other, dry_run(other, rank), machines).device_bytes <= memory:
            return f"{sentence}; the cheapest single change that fits: {one.change} ({one.slower:+.1%} time)"
    return f"{sentence}; no single change makes it fit: try `fivefold plan`"


# ---- showing -----------------------------------------------------------------------------------------------------


def _show(job: "Job", found: "list[Against]", machines: "Cluster", advice: str, output: Path | None) -> None:
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=120)
    console.print(
        f"{job.model.name} as {job.layout} in {job.train.dtype}: {job.train.batch} sequences of {job.data.seq:,} "
        f"tokens, {job.layout.world:,} ranks",
        soft_wrap=True,
    )
    if len(found) > 1:
        console.print(_stages(found))
    for one in found[:1] if len(found) > 4 else found:
        _show_rank(console, one)
    if advice:
        console.print(advice, style="bold red", soft_wrap=True)
    if output is not None:
        console.print(f"written to {output}")


def _show_rank(console: Console, one: "Against") -> None:
    from fivefold.train.chart import chart

    dry = one.dry
    place = ", ".join(f"{axis} {at}" for axis, at in dry.place.items())
    console.print(f"\nrank {dry.rank} ({place}), layers {'+'.join(map(str, dry.layers))}, in {dry.seconds:.1f} s")
    console.print(_figures(one), _traffic(one))
    agrees = "as the schedule says" if dry.live == dry.allowed else f"and the schedule says {dry.allowed}"
    console.print(f"microbatches that wait for their backward pass: {dry.live} at most, {agrees}")
    console.print(f"GB through the step; the peak is in {dry.peak_moment}")
    for line in chart([moment.peak / 1e9 for moment in dry.moments], {}, height=8):
        console.print(line, no_wrap=True)


def _figures(one: "Against") -> Table:
    table = Table()
    for name in ("", "dry run", "planner", "difference"):
        table.add_column(name, justify="left" if not name else "right")
    for figure in one.figures:
        scale = 1e9 if figure.unit == "GB" else 1e12
        same = "the same" if figure.dry == figure.plan else f"{figure.difference:+.2%}"
        table.add_row(figure.name, *(f"{x / scale:,.3f} {figure.unit}" for x in (figure.dry, figure.plan)), same)
    return table


def _traffic(one: "Against") -> Table:
    table = Table()
    for name in ("axis", "ranks", "collective", "calls", "payload", "wire", "planner"):
        table.add_column(name, justify="left" if name in ("axis", "collective") else "right")
    planned: dict[tuple[str, str], Any] = {(row.axis, row.kind): row for row in one.planned}
    for row in one.dry.traffic:
        other = planned.pop((row.axis, row.kind), None)
        same = "the same" if other == row else "none" if other is None else f"{other.calls} calls, {other.payload} B"
        sent = (f"{row.calls:,}", bytes_text(row.payload), bytes_text(float(row.wire)))
        table.add_row(row.axis, f"{one.ranks.get(row.axis, '')}", row.kind, *sent, same)
    for other in planned.values():
        table.add_row(other.axis, "", other.kind, "0", "", "", f"{other.calls} calls, {other.payload} B")
    return table


def _stages(found: "list[Against]") -> Table:
    table = Table(title="Stages")
    for name in ("rank", "stage", "layers", "parameters", "state", "activations", "peak", "at", "planner's peak"):
        table.add_column(name, justify="right")
    for one in found:
        dry = one.dry
        state = dry.parameters + dry.gradients + dry.optimizer
        sizes = (dry.parameters, state, dry.activations, dry.peak)
        peak = next(figure for figure in one.figures if figure.name == "peak")
        cells = [str(dry.rank), str(dry.place["pp"]), "+".join(map(str, dry.layers))]
        cells += [f"{size / 1e9:.2f} GB" for size in sizes]
        table.add_row(*cells, dry.peak_moment, f"{peak.difference:+.1%}")
    return table
