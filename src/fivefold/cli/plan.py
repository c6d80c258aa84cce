"""`fivefold plan` chooses a layout, `fivefold serve` one for inference, `fivefold goodput` predicts days to train."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fivefold.cli.options import (
    DRAWABLE_SUFFIXES,
    Batch,
    ClusterText,
    Html,
    Imbalance,
    Json,
    ModelWords,
    Output,
    Precision,
    Seq,
    Software,
    check_whole_layout,
    command_line,
    counting_bar,
    write_page,
)
from fivefold.render.blocks import show
from fivefold.support.dtypes import precision_of

if TYPE_CHECKING:
    from fivefold.planner.result import PlanResult

PLAN = "Choose a layout, and explain the choice.  [dim]fivefold plan llama3-70b --cluster 8x8xH100[/]"
SERVE = "Choose how to serve a model.  [dim]fivefold serve llama3-70b --cluster 8xH100[/]"
GOODPUT = "Days to train, with failures.  [dim]fivefold goodput llama3-405b --cluster 2048x8xH100 --tokens 15.6T[/]"

OUTPUT_SUFFIXES = (".toml", ".md", ".html", *DRAWABLE_SUFFIXES)


_Tokens = Annotated[
    str | None, typer.Option(help="Length of the run: 1.4T, 300B; default: chinchilla, 20 per parameter.")
]
_Layout = Annotated[str | None, typer.Option(help="Explain and time this layout, and compare it with the best.")]
_Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Write a job (.toml), a design document (.md, .html), a picture, or the result (.json, .txt).",
    ),
]


def plan(
    words: ModelWords,
    cluster: ClusterText = None,
    batch: Batch = None,
    seq: Seq = None,
    tokens: _Tokens = None,
    layout: _Layout = None,
    fix: Annotated[str, typer.Option(help="Layout settings to fix: tp=8,zero=1,recompute=none.")] = "",
    by: Annotated[
        Literal["throughput", "memory", "pareto"], typer.Option(help="What to rank layouts by.")
    ] = "throughput",
    top: Annotated[int, typer.Option(help="Layouts to show.")] = 5,
    precision: Precision = "",
    software: Software = "fivefold",
    imbalance: Imbalance = None,
    price: Annotated[float | None, typer.Option(help="Dollars per GPU-hour.")] = None,
    output: _Output = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Choose a layout: closed forms evaluate all layouts, and the best are timed by their own schedules.

    Prints the ranking, and for the chosen layout its memory by component, its time
    by cause, its traffic by axis and link, and why each neighbour loses. Among
    layouts within 3% the simplest is chosen: published runs of one configuration
    differ by more; tp over a network must win by 10%. A range says where time, rate and days should lie in 4 of 5
    cases. `fivefold accuracy` compares the planner with measured runs.

    --layout explains a layout of your own instead, compares it with the choice, and shows
    the timeline of its pipeline. Exit code 1 if it does not fit into the devices' memory.

    -o job.toml writes a job for this model on this cluster: learning rate, warmup, batch
    and steps come from published recipes and the token budget, each with its source.
    -o memory.svg, traffic.svg, mesh.svg, step.svg (the timeline) or any other .svg or .png
    (memory and time) writes a picture; .dark.svg and .dark.png have a dark background.
    -o decision.md or .html writes a design document: the math of the layout with its
    numbers, compared with textbook rules, its neighbours, and at which memory, link and
    batch another layout wins, found by planning again. --html plan.html also writes the
    plan as a self-contained page of `fivefold ui`.

    [dim]Examples:[/]

      fivefold plan llama3-70b --cluster 8x8xH100

      fivefold plan llama3-70b --cluster 8x8xH100 --tokens 1.4T --price 2.5 -o job.toml

      fivefold plan llama3-405b --cluster 2048x8xH100 --batch 2048 --seq 8192

      fivefold plan llama3-8b --layout dp=8,zero=3,microbatches=16 --batch 128

      fivefold plan llama3-8b --layout pp=8,schedule=zb-v,microbatches=16,recompute=selective --batch 16 -o step.svg

      fivefold plan llama3-70b --cluster 4x8xH100+4x8xA100 --batch 256

      fivefold plan qwen3-30b-a3b --cluster 2x8xH100 --imbalance 1.2

      fivefold plan tiny --cluster 2xCPU --batch 16 --seq 128 -o plan.toml

      fivefold plan llama3-70b --cluster 8x8xH100 -o memory.svg

      fivefold plan llama3-70b --cluster 8x8xH100 -o decision.md

      fivefold plan llama3-70b --cluster 8x8xH100 --html plan.html
    """
    from fivefold.planner import plan as planning
    from fivefold.planner.training import CHINCHILLA_BUDGET

    check_whole_layout(layout or fix, words, "--layout" if layout else "--fix")
    if tokens is None and _is_job(output) and not words[0].endswith(".toml"):
        tokens = None if any(word.startswith("train.steps=") for word in words) else CHINCHILLA_BUDGET
    result = planning.plan(
        words[0], cluster, changes=words[1:], batch=batch, seq=seq, layout=layout, fix=fix, by=by, top=top,
        precision=precision, software=software, price=price, tokens=tokens, imbalance=imbalance,
    )  # fmt: skip
    remarks = [] if html is None else [write_page(result, html)]
    if output is not None and output.suffix.lower() in WRITERS:
        remarks = [WRITERS[output.suffix.lower()](result, output), *remarks]
        output = None
    show(result, as_json=as_json, output=output, remarks=["", *remarks] if remarks else [])


