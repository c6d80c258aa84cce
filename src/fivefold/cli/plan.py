"""`fivefold plan` and `fivefold simulate`: which layout, how fast, how much memory, and why not its neighbour."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from fivefold.cli.parse_args import read_cluster, read_fixed, read_model
from fivefold.support.errors import UserError
from fivefold.support.formatting import si

if TYPE_CHECKING:
    from fivefold.plan.cost.time import Case
    from fivefold.plan.search.search import Option, Plan

PLAN = "Choose a layout, and say why.  [dim]fivefold plan llama3-70b --cluster 8x8xH100[/]"
SIMULATE = "Time a layout's step.  [dim]fivefold simulate llama3-8b --layout dp=8,zero=1 --cluster 8xH100[/]"

TOKENS = 1 << 22  # of a step, where no batch is given: four million, as most large runs have had
Words = Annotated[
    list[str], typer.Argument(metavar="MODEL [KEY=VALUE ...]", help="A model, job file or config; and changes of it.")
]
ClusterText = Annotated[str, typer.Option("--cluster", "-c", help="Nodes x GPUs x accelerator, or a TOML file.")]
Batch = Annotated[int | None, typer.Option(help="Sequences of a step; default: about 4M tokens.")]
Seq = Annotated[int | None, typer.Option(help="Tokens of a sequence; default: 8192, or the model's context.")]
Precision = Annotated[str, typer.Option(help="Of matrix products: bf16, fp16, fp8, fp32; default: bf16, CPU: fp32.")]
Software = Annotated[str, typer.Option(help="Whose kernels and overlap: fivefold, nemo, torchtitan, megatron.")]
Json = Annotated[bool, typer.Option("--json", help="For scripts.")]


def plan(
    words: Words,
    cluster: ClusterText = "8xH100",
    batch: Batch = None,
    seq: Seq = None,
    layout: Annotated[str | None, typer.Option(help="Explain this layout, beside the best.")] = None,
    fix: Annotated[str, typer.Option(help="Choices that are not free: tp=8,zero=1,recompute=none.")] = "",
    by: Annotated[Literal["throughput", "memory", "pareto"], typer.Option(help="What ranks layouts.")] = "throughput",
    top: Annotated[int, typer.Option(min=1, help="How many to show.")] = 5,
    precision: Precision = "",
    software: Software = "fivefold",
    price: Annotated[float | None, typer.Option(help="Of a GPU and hour, in dollars.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A job file for `fivefold train`.")] = None,
    inference: Annotated[bool, typer.Option("--inference", help="Plan serving instead of training.")] = False,
    prompt: Annotated[int, typer.Option(help="Serving: tokens of a prompt.")] = 2048,
    answer: Annotated[int, typer.Option(help="Serving: tokens of an answer.")] = 512,
    concurrent: Annotated[int | None, typer.Option(help="Serving: sequences at a time; default: what fits.")] = None,
    ttft: Annotated[float | None, typer.Option(help="Serving: seconds to the first token, at most.")] = None,
    tpot: Annotated[float | None, typer.Option(help="Serving: seconds per token after it, at most.")] = None,
    as_json: Json = False,
) -> None:
    """Choose a layout: all are weighed, the best timed by their own schedules.

    Prints the ranking, and for the chosen layout its memory by component, its time
    by cause, its traffic by axis and link, and why each neighbour loses. Among
    layouts within 3% the simplest is chosen: published runs of one configuration
    differ by more. `fivefold truth` holds all of it against measured runs.

    [dim]Examples:[/]

      fivefold plan llama3-70b --cluster 8x8xH100

      fivefold plan llama3-405b --cluster 2048x8xH100 --batch 2048 --seq 8192

      fivefold plan llama3-8b --layout dp=8,zero=3,microbatches=16 --batch 128

      fivefold plan llama3-70b --cluster 4x8xH100+4x8xA100 --batch 256

      fivefold plan tiny --cluster 2xCPU --batch 16 --seq 128 -o plan.toml

      fivefold plan llama3-70b --cluster 8xH100 --inference
    """
    from fivefold.plan.search.advice import simplest
    from fivefold.plan.search.search import search

    if inference:
        from fivefold.cli.serve import serve

        training = {"--layout": layout, "--fix": fix, "-o": output, "--batch": batch, "--seq": seq, "--price": price}
        _refuse_training(training)
        serve(words, cluster, prompt, answer, concurrent, precision, (ttft, tpot), as_json)
        return
    _refuse_serving(ttft, tpot, concurrent)
    _check_price(price)
    _check_output(output)
    if layout is not None and fix:
        raise UserError("--layout says everything, and --fix holds choices of a search; give one of them")
    case = _case(words, cluster, batch, seq, precision, software)
    given = _given(case, layout) if layout is not None else None
    found = search(case, by, max(top, 24 if by == "throughput" else top), **read_fixed(fix))
    chosen = simplest(found.options) if by == "throughput" else found.best
    explained = given or chosen
    if output is not None:
        _write(explained, words, output)
    if as_json:
        typer.echo(json.dumps(_answer(case, found, chosen, given, top, price)))
        return
    _show(case, found.options[:top], chosen, given, found.weighed, found.fitting, price)
    if output is not None:
        Console().print(f"\nwritten to {output}: fivefold train {output} --nproc {explained.layout.world}")


def _answer(
    case: "Case", found: "Plan", chosen: "Option", given: "Option | None", top: int, price: float | None
) -> dict[str, Any]:
    """For scripts."""
    from fivefold.plan.search.explain import neighbours
    from fivefold.plan.tables import to_dict

    shown: dict[str, Any] = {
        "model": case.spec.name,
        "cluster": str(case.cluster),
        "batch": case.batch,
        "seq": case.seq,
        "software": case.stack.name,
        "weighed": found.weighed,
        "fitting": found.fitting,
        "best": to_dict(chosen, price),
        "options": [to_dict(option, price) for option in found.options[:top]],
        "neighbours": [one.to_dict() for one in neighbours(given or chosen)],
    }
    return shown if given is None else shown | {"layout": to_dict(given, price)}


def simulate(
    words: Words,
    layout: Annotated[str, typer.Option(help="dp=8,tp=8,pp=4,...")],
    cluster: ClusterText = "8xH100",
    batch: Batch = None,
    seq: Seq = None,
    precision: Precision = "",
    software: Software = "fivefold",
    output: Annotated[Path | None, typer.Option("--output", "-o", help=".svg or .png: the timeline.")] = None,
    as_json: Json = False,
) -> None:
    """Time one step of a layout on a cluster, without either: its schedule runs on a clock.

    [dim]Examples:[/]

      fivefold simulate llama3-70b --layout dp=2,tp=8,pp=4,zero=1,sp,microbatches=32 --cluster 8x8xH100 --batch 64

      fivefold simulate llama3-8b --layout pp=8,schedule=zb-v,microbatches=16 --batch 16 -o step.svg
    """
    from fivefold.plan.tables import memory, summary, times, to_dict

    if output is not None:
        _check_picture(output)
    option = _given(_case(words, cluster, batch, seq, precision, software), layout)
    simulation = option.estimate.simulation
    if output is not None:
        if simulation is None:
            raise UserError(f"{option.layout} has one pipeline stage, and so no timeline to draw; give pp=2 or more")
        from fivefold.schedule.draw import save_picture

        save_picture([simulation], output)
    if as_json:
        typer.echo(json.dumps(to_dict(option)))
        return
    console = Console(highlight=False)
    console.print(summary(option, None), soft_wrap=True)
    console.print(times(option), memory(option))
    if simulation is not None:
        from fivefold.schedule.draw import legend, to_terminal

        colour = console.color_system is not None
        if option.layout.microbatches * option.layout.pp <= 1024:
            console.print(to_terminal(simulation, console.width, colour), no_wrap=True, crop=True)
            console.print(legend([simulation], colour))
        console.print(f"bubble {simulation.bubble_makespan:.1%} of the pipeline's {simulation.makespan:.3g} s")
    if not option.fits:
        _warn(console, option)
    if output is not None:
        console.print(f"written to {output}")


# ---- reading -----------------------------------------------------------------------------------------------------


def _case(words: list[str], cluster: str, batch: int | None, seq: int | None, precision: str, software: str) -> "Case":
    """Everything that is asked, checked; the layout stays open."""
    from fivefold.layout.layout import Layout
    from fivefold.plan.cost.software import software_of
    from fivefold.plan.cost.time import Case

    job, named = read_model(words)
    machines = read_cluster(cluster)
    spec = job.model
    if wrong := spec.problems():
        raise UserError(wrong)
    length = seq if seq is not None else (job.data.seq if "data.seq" in named else min(spec.context, 8192))
    if length < 1:
        raise UserError(f"--seq {length} must be at least 1")
    if spec.positions == "learned" and length > spec.context:
        raise UserError(
            f"--seq {length} is longer than the {spec.context} learned positions of {spec.name}; "
            f"nearest: --seq {spec.context}"
        )
    size = batch if batch is not None else job.train.batch if "train.batch" in named else _usual(machines.world, length)
    if size < 1:
        raise UserError(f"--batch {size} must be at least 1")
    device = machines.groups[0].accelerator
    kind = precision or ("fp32" if device.is_cpu else "bf16")
    for group in machines.groups:
        group.accelerator.rate(kind)  # says which rates there are
    return Case(spec, Layout(), machines, length, size, kind, software_of(software, device).computing_in(kind))


def _usual(world: int, seq: int) -> int:
    """About four million tokens, and a number that deals out evenly."""
    return max(1, round(TOKENS / seq / world)) * world


def _given(case: "Case", text: str) -> "Option":
    from dataclasses import replace

    from fivefold.layout.layout import Layout
    from fivefold.plan.search.mixed import groups_of
    from fivefold.plan.search.search import weigh

    layout = Layout.parse(text)
    problems = layout.problems(case.spec, world=case.cluster.world, seq=case.seq, batch=case.batch)
    if problems:
        raise UserError([problem.replace("--nproc", "--cluster with a world of") for problem in problems])
    if alike := case.cluster.alike():
        case = replace(case, cluster=alike)
    return weigh(replace(case, layout=layout, groups=groups_of(case.cluster, layout)))


def _refuse_training(options: dict[str, Any]) -> None:
    """Serving has no use for them, and says so."""
    if extra := [option for option, value in options.items() if value]:
        raise UserError(f"{', '.join(extra)} is of training, and --inference plans serving; leave one of them out")


def _refuse_serving(*options: object) -> None:
    if any(value is not None for value in options):
        raise UserError("--ttft, --tpot and --concurrent are of serving; add --inference")


def _check_price(price: float | None) -> None:
    if price is not None and not 0 <= price < 1e6:
        raise UserError(f"--price {price:g} must be dollars per GPU and hour, zero or more")


def _check_picture(path: Path) -> None:
    from fivefold.schedule.draw import PICTURES

    if path.suffix.lower() not in PICTURES:
        raise UserError(f"{path} should end in {' or '.join(PICTURES)}")
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no directory {path.parent}")


def _check_output(path: Path | None) -> None:
    if path is None:
        return
    if path.suffix != ".toml":
        raise UserError(f"{path} should end in .toml")
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no directory {path.parent}")


def _write(option: "Option", words: list[str], path: Path) -> None:
    """The job that the option is, with everything else as the job file or the defaults say."""
    from msgspec import structs

    from fivefold.job.config import to_toml

    job, _ = read_model(words)
    case = option.case
    dtype = "bfloat16" if case.precision in ("bf16", "fp16", "fp8") else "float32"
    job = structs.replace(
        job,
        layout=option.layout,
        data=structs.replace(job.data, seq=case.seq),
        train=structs.replace(job.train, batch=case.batch, dtype=dtype),
    )
    try:
        path.write_text(to_toml(job))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


# ---- showing -----------------------------------------------------------------------------------------------------


def _show(
    case: "Case",
    options: "tuple[Option, ...]",
    chosen: "Option",
    given: "Option | None",
    weighed: int,
    fitting: int,
    price: float | None,
) -> None:
    from fivefold.plan import tables
    from fivefold.plan.search.explain import difference, neighbours

    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=150)
    console.print(
        f"{case.spec.name} ({si(case.spec.parameter_count, 4)} parameters) on {case.cluster}: {case.batch} sequences "
        f"of {case.seq:,} tokens a step, {case.precision}, {case.stack.name}; {weighed:,} layouts weighed, "
        f"{fitting:,} fit",
        soft_wrap=True,
    )
    console.print(tables.ranking(options if chosen in options else (*options, chosen), chosen))
    if chosen is not options[0] and given is None:
        faster = 1 - options[0].seconds / chosen.seconds
        console.print(
            f"{options[0].layout} is {faster:.1%} faster, which is within the noise of measured runs; "
            f"{chosen.layout} is simpler",
            soft_wrap=True,
        )
    option = given or chosen
    console.print("")
    console.print(Text(tables.summary(option, price), style="bold"), soft_wrap=True)
    if option.case.groups:
        console.print(_hosts(option), soft_wrap=True)
    console.print(tables.times(option), tables.memory(option), tables.links(option))
    if given is not None:
        if not given.fits:
            _warn(console, given)
        console.print(f"beside it, the planner's {chosen.layout} {difference(given, chosen)}", soft_wrap=True)
    if hint := _better_batch(option):
        console.print(hint, soft_wrap=True)
    console.print("Its neighbours:")
    for sentence in tables.reasons(neighbours(option)):
        console.print(f"  {sentence}", soft_wrap=True)


def _better_batch(option: "Option") -> str:
    """A batch nearby that deals out better over the GPUs, where the given one does so badly."""
    from dataclasses import replace

    from fivefold.plan.search.search import search

    case, gpus = option.case, option.case.cluster.groups[0].gpus
    unit = min(gpus, case.cluster.world)
    if case.batch % unit == 0 or case.groups:
        return ""
    near = max(unit, round(case.batch / unit) * unit)
    better = search(replace(case, batch=near), top=1).best
    gain = better.tokens_per_second / option.tokens_per_second - 1
    if gain < 0.05:
        return ""
    return (
        f"a batch of {case.batch} deals out badly over {case.cluster.world} GPUs; --batch {near} gives {gain:.0%} more "
        f"tokens/s, with {better.layout}"
    )


def _hosts(option: "Option") -> str:
    """How unlike nodes are to be numbered, so that every replica spans them."""
    names = [str(group.accelerator.name) for group in option.case.cluster.groups]
    runs = [f"{option.case.groups.count(at)} on {name}" for at, name in enumerate(names)]
    return (
        f"pipeline stages in order: {', then '.join(runs)}, with layers {','.join(map(str, option.layout.split))}; "
        "number the hosts so that each replica has its share of every group"
    )


def _warn(console: Console, option: "Option") -> None:
    from fivefold.plan.cost.footprint import HEADROOM

    room = option.footprint
    grown = max(room.parts.items(), key=lambda part: part[1])
    console.print(
        f"it does not fit: {room.total / 1e9:.1f} GB on pipeline rank {room.rank}, {grown[1] / 1e9:.1f} of them "
        f"{grown[0]}, and a plan may fill {HEADROOM * option.memory / 1e9:.1f} of {option.memory / 1e9:.1f} GB",
        style="bold red",
        soft_wrap=True,
    )
