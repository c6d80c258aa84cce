"""Every table of the program, at 80 and 120 columns and piped: nothing is cut, nothing is missing.

Each result is made of small data; a new class of results without an entry in MAKERS fails here.
"""

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from benchmarks import attention, overlap, pipeline, plan, schedules
from benchmarks import mixed as mixed_ranks
from rich.cells import cell_len

import fivefold as ff
from fivefold.accuracy.coverage import CoverageResult, Covered
from fivefold.accuracy.fit import Constants
from fivefold.accuracy.result import AccuracyResult, SourceList, planner_accuracy
from fivefold.accuracy.score import choices
from fivefold.accuracy.sweeps import SweepsResult
from fivefold.bench import checkpoint, comparison, optimizer, scaling, steps, train
from fivefold.bench import checkpoint as recovery
from fivefold.bench.harness import Machine, RoundTimes, RowsResult
from fivefold.checkup.parts import Budget
from fivefold.checkup.result import CheckupPlan, CheckupResult
from fivefold.hardware.accelerators import ACCELERATORS
from fivefold.hardware.cluster import accelerators
from fivefold.labs.catalogue import StartedLab, lab_of, labs
from fivefold.labs.lab import FileVerdict
from fivefold.layout.layout import Layout
from fivefold.planner import mixed_compare as mixed
from fivefold.planner.compare_cp import compare_cp
from fivefold.planner.cp_by_length import cp_by_length
from fivefold.planner.decision import decide
from fivefold.planner.error_range import bands
from fivefold.planner.model_summary import model
from fivefold.planner.textbook_formulas import zero
from fivefold.render.blocks import Block, Result, Table, to_text
from fivefold.schedules.result import PublishedResult, compare
from fivefold.spec.presets import models
from fivefold.trainer.inspect import InspectResult
from fivefold.web.report import Report
from tests.layers import modules, pure_modules
from tests.render import by_hand

WIDTHS = (80, 120, None)  # None: piped


def compared() -> comparison.ComparisonResult:
    systems = ("bare loop", "fivefold", "fivefold dp=2,tp=2,pp=2,cp=2,zero=1,sp", "DTensor tp=2")
    case = comparison.Comparison("peers", comparison.base_job([]), systems)
    times = RoundTimes({name: [1.25, 1.5, 2.0] for name in systems})
    losses = {name: [5.0, 4.0] for name in systems}
    return comparison.ComparisonResult(case, times, losses, Machine(cores=2, torch="2.13", name="a core"))


def recovered() -> recovery.RecoveryResult:
    times = RoundTimes({"memory": [0.1, 0.2], "disk": [0.4, 0.5]})
    job = comparison.base_job(["checkpoint.memory_every=10"])
    return recovery.RecoveryResult(job, 10**9, [0.1, 0.2], [0.01], [0.02], times, times, times)


def saved() -> checkpoint.CheckpointResult:
    times = RoundTimes({name: [1.0] for name in checkpoint.SHOWN_NAMES})
    return checkpoint.CheckpointResult(comparison.base_job([]), 10**9, [0.1, 0.2], [0.01], [0.02], times, times)


def trained() -> train.TrainBenchResult:
    job = train.job_of(["llama3-8b"])
    saved = train.Saved(10**10, 0.5, 12.5, [0.6, 0.7])
    kernels = [{"name": "a_kernel_with_a_long_name" * 3, "kind": "gemm", "seconds": 0.1, "calls": 12}]
    turn = train.TrainTurn(
        "NVIDIA H200", "2.13", [0.6, 0.61], 10**11, 30.0, 11.9, 3, {"a reason": 2}, "bfloat16", saved, kernels
    )
    return train.TrainBenchResult(job, {"fivefold": [turn], "torchtitan": [turn]}, train.Extras(True, True))


