"""The decision: a layout for 70B on 128 GPUs, with its arithmetic, judged against the planner."""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.labs.lab import FileVerdict, Lab
from fivefold.layout.layout import Layout
from fivefold.planner.plan import plan, simulate
from fivefold.support.errors import UserError
from fivefold.support.text import did_you_mean, si

MODEL, CLUSTER, BATCH, SEQ = "llama3-70b", "16x8xH100", 512, 8192
SLOWER = 0.15  # than the planner's best layout, at most
_HEADS = ("quantity", ">yours", ">the planner's", ">allowed")
_STATE = ("parameters", "gradients", "optimizer")


class StatedFigure(NamedTuple):
    """A number of the answer, the planner's, and how far they may be apart."""

    name: str
    planned: float
    allowed: float
    how: str  # it follows
    textbook: float | None = None  # what the formula of `how` gives where the planner knows more; as right


def quantities(option: Mapping[str, Any], parameters: float, bubble: float, layout: Layout) -> list[StatedFigure]:
    """All that the answer states, for its own layout."""
    tokens = BATCH * SEQ
    others = layout.pp - 1
    formula = others / (layout.microbatches + others) if layout.schedule in ("1f1b", "gpipe") else None
    held = sum(option["memory_by_component"].get(part, 0) for part in _STATE)
    return [
        StatedFigure(
            "parameters",
            parameters,
            0.02,
            "q and o, k and v of 8 of 64 heads, three matrices of the MLP; embedding and head apart",
        ),
        StatedFigure("tokens_per_step", tokens, 0.0, "sequences x tokens of each"),
        StatedFigure(
            "flops_per_step", 6 * parameters * tokens, 0.1, "6 for each parameter and token, without attention's scores"
        ),
        StatedFigure("state_gb", held / 1e9, 0.15, "bytes of weights, gradients and Adam, divided by their axes"),
        StatedFigure("bubble", bubble, 0.25, "(p - 1) / (m + p - 1) of the time, 0 without a pipeline", formula),
        StatedFigure("step_seconds", option["step_seconds"], 0.3, "FLOPs / (128 x 989e12 x the MFU you expect)"),
    ]


def judge(lab: Lab, file: Path) -> FileVerdict:
    try:
        answer = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:  # the last of [[[[...
        return FileVerdict(lab.name, lab.title, _HEADS, [], [f"{file.name} is no TOML: {error}"])
    layout = answer.get("layout")
    if not isinstance(layout, str) or not layout:
        return FileVerdict(lab.name, lab.title, _HEADS, [], ['layout = "" is not written yet'])
    try:
        own = simulate(MODEL, layout, CLUSTER, batch=BATCH, seq=SEQ)
    except UserError as error:
        return FileVerdict(lab.name, lab.title, _HEADS, [], error.problems)
    option = own.to_dict()
    workload, bubble = own.option.workload, own.option.estimate.bubble
    wanted = quantities(option, float(workload.spec.parameter_count), bubble, workload.layout)
    rows, problems = [], []
    for one in wanted:
        row, problem = _compared(one, answer.get(one.name))
        rows.append(row)
        problems += problem
    names = ["layout", "why", *(one.name for one in wanted)]
    problems += [f"{name} is not asked for; {did_you_mean(name, names)}" for name in answer if name not in names]
    if not own.ok:
        return FileVerdict(lab.name, lab.title, _HEADS, rows, [own.advice, *problems])
    best = plan(MODEL, CLUSTER, batch=BATCH, seq=SEQ).options[0]
    causes = simulate(MODEL, best.layout, CLUSTER, batch=BATCH, seq=SEQ).to_dict()["time_by_cause"]
    slower = option["step_seconds"] / best.seconds - 1
    if slower > SLOWER:
        than = f"{layout} takes {slower:.0%} longer than the planner's best, {best.layout}"
        problems.insert(0, f"{than}: what it has most more of is {_more(option['time_by_cause'], causes)}")
    return FileVerdict(lab.name, lab.title, _HEADS, rows, problems)


def _compared(one: StatedFigure, stated: Any) -> tuple[list[str], list[str]]:
    allowed = f"{one.allowed:.0%}" if one.allowed else "none"
    if stated in (None, -1):
        return [one.name, "-", si(one.planned), allowed], [f"{one.name} is not written yet: {one.how}"]
    if isinstance(stated, bool) or not isinstance(stated, int | float) or not 0 <= stated < math.inf:
        wrong = f"{one.name} = {stated!r} is no number of 0 or more; write it without quotes, as 70.6e9"
        return [one.name, "-", si(one.planned), allowed], [wrong]
    row = [one.name, si(float(stated)), si(one.planned), allowed]
    right = [one.planned] if one.textbook is None else [one.planned, one.textbook]
    if any(abs(stated - figure) <= one.allowed * figure + 1e-9 for figure in right):
        return row, []
    ratio = f"{stated / one.planned:.3g} x the planner's" if one.planned else f"{stated:g}, and the planner's is 0"
    return row, [f"{one.name} is {ratio}: {one.how}"]


def _more(own: Mapping[str, float], best: Mapping[str, float]) -> str:
    """The cause of time of which a layout has most more than another one."""
    return max(own, key=lambda name: own[name] - best.get(name, 0.0))


LAB = Lab(
    "decision",
    "The decision: 70B on 16 nodes",
    "choose TP, PP, DP and ZeRO by arithmetic, and defend the numbers",
    suffix=".toml",
    read=judge,
)
