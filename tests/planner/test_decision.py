"""The decision, written down: its figures are those of `plan --json`, and what would change it is planned again."""

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.cost.peak_memory import USABLE_FRACTION
from fivefold.hardware.cluster import Cluster
from fivefold.planner.decision import Decision, TurningPoint, decide
from fivefold.planner.explain import CAUSE_NAMES
from fivefold.planner.plan import plan, simulate
from fivefold.planner.result import PlanResult
from fivefold.planner.textbook_formulas import Shortcut, flops_text, shortcuts
from fivefold.render.blocks import Table, Text
from fivefold.render.html import Section, to_markdown

DENSE = "dp=2,tp=2,pp=2,zero=1,sp,microbatches=8,recompute=selective"
UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "KB": 1e3, "B": 1.0, "s": 1.0, "ms": 1e-3}


def dense() -> PlanResult:
    return plan("llama3.2-1b", "8xH100", batch=32, seq=4096, layout=DENSE, price=2.5)


def sharded() -> PlanResult:
    return plan("llama3-8b", "8xH100", batch=64, seq=8192, layout="dp=8,zero=3,microbatches=8,recompute=full")


def mixture() -> PlanResult:
    return plan("tiny-moe", "2x4xH100", batch=64, seq=512, layout="dp=8,ep=4,zero=1,microbatches=4")


@pytest.fixture(scope="module", params=[dense, sharded, mixture], ids=["dense", "sharded", "mixture"])
def decision(request: pytest.FixtureRequest) -> Decision:
    found = request.param()
    turn = TurningPoint("batch", "sequences", found.workload.batch, found.workload.batch / 2, None)
    return Decision(found, tuple(shortcuts(found.explained)), (turn,), "fivefold plan")


def tables(text: str) -> dict[str, list[list[str]]]:
    """By their section: the cells of the rows, without emphasis."""
    found: dict[str, list[list[str]]] = {}
    section = ""
    for line in text.splitlines():
        section = line[3:] if line.startswith("## ") else section
        if line.startswith("|") and not set(line) <= set("|-: "):
            found.setdefault(section, []).append([cell.strip().strip("*") for cell in line.strip("|").split("|")])
    return {name: rows[1:] for name, rows in found.items()}


def value(cell: str) -> float:
    number, unit = cell.replace(",", "").split()
    return float(number) * UNITS[unit]


def near(cell: str, exact: float) -> bool:
    """Whether a cell says a number, to the digits that it has."""
    number, unit = cell.split()
    digits = len(number.partition(".")[2])
    last = 10.0**-digits if digits else 10.0 ** max(0, len(number) - 4)  # zeros at the end may be left out
    return abs(value(cell) - exact) <= 0.501 * last * UNITS[unit] or f"{exact / UNITS[unit]:.4g}" == number


def test_figures_are_those_of_json(decision: Decision) -> None:
    found = decision.plan.to_dict()
    shown, rows = found["layout"], tables(decision.markdown())
    memory = {name: cell for name, cell, _ in rows["Memory"]}
    parts = {name: size for name, size in shown["memory_by_component"].items() if size > 0}
    assert [*memory][:-2] == [*parts]
    assert all(near(memory[name], size) for name, size in parts.items())
    assert near(memory["total"], shown["memory_bytes"])
    assert near(memory["a plan's limit"], decision.plan.explained.limit)
    causes = {name: cell for name, cell, _ in rows["Time"]}
    assert near(causes.pop("step"), shown["step_seconds"])
    assert causes
    named = {CAUSE_NAMES[cause]: length for cause, length in shown["time_by_cause"].items()}
    assert all(near(cell, named[name]) for name, cell in causes.items())
    sent = [row for row in shown["traffic"] if row["payload"] > 4096]
    assert len(rows["Traffic"]) == len(sent) > 0
    for (axis, kind, calls, *cells), row in zip(rows["Traffic"], sent, strict=True):
        assert (axis, kind, calls) == (row["axis"], row["kind"], f"{row['calls']:,}")
        assert all(
            near(cell, row[key]) for cell, key in zip(cells, ("payload", "inside", "across", "seconds"), strict=True)
        )
    neighbours = {one["change"]: one for one in found["neighbours"]}
    assert {row[0] for row in rows["Layouts one change away"]} == {*neighbours}
    for change, time, size in rows["Layouts one change away"]:
        slower = neighbours[change]["slower"]
        assert time == (f"{slower:+.1%}" if slower is not None else time)
        assert not size or near(size, neighbours[change]["memory_bytes"])


