"""`fivefold plan` and `fivefold simulate`: which layout, how fast, how much memory, and why not its neighbour."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fivefold.cli.job_args import whole_layout
from fivefold.support.dtypes import precision_of
from fivefold.support.errors import UserError

if TYPE_CHECKING:
    from fivefold.planner.result import PlanResult
    from fivefold.planner.serve import ServePlan

PLAN = "Choose a layout, and say why.  [dim]fivefold plan llama3-70b --cluster 8x8xH100[/]"
SIMULATE = "Time a layout's step.  [dim]fivefold simulate llama3-8b --layout dp=8,zero=1 --cluster 8xH100[/]"

Words = Annotated[
    list[str],
    typer.Argument(metavar="MODEL [KEY=VALUE ...]", help="A model's name, a job file or a config; and changes to it."),
]
ClusterText = Annotated[
    str | None,
    typer.Option(
        "--cluster", "-c", help="Nodes x GPUs per node x accelerator, or a TOML file; default: the job's, or 8xH100."
    ),
]
Batch = Annotated[
    int | None, typer.Option(help="Sequences per step; default: as published runs of the size, 4M tokens or more.")
]
Seq = Annotated[int | None, typer.Option(help="Tokens per sequence; default: 8192, or the model's context.")]
Precision = Annotated[
    str, typer.Option(help="Precision of matmuls: bf16, fp16, fp8, fp4, fp32; default: bf16, CPU: fp32.")
]
Software = Annotated[str, typer.Option(help="Whose kernels and overlap: fivefold, nemo, torchtitan, megatron.")]
Imbalance = Annotated[
    float | None,
    typer.Option(help="Experts: tokens of the fullest rank over the mean; default: 1.6, by published runs."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def plan(
    words: Words,
    cluster: ClusterText = None,
    batch: Batch = None,
    seq: Seq = None,
    tokens: Annotated[
        str | None, typer.Option(help="Length of the run: 1.4T, 300B; default: chinchilla, 20 per parameter.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="Explain this layout, and compare it with the best.")] = None,
    fix: Annotated[str, typer.Option(help="Choices to keep: tp=8,zero=1,recompute=none.")] = "",
    by: Annotated[Literal["throughput", "memory", "pareto"], typer.Option(help="Rank layouts by.")] = "throughput",
    top: Annotated[int, typer.Option(min=1, help="Layouts to show.")] = 5,
    precision: Precision = "",
    software: Software = "fivefold",
    imbalance: Imbalance = None,
    price: Annotated[float | None, typer.Option(help="Dollars per GPU and hour.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a job (.toml), the decision (.md, .html), a picture.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the page of this plan, one file: plan.html.")] = None,
    inference: Annotated[bool, typer.Option("--inference", help="Plan serving instead of training.")] = False,
    prompt: Annotated[int, typer.Option(help="Serving: tokens per prompt.")] = 2048,
    answer: Annotated[int, typer.Option(help="Serving: tokens per answer.")] = 512,
    concurrent: Annotated[int | None, typer.Option(help="Serving: sequences at a time; default: what fits.")] = None,
    ttft: Annotated[float | None, typer.Option(help="Serving: at most this many seconds to the first token.")] = None,
    tpot: Annotated[float | None, typer.Option(help="Serving: at most this many seconds per token after it.")] = None,
    as_json: Json = False,
) -> None:
    """Choose a layout: closed forms evaluate all layouts, and the best are timed by their own schedules.

    Prints the ranking, and for the chosen layout its memory by component, its time
    by cause, its traffic by axis and link, and why each neighbour loses. Among
    layouts within 3% the simplest is chosen: published runs of one configuration
    differ by more; tp over a network must win by 10%. A range says where time, rate and days should lie in 4 of 5
    cases. `fivefold truth` compares the planner with measured runs.

    With -o job.toml, a job for this model on this cluster is written: learning rate,
    warmup, batch and steps come from published recipes and the token budget, each with
    its source. With -o memory.svg, traffic.svg, mesh.svg or any other .svg or .png (memory
    and time) a picture is; .dark.svg and .dark.png are dark. With -o decision.md or .html
    the decision is written down for a design review: the math of the layout with its
    numbers, textbook shortcuts beside them, its neighbours, and at which memory, link and
    batch another layout wins, found by planning again. With --html plan.html, the page of
    `fivefold ui` is written with this plan in it, as one file to send.

    [dim]Examples:[/]

      fivefold plan llama3-70b --cluster 8x8xH100

      fivefold plan llama3-70b --cluster 8x8xH100 --tokens 1.4T --price 2.5 -o job.toml

      fivefold plan llama3-405b --cluster 2048x8xH100 --batch 2048 --seq 8192

      fivefold plan llama3-8b --layout dp=8,zero=3,microbatches=16 --batch 128

      fivefold plan llama3-70b --cluster 4x8xH100+4x8xA100 --batch 256

      fivefold plan qwen3-30b-a3b --cluster 2x8xH100 --imbalance 1.2

      fivefold plan tiny --cluster 2xCPU --batch 16 --seq 128 -o plan.toml

      fivefold plan llama3-70b --cluster 8x8xH100 -o memory.svg

      fivefold plan llama3-70b --cluster 8x8xH100 -o decision.md

      fivefold plan llama3-70b --cluster 8x8xH100 --html plan.html

      fivefold plan llama3-70b --cluster 8xH100 --inference

      fivefold plan deepseek-v3 --cluster 4x8xH100 --inference --precision fp8 --tpot 0.05
    """
    from fivefold.render.blocks import check_writable, show
    from fivefold.render.paint import PICTURES

    whole_layout(layout or fix, words, "--layout" if layout else "--fix")
    if inference:
        training = {"--layout": layout, "--fix": fix, "-o": output, "--batch": batch, "--seq": seq, "--price": price}
        training |= {"--tokens": tokens, "--html": html}
        _refuse(training, "belongs to training, and --inference plans serving; leave one of them out")
        show(_served(words, cluster, prompt, answer, concurrent, precision, ttft, tpot, imbalance), as_json)
        return
    _refuse({"--ttft": ttft, "--tpot": tpot, "--concurrent": concurrent}, "belongs to serving; add --inference")
    check_writable(output, ".toml", ".md", ".html", *PICTURES)
    check_writable(html, ".html", ".htm")
    from fivefold.planner import plan as planning
    from fivefold.planner.training import TWENTY

    if tokens is None and _is_job(output) and not words[0].endswith(".toml"):
        tokens = None if any(word.startswith("train.steps=") for word in words) else TWENTY
    found = planning.plan(
        words[0], cluster, changes=words[1:], batch=batch, seq=seq, layout=layout, fix=fix, by=by, top=top,
        precision=precision, software=software, price=price, tokens=tokens, imbalance=imbalance,
    )  # fmt: skip
    said = [] if output is None else [_written(found, output)]
    said += [] if html is None else [_reported(found, html)]
    show(found, as_json)
    if said and not as_json:
        typer.echo("\n" + "\n".join(said))


def _served(
    words: list[str], cluster: str | None, prompt: int, answer: int, concurrent: int | None, precision: str,
    ttft: float | None, tpot: float | None, imbalance: float | None,
) -> "ServePlan":  # fmt: skip
    from fivefold.planner.serve import serve

    return serve(
        words[0], cluster or "8xH100", changes=words[1:], prompt=prompt, output=answer, sequences=concurrent,
        precision=precision_of(precision) or "bf16", ttft=ttft, tpot=tpot, imbalance=imbalance,
    )  # fmt: skip


def _is_job(output: Path | None) -> bool:
    return output is not None and output.suffix.lower() == ".toml"


def _written(found: "PlanResult", output: Path) -> str:
    """Write what the file's name asks for; and what to say about it."""
    from fivefold.render.paint import save

    if _is_job(output):
        return _write_job(found, output)
    if output.suffix.lower() in (".md", ".html"):
        return _write_decision(found, output)
    save(found.drawn(output.stem), output)
    return f"written to {output}"


