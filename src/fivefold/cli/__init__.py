"""The command line: `fivefold COMMAND --help`.

Commands import what they need when they run, so that `fivefold --help` and the planning side start in a blink and work
without torch.
"""

import errno
import multiprocessing
import sys
import warnings
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from fivefold.cli import (
    accelerators,
    bench,
    calibrate,
    checkpoint,
    context,
    curve,
    data,
    doctor,
    dryrun,
    experts,
    generate,
    goodput,
    launch,
    mixed,
    models,
    plan,
    report,
    schedules,
    trace,
    train,
    truth,
    ui,
    verify,
    zero,
)
from fivefold.cli import huggingface as hf
from fivefold.cli.unknown import Explaining
from fivefold.launch.host import keep_freed_memory
from fivefold.launch.world import rank_here
from fivefold.support.errors import TRAINING, Note, PeerLost, TrainingError, UserError, needs
from fivefold.version import __version__

app = typer.Typer(
    name="fivefold",
    cls=Explaining,
    help="LLM training under 5-D parallelism: one model, one data order, one loss curve, whatever the layout.",
    epilog="Every command has --help with more examples.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,  # a bug shows Python's own traceback
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("plan", short_help=plan.PLAN)(plan.plan)
app.command("simulate", short_help=plan.SIMULATE)(plan.simulate)
app.command("goodput", short_help=goodput.SHORT)(goodput.goodput)
app.command("ui", short_help=ui.SHORT)(ui.ui)
app.command("dryrun", short_help=dryrun.SHORT)(dryrun.dryrun)
app.command("truth", short_help=truth.SHORT)(truth.truth)
app.command("train", short_help=train.SHORT)(train.train)
app.command("resume", short_help=train.RESUME, help=train.RESUME_HELP)(train.resume)
app.command("launch", short_help=launch.SHORT)(launch.launch)
app.command("doctor", short_help=doctor.SHORT)(doctor.doctor)
app.command("generate", short_help=generate.SHORT)(generate.generate)
app.command("verify", short_help=verify.SHORT)(verify.verify)
app.command("curve", short_help=curve.SHORT)(curve.curve)
app.command("trace", short_help=trace.SHORT)(trace.trace)
app.command("experts", short_help=experts.SHORT)(experts.experts)
app.command("calibrate", short_help=calibrate.SHORT)(calibrate.calibrate)
app.command("models", short_help=models.SHORT)(models.models)
app.command("accelerators", short_help=accelerators.SHORT)(accelerators.accelerators)
app.command("schedules", short_help=schedules.SCHEDULES)(schedules.schedules)
app.command("draw", short_help=schedules.DRAW)(schedules.draw)
app.command("zero", short_help=zero.SHORT)(zero.zero)
app.command("context", short_help=context.SHORT)(context.context)
app.command("mixed", short_help=mixed.SHORT)(mixed.mixed)
app.add_typer(report.app, name="report", short_help=report.SHORT)
app.add_typer(data.app, name="data", short_help=data.SHORT)
app.add_typer(checkpoint.app, name="checkpoint", short_help=checkpoint.SHORT)
app.add_typer(hf.importing, name="import", short_help=hf.IMPORT)
app.add_typer(hf.exporting, name="export", short_help=hf.EXPORT)
app.add_typer(bench.app, name="bench", short_help=bench.SHORT)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fivefold {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Run; bad input ends in a sentence per problem and exit code 2, a run that broke in 1, or 3 for want of a peer."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    _speak_notes(console)
    keep_freed_memory()
    try:
        app()
    except (UserError, ModuleNotFoundError) as error:
        for problem in error.problems if isinstance(error, UserError) else _missing(error):
            console.print(_error(problem))
        sys.exit(2)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # which only a word of the command line can be
            raise
        console.print(_error(f"the path {str(error.filename)[:40]!r}... is too long for the file system"))
        sys.exit(2)
    except TrainingError as error:
        # What all ranks have seen one says, and each who it was waiting for.
        if isinstance(error, PeerLost) or rank_here() == 0:
            console.print(_error(str(error)))
        sys.exit(error.code)


def _missing(error: ModuleNotFoundError) -> list[str]:
    """A package of the extra `train` is not installed. Any other import that fails is a bug, and stays one."""
    if error.name not in TRAINING:
        raise error
    return [needs(error.name)]


def _error(sentence: str) -> Text:
    return Text.assemble(("error: ", "bold red"), sentence)


def _speak_notes(console: Console) -> None:
    """Our own notes are a line; other warnings stay as Python shows them."""
    plain: Any = warnings.showwarning
    # What all ranks read one says: the process that starts ranks, or rank 0 where another launcher started them.
    first = multiprocessing.parent_process() is None and rank_here() == 0

    def show(message: Any, *place: Any, **more: Any) -> None:
        if isinstance(message, Note):
            if first:
                console.print(Text.assemble(("note: ", "bold yellow"), str(message)))
        else:
            plain(message, *place, **more)

    warnings.showwarning = show
