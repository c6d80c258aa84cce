"""The Accuracy view in a browser: its figures, its table and its rows are those of `fivefold accuracy`."""

from collections.abc import Callable
from statistics import fmean

import pytest

import fivefold as ff
from tests.browser.window import Window

Opening = Callable[..., Window]


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}%"


def signed(share: float) -> str:
    return f"{'−' if share < 0 else '+'}{percent(abs(share))}"


def seconds(value: float) -> str:
    number, unit = (value, "s") if value >= 1 else (1e3 * value, "ms")
    return f"{f'{number:,.0f}' if number >= 100 else f'{number:.{1 if number >= 10 else 2}f}'} {unit}"


@pytest.mark.parametrize("source", ["llama3", "torchtitan"])
def test_figures_of_a_source_are_those_of_accuracy(window: Opening, source: str) -> None:
    found = window("accuracy")
    found.page.wait_for_selector(".view-accuracy [data-loaded]")  # of all published runs
    found.one("select-accuracy-source").select_option(source)
    found.settle()
    told = ff.planner_accuracy(rows=source).to_dict()
    errors = [abs(row["error"]) for row in told["rows"] if row["error"] is not None]
    assert found.text("mean-error") == percent(fmean(errors))
    for name, band in (("near", 0.1), ("far", 0.25)):
        assert found.text(name) == percent(sum(error <= band for error in errors) / len(errors), 0)
    line = told["sources"][source]
    row = found.one("sources").locator("tbody tr", has=found.one(f"source-{source}"))
    cells = [text.strip() for text in row.locator("td").all_inner_texts()]
    assert cells[1:3] == [str(line["rows"]), str(line["timed"])]
    assert cells[3:8] == [
        percent(line["mape"]), percent(line["median_ape"]), signed(line["bias"]), percent(line["null_mape"]),
        signed(line["worst"]["error"]),
    ]  # fmt: skip
    known = {f"{one['source']}:{one['line']}": one for one in told["rows"]}
    for listed in found.one("rows").locator("tbody tr").all()[:8]:
        name, *_, measured, predicted, _, error, _ = (text.strip() for text in listed.locator("td").all_inner_texts())
        one = known[name]
        assert (measured, predicted, error) == (
            seconds(one["measured_seconds"]), seconds(one["predicted_seconds"]), signed(one["error"])
        )  # fmt: skip
    assert found.wrong == []


def test_an_address_that_names_nothing_published_is_told_and_all_is_shown(window: Opening) -> None:
    found = window("accuracy?source=nowhere&gpu=H100x")
    found.page.wait_for_selector(".view-accuracy [data-loaded]")
    said = found.text("accuracy-refused")
    assert said == "The published runs have no source 'nowhere' and no GPU 'H100x'. Shown instead are all."
    assert found.one("select-accuracy-source").input_value() == "all"
    found.one("select-accuracy-source").select_option("llama3")
    found.settle()
    assert not found.one("accuracy-refused").is_visible()
    assert found.page.url.endswith("#accuracy?source=llama3")
    assert found.wrong == []


def test_the_run_that_is_told_of_is_one_of_those_that_are_shown(window: Opening) -> None:
    found = window("accuracy?source=llama3")
    found.page.wait_for_selector(".view-accuracy [data-loaded]")
    assert "llama3.csv" in found.text("row")
    found.one("source-megatron_bridge, experts").click()  # a line of its own, which the list of sources has, too
    assert "megatron_bridge.csv" in found.text("row")
    assert found.one("select-accuracy-source").input_value() == "megatron_bridge, experts"
