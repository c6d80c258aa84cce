"""The Mesh view in a browser: ranks, groups and bytes are those of `fivefold draw mesh` and of the planner."""

import re
from collections.abc import Callable
from typing import Any

import fivefold as ff
from fivefold.cost.collective_time import wire
from fivefold.cost.traffic import layer_collectives
from fivefold.layout.rank_part import part_of
from tests.browser.window import Window

Opening = Callable[..., Window]
MODEL, CLUSTER, BATCH, SEQ = "qwen3-30b-a3b", "2x8xH100", 64, 4096
START = "dp=4,tp=2,pp=2,ep=4,zero=1,sp,microbatches=4"


def words(page: Window) -> dict[str, str]:
    return dict(page.page.evaluate("() => Object.fromEntries(new URLSearchParams(location.hash.split('?')[1]))"))


def size_of(size: float) -> str:
    """Bytes as the page writes them: three digits that count."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            value = size / unit
            return f"{round(value) if value >= 100 else f'{value:.{1 if value >= 10 else 2}f}'} {name}"
    return f"{size:.0f} B"


def agrees(page: Window) -> int:
    """The rank that is shown: its place, its groups and its part, and what one layer sends."""
    asked = words(page)
    layout, number = ff.Layout.parse(asked["layout"]), int(asked["rank"])
    told: Any = ff.mesh(layout, CLUSTER).to_dict()
    at = told["ranks"][number]
    assert page.text("rank") == f"Rank {number} · node {at['node']}"
    chips = dict(one.split() for one in page.text("coordinates").splitlines())
    wide = {one["axis"]: one["ranks"] for one in told["axes"]}
    assert {axis: int(place) for axis, place in chips.items()} == {
        axis: layout.position(axis, number) for axis in chips
    } | {axis: at[axis] for axis in wide if axis in at}
    assert set(chips) == set(wide)
    for axis, ranks in wide.items():
        assert page.text(f"colour-{axis}") == f"{axis} = {ranks}"
        listed = [int(one) for one in re.findall(r"\d+", page.text(f"group-{axis}").partition("ranks:")[2])]
        assert listed == layout.group(axis, number)
    spec = ff.preset(MODEL)
    part = part_of(spec, layout, SEQ, BATCH, number)
    assert page.text("fact-layers").startswith(f"{part.layers[0]} to {part.layers[-1]} of {spec.layers}")
    assert page.text("fact-heads") == f"{part.heads[0]} to {part.heads[-1]} of {spec.heads}"
    assert page.text("fact-sequences") == f"{part.sequences[0]} to {part.sequences[-1]} of {BATCH}"
    layer = int(page.one("slider-layer").input_value())
    sent = layer_collectives(spec, layout, SEQ, BATCH, "bfloat16", layer)
    rows = page.one("collectives").locator("tbody tr")
    assert rows.count() == len(sent)
    for row, one in zip(rows.all(), sent, strict=True):
        cells = [text.strip() for text in row.locator("td").all_inner_texts()]
        assert cells[3].startswith(one.kind)
        assert cells[4] == (f"{one.calls} × " if one.calls > 1 else "") + size_of(one.payload)
        assert cells[5] == size_of(float(wire(one.kind, one.calls * one.payload, layout.size(one.axis))))
    return number


def test_keys_and_sliders_bring_the_ranks_of_draw_mesh(window: Opening) -> None:
    page = window(f"mesh?model={MODEL}&cluster={CLUSTER}&batch={BATCH}&seq={SEQ}&layout={START}")
    assert agrees(page) == 0
    board = page.one("cluster")
    met = set()
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
        board.press(key)
        page.settle()
        met.add(agrees(page))
    assert len(met) == 3
    page.one("slider-tp").press("ArrowRight")
    page.settle()
    assert words(page)["layout"] != START
    agrees(page)
    assert page.wrong == []
