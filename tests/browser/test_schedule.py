"""The Schedule view in a browser: sliders and keys change its figures to those of `draw` and `schedules`."""

import random
from collections.abc import Callable

import fivefold as ff
from fivefold.schedules.result import compare
from tests.browser.window import Window

Opening = Callable[..., Window]


def agrees(page: Window) -> str:
    """What the address asks for, drawn by Python: the same makespan, bubbles and peak."""
    words = page.page.evaluate("() => Object.fromEntries(new URLSearchParams(location.hash.split('?')[1]))")
    numbers = {key: int(words[key]) for key in ("pp", "microbatches", "chunks") if words.get(key)}
    found = ff.draw(words["schedule"], times=words.get("times", ""), slow=words.get("slow", ""), **numbers).to_dict()
    told = {name: page.text(name) for name in ("makespan", "bubble", "bubble-span", "peak")}
    assert float(told["makespan"].replace(",", "")) == round(found["makespan"], len(told["makespan"].partition(".")[2]))
    assert told["bubble"] == f"{100 * found['bubble_makespan']:.2f}%"
    assert told["bubble-span"] == f"{100 * found['bubble_span']:.2f}%"
    assert float(told["peak"]) == round(max(found["peak_activations"]), 3)
    return str(sorted(words.items()))


def test_sliders_bring_the_figures_of_draw(window: Opening) -> None:
    page, choose = window("schedule?schedule=zb-h1&pp=4&microbatches=8"), random.Random(4)
    met = {agrees(page)}
    for _ in range(8):
        slider = page.one(f"slider-{choose.choice(['pp', 'microbatches', 'f', 'i', 'w', 'comm'])}")
        right = slider.input_value() != slider.get_attribute("max") and choose.random() < 0.7
        slider.press("ArrowRight" if right else "ArrowLeft")
        page.settle()
        met.add(agrees(page))
    page.one("select-slow").select_option("1")
    page.settle()
    met.add(agrees(page))
    assert len(met) >= 6
    assert page.wrong == []


def test_all_schedules_are_those_of_the_command(window: Opening) -> None:
    page = window("schedule?schedule=1f1b&pp=4&microbatches=8&times=comm=0.1")
    for row in compare(4, 8, times="comm=0.1").to_dict()["schedules"]:
        if "refused" not in row:
            said = page.text(f"makespan-{row['schedule']}")
            assert float(said) == round(row["makespan"], len(said.partition(".")[2])), row["schedule"]
    page.one("take-zb-v").press("Enter")
    page.settle()
    assert "schedule=zb-v" in page.page.url
    agrees(page)