def _is_job(output: Path | None) -> bool:
    return output is not None and output.suffix.lower() == ".toml"


def _write_decision(result: "PlanResult", output: Path) -> str:
    """Write the design document: the question, the layout with its math, its neighbours, and what would change the
    decision. Returns the line to print about it."""
    from fivefold.planner.decision import decide
    from fivefold.support.files import write

    with counting_bar() as progress:
        decision = decide(result, command_line(), progress)
    write(output, decision.html() if output.suffix.lower() == ".html" else decision.markdown())
    return f"written to {output}"


def _write_job(result: "PlanResult", output: Path) -> str:
    """Write the job, and next to it its schedule if that was generated for it. Returns the line on what to do next."""
    from fivefold.job.preflight import needs_data
    from fivefold.planner.search import write_schedule
    from fivefold.planner.training import start
    from fivefold.support.files import write

    schedule = write_schedule(result.explained, output.with_suffix(".schedule.txt"))
    write(output, result.training.file(result.explained, str(output), command_line(), schedule))
    fill = "fill in data.path, then " if needs_data(result.job) else ""
    with_schedule = f", with its schedule in {schedule}" if schedule else ""
    return f"written to {output}{with_schedule}: {fill}{start(result.explained, str(output))}"


# By suffix; all other suffixes are for the result itself.
WRITERS = {".toml": _write_job, ".md": _write_decision, ".html": _write_decision}


