"""Ranges: what plans print around their numbers, and where the widths come from."""

import json
from pathlib import Path

import pytest

from fivefold.cost.step import Workload
from fivefold.cost.systems import software_of
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.planner.error_range import (
    BANDS_FILE,
    COVERAGE,
    IN_WORDS,
    Band,
    Bands,
    Range,
    bands,
    step_range,
    traits,
    write,
)
from fivefold.planner.plan import plan, simulate
from fivefold.planner.result import PlanResult
from fivefold.spec.presets import preset


def workload(cluster: str = "8xH100", model: str = "llama3-8b", software: str = "fivefold") -> Workload:
    machines = Cluster.parse(cluster)
    profile = software_of(software, machines.groups[0].accelerator)
    return Workload(preset(model), Layout(dp=machines.world), machines, 2048, machines.world, software=profile)


@pytest.fixture(scope="module")
def small() -> PlanResult:
    return plan("llama3-8b", "8xH100", batch=128, top=2, tokens="1T")


def test_the_shipped_widths_are_believable() -> None:
    for band in (bands().time, bands().memory):
        assert -0.5 < band.low < 0 < band.high < 0.7
        assert band.rows > band.sources >= 3
    assert 0.75 <= bands().time.covered <= 0.88
    levels = [factor for trait in bands().time.factors.values() for factor in trait.values()]
    assert all(0.5 < factor < 2 for factor in levels)
    assert BANDS_FILE.stat().st_size < 4096


def test_a_case_is_of_a_kind() -> None:
    kind = {"system": "fused", "device": "known", "model": "dense", "size": "below 10B", "scale": "one node"}
    assert traits(workload()) == kind
    assert traits(workload("H200"))["system"] == "calibrated"
    assert traits(workload("H200", software="nemo"))["system"] == "fused"
    assert traits(workload("8xMI300X"))["device"] == "guess"
    assert traits(workload("8x8xH100", "llama3-70b")) == kind | {"size": "10B and more", "scale": "up to 512 GPUs"}
    assert traits(workload("8x8xH100", "mixtral-8x7b"))["model"] == "experts"
    assert traits(workload("128x8xH100"))["scale"] == "more than 512 GPUs"
    known = {name: set(levels) for name, levels in bands().time.factors.items()}
    assert all(level in known[name] for name, level in traits(workload()).items())


def test_a_band_is_as_wide_as_its_traits_say() -> None:
    band = Band(-0.1, 0.2, 5, 50, factors={"system": {"eager": 2.0}, "size": {"large": 1.5}})
    assert band.scale({"system": "eager", "size": "large"}) == 3.0
    assert band.scale({"system": "eager", "colour": "red"}) == 2.0
    assert band.holds(0.5, {"system": "eager", "size": "large"})
    assert not band.holds(0.5, {"system": "eager"})
    assert band.range({}).around(10.0) == pytest.approx((9.048, 12.214), rel=1e-3)
    assert Range(0.5, 2.0).inverse(10.0) == (5.0, 20.0)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    time = Band(-0.125, 0.25, 7, 70, 0.81, {"scale": {"one node": 0.9, "up to 512 GPUs": 1.1}})
    write(Bands(time, Band(-0.1, 0.1, 3, 30)), path := tmp_path / "error_range.toml")
    import tomllib

    from msgspec import convert

    assert convert(tomllib.loads(path.read_text()), Bands) == Bands(time, Band(-0.1, 0.1, 3, 30))
    before = path.read_text()
    write(Bands(time, Band(-0.1, 0.1, 3, 30)), path)
    assert path.read_text() == before


def test_a_plan_s_ranges_contain_its_numbers(small: PlanResult) -> None:
    shown = json.loads(json.dumps(small.to_dict()))
    best = shown["best"]
    assert best["range_share"] == COVERAGE == 0.8
    for name in ("step_seconds", "tokens_per_second", "mfu", "memory_bytes"):
        low, high = best[f"{name}_range"]
        assert low < best[name] < high, name
    low, high = shown["training"]["days_range"]
    assert low < shown["training"]["days"] < high
    # A step that takes longer has fewer tokens per second.
    step, rate = best["step_seconds_range"], best["tokens_per_second_range"]
    assert step[1] * rate[0] == pytest.approx(best["step_seconds"] * best["tokens_per_second"])


def test_a_plan_a_simulation_and_a_job_say_the_range(small: PlanResult) -> None:
    low, high = (f"{end:#.3g}" for end in small.to_dict()["best"]["step_seconds_range"])
    assert f"{IN_WORDS}: {low} to {high} s per step" in str(small)
    assert f"({low} to {high} {IN_WORDS})" in small.training.file(small.explained).replace("\n# ", " ")
    assert IN_WORDS in str(simulate("llama3-8b", "dp=8,zero=3,microbatches=16", batch=128))


def test_a_core_that_nobody_measured_has_no_range() -> None:
    assert step_range(workload("2xCPU", "tiny")) is None
    found = plan("tiny", "2xCPU", batch=16, seq=128)
    assert found.to_dict()["best"]["step_seconds_range"] is None
    assert "no range" in str(found)