def test_predictions_have_their_ranges(decision: Decision) -> None:
    shown, rows = decision.figures, tables(decision.markdown())["The decision"]
    step = next(row for row in rows if row[0] == "time of a step")
    assert near(step[1], shown["step_seconds"])
    assert all(near(cell, end) for cell, end in zip(step[2].split(" to "), shown["step_seconds_range"], strict=True))
    assert next(row for row in rows if row[0] == "MFU")[1] == f"{shown['mfu']:.1%}"


def test_names_are_no_markup() -> None:
    section = Section("a <b>", [Text("x <script>alert(1)</script> \x1b[31m & y"), Table(["<i>"], [["|<u>"]])])
    page = to_markdown("a\nb <script>", [section])
    assert page.startswith("# a?b &lt;script>\n")
    assert "<" not in page
    assert "\x1b" not in page
    assert "x &lt;script>alert(1)&lt;/script> ?[31m &amp; y" in page


def test_tables_are_narrow_and_prose_is_broken(decision: Decision) -> None:
    for line in decision.markdown().splitlines():
        assert len(line) <= 80 or "`" in line, line


def test_exact_figures_stand_beside_shortcuts(decision: Decision) -> None:
    found, option = {one.name: one for one in decision.shortcuts}, decision.plan.explained
    shown = decision.figures
    parts = shown["memory_by_component"]
    assert found["state"].exact == sum(parts[name] for name in ("parameters", "gradients", "optimizer"))
    kept = sum(size for name, size in parts.items() if name.startswith("activations"))
    assert found["activations"].exact == pytest.approx(kept)
    peak = option.workload.cluster.world * option.workload.first_device.accelerator.rate("bf16")
    assert found["FLOPs"].exact / shown["step_seconds"] / peak == pytest.approx(shown["mfu"])
    text = decision.markdown()
    for one in found.values():
        assert one.formula in re.sub(r"\s+", " ", text)
        assert one.textbook > 0
        assert one.why


def test_a_number_of_operations_has_its_unit() -> None:
    """P is the number of parameters in the formulas beside it."""
    assert [flops_text(one) for one in (2.019e18, 3.5e15, 9.6e10, 12)] == [
        "2,019 PFLOP", "3.50 PFLOP", "96.00 GFLOP", "12 FLOP"
    ]  # fmt: skip


def test_the_rate_of_a_slow_device_is_not_nothing() -> None:
    text = decide(plan("tiny", "2xCPU", batch=8, seq=64), "").markdown()
    assert re.search(r"CPU, nominal .*peak in fp32 +\| 0\.096 TFLOP/s", text, re.DOTALL)


def said(model: str, layout: str, cluster: str, batch: int, seq: int) -> dict[str, Shortcut]:
    return {one.name: one for one in shortcuts(simulate(model, layout, cluster, batch=batch, seq=seq).option)}


def test_shortcuts_are_what_textbooks_say() -> None:
    found = said("llama3.2-1b", DENSE, "8xH100", 32, 4096)
    count, tokens, hidden, layers = 1_235_814_400, 2 * 4096, 2048, 16  # of a microbatch on a rank
    assert found["state"].textbook == pytest.approx((4 + 12 / 2) * count / 4)
    assert found["dp on the wire"].textbook == pytest.approx(2 * 2 * count / 4)
    assert found["activations"].textbook == pytest.approx(34 * tokens * hidden / 2 * layers)
    assert found["tp on the wire"].textbook == pytest.approx(4 * 2 * tokens * hidden * (layers / 2) * 8)
    assert found["pp on the wire"].textbook == pytest.approx(2 * tokens * hidden * 8)
    assert found["pp on the wire"].exact == found["pp on the wire"].textbook / 2  # sp: its part alone
    assert found["bubble"].textbook == 1 / 9
    assert 0 < found["bubble"].exact < 0.2


