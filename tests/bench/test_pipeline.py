"""The pipeline's benchmark: what it computes of its times, and a tiny run of it."""

import json
from dataclasses import replace

import pytest
import torch
from benchmarks import pipeline
from benchmarks.pipeline import SCHEDULES, PipelineResult, PipelineShape, app, measure
from typer.testing import CliRunner

from fivefold.support.errors import UserError

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="refused with a sentence before torch 2.13"
)

SHAPE = PipelineShape(pp=2, microbatches=4, hidden=64, layers=4, seq=8, batch=4, rounds=3)
RESULT = PipelineResult(
    SHAPE,
    alone=[4.0, 8.0, 4.0],
    ours={"1f1b": [2.5, 5.0, 2.5], "zb-h1": [2.25, 4.5, 2.25], "zb-v": [2.0, 4.0, 9.0]},
    torch={"1f1b": [2.5, 5.0, 5.0], "zb-h1": [4.5, 9.0, 4.5], "zb-v": [4.0, 8.0, 4.0]},
    bubbles={"1f1b": 0.2, "zb-h1": 0.1, "zb-v": 0.0},
    errors={"1f1b": 0.0, "torch 1f1b": 1e-6},
    cores=2,
    version="2.13",
)


def test_the_ideal_is_the_ranks_share_of_one_process_and_the_bubble() -> None:
    one_f_one_b, h1, v = RESULT.rows()
    assert one_f_one_b["ideal"] == pytest.approx(4 / 2 / 0.8)
    assert one_f_one_b["share"] == pytest.approx(1.0)
    assert h1["share"] == pytest.approx((4 / 2 / 0.9) / 2.25)
    assert v["ideal"] == 2.0


def test_ratios_are_medians_of_each_rounds_own() -> None:
    one_f_one_b, h1, v = RESULT.rows()
    # A round twice as slow for both is no matter.
    assert (one_f_one_b["ratio"], h1["ratio"], v["ratio"]) == (1.0, 0.5, 0.5)
    assert (h1["to_1f1b"], v["to_1f1b"]) == (pytest.approx(0.9), pytest.approx(0.8))


def test_gradients_that_differ_are_no_result() -> None:
    assert RESULT.ok
    assert not replace(RESULT, errors={"zb-v": 1e-3}).ok


def test_a_tiny_run_has_all_systems_and_their_gradients_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    result = measure(replace(SHAPE, rounds=1))
    assert list(result.ours) == list(result.torch) == list(SCHEDULES)
    assert all(len(times) == 1 and times[0] > 0 for times in (*result.ours.values(), *result.torch.values()))
    assert {name: result.errors[name] for name in SCHEDULES} == dict.fromkeys(SCHEDULES, 0.0)  # to the bit
    assert result.ok
    assert all(0 < bubble < 1 for bubble in result.bubbles.values())
    assert "ours/torch" in str(result)
    assert "gradients agree" in str(result)
    assert result.to_dict()["schedules"][1]["schedule"] == "zb-h1"
    # The command asks for just that, and prints it.
    asked: list[PipelineShape] = []
    monkeypatch.setattr(pipeline, "measure", lambda shape: asked.append(shape) or result)
    words = "--pp 2 --hidden 64 --layers 4 --seq 8 --batch 4 --microbatches 4 --rounds 1 --json"
    run = CliRunner().invoke(app, words.split())
    assert run.exit_code == 0, run.output
    assert [row["schedule"] for row in json.loads(run.stdout)["schedules"]] == list(SCHEDULES)
    assert asked == [replace(SHAPE, rounds=1)]


def test_all_problems_are_named_before_any_process_starts() -> None:
    with pytest.raises(UserError) as refused:
        measure(PipelineShape(pp=1, microbatches=4, hidden=64, layers=4, seq=0, batch=4, rounds=0))
    assert len(refused.value.problems) == 3
    with pytest.raises(UserError, match=r"5 microbatches .* --microbatches 4"):
        measure(replace(SHAPE, microbatches=5, batch=5))
    with pytest.raises(UserError, match="batch of 4 sequences"):
        measure(replace(SHAPE, microbatches=8))
