"""Options and arguments that several commands share, and their progress bars.

Every command is registered by `command`, which adds --quiet, and --plugin where a job or run is named, and checks that
the file of -o can be written.
"""

import functools
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fivefold.cli.completion import models
from fivefold.render.blocks import TEXT_SUFFIXES, check_writable
from fivefold.render.paint import PICTURE_SUFFIXES
from fivefold.support.errors import UserError
from fivefold.support.plugins import find_value, is_plugin, load
from fivefold.support.progress import is_shown, silence

DRAWABLE_SUFFIXES = (*PICTURE_SUFFIXES, *TEXT_SUFFIXES)  # of a result that can also be drawn
PAGE_SUFFIXES = (".html", ".htm")

# ---- types of options and arguments ---------------------------------------------------------------------------------

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors, and with --json the JSON.")]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="PACKAGE.MODULE:NAME",
        help="Import this plugin, which a run's stored job names. A job file or KEY=VALUE needs no such option.",
        show_default=False,
    ),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the result: .json, .txt.")]
Picture = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the result: .json, .txt; or draw it: .svg, .png.")
]
Html = Annotated[Path | None, typer.Option("--html", help="Also write a self-contained HTML page.")]

ModelWords = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL [KEY=VALUE ...]",
        help="A model's name, a job file or a config, then changes to it.",
        autocompletion=models,
    ),
]
JobWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB.toml] [KEY=VALUE]...", help="A job file, then settings that change it.", show_default=False
    ),
]
RunWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB.toml | RUN] [KEY=VALUE]...",
        help="A job file or a run's directory, then settings that change its job.",
        show_default=False,
    ),
]
ClusterText = Annotated[
    str | None,
    typer.Option(
        "--cluster", "-c", help="Nodes x GPUs per node x accelerator, or a TOML file; default: the job's, or 8xH100."
    ),
]
Batch = Annotated[
    int | None, typer.Option(help="Sequences per step; default: as in published runs of this size, 4M tokens or more.")
]
Seq = Annotated[int | None, typer.Option(help="Tokens per sequence; default: 8192, or the model's context.")]
Precision = Annotated[
    str, typer.Option(help="Precision of matmuls: bf16, fp16, fp8, fp4, fp32; default: bf16, CPU: fp32.")
]
Software = Annotated[
    str, typer.Option(help="Software whose kernels and overlap to model: fivefold, nemo, torchtitan, megatron.")
]
Imbalance = Annotated[
    float | None,
    typer.Option(help="Experts: tokens of the most loaded rank / mean; default: 1.6, from published runs."),
]

# ---- commands -------------------------------------------------------------------------------------------------------


def command(
    app: typer.Typer, name: str, short: str, output_suffixes: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command. `output_suffixes` are those that the file of its -o may have."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        app.command(name, short_help=short)(_with_common_options(function, output_suffixes))
        return function

    return add


def _with_common_options(function: Callable[..., None], output_suffixes: tuple[str, ...]) -> Callable[..., None]:
    """The function with --quiet and --plugin, and with a check of the files that it writes."""

    @functools.wraps(function)
    def run(*, quiet: bool = False, plugin: Sequence[str] | None = None, **arguments: Any) -> None:
        for name in plugin or ():
            load(name)
        _import_schedules(arguments)
        if output_suffixes:
            check_writable(arguments["output"], *output_suffixes)
        check_writable(arguments.get("html"), *PAGE_SUFFIXES)
        with _quiet(prints_json=bool(arguments.get("as_json"))) if quiet else nullcontext():
            function(**arguments)

    annotations: dict[str, Any] = {"quiet": Quiet}
    defaults: dict[str, Any] = {"quiet": False}
    signature = inspect.signature(function)
    if any(map(_names_a_job, signature.parameters.values())):
        annotations["plugin"], defaults["plugin"] = Plugins, None
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
        for name, annotation in annotations.items()
    ]
    # Typer reads a command's options from the signature and the annotations of its function.
    vars(run)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), *added])
    run.__annotations__ = {**function.__annotations__, **annotations}
    run.__doc__ = _unwrap(inspect.getdoc(function) or "")
    return run


