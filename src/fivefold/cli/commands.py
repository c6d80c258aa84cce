"""The command line: `fivefold COMMAND --help`.

Commands import what they need when they run, so that `fivefold --help` and the commands that plan start quickly and
work without torch.
"""

import errno
import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from zlib import crc32

import typer
from rich.console import Console
from rich.text import Text

from fivefold.cli import (
    bench,
    catalogue,
    checkpoint,
    checkup,
    compare,
    completion,
    data,
    draw,
    hf,
    lab,
    machines,
    plan,
    runs,
    train,
    verify,
    web,
)
from fivefold.cli.options import DRAWABLE_SUFFIXES, command, command_line
from fivefold.cli.renamed import ExplainsUnknown
from fivefold.launch.heartbeat import BEATS_ENV
from fivefold.launch.host import keep_freed_memory
from fivefold.launch.world import rank_here
from fivefold.render.blocks import TEXT_SUFFIXES
from fivefold.support.errors import TRAIN_PACKAGES, Note, PeerLost, TrainingError, UserError, missing_package_sentence
from fivefold.support.plugins import options, plugin_error, untrusted_in
from fivefold.support.progress import is_shown
from fivefold.version import __version__

app = typer.Typer(
    name="fivefold",
    cls=ExplainsUnknown,
    help="LLM training under 5-D parallelism: one model, one data order, one loss curve, whatever the layout.",
    epilog="Every command has --help with more examples. In all of them --json prints JSON, --output (-o) names the "
    "file to write, and --quiet (-q) prints only errors.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,  # a bug shows Python's own traceback
    context_settings={"help_option_names": ["-h", "--help"]},
)
command(app, "plan", plan.PLAN, plan.OUTPUT_SUFFIXES)(plan.plan)
command(app, "serve", plan.SERVE, TEXT_SUFFIXES)(plan.serve)
command(app, "goodput", plan.GOODPUT, TEXT_SUFFIXES)(plan.goodput)
app.add_typer(compare.app, name="compare", short_help=compare.SHORT)
command(app, "draw", draw.DRAW)(draw.draw)
command(app, "dryrun", verify.DRYRUN, DRAWABLE_SUFFIXES)(verify.dryrun)
command(app, "verify", verify.VERIFY, DRAWABLE_SUFFIXES)(verify.verify)
command(app, "train", train.TRAIN)(train.train)
command(app, "generate", runs.GENERATE, TEXT_SUFFIXES)(runs.generate)
command(app, "inspect", runs.INSPECT, DRAWABLE_SUFFIXES)(runs.inspect)
command(app, "trace", runs.TRACE)(runs.trace)
command(app, "launch", machines.LAUNCH)(machines.launch)
command(app, "doctor", machines.DOCTOR, TEXT_SUFFIXES)(machines.doctor)
command(app, "calibrate", machines.CALIBRATE, (".toml",))(machines.calibrate)
command(app, "checkup", checkup.CHECKUP)(checkup.checkup)
app.add_typer(data.app, name="data", short_help=data.SHORT)
app.add_typer(checkpoint.app, name="checkpoint", short_help=checkpoint.SHORT)
app.add_typer(hf.app, name="hf", short_help=hf.SHORT)
app.add_typer(catalogue.app, name="list", short_help=catalogue.LIST)
command(app, "accuracy", catalogue.ACCURACY, DRAWABLE_SUFFIXES)(catalogue.accuracy)
app.add_typer(bench.app, name="bench", short_help=bench.SHORT)
app.add_typer(lab.app, name="lab", short_help=lab.SHORT)
command(app, "ui", web.UI)(web.ui)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fivefold {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def program(function: Callable[..., None], output_suffixes: tuple[str, ...] = TEXT_SUFFIXES) -> typer.Typer:
    """A program with one command, for `main` to run."""
    single = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
    command(single, function.__name__, "", output_suffixes)(function)
    return single


def run(other_app: typer.Typer | None = None) -> None:
    """Run the command line, or another program's app. Bad input ends with a sentence per problem and exit code 2, a
    failed run with 1, a run that lost a peer with 3."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    _print_notes(console)
    keep_freed_memory()
    completion.keep_to_a_line()
    try:
        (other_app or app)()
    except UserError as error:
        _refuse(console, error)
    except ModuleNotFoundError as error:
        _refuse(console, _missing_package(error))
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # a path of the command line; all others are bugs
            raise
        too_long = f"the path {str(error.filename)[:40]!r}... is too long for the file system"
        _refuse(console, UserError(too_long, "path.length"))
    except TrainingError as error:
        # An error that all ranks have is printed by rank 0; PeerLost differs, as each rank names the peer it waits for.
        if isinstance(error, PeerLost) or rank_here() == 0:
            console.print(_error(str(error)))
        sys.exit(error.code)
    except (Exception, SystemExit) as error:
        # Else it is a bug of ours, with its traceback, or the exit code of a command that has ended.
        if (of_plugin := plugin_error(error)) is None:
            raise
        _refuse(console, of_plugin)


def _refuse(console: Console, error: UserError) -> NoReturn:
    """Print each problem, and with --json also an object with them and their codes instead of the result."""
    for problem in filter(_is_first_to_say, error.problems):
        console.print(_error(problem))
    if len(names := untrusted_in(error)) > 1:
        console.print(f"with all of them: {command_line()}{options(names)}")
    if "--json" in sys.argv[1:]:
        typer.echo(json.dumps({"problems": error.problems, "codes": error.codes}))
    sys.exit(2)


def _is_first_to_say(sentence: str) -> bool:
    """Whether no other rank of the same launcher has printed it yet: most have the same problems."""
    if not (beats := os.environ.get(BEATS_ENV)):
        return True
    said = Path(beats).with_name(f"said-{crc32(sentence.encode())}")
    try:
        said.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # the launcher is gone
        return True
    return True


def _missing_package(error: ModuleNotFoundError) -> UserError:
    """The sentence about a missing package of the extra `train`. Any other failed import is a bug and raised again."""
    if error.name not in TRAIN_PACKAGES:
        raise error
    return UserError(missing_package_sentence(error.name), f"install.{error.name}")


def _error(sentence: str) -> Text:
    return Text.assemble(("error: ", "bold red"), sentence)


def _print_notes(console: Console) -> None:
    """Print Fivefold's own notes as one line each; other warnings stay as Python shows them."""
    python_showwarning: Any = warnings.showwarning
    # One of all ranks prints: the process that started them, or rank 0 under another launcher.
    prints = multiprocessing.parent_process() is None and rank_here() == 0

    def show(message: Any, *args: Any, **options: Any) -> None:
        if isinstance(message, Note):
            if prints and is_shown():
                console.print(Text.assemble(("note: ", "bold yellow"), str(message)))
        else:
            python_showwarning(message, *args, **options)

    warnings.showwarning = show
