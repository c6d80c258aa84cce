"""`fivefold generate` continues text with a run's weights, `fivefold trace` traces a few steps, `fivefold inspect`
shows a run."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from fivefold.cli.options import (
    PAGE_SUFFIXES,
    Html,
    JobWords,
    Json,
    Output,
    Picture,
    command_line,
    split_job_and_changes,
    write_page,
)
from fivefold.render.blocks import console_of, show
from fivefold.support.dtypes import dtype_of
from fivefold.support.errors import UserError
from fivefold.support.files import write

GENERATE = 'Generate text.  [dim]fivefold generate runs/demo --prompt "def "[/]'
TRACE = "Trace where a step's time goes.  [dim]fivefold trace job.toml layout=pp=2,microbatches=4[/]"
INSPECT = "Show a run: loss, expert load, checkpoint.  [dim]fivefold inspect runs/demo[/]"


_Source = Annotated[
    str,
    typer.Argument(
        metavar="RUN|DIR", help="A run, a checkpoint, or a Hugging Face directory; a URL.", show_default=False
    ),
]
_TopP = Annotated[float, typer.Option(help="Sample from the most likely tokens with this total probability; 1: all.")]


def generate(
    source: _Source,
    prompt: Annotated[list[str] | None, typer.Option(help="The prompt; repeatable.")] = None,
    tokens: Annotated[str | None, typer.Option(help="The prompt as token ids: 1,2,3.")] = None,
    count: Annotated[int, typer.Option("--count", "-n", help="Maximum number of tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0: always take the most likely token.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(help="Sample from this many most likely tokens; 0: all.")] = 0,
    top_p: _TopP = 0.95,
    seed: Annotated[int, typer.Option(help="Random seed: the same one samples the same text.")] = 0,
    layout: Annotated[str, typer.Option(help="tp and pp: processes on this machine to shard the model over.")] = "dp=1",
    step: Annotated[int | None, typer.Option(help="Which checkpoint; default: the newest complete one.")] = None,
    dtype: Annotated[str, typer.Option(help="Compute dtype: float32, bfloat16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    share_gpu: Annotated[str, typer.Option(help="Backend of ranks that share a GPU: gloo or nccl.")] = "gloo",
    timeout: Annotated[float, typer.Option(help="Time limit, in seconds, of a layout with several ranks.")] = 600.0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt, with the weights of a run or of a Hugging Face directory.

    Tokens are sampled; --temperature 0 always takes the most likely one. The same
    seed, printed at the end on standard error, samples the same tokens in any
    layout, up to rounding. Keys and values of earlier tokens are cached.

    [dim]Examples:[/]

      fivefold generate runs/demo --prompt "def main"

      fivefold generate runs/demo --prompt "import" --seed 7 --top-k 20 --layout tp=2,pp=2

      fivefold generate runs/demo --prompt "import" --temperature 0

      fivefold generate ~/models/Llama-3.2-1B --prompt "Once upon a time" -n 50 --json
    """
    from fivefold.generation.request import Request
    from fivefold.generation.request import generate as run
    from fivefold.generation.sampling import Sampling
    from fivefold.support.storage_place import place_of

    if bool(prompt) == bool(tokens):
        raise UserError("give either --prompt or --tokens", "option.conflict")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    request = Request(place_of(source), step, layout, dtype_of(dtype), device, count, sampling, timeout, share_gpu)
    streamed: list[str] = []
    answers = run(request, prompt or [], _ids(tokens), streamed.append if as_json else _printer(streamed))
    figures = json.dumps([asdict(answer) | {"sampling": msgspec.to_builtins(sampling)} for answer in answers])
    if output is not None:
        write(output, f"{figures}\n" if output.suffix.lower() == ".json" else "".join(streamed))
    if as_json:
        typer.echo(figures)
    elif temperature:
        console_of(stderr=True).print(f"sampled with {sampling}", markup=False)


