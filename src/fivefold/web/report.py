"""`report`: the result of a command as one HTML file to send to a colleague. It needs no server and no network.

report(plan("llama3-70b", "8x8xH100"), "plan.html")
report(verify("dp=2,tp=2"), "proof.html")
report(Path("verify.json"), "proof.html")       # what `verify --json` printed
report(Path("runs/demo"), "run.html")           # a run, or the newest of a directory
"""

import base64
import datetime
import html
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fivefold.planner.result import PlanResult
from fivefold.render.blocks import Block, Result, Text, check_writable
from fivefold.schedules.result import DrawResult
from fivefold.support.errors import UserError
from fivefold.support.files import write
from fivefold.support.parsing import path_of, read_json
from fivefold.tracing.lanes import read_lanes
from fivefold.tracing.result import TraceResult
from fivefold.verifier.result import VerifyResult
from fivefold.version import __version__
from fivefold.web.question import Ask
from fivefold.web.redact import make_shareable, without_paths
from fivefold.web.views import View, answer, view_of

# ---- a page ---------------------------------------------------------------------------------------------------------
# Views as one HTML file with their payloads, scripts and styles inline.
#
# page = html_page("a plan", [answered_view("plan", Ask({"model": "llama3-70b", "cluster": "8x8xH100"}))])
#
# The scripts are those of the served page, but for their imports: a path becomes an entry of the file's import map.


STATIC = Path(__file__).parent / "static"
CONTENT_POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data: blob:"
_IMPORTED = re.compile(r"""(["'`])(\.{1,2}/[^"'`\n]+\.js)\1""")
_HEAD = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta http-equiv="Content-Security-Policy" content="{policy}">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <title>{title}</title>
  <style>{style}</style>
  <script type="importmap">{modules}</script>
  <script type="application/json" id="payload">{payload}</script>
  <script type="module">import "fivefold/app.js";</script>
</head>
"""


def page_view(
    name: str | View, payload: Any, parts: Mapping[str, Any] | None = None, held: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A view with its payload and its parts, as the page reads it; `held` has answers to other questions."""
    view = name if isinstance(name, View) else view_of(name)
    more = {"held": held} if held else {}
    return more | {
        "name": view.name,
        "title": view.title,
        "says": view.description,
        "payload": payload,
        "parts": dict(parts or {}),
    }


def answered_view(name: str, ask: Ask, parts: Sequence[str] | None = None) -> dict[str, Any]:
    """A view with the payload that answers a question, and the parts that the payload `asks` for: all, or those in
    `parts`."""
    payload = answer(name, "", ask)
    asks = {part: words for part, words in payload.get("asks", {}).items() if parts is None or part in parts}
    answers = {}
    for part, query in asks.items():
        try:
            answers[part] = answer(name, part, Ask(query, ask.runs))
        except UserError as error:  # for example a damaged trace, without which the rest is still shown
            for run in payload["shown"]:
                run["left_out"] += error.problems * (run["name"] == query.get("run"))
    return page_view(name, payload, answers)


def html_page(title: str, views: Sequence[dict[str, Any]], made: Mapping[str, str] | None = None) -> str:
    """The page of views from `page_view` or `answered_view`; `made` has the program, the command and the day."""
    texts = _modules(["app.js", *(f"views/{view.get('module', view['name'])}.js" for view in views)])
    modules = {f"fivefold/{name}": _data_url("text/javascript", text) for name, text in texts.items()}
    body = (STATIC / "index.html").read_text().partition("<body>")[2]
    icon = _data_url("image/svg+xml", (STATIC / "icon.svg").read_text())
    head = _HEAD.format(
        policy=CONTENT_POLICY, title=html.escape(title), style=(STATIC / "style.css").read_text(),
        modules=_json({"imports": modules}), payload=_json({"title": title, "made": made, "views": list(views)}),
    )  # fmt: skip
    return f"{head}<body>{body.replace('icon.svg', icon)}"


def _modules(names: Sequence[str]) -> dict[str, str]:
    """The texts of modules and of all that they import."""
    texts: dict[str, str] = {}
    left = list(names)
    while left:
        if (name := left.pop()) not in texts and (STATIC / name).is_file():
            texts[name] = _module_text(name)
            left += re.findall(r'^import .*?from "fivefold/([^"]+)";$', texts[name], re.M)
    return dict(sorted(texts.items()))


def _module_text(name: str) -> str:
    """A module's text, with imports by the names of the import map."""
    folder = posixpath.dirname(name)

    def import_map_name(match: re.Match[str]) -> str:
        return f"{match[1]}fivefold/{posixpath.normpath(posixpath.join(folder, match[2]))}{match[1]}"

    return _IMPORTED.sub(import_map_name, (STATIC / name).read_text())


