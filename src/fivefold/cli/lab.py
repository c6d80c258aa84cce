"""`fivefold lab`: exercises whose answers run on real ranks and are held against one process."""

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli import completion
from fivefold.cli.options import DRAWABLE_SUFFIXES, Json, Output, Picture, command, counting_bar, stoppable
from fivefold.cli.renamed import ExplainsUnknown
from fivefold.render.blocks import TEXT_SUFFIXES, show

SHORT = "Exercises that check themselves on real ranks.  [dim]fivefold lab start linear my-lab[/]"
app = typer.Typer(cls=ExplainsUnknown, rich_markup_mode="rich")
_Answer = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a lab, or the file in it.")]


@app.callback(invoke_without_command=True)
def labs(context: typer.Context, as_json: Json = False) -> None:
    """List the labs: exercises to write the parallelism of a transformer by hand.

    Each has a statement and a file with holes. Your code runs on real ranks of this
    machine and is held against one process; what is wrong is said in a sentence.

    [dim]Examples:[/]

      fivefold lab

      fivefold lab start linear my-lab

      fivefold lab check my-lab
    """
    if context.invoked_subcommand is None:
        from fivefold.labs.catalogue import labs

        show(labs(), as_json=as_json)


@command(
    app, "start", "Write the statement and the file of a lab.  [dim]fivefold lab start linear my-lab[/]", TEXT_SUFFIXES
)
def start(
    name: Annotated[
        str, typer.Argument(help="The lab: one that `fivefold lab` lists.", autocompletion=completion.labs)
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to; it is created, and nothing is replaced.")],
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Write a lab's statement, README.md, and the file to fill in.

    [dim]Examples:[/]

      fivefold lab start linear my-lab
    """
    from fivefold.labs.catalogue import start_lab

    show(start_lab(name, folder), as_json=as_json, output=output)


@command(app, "check", "Hold your answer against one process.  [dim]fivefold lab check my-lab[/]", TEXT_SUFFIXES)
def check(
    answer: _Answer,
    timeout: Annotated[
        float, typer.Option(help="Seconds that one layout has before its ranks count as hanging.")
    ] = 30.0,
    first: Annotated[bool, typer.Option("--first", help="End at the first layout that is wrong.")] = False,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Run an answer on real ranks, hold it against one process, and count what it sends.

    Outputs, gradients and messages are compared in several layouts with awkward
    sizes: 10 to 20 seconds on two cores, and longer where other work runs. --timeout
    limits each layout, and not the whole check. The command ends with 0 if all are
    right and with 1 otherwise, and at the first layout that hangs, exits or is not
    written. It runs your code with your rights: it is no sandbox.

    [dim]Examples:[/]

      fivefold lab check my-lab

      fivefold lab check my-lab --json
    """
    from fivefold.labs.checking import check_lab

    with stoppable("nothing is checked"), counting_bar() as progress:
        found = check_lab(answer, timeout=timeout, first=first, progress=progress)
    show(found, as_json=as_json, output=output)


@command(app, "bench", "Time your answer on more ranks.  [dim]fivefold lab bench my-lab[/]", DRAWABLE_SUFFIXES)
def bench(
    answer: _Answer,
    rounds: Annotated[int, typer.Option(help="Timed steps on each number of ranks; medians are shown.")] = 5,
    output: Picture = None,
    as_json: Json = False,
) -> None:
    """Time an answer on 1, 2 and 4 ranks: scaling efficiency, and when each rank computes or waits.

    One rank runs PyTorch's own code on the whole; more ranks run yours on the same
    work, right or not. The timeline shows messages that travel while a rank computes,
    and for a pipeline the simulated bubble stands beside the time in messages.
    -o timeline.svg draws the step.

    [dim]Examples:[/]

      fivefold lab bench my-lab

      fivefold lab bench my-lab -o timeline.svg
    """
    from fivefold.labs.scaling import bench_lab

    with stoppable("nothing is timed"):
        found = bench_lab(answer, rounds=rounds)
    show(found, as_json=as_json, output=output)
