"""The Accuracy view: the planner's predictions beside measured runs, as in `fivefold accuracy`.

payload(Ask())                          # the sources, and how many rows each has
rows(Ask({"source": "llama3"}))         # its rows: cells, prediction, range, error; and its line of the table
rows(Ask())                             # the rows of all sources, which takes half a minute
"""

from functools import cache
from typing import Any

from fivefold.accuracy.cases import read_rows
from fivefold.accuracy.result import ERROR_BANDS, AccuracyResult, planner_accuracy
from fivefold.accuracy.score import EXPERTS_SUFFIX, RowScore, line_of, null_seconds
from fivefold.planner.error_range import COVERAGE, step_range
from fivefold.support.errors import UserError
from fivefold.support.text import did_you_mean
from fivefold.web.question import Ask

SHARED_TEXT_CELLS = ("source", "url_or_path", "notes")  # each text is sent once
CELLS_IN_FIGURES = ("status", "model")  # cells that a row's figures repeat


def payload(ask: Ask) -> dict[str, Any]:
    """The sources that can be asked for."""
    ask.only("source", "model", "kind")
    files = [row.file for row in read_rows()]
    if (source := ask.text("source").removesuffix(EXPERTS_SUFFIX)) and source not in files:
        raise UserError(
            f"unknown source {source[:60]!r}; {did_you_mean(source[:60], list(dict.fromkeys(files)))}",
            "accuracy.source.unknown",
        )
    return {
        "sources": [{"name": name, "rows": files.count(name)} for name in dict.fromkeys(files)],
        "bands": sorted(ERROR_BANDS),
        "range_share": COVERAGE,
        "asks": {"rows": {}},
    }


def rows(ask: Ask) -> dict[str, Any]:
    """All rows of a source, or of all sources."""
    ask.only("source")
    return _rows(ask.text("source"))


@cache
def _rows(source: str) -> dict[str, Any]:
    result = planner_accuracy(rows=source)
    figures = result.to_dict()
    texts: dict[str, int] = {}  # each long text -> its index in the answer
    null = _null_seconds_by_row(result)
    rows = [_row(score, texts) | {"null_seconds": null.get(score.row.where)} for score in result.results]
    lines = [
        figures["sources"][line.source] | {"experts": line.experts, "judged": line.judged} for line in result.scores
    ]
    names = ("mean_mape", "experts_mape", "sweeps")
    return {"lines": lines, "rows": rows, "texts": list(texts), **{name: figures[name] for name in names}}


def _null_seconds_by_row(result: AccuracyResult) -> dict[str, float]:
    """By row: the step time by the null model, which knows one utilisation per line of the table."""
    seconds_by_row: dict[str, float] = {}
    for line in result.scores:
        timed = [score for score in result.results if score.error is not None and line_of(score.row) == line.source]
        seconds = null_seconds([score.run for score in timed if score.run]) if timed else []
        seconds_by_row |= {score.row.where: value for score, value in zip(timed, seconds, strict=True)}
    return seconds_by_row


def _row(score: RowScore, texts: dict[str, int]) -> dict[str, Any]:
    """A row's figures as `accuracy --json` has them, its range, and its cells as they stand in the file."""
    run = score.run
    band = step_range(run.workload) if run and score.seconds is not None else None
    values = {name: text.strip() for name, text in score.row.values.items() if name and text and text.strip()}
    return score.to_dict() | {
        "experts": line_of(score.row).endswith(EXPERTS_SUFFIX),
        "software": run.source.software.name if run else None,
        "predicted_range": band.around(score.seconds) if band and score.seconds is not None else None,
        "cells": {name: text for name, text in values.items() if name not in (*SHARED_TEXT_CELLS, *CELLS_IN_FIGURES)},
        "long": {name: texts.setdefault(values[name], len(texts)) for name in SHARED_TEXT_CELLS if name in values},
    }