def _data_url(media_type: str, text: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(text.encode()).decode()}"


def _json(value: Any) -> str:
    """JSON as the text of a script element: nothing in it can end that element, or a line of a script."""
    text = msgspec.json.encode(value).decode()
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


# ---- proof ----------------------------------------------------------------------------------------------------------
# The Verify view of a report: the output of `verify --json` for a layout, or for a sweep of them.
#
# verify_payload(verify("dp=2,tp=2").to_dict())
# read_verify_json(Path("verify.json"))           # the same from a file; a file with something else is refused


MAX_FULL_PROOFS = 20  # of a sweep, failed ones first
# The structs have the fields of `verify --json` that the view shows.


class ProofPair(msgspec.Struct):
    layout: float | None
    reference: float | None


class Worst(msgspec.Struct):
    name: str
    step: int
    error: float | None
    note: str
    passed: bool = msgspec.field(name="holds")


class ProofNumbers(msgspec.Struct):
    calls: float
    payload: float
    wire: float


class ProofTraffic(msgspec.Struct):
    axis: str
    kind: str
    counted: ProofNumbers
    expected: ProofNumbers
    passed: bool = msgspec.field(name="holds")


class ProofMemory(msgspec.Struct):
    rank: int
    name: str
    expected: float
    counted: float
    passed: bool = msgspec.field(name="holds")


class Proof(msgspec.Struct):
    """The comparison of one layout with one process."""

    layout: str
    model: str
    variant: str
    dtype: str
    passed: bool
    problems: list[str]
    details: str
    bound: float
    losses: list[ProofPair]
    norms: list[ProofPair]
    traffic_per_step: list[ProofTraffic]
    held: list[ProofMemory]
    seconds: float
    worst_loss: Worst | None = None
    worst_norm: Worst | None = None
    worst_gradient: Worst | None = None
    worst_parameter: Worst | None = None
    worst_routing: Worst | None = None
    worst_load: Worst | None = None
    worst_bias: Worst | None = None


class Sweep(msgspec.Struct):
    passed: bool
    sampled: int
    total: int
    pairs_met: float
    failed: int
    layouts: list[Proof]


def read_verify_json(path: Path) -> dict[str, Any]:
    """The payload of a file with the output of `verify --json`."""
    try:
        return verify_payload(read_json(path))
    except msgspec.ValidationError as error:
        raise UserError(
            f"{path} is not what `fivefold verify --json` prints: {error}; write one with "
            f"`fivefold verify --layout dp=2 --json > {path}`",
            "file.syntax",
        ) from None


def verify_payload(table: Any) -> dict[str, Any]:
    """The payload: the rows of a sweep, and some of its layouts in full, failed ones first."""
    if not (isinstance(table, dict) and "layouts" in table):
        proof = msgspec.convert(table, Proof)
        return {"title": f"{proof.layout} of {proof.model}", "sweep": None, "proofs": [msgspec.to_builtins(proof)]}
    sweep = msgspec.convert(table, Sweep)
    full = sorted(sweep.layouts, key=lambda proof: proof.passed)[:MAX_FULL_PROOFS]
    counts = {name: getattr(sweep, name) for name in ("passed", "sampled", "total", "pairs_met", "failed")}
    return {
        "title": f"{sweep.sampled} of {sweep.total} layouts",
        "sweep": counts | {"rows": [_row(proof) for proof in sweep.layouts]},
        "proofs": [msgspec.to_builtins(proof) for proof in full],
    }


def _row(proof: Proof) -> dict[str, Any]:
    return {
        "layout": proof.layout,
        "model": proof.variant or proof.model,
        "passed": proof.passed,
        "seconds": proof.seconds,
        "gradient": proof.worst_gradient and proof.worst_gradient.error,
        "parameter": proof.worst_parameter and proof.worst_parameter.error,
        "traffic": all(row.passed for row in proof.traffic_per_step),
        "held": all(check.passed for check in proof.held),
    }


# ---- report ---------------------------------------------------------------------------------------------------------


MAX_REPORT_BYTES = 3_000_000  # small enough for any mail server
HTML_SUFFIX = ".html"
# Views that only a report has: the served page cannot run a proof, and shows traces in its Run view.
TRACE_VIEW = View("trace", "Trace", "what the ranks of a step did")
VERIFY_VIEW = View("verify", "Verify", "a layout against one process")


@dataclass(frozen=True)
class Report(Result):
    """An HTML file that was written."""

    file: Path
    title: str
    views: tuple[str, ...]
    size: int  # bytes

    def blocks(self) -> Iterator[Block]:
        yield Text(f"{self.title}: written to {self.file}, {self.size / 1e6:.2f} MB; a browser opens it")

    def to_dict(self) -> dict[str, Any]:
        return {"file": str(self.file), "title": self.title, "views": list(self.views), "bytes": self.size}


