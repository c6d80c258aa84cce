"""Sweeps: what the planner's choice costs beside rules of thumb."""

import csv
import json
from pathlib import Path

import pytest

from fivefold.accuracy.cases import DATA
from fivefold.accuracy.sweeps import PLANNER, RULES, SweepsResult, regret_if_told, regret_of, sweeps


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> SweepsResult:
    """One model, batch and cluster; the times are made up."""
    with (DATA / "aleph_layouts.csv").open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    row = next(row for row in rows if row["model"] == "Llama-13B" and row["gpus"] == "64" and row["status"] == "ok")
    row |= {"heads": "80", "kv_heads": "80"}  # which tp=16 divides, as it does not their 40
    tried = [  # tp, pp, microbatch, seconds
        ("1", "1", "1", "30"), ("2", "1", "1", "26"), ("2", "1", "2", "24"), ("8", "1", "1", "40"),
        ("8", "1", "1", "44"), ("4", "2", "1", "20"), ("16", "1", "1", "90"),
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("runs") / "made_up.csv"
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, row)
        writer.writeheader()
        for tp, pp, size, seconds in tried:
            dp = str(64 // int(tp) // int(pp))
            shape = {"tp": tp, "pp": pp, "dp": dp, "micro_batch": size, "global_batch": "2048"}
            writer.writerow(row | shape | {"step_time_s": seconds, "derived_step_time_s": ""})
        failed = {"tp": "1", "pp": "1", "dp": "64", "micro_batch": "8", "step_time_s": "", "derived_step_time_s": ""}
        writer.writerow(row | failed | {"tflops_per_gpu": "", "mfu": "", "status": "oom"})
    return sweeps(path.parent)


def test_rules_take_what_they_prefer_of_what_ran(found: SweepsResult) -> None:
    (sweep,) = found.sweeps
    assert sweep.layouts == 8
    tp_first, by_tp, by_pp, middle = (regret_of(sweep, rule) for rule in RULES)
    assert tp_first == pytest.approx(42 / 20 - 1)  # two that it cannot tell apart
    assert by_tp == by_pp == pytest.approx(30 / 20 - 1)
    assert middle == pytest.approx(30 / 20 - 1)


def test_the_planner_is_held_against_the_best(found: SweepsResult) -> None:
    (sweep,) = found.sweeps
    assert sweep.best.run is not None
    assert sweep.best.run.seconds == 20
    assert found.regrets[0][PLANNER] == sweep.regret >= 0
    assert regret_if_told(sweep) >= 0
    shown = json.loads(json.dumps(found.to_dict()))
    assert set(shown["rules"]) == {"planner", "told", "tp first", "least, tp", "least, pp", "middle"}
    assert "made_up: Llama-13B, 64 GPUs, batch 2048" in str(found)


def test_without_sweeps_it_says_what_one_is(tmp_path: Path) -> None:
    (tmp_path / "llama3.csv").write_bytes((DATA / "llama3.csv").read_bytes())
    none = sweeps(tmp_path)
    assert "no sweep" in str(none)
    assert none.to_dict() == {"rules": {}, "sweeps": []}