def test_shortcuts_of_full_sharding_and_of_experts() -> None:
    whole = said("llama3-8b", "dp=8,zero=3,microbatches=8,recompute=full", "8xH100", 64, 8192)
    assert whole["dp on the wire"].textbook == 3 * 2 * 8_030_261_248
    assert whole["dp on the wire"].exact > 8 * whole["dp on the wire"].textbook  # of every microbatch
    assert whole["state"].textbook == 2 * 8_030_261_248
    assert whole["activations"].textbook == pytest.approx(whole["activations"].exact)  # 2 BSH a layer, to the byte
    experts = said("qwen3-30b-a3b", "dp=16,ep=8,zero=1,microbatches=4,recompute=full", "2x8xH100", 64, 4096)
    assert experts["ep on the wire"].textbook == pytest.approx(4 * 8 * 4096 * 2048 * 2 * 7 / 8 * 48 * 4)
    assert experts["ep on the wire"].exact > experts["ep on the wire"].textbook  # full recompute sends again


def test_turning_points_are_where_plans_turn() -> None:
    """Where the choice is said to hold it is planned, and where it is said to be another that one is."""
    asked: dict[str, Any] = {"batch": 64, "seq": 2048, "fix": "pp=1,cp=1,tp=1"}
    found = plan("llama3.2-1b", "8xA100-40", **asked)
    decision = decide(found)
    assert {one.name for one in decision.turns} == {"memory of a device", "link within the node", "batch"}
    assert [one.holds / one.value for one in decision.turns if not one.turns] == [
        factor for one, factor in zip(decision.turns, 3 * (0.5, 2.0), strict=True) if not one.turns
    ]
    turned = [one for one in decision.turns if one.turns]
    assert turned
    device = found.workload.cluster.groups[0]

    def choice(one: TurningPoint, at: float) -> str:
        card = device.accelerator
        if one.name == "batch":
            assert at == round(at)
            return str(plan("llama3.2-1b", "8xA100-40", **(asked | {"batch": round(at)})).chosen.layout)
        if one.name.startswith("memory"):
            card = structs.replace(card, memory=int(at * 1e9))
        else:
            card = structs.replace(card, inside=structs.replace(card.inside, bandwidth=at * 1e9))
        return str(plan("llama3.2-1b", Cluster((structs.replace(device, accelerator=card),)), **asked).chosen.layout)

    def apart(layout: str) -> str:
        return re.sub(r",?microbatches=\d+", "", layout)

    one = turned[0]
    assert choice(one, one.turns or 0) == one.choice
    assert apart(one.choice) != apart(str(found.chosen.layout))
    assert apart(choice(one, one.holds)) == apart(str(found.chosen.layout))
    assert one.choice in decision.markdown()
    least = found.chosen.footprint.total / USABLE_FRACTION
    assert f"needs devices of {least / 1e9:.1f} GB" in decision.markdown().replace("\n", " ")


@pytest.mark.parametrize("suffix", ["md", "html"])
def test_the_command_writes_it(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"decision.{suffix}"
    asked = f"plan tiny --cluster 2xCPU --batch 16 --seq 128 -o {path}"
    result = CliRunner().invoke(app, asked.split(), catch_exceptions=False)
    assert result.exit_code == 0
    text = path.read_text()
    assert "What would change the decision" in text
    assert text.startswith("# The layout of tiny" if suffix == "md" else "<!doctype html>")
    if suffix == "html":
        assert text.count("<svg") == 6  # memory, traffic and time, light and dark
        assert "<script" not in text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
