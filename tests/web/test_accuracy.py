"""The Accuracy view: rows, ranges and errors are those of `fivefold accuracy`; the null model's rows make its error."""

from statistics import fmean
from typing import Any

import pytest

from fivefold.accuracy.result import planner_accuracy
from fivefold.accuracy.score import null_error
from fivefold.planner.error_range import step_range
from fivefold.support.errors import UserError
from fivefold.web.accuracy import payload, rows
from fivefold.web.question import Ask
from fivefold.web.workers import Workers
from tests.web.serving import serving


def test_the_list_has_every_source() -> None:
    page = payload(Ask())
    assert {"llama3", "laer_moe_megatron"} <= {one["name"] for one in page["sources"]}
    assert page["bands"] == [0.1, 0.25]
    with pytest.raises(UserError, match="unknown source 'nobody'"):
        rows(Ask({"source": "nobody"}))
    with pytest.raises(UserError, match="unknown source 'nobody'"):
        payload(Ask({"source": "nobody"}))
    assert payload(Ask({"source": "laer_moe_megatron, experts"})) == page


@pytest.mark.parametrize(
    ("source", "experts"), [("llama3", False), ("laer_moe_megatron", True), ("zero_memory", False)]
)
def test_rows_are_those_of_accuracy(source: str, experts: bool) -> None:
    found, result = rows(Ask({"source": source})), planner_accuracy(rows=source)
    whole = result.to_dict()
    assert len(found["rows"]) == len(whole["rows"])
    for row, known, score in zip(found["rows"], whole["rows"], result.results, strict=True):
        assert {name: row[name] for name in known} == known
        cells = row["cells"] | {name: found["texts"][at] for name, at in row["long"].items()}
        published = {name: text.strip() for name, text in score.row.values.items() if text and text.strip()}
        assert cells | {"status": row["status"], "model": row["model"]} == published | {"status": score.row.status}
        if score.run and score.seconds is not None:
            band = step_range(score.run.workload)
            assert row["predicted_range"] == (band and band.around(score.seconds))
    for line in found["lines"]:
        assert {name: line[name] for name in whole["sources"][line["source"]]} == whole["sources"][line["source"]]
        assert line["experts"] is experts
    assert (found["mean_mape"], found["experts_mape"]) == (whole["mean_mape"], whole["experts_mape"])


def test_the_null_models_rows_make_its_error() -> None:
    found = rows(Ask({"source": "torchtitan"}))
    timed = [row for row in found["rows"] if row["null_seconds"] is not None]
    (line,) = found["lines"]
    assert len(timed) == line["timed"]
    error = fmean(abs(row["null_seconds"] / row["measured_seconds"] - 1) for row in timed)
    assert error == pytest.approx(line["null_mape"], rel=1e-12)
    runs = [score.run for score in planner_accuracy(rows="torchtitan").results if score.run and score.error is not None]
    assert line["null_mape"] == null_error(runs) > line["mape"]


def test_answers_that_never_change_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    async def ask(self: Workers, lane: str, question: Any) -> bytes:
        calls.append(question.query)
        return b'{"rows": []}'

    monkeypatch.setattr(Workers, "ask", ask)
    with serving() as server:
        for source in ("llama3", "llama3", "torchtitan"):
            assert server.ask("accuracy/rows", {"source": source}).json == {"rows": []}
        server.ask("plan/search")
        server.ask("plan/search")
    assert calls == [{"source": "llama3"}, {"source": "torchtitan"}, {}, {}]