def report(result: Result | str | Path, output: str | Path, command: str = "") -> Report:
    """Write `result` as one HTML file, `output`. It may be the path of a run, of a directory of runs, or of a file with
    the JSON of a `VerifyResult`. `command` is the command that the file names as its origin.

    >>> ff.report(ff.plan("tiny", "2xCPU", batch=8, seq=64), "plan.html").views
    ('plan', 'mesh')
    """
    path = path_of(output)
    check_writable(path, HTML_SUFFIX, ".htm")
    title, views = views_of(result)
    made = {
        "by": f"Fivefold {__version__}",
        "command": without_paths(command),
        "on": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
    }
    text = html_page(title, views, made).encode()
    if len(text) > MAX_REPORT_BYTES:
        raise UserError(
            f"the report of {title} is {len(text) / 1e6:.2f} MB; the limit is {MAX_REPORT_BYTES / 1e6:g} MB; report "
            "fewer runs, schedules, ranks or microbatches, or look at it with `fivefold ui`",
            "report.size",
        )
    write(path, text.decode())
    return Report(path, title, tuple(view["name"] for view in views), len(text))


def views_of(result: Result | str | Path) -> tuple[str, list[dict[str, Any]]]:
    """The title and the views of a result."""
    if isinstance(result, str | Path):
        return _path_views(path_of(result))
    for kind, views in VIEWS_BY_RESULT.items():
        if isinstance(result, kind):
            return views(result)
    names = ", ".join(kind.__name__ for kind in VIEWS_BY_RESULT)
    raise UserError(
        f"there is no report of a {type(result).__name__}; reports can be made of {names}, and of a run", "report.kind"
    )


def _plan_views(result: PlanResult) -> tuple[str, list[dict[str, Any]]]:
    """The plan; the mesh of its layout, unless it has too many ranks; and the schedule, if there is a pipeline."""
    from fivefold.planner.mesh_picture import MAX_RANKS
    from fivefold.web.mesh import mesh_view
    from fivefold.web.plan import others, plan_view
    from fivefold.web.schedule import step_view

    option, views = result.explained, [page_view("plan", *plan_view(result), others(result))]
    if option.layout.world <= MAX_RANKS:
        views.append(page_view("mesh", *mesh_view(option.workload, result.workload.software.name)))
    simulation = option.estimate.simulation
    if simulation is not None and (step := step_view(simulation, option.layout.microbatches)) is not None:
        views.append(page_view("schedule", step))
    return f"{result.workload.spec.name} on {result.workload.cluster}", views


def _draw_views(result: DrawResult) -> tuple[str, list[dict[str, Any]]]:
    from fivefold.web.schedule import others, schedule_views

    first, views = result.simulations[0].schedule, schedule_views(result)
    names = [name for name, _, _ in views]
    title = f"{', '.join(names)}: p={first.p}, m={first.m}"
    if len(views) == 1:
        return title, [page_view("schedule", *views[0][1:], others(result))]
    return title, [
        page_view("schedule", *contents) | {"module": "schedule", "name": f"schedule-{number}", "title": name}
        for number, (name, *contents) in enumerate(views)
    ]


def _result_views(result: VerifyResult) -> tuple[str, list[dict[str, Any]]]:
    return _verify_views(verify_payload(result.to_dict()))


def _path_views(path: Path) -> tuple[str, list[dict[str, Any]]]:
    if path.is_dir():
        return _runs_views(path)
    return _verify_views(read_verify_json(path))


def _runs_views(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """The run of a directory, or the newest of the runs in it."""
    from fivefold.web.run import MAX_SHOWN_RUNS
    from fivefold.web.run_files import runs_in

    roots = (path.resolve(),)
    runs, notes = runs_in(roots)
    if not runs:
        raise UserError(
            notes or f"{path} contains no run; a run's directory has job.toml and metrics.jsonl", "run.missing"
        )
    names = list(runs)[:MAX_SHOWN_RUNS]
    return ", ".join(names), [make_shareable(answered_view("run", Ask({"runs": ",".join(names)}, roots)))]


def _trace_views(result: TraceResult) -> tuple[str, list[dict[str, Any]]]:
    payload = {"run": result.file.stem} | read_lanes(result.file)
    return f"a trace of {payload['layout'] or 'one rank'}", [page_view(TRACE_VIEW, payload)]


def _verify_views(payload: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    return payload["title"], [page_view(VERIFY_VIEW, payload)]


VIEWS_BY_RESULT: dict[type[Result], Callable[[Any], tuple[str, list[dict[str, Any]]]]] = {
    PlanResult: _plan_views,
    DrawResult: _draw_views,
    VerifyResult: _result_views,
    TraceResult: _trace_views,
}
