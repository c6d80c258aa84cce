"""`report`: what a command has found, as one HTML file to send to a colleague. It needs no server and no network.

report(plan("llama3-70b", "8x8xH100"), "plan.html")
report(verify("dp=2,tp=2"), "proof.html")
report(Path("verify.json"), "proof.html")       # what `verify --json` printed
report(Path("runs/demo"), "run.html")           # a run, or the newest of a directory
"""

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold import __version__
from fivefold.plan.result import PlanResult
from fivefold.report import Block, Result, Text
from fivefold.report.show import check_writable
from fivefold.schedule.result import DrawResult
from fivefold.support.documents import path_of
from fivefold.support.errors import UserError
from fivefold.support.files import write
from fivefold.trace.lanes import lanes
from fivefold.trace.result import TraceResult
from fivefold.ui.ask import Ask
from fivefold.ui.proof import read, shown
from fivefold.ui.run_sent import placeless, sent
from fivefold.ui.views import View
from fivefold.ui.whole import held, view, whole
from fivefold.verify.result import VerifyResult

LARGEST = 3_000_000  # bytes of a report: what every mail passes on
HTML = ".html"
TRACE = View("trace", "Trace", "what the ranks of a step did")  # nor anything to run
VERIFY = View("verify", "Verify", "a layout against one process")  # a page that is served has nothing to prove


@dataclass(frozen=True)
class Report(Result):
    """A file that was written."""

    file: Path
    title: str
    views: tuple[str, ...]
    size: int  # bytes

    def blocks(self) -> Iterator[Block]:
        yield Text(f"{self.title}: written to {self.file}, {self.size / 1e6:.2f} MB; a browser opens it")

    def to_dict(self) -> dict[str, Any]:
        return {"file": str(self.file), "title": self.title, "views": list(self.views), "bytes": self.size}


def report(found: Result | str | Path, output: str | Path, command: str = "") -> Report:
    """Write a result, or what a path holds, as one file; `command` is what the file says that it was made by.

    ff.report(ff.plan("llama3-8b", "8xH100"), "plan.html")
    ff.report("runs/demo", "run.html")
    """
    path = path_of(output)
    check_writable(path, HTML, ".htm")
    title, views = seen(found)
    made = {
        "by": f"Fivefold {__version__}",
        "command": placeless(command),
        "on": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
    }
    text = whole(title, views, made).encode()
    if len(text) > LARGEST:
        raise UserError(
            f"the report of {title} has {len(text) / 1e6:.2f} MB, and {LARGEST / 1e6:g} MB is the most; report fewer "
            "runs, schedules, ranks or microbatches, or look at it with `fivefold ui`"
        )
    write(path, text.decode())
    return Report(path, title, tuple(one["name"] for one in views), len(text))


def seen(found: Result | str | Path) -> tuple[str, list[dict[str, Any]]]:
    """A title, and the views that show it."""
    if isinstance(found, str | Path):
        return _of_path(path_of(found))
    for kind, views in KINDS.items():
        if isinstance(found, kind):
            return views(found)
    names = ", ".join(kind.__name__ for kind in KINDS)
    raise UserError(f"there is no report of a {type(found).__name__}; there are reports of {names}, and of a run")


def _of_plan(found: PlanResult) -> tuple[str, list[dict[str, Any]]]:
    """The plan; where its ranks can be drawn the mesh of its layout, and of a pipeline the schedule."""
    from fivefold.plan.mesh import MOST
    from fivefold.ui.api_mesh import placed
    from fivefold.ui.api_plan import planned
    from fivefold.ui.api_schedule import stepped

    option, views = found.explained, [view("plan", *planned(found))]
    if option.layout.world <= MOST:
        views.append(view("mesh", *placed(option.case, found.case.stack.name)))
    timed = option.estimate.simulation
    if timed is not None and (shown := stepped(timed, option.layout.microbatches)) is not None:
        views.append(view("schedule", shown))
    return f"{found.case.spec.name} on {found.case.cluster}", views


def _of_draw(found: DrawResult) -> tuple[str, list[dict[str, Any]]]:
    from fivefold.ui.api_schedule import drawn

    shown, views = found.simulations[0].schedule, drawn(found)
    names = [name for name, _, _ in views]
    title = f"{', '.join(names)}: p={shown.p}, m={shown.m}"
    if len(views) == 1:
        return title, [view("schedule", *views[0][1:])]
    return title, [
        view("schedule", *one) | {"module": "schedule", "name": f"schedule-{at}", "title": name}
        for at, (name, *one) in enumerate(views)
    ]


def _of_verify(found: VerifyResult) -> tuple[str, list[dict[str, Any]]]:
    return _proof(shown(found.to_dict()))


def _of_path(path: Path) -> tuple[str, list[dict[str, Any]]]:
    if path.is_dir():
        return _of_runs(path)
    return _proof(read(path))


def _of_runs(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """A run's directory, or one with runs in it, of which the newest are shown."""
    from fivefold.ui.api_run import SHOWN
    from fivefold.ui.run_files import runs_in

    roots = (path.resolve(),)
    found, notes = runs_in(roots)
    if not found:
        raise UserError(notes or f"{path} has no run in it; a run's directory has job.toml and metrics.jsonl")
    names = list(found)[:SHOWN]
    return ", ".join(names), [sent(held("run", Ask({"runs": ",".join(names)}, roots)))]


def _of_trace(found: TraceResult) -> tuple[str, list[dict[str, Any]]]:
    shown = {"run": found.file.stem} | lanes(found.file)
    return f"a trace of {shown['layout'] or 'one rank'}", [view(TRACE, shown)]


def _proof(payload: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    return payload["title"], [view(VERIFY, payload)]


KINDS: dict[type[Result], Callable[[Any], tuple[str, list[dict[str, Any]]]]] = {
    PlanResult: _of_plan,
    DrawResult: _of_draw,
    VerifyResult: _of_verify,
    TraceResult: _of_trace,
}