def serve(
    words: ModelWords,
    cluster: ClusterText = None,
    prompt: Annotated[int, typer.Option(help="Tokens per prompt.")] = 2048,
    answer: Annotated[int, typer.Option(help="Tokens per answer.")] = 512,
    concurrent: Annotated[int | None, typer.Option(help="Concurrent sequences; default: as many as fit.")] = None,
    ttft: Annotated[float | None, typer.Option(help="Upper bound on the time to first token, in seconds.")] = None,
    tpot: Annotated[float | None, typer.Option(help="Upper bound on the time per output token, in seconds.")] = None,
    precision: Precision = "",
    imbalance: Imbalance = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Choose how to serve a model on a cluster: the layouts of lowest latency and of highest throughput, and why.

    Prints both side by side, and what lies between them: concurrent sequences, time to
    the first token and per further token, tokens per second, cache and memory per GPU,
    and what bounds them. --ttft and --tpot leave out layouts that take longer.

    [dim]Examples:[/]

      fivefold serve llama3-70b --cluster 8xH100

      fivefold serve deepseek-v3 --cluster 4x8xH100 --precision fp8 --tpot 0.05

      fivefold serve llama3-8b --cluster 1xH100 --prompt 512 --answer 128 --concurrent 64 --json
    """
    from fivefold.planner.serve import serve

    result = serve(
        words[0], cluster or "8xH100", changes=words[1:], prompt=prompt, output=answer, sequences=concurrent,
        precision=precision_of(precision) or "bf16", ttft=ttft, tpot=tpot, imbalance=imbalance,
    )  # fmt: skip
    show(result, as_json=as_json, output=output)


_GoodputTokens = Annotated[
    str | None, typer.Option(help="Length of the run: 1.4T, 300B; default: the job's, or 20 per parameter.")
]
_Every = Annotated[
    int | None,
    typer.Option(help="Steps between checkpoints; default: the job's, or the interval that minimizes run time."),
]
_Mtbf = Annotated[float | None, typer.Option(help="Hours between failures of one GPU; default: Llama 3's, 50,677.")]
_Detect = Annotated[float | None, typer.Option(help="Seconds to notice a failure; default: a tenth of train.timeout.")]
_Storage = Annotated[
    float | None, typer.Option(help="Aggregate storage bandwidth, GB/s; default: 2.08 per node, at most 95.")
]
_Jitter = Annotated[float | None, typer.Option(help="Coefficient of variation of a rank's step time; default: 0.0072.")]


def goodput(
    words: ModelWords,
    cluster: ClusterText = None,
    tokens: _GoodputTokens = None,
    layout: Annotated[str | None, typer.Option(help="This layout, instead of the planner's choice.")] = None,
    fix: Annotated[str, typer.Option(help="Layout settings to fix: tp=8,zero=1.")] = "",
    batch: Batch = None,
    seq: Seq = None,
    precision: Precision = "",
    software: Software = "fivefold",
    every: _Every = None,
    mtbf: _Mtbf = None,
    detect: _Detect = None,
    restart: Annotated[float | None, typer.Option(help="Seconds to restart after a failure; default: 600.")] = None,
    storage: _Storage = None,
    save: Annotated[float | None, typer.Option(help="Seconds that a save blocks training; default: 0.59.")] = None,
    jitter: _Jitter = None,
    runs: Annotated[int, typer.Option(help="Simulated runs.")] = 1000,
    seed: Annotated[int, typer.Option(help="Random seed of the simulation.")] = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Predict how long a run takes with failures, and how often to save it.

    Failures are random, at a published rate or that of your cluster. Each costs the
    time to notice it, to restart, to load the last checkpoint and to repeat the steps
    since then. The expected time is exact; p10, median and p90 come from simulated
    runs. The cost of uneven ranks is printed separately and is not part of other figures.

    [dim]Examples:[/]

      fivefold goodput llama3-405b --cluster 2048x8xH100 --tokens 15.6T

      fivefold goodput llama3-70b --cluster 128x8xH100 --tokens 15T --every 500

      fivefold goodput llama3-8b --cluster 128x8xA100 --mtbf 8090 --restart 900 --storage 40

      fivefold goodput recipes/llama3-8b-8xH100.toml --json
    """
    from fivefold.planner import goodput_result

    check_whole_layout(layout or fix, words, "--layout" if layout else "--fix")
    result = goodput_result.goodput(
        words[0], cluster, changes=words[1:], batch=batch, seq=seq, tokens=tokens, layout=layout, fix=fix,
        precision=precision, software=software, every=every, mtbf=mtbf, detect=detect, restart=restart,
        storage=storage, save=save, jitter=jitter, runs=runs, seed=seed,
    )  # fmt: skip
    show(result, as_json=as_json, output=output)