def _reported(found: "PlanResult", html: Path) -> str:
    """Write the page of the plan, as `fivefold report plan` does."""
    from fivefold.web.report import report

    return str(report(found, html, shlex.join(["fivefold", *sys.argv[1:]]))).rstrip()


def _write_decision(found: "PlanResult", output: Path) -> str:
    """Write the question, the layout with its math, its neighbours, and what would change the decision."""
    from fivefold.cli.progress import counting_bar
    from fivefold.planner.decision import decide
    from fivefold.support.files import write

    with counting_bar() as progress:
        decision = decide(found, shlex.join(["fivefold", *sys.argv[1:]]), progress)
    write(output, decision.html() if output.suffix.lower() == ".html" else decision.markdown())
    return f"written to {output}"


def _write_job(found: "PlanResult", output: Path) -> str:
    """Write the job, and a schedule that was made for it beside it; what to do next."""
    from fivefold.job.preflight import needs_data
    from fivefold.planner.search import write_schedule
    from fivefold.planner.training import start
    from fivefold.support.files import write

    command = shlex.join(["fivefold", *sys.argv[1:]])
    schedule = write_schedule(found.explained, output.with_suffix(".schedule.txt"))
    write(output, found.training.file(found.explained, str(output), command, schedule))
    fill = "fill in data.path, then " if needs_data(found.job) else ""
    beside = f", with its schedule in {schedule}" if schedule else ""
    return f"written to {output}{beside}: {fill}{start(found.explained, str(output))}"


def simulate(
    words: Words,
    layout: Annotated[str, typer.Option(help="The layout: dp=8,tp=8,pp=4,...")],
    cluster: ClusterText = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: Precision = "",
    software: Software = "fivefold",
    imbalance: Imbalance = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Draw the timeline: .svg or .png.")] = None,
    as_json: Json = False,
) -> None:
    """Time one step of a layout on a cluster: its schedule runs on a clock, and no GPU is needed.

    Exit code 1 if the layout does not fit into the devices' memory.

    [dim]Examples:[/]

      fivefold simulate llama3-70b --layout dp=2,tp=8,pp=4,zero=1,sp,microbatches=32 --cluster 8x8xH100 --batch 64

      fivefold simulate llama3-8b --layout pp=8,schedule=zb-v,microbatches=16,recompute=selective --batch 16 -o step.svg
    """
    from fivefold.planner import plan as planning
    from fivefold.render.blocks import check_writable, show
    from fivefold.render.paint import PICTURES

    whole_layout(layout, words)
    check_writable(output, *PICTURES)
    found = planning.simulate(
        words[0], layout, cluster, changes=words[1:], batch=batch, seq=seq, precision=precision, software=software,
        imbalance=imbalance,
    )  # fmt: skip
    if output is not None and found.simulation is None:
        raise UserError(f"{layout} has one pipeline stage, and so no timeline to draw; give pp=2 or more")
    show(found, as_json, output)


def _refuse(options: dict[str, Any], why: str) -> None:
    if given := [option for option, value in options.items() if value not in (None, "")]:
        raise UserError(f"{', '.join(given)} {why}")