def updated() -> optimizer.OptimizerBenchResult:
    seconds = RoundTimes({"adamw": [0.1, 0.2, 0.4], "muon": [0.2, 0.6, 0.5]})
    updates = optimizer.Updates(seconds, optimizer.Paces(1e9, 1e12), Machine(2, "2.13", "a CPU"), "CPU, threads: 1")
    return optimizer.OptimizerBenchResult(optimizer.jobs_of(["tiny", "layout=dp=2,zero=1"], "adamw,muon"), 3, updates)


def piped() -> pipeline.PipelineResult:
    names = {"1f1b": [1.0, 1.1], "interleaved": [0.9, 1.0]}
    shape = pipeline.PipelineShape(4, 8, 64, 8, 16, 8, 2)
    ratios = dict.fromkeys(names, 0.25)
    return pipeline.PipelineResult(shape, [3.0, 3.1], names, names, ratios, dict.fromkeys(names, 1e-9), 2, "2.13")


def overlapped() -> overlap.OverlapResult:
    shape = overlap.OverlapShape(2, 6, 128, 8, 256, 12, 100.0, 2)
    times = RoundTimes({overlap.IN_TURN: [2.0, 2.2], overlap.IN_TURNS: [1.5, 1.6]})
    simulated = {overlap.IN_TURN: 2.0, overlap.IN_TURNS: 1.4}
    return overlap.OverlapResult(
        shape, times, simulated, 0.6, True, str(overlap.WireDelay(100.0)), Machine(2, "2.13", "Neoverse")
    )


def covered() -> CoverageResult:
    rows = (Covered("nemo_performance_pages", 7, 0.04, 6 / 7, 0.0, 1 / 7), Covered("llama3", 3, 0.01, 1.0, 0.0, 0.0))
    return CoverageResult(rows, rows[:1], bands(), (), own_runs=False)


def on_unequal_ranks() -> mixed_ranks.MixedBenchResult:
    """Of figures that a planner and a clock might have had."""
    systems = {name: 4.0 - number / 4 for number, name in enumerate(mixed_ranks.SYSTEMS)}
    layout = Layout(pp=4, schedule="zb-v", microbatches=8)
    found = {name: mixed_ranks.Planned(layout, (3, 3, 2, 2, 1, 1, 2, 2), one, 0.03) for name, one in systems.items()}
    times, losses = (
        RoundTimes({name: [one, one + 0.1] for name, one in systems.items()}),
        {name: [7.0, 6.5] for name in systems},
    )
    run = mixed_ranks.MixedRun(2.0, by_hand.speeds(), found, times, losses)
    return mixed_ranks.MixedBenchResult(by_hand.JOB, 4, 2, Machine(4, "2.13", "Neoverse"), (run,))


def judged() -> AccuracyResult:
    result = planner_accuracy(rows="torchtitan")
    left_out = {score.source: 0.05 for score in result.scores}
    return replace(result, left_out=left_out, constants=Constants.shipped())


@cache
def swept() -> AccuracyResult:
    return planner_accuracy(rows="internevo")


