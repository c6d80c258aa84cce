"""The loss curve of a layout: same start, same losses but for rounding, and a control that may agree to the bit."""

from pathlib import Path

import pytest

from fivefold.data.prepare import prepare
from fivefold.job.reading import read_job
from fivefold.layout.layout import Layout
from fivefold.verifier.verify import CurveResult, compare_curves
from tests.verifier.cases import slow


@pytest.mark.parametrize("layout", ["dp=2,zero=1", *slow(["pp=2,microbatches=2,schedule=zb-h1"])])
def test_a_layout_follows_one_process_from_the_same_bits(tmp_path: Path, layout: str) -> None:
    (tmp_path / "text.txt").write_text("one model, one data order, one loss curve. " * 200)
    prepare([tmp_path / "text.txt"], tmp_path / "tokens")
    small = ["model.layers=2", "model.hidden=32", "model.head_dim=8", "model.ffn=32", "data.seq=16", "train.batch=4"]
    data = [f"data.path={tmp_path}/tokens", "train.eval_samples=0", "train.steps=3"]
    curves = compare_curves(read_job(None, [*small, *data, f"layout={layout}"]), timeout=120)
    assert curves.same_start
    assert curves.ok
    assert len(curves.in_layout) == 3
    assert curves.alone != curves.alone[:1] * 3


def test_a_layout_that_strays_fails_and_one_rounding_does_not() -> None:
    def curves(spread: float, same: bool = True) -> CurveResult:
        return CurveResult(Layout(), [5.0, 4.0], [5.0, 4.0], [5.0, 4.0 + spread], same_start=same, rounding=2.0**-23)

    assert curves(2.4e-7).ok  # the control agrees to the bit, and one rounding is no crime
    assert not curves(1e-4).ok
    assert not curves(0.0, same=False).ok


def test_a_step_without_a_loss_has_no_distance_unless_only_one_curve_has_it() -> None:
    some = [5.0, None, 4.0]
    alike = CurveResult(Layout(), some, some, some, same_start=True, rounding=2.0**-23)
    assert alike.ok
    assert "none" in str(CurveResult(Layout(), [None, 5.0], [None, 5.0], [None, 5.0], same_start=True, rounding=1e-7))
    other = CurveResult(Layout(), some, some, [5.0, 4.5, 4.0], same_start=True, rounding=2.0**-23)
    assert not other.ok