def _printer(streamed: list[str]) -> Callable[[str], None]:
    """A function that prints pieces of text and appends them to `streamed`."""
    console = Console(highlight=False, soft_wrap=True)

    def stream(text: str) -> None:
        streamed.append(text)
        encoding = console.encoding  # which may lack characters that the model writes
        console.file.write(text.encode(encoding, "replace").decode(encoding))
        console.file.flush()

    return stream


def _ids(text: str | None) -> list[int] | None:
    """The token ids of --tokens."""
    if text is None:
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(
            f"--tokens {text!r} is not a list of numbers; write for example --tokens 1,2,3", "option.numbers"
        ) from None


def trace(
    job: JobWords = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the trace of all ranks, as JSON.")] = Path(
        "trace.json"
    ),
    html: Html = None,
    timeout: Annotated[float, typer.Option(help="Seconds for the whole run.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Run a few steps of a job and show what every rank did and waited for.

    Starts the layout's ranks on this machine, trains trace.after steps to warm
    up and trace.steps (3) more, and writes one file for all ranks, which
    ui.perfetto.dev opens: every action with stage and microbatch, every
    collective by axis with its bytes, every wait, and next to them the same
    schedule simulated with the measured durations. Nothing else is kept. To
    trace a longer run on a cluster: fivefold train ... trace.steps=3

    [dim]Examples:[/]

      fivefold trace layout=pp=4,schedule=zb-h1,microbatches=8

      fivefold trace job.toml layout=dp=2,tp=2,pp=2 -o 3d.json

      fivefold trace job.toml --html trace.html

      fivefold trace job.toml trace.steps=10 --json
    """
    from fivefold.trainer.start import trace as run

    if output.suffix.lower() in PAGE_SUFFIXES:
        raise UserError(f"-o {output} writes the trace as JSON; for a page write --html {output}", "output.kind")
    with console_of(stderr=True).status("training the traced steps"):
        result = run(*split_job_and_changes(job), output=output, timeout=timeout)
    show(result, as_json=as_json, remarks=[] if html is None else [write_page(result, html)])


def inspect(
    run: Annotated[
        str, typer.Argument(help="A run's directory, or one of its checkpoints; a URL.", show_default=False)
    ],
    step: Annotated[int | None, typer.Option(help="Which checkpoint; default: the newest complete one.")] = None,
    output: Picture = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Show a run: its loss, the load of its experts, and the contents of its newest checkpoint.

    It reads metrics.jsonl, which a running job may still be writing, and lists the
    checkpoint's files without loading them. For a mixture of experts it shows how many
    tokens each layer's experts received, at the first logged step and at the last.

    -o load.svg plots these tokens, one line per expert; -o with any other .svg or .png
    plots the loss. --html writes the page of `fivefold ui` with this run, or with all runs
    of a directory, as one file that is safe to send: paths are cut to their last part, and
    host names are removed.

    [dim]Examples:[/]

      fivefold inspect runs/demo

      fivefold inspect runs/moe -o load.svg

      fivefold inspect runs/demo --step 100 --json

      fivefold inspect runs/demo --html run.html

      fivefold inspect runs --html all.html
    """
    from fivefold.support.storage_place import place_of
    from fivefold.trainer.inspect import inspect as inspect_run
    from fivefold.trainer.records import METRICS_FILE

    place = place_of(run)
    if html is not None and not (isinstance(place, Path) and place.is_dir()):
        raise UserError(f"--html needs a run's directory, or one with runs in it; {run} is neither", "option.conflict")
    if html is not None and isinstance(place, Path) and not (place / METRICS_FILE).is_file():  # a directory of runs
        from fivefold.web.report import report

        show(report(place, html, command_line()), as_json=as_json)
        return
    show(
        inspect_run(place, step),
        as_json=as_json,
        output=output,
        remarks=[] if html is None else [write_page(place, html)],
    )