LITTLE = "zero=1,sp,schedule=1f1b,recompute=selective"  # to search
FIXED = "tp=8,pp=16,cp=1,zero=1,sp,schedule=1f1b,recompute=full"
LAYOUT = "dp=2,tp=4,pp=4,sp,microbatches=16"
ATTENTION = attention.AttentionShape(2, 64, 4, 2, 16, 1, "float32", 1)
MAKERS: dict[str, Callable[[], Result]] = {
    "PlanResult": lambda: ff.plan("llama3-70b", "8x8xH100", fix=LITTLE, tokens="1.4T", price=2.0),
    "PlanResult on unlike nodes": lambda: ff.plan("llama3.2-1b", "2xH100+2xA100-80", batch=64, seq=2048, price=2.5),
    "PlanResult of a layout that fits nowhere": lambda: ff.plan("llama3-8b", "2xH100", layout="pp=2", batch=8),
    "PlanResult of a layout": lambda: ff.plan("llama3-70b", "8x8xH100", layout="dp=2,tp=8,pp=4,sp,microbatches=64"),
    "SimulateResult": lambda: ff.simulate("llama3-8b", "pp=8,schedule=zb-v,microbatches=16", batch=16),
    "Decision": lambda: decide(ff.plan("tiny", "2xCPU", batch=16, seq=128), "fivefold plan tiny"),
    "Report": lambda: Report(Path("plan.html"), "llama3-70b on 8x8xH100", ("plan",), 140_000),
    "MeshResult": lambda: ff.mesh("dp=4,tp=2,pp=2,cp=2,ep=4", "4x8xH100"),
    "MeshResult of 16,384 ranks": lambda: ff.mesh("dp=128,tp=8,pp=16,zero=1", "2048x8xH100"),
    "GoodputResult": lambda: ff.goodput("llama3-405b", "2048x8xH100", tokens="15.6T", batch=2048, fix=FIXED),
    "ServePlan": lambda: ff.serve("llama3-405b", "2x8xH100", prompt=2048, output=512, ttft=0.6, tpot=0.1),
    "MixedSchedules": lambda: mixed.compare("llama3-8b", "4x8xH100", layout=LAYOUT, batch=64, slower=(1.5,)),
    "ContextResult": lambda: compare_cp(131_072, 8),
    "LengthsResult": lambda: cp_by_length([8192, 131_072], cluster="8xH100"),
    "ModelList": lambda: models(seq=8192),
    "ModelResult": lambda: model("llama3-405b"),
    "AcceleratorList": accelerators,
    "AcceleratorList of one": lambda: accelerators("MI300X"),
    "AccuracyResult": judged,
    "AccuracyResult with sweeps": swept,
    "SweepsResult": lambda: SweepsResult(tuple(choices(swept().results))),
    "CoverageResult": covered,
    "SourceList": SourceList,
    "Labs": labs,
    "StartedLab": lambda: StartedLab(lab_of("linear"), (Path("my-lab/README.md"), Path("my-lab/linear.py"))),
    "LabCheck": by_hand.lab_check,
    "LabBench": by_hand.lab_bench,
    "FileVerdict": lambda: FileVerdict(
        "schedule", "A schedule", ["schedule", ">makespan"], [["yours", "33"]], ["it takes 33"]
    ),
    "Certificate": by_hand.certificate,
    "RepeatedCertificate": by_hand.repeated_certificate,
    "DrawResult": lambda: ff.draw("1f1b", "zb-v", pp=4, microbatches=8),
    "CompareResult": lambda: compare(8, 32, times="f=1,i=1,w=1,comm=0.1"),
    "PublishedResult": PublishedResult,
    "ZeroResult": lambda: zero("llama3-8b"),
    "RowsResult of planning": lambda: RowsResult(
        [plan.QUESTIONS[0]._asdict() | plan.time_search(plan.QUESTIONS[0], 1)], plan.COLUMNS, "median"
    ),
    "RowsResult of schedules": lambda: schedules.result([schedules.best(schedules.ScheduleCase("zb-v", 4, 8))]),
    "RowsResult of steps": lambda: steps.result(
        [steps.Timed(steps.StepCase("llama3-8b", 4), "H100", "2.13", "bfloat16", 5, 0.5, 0.4, 0.6, 10**10)],
        ACCELERATORS["H100"],
    ),
    "CheckpointResult": saved,
    "RecoveryResult": recovered,
    "AttentionResult": lambda: attention.AttentionResult(
        ATTENTION, {"output": 1e-7, "input gradient": 2e-7}, True, 0.1, 0.2, 2
    ),
    "ComparisonResult": compared,
    "ScalingResult": lambda: scaling.ScalingResult(["dp=2,tp=2,pp=2,cp=2,zero=1,sp"], [compared()], {}),
    "PipelineResult": piped,
    "OverlapResult": overlapped,
    "MixedBenchResult": on_unequal_ranks,
    "TrainBenchResult": trained,
    "OptimizerBenchResult": updated,
    "LaunchResult": by_hand.deployed,
    "LaunchResult on the terminal": by_hand.shown,
    "VerifyResult": by_hand.verified,
    "VerifyResult of a gradient that cancels": lambda: by_hand.verified(noisy=True),
    "VerifyResult that fails": lambda: by_hand.verified(holds=False),
    "VerifyResult of a rank that died": by_hand.broken,
    "VerifyResult of a sweep": by_hand.swept,
    "CurveResult": by_hand.followed,
    "TraceResult": by_hand.traced,
    "TraceResult of many ranks": lambda: by_hand.traced(20),
    "DryRunResult": by_hand.dried,
    "DryRunResult of many ranks": lambda: by_hand.dried(8),
    "CheckpointList": by_hand.listed,
    "CheckpointContents": by_hand.held,
    "CheckpointCheck": by_hand.checked,
    "TrainResult": by_hand.trained,
    "RunsResult": by_hand.compared_runs,
    "RunsResult of the same": lambda: by_hand.compared_runs(same=True),
    "ExpertsResult": by_hand.loaded,
    "InspectResult": lambda: InspectResult(by_hand.trained(), by_hand.loaded(), by_hand.held(), ("a note",)),
    "CalibrationResult": by_hand.calibrated,
    "RanksResult": by_hand.speeds,
    "DoctorResult": by_hand.examined,
    "DoctorResult of many nodes": lambda: by_hand.examined(20),
    "CheckupPlan": lambda: CheckupPlan(Budget(10.0), "8 ranks on NVIDIA H200"),
    "CheckupResult": lambda: CheckupResult(by_hand.checked_up(), ("written: checkup.json",)),
}