def _unwrap(text: str) -> str:
    """Paragraphs without line breaks, which Typer would keep at any width; indented lines stay."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        paragraph if any(line.startswith((" ", "-", "|")) for line in paragraph.splitlines())
        else paragraph.replace("\n", " ") for paragraph in paragraphs
    )  # fmt: skip


@contextmanager
def _quiet(*, prints_json: bool) -> Iterator[None]:
    """Print only errors and JSON, and show no progress."""
    with silence(), open(os.devnull, "w") as nowhere, redirect_stdout(sys.stdout if prints_json else nowhere):
        yield


def _import_schedules(arguments: Mapping[str, Any]) -> None:
    """Import schedules from a user's own modules: those of --layout and --fix, and those to draw."""
    layouts = [text for key in ("layout", "fix") if isinstance(text := arguments.get(key), str)]
    drawn = words if isinstance(words := arguments.get("schedule"), list) else []
    if not any(map(is_plugin, (*layouts, *drawn))):
        return  # the usual case, in which nothing more is imported
    from fivefold.layout.layout import schedule_named
    from fivefold.schedules.info import ScheduleInfo
    from fivefold.schedules.registry import is_file

    named = [("layout.schedule", schedule_named(layout)) for layout in layouts] + [("schedule", name) for name in drawn]
    for setting, name in named:
        if is_plugin(name) and not is_file(name):
            find_value(setting, name, ScheduleInfo, trusted=True)


def _names_a_job(parameter: inspect.Parameter) -> bool:
    """Whether a parameter takes a job, which may be stored, or a run: both may need plugins."""
    metavars = [getattr(info, "metavar", None) or "" for info in getattr(parameter.annotation, "__metadata__", ())]
    return parameter.name == "run" or any("KEY=VALUE" in metavar or "RUN" in metavar for metavar in metavars)


# ---- what was typed -------------------------------------------------------------------------------------------------


def command_line() -> str:
    """The command line that was typed, for files that name their origin."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name if spec is not None and spec.name.startswith("benchmarks.") else ""
    return shlex.join([*(["python", "-m", module] if module else ["fivefold"]), *sys.argv[1:]])


def options_given(context: typer.Context, names: Mapping[str, str]) -> list[str]:
    """Those of `names`, {parameter: option}, that were given on the command line."""
    source = context.get_parameter_source
    return [option for name, option in names.items() if getattr(source(name), "name", "") == "COMMANDLINE"]


def refuse(options: list[str], why: str) -> None:
    """Raise an error about options that were given, if any."""
    if options:
        raise UserError(f"{', '.join(options)} {why}", "option.conflict")


def check_whole_layout(layout: str | None, words: list[str], option: str = "--layout") -> None:
    """Refuse a layout cut by a space: `--layout dp=8 zero=3` gives the layout dp=8 and the argument zero=3."""
    from fivefold.job.aliases import apart

    if problems := apart(words, layout or "", f"{option} "):
        raise UserError(problems)


def split_job_and_changes(words: list[str] | None) -> tuple[str | None, list[str]]:
    """The job file, if any, and the KEY=VALUE changes: a word without '=' is the file."""
    files = [word for word in words or [] if "=" not in word]
    if len(files) > 1:
        problem = f"give at most one job file, not {len(files)}: {', '.join(files)}; changes are KEY=VALUE"
        raise UserError(problem, "job.files")
    return (files[0] if files else None), [word for word in words or [] if "=" in word]


# ---- pages ----------------------------------------------------------------------------------------------------------


def write_page(result: Any, html: Path) -> str:
    """Write the page of a result, or of the run at a path; returns the line to print about it."""
    from fivefold.web.report import report

    return str(report(result, html, command_line())).rstrip()


# ---- progress bars --------------------------------------------------------------------------------------------------
# Shown on a terminal only, and removed afterwards.


@contextmanager
def stoppable(why: str) -> Iterator[None]:
    """Ctrl-C ends the command with a line that says what there is now."""
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print(f"stopped; {why}")
        raise typer.Exit(130) from None


@contextmanager
def bytes_bar(what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A bar for bytes: call it with the number of further bytes, and with the total if it was not known before."""
    with _bar(TextColumn(what), BarColumn(30), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, total=None: bar.update(task, advance=done, total=total)


@contextmanager
def counting_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar for tasks: call it with the number done, their total, and the name of the next."""
    with _bar(BarColumn(30), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")) as bar:
        task = bar.add_task("")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def _bar(*columns: ProgressColumn) -> Progress:
    console = Console(stderr=True, highlight=False)
    return Progress(*columns, console=console, transient=True, disable=not (console.is_terminal and is_shown()))