def kinds(kind: type[Result] = Result) -> set[str]:
    """Every class of results in the source."""
    ours = ("fivefold.", "benchmarks.")  # not of other tests
    own = [child for child in kind.__subclasses__() if child.__module__.startswith(ours)]
    below = {name for child in own for name in kinds(child)}
    return below | {kind.__name__} - {"Result"}


@cache
def made(name: str) -> Result:
    return MAKERS[name]()


def test_every_result_of_the_program_is_rendered_here() -> None:
    for module in modules():
        if module.endswith((".result", ".listing")) or module in pure_modules():
            importlib.import_module(module)
    assert {name.split()[0] for name in MAKERS} == kinds()
    for name in MAKERS:
        assert type(made(name)).__name__ == name.split()[0]


@cache
def blocks(name: str) -> list[Block]:
    return list(made(name).blocks())


@pytest.mark.parametrize("name", MAKERS)
def test_a_result_fits_and_nothing_is_cut(name: str) -> None:
    for width in WIDTHS:
        text = to_text(blocks(name), width)
        assert "…" not in text, width
        assert [line for line in text.splitlines() if width is not None and cell_len(line) > width] == []


@pytest.mark.parametrize("name", MAKERS)
def test_every_head_and_every_cell_of_a_table_is_whole(name: str) -> None:
    tables = [block for block in blocks(name) if isinstance(block, Table)]
    for table, width in product(tables, WIDTHS):
        text = to_text([table], width)
        rows = [[cell.text for cell in cells] for cells in table.cells]
        # A record opens with its name and what stands before it, and does not say what these are.
        named = [bool(column.head) and not column.right for column in table.columns]
        opening = 1 + named.index(True) if True in named else 0
        for at, (column, *cells) in enumerate(zip(table.columns, *rows, strict=True)):
            if at < opening and column.head not in text:
                continue
            for word in column.head.split() if any(cells) else ():
                assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text), f"the head {column.head!r} is cut"
            for piece in (piece for cell in cells for piece in re.split(r"(?<=,)|\s", cell)):
                assert piece in text, f"{piece!r} of {column.head!r} is missing"
        if width is None:
            lines = text.splitlines()
            for row in rows:
                assert any(all(cell in line for cell in row) for line in lines), f"{row} is not one line"


@pytest.mark.parametrize("name", MAKERS)
def test_a_result_is_json_and_html_too(name: str) -> None:
    assert json.dumps(made(name).to_dict())
    html = made(name)._repr_html_()
    assert html.count("<table>") == sum(isinstance(block, Table) for block in blocks(name))
    assert html.count("<svg") == (made(name).svg() is not None)
