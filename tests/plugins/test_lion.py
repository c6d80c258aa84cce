"""An optimizer of another package is proven, planned, trained and resumed as one of ours."""

import sys
from pathlib import Path

import pytest

import fivefold as ff
from fivefold.cost.model_state import state_of
from fivefold.dry.result import DryRunResult
from fivefold.support.errors import UserError
from tests.commands import fivefold
from tests.plugins.conftest import is_short_and_without_torch
from tests.verifier.cases import slow

PACKAGE, NAME = "lion", "fivefold_lion:Lion"
CHOSEN = f"optimizer.name={NAME}"
SMALL = ("data.seq=32", "train.batch=4", "train.dtype=float64", "train.eval_samples=0", "train.device=cpu",
         "model.hidden=32", "model.ffn=48", "model.layers=2", "run.name=lion",
         "optimizer.schedule_steps=40")  # fmt: skip


@pytest.fixture
def lion(package: Path) -> Path:
    return package


def test_it_is_a_short_package_of_its_own_that_imports_no_torch(lion: Path) -> None:
    is_short_and_without_torch(lion, "fivefold_lion")


@pytest.mark.parametrize("layout", [
    "dp=2,tp=2,zero=1",
    *slow(["pp=2,dp=2,schedule=zb-h1,microbatches=4", "cp=2,dp=2,zero=2", "dp=2,tp=2,zero=3"]),
])  # fmt: skip
def test_a_layout_computes_what_one_process_computes_in_float64(layout: str, lion: Path) -> None:
    """Loss, norm, gradients, parameters; what is sent; and memory, in which there is one state of each parameter."""
    result = ff.verify(layout, [CHOSEN], steps=2, seq=16)
    assert result.ok, str(result)


@pytest.mark.slow  # those above meet each axis and each stage of ZeRO once
def test_layouts_compute_what_one_process_computes(lion: Path) -> None:
    result = ff.verify(None, [CHOSEN], everything=True, world=4, sample=20)
    assert result.ok, str(result)


def test_a_wrong_rule_is_found(lion: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (lion / "fivefold_lion.py").read_text()
    wrong = lion.parent / "wrong"
    wrong.mkdir(exist_ok=True)
    assert "1 - average)" in text
    (wrong / "wrong_lion.py").write_text(
        text.replace("1 - average)\n", "0.02)\n").replace("fivefold_lion:", "wrong_lion:")
    )
    sys.path.insert(0, str(wrong))
    result = ff.verify("dp=2", ["optimizer.name=wrong_lion:Lion"], steps=2, seq=16)
    assert not result.ok
    assert "parameter" in str(result)


def test_memory_has_one_state_in_the_planner_and_in_the_dry_run(lion: Path) -> None:
    from fivefold_lion import Lion  # type: ignore[import-not-found,unused-ignore]

    spec, layout = ff.preset("tiny"), ff.Layout(dp=2, zero=1)
    job = ff.Job(model=spec, layout=layout, optimizer=Lion())
    assert job.problems() == []
    kept = state_of(spec, layout, "float64", Lion()).optimizer, state_of(spec, layout, "float64").optimizer
    assert kept[0] == kept[1] / 2  # AdamW's are two
    given = {"batch": 4, "seq": 64}
    adam_option = ff.simulate("tiny", "dp=2,zero=1", "2xH100", **given).option
    lion_option = ff.simulate("tiny", "dp=2,zero=1", "2xH100", changes=[CHOSEN], **given).option
    assert lion_option.footprint.total < adam_option.footprint.total
    dry = ff.dryrun(job, batch=4, seq=64)
    assert isinstance(dry, DryRunResult)
    [figure] = [figure for figure in dry.ranks[0].figures if figure.name == "optimizer"]
    assert figure.dry == figure.plan > 0


def test_a_run_goes_on_in_another_layout_with_the_same_curve(
    lion: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = ff.train(None, [CHOSEN, *SMALL, "train.steps=4", "run.name=whole"]).losses
    ff.train(None, [CHOSEN, *SMALL, "train.steps=2", "layout=dp=2,zero=1"])
    resumed = ff.train("runs/lion", ["train.steps=4", "layout=tp=2"])
    assert resumed.losses == pytest.approx(whole, abs=1e-10)

    # To another process the name is one of a file, and its user has to say that it may be imported.
    done = fivefold("train", "runs/lion/job.toml", "train.steps=5", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"If you trust it: --plugin {NAME}" in done.stderr
    at = {"PYTHONPATH": str(lion)}
    (tmp_path / "fivefold_lion.py").write_text((lion / "fivefold_lion.py").read_text())  # a command looks here, too
    done = fivefold("train", "runs/lion", "train.steps=5", "--plugin", NAME, "layout=dp=2,zero=3", "--nproc", "2",
                    cwd=tmp_path, env=at)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "step 5/5" in done.stdout


@pytest.mark.slow  # test_mixture.py has the like
def test_what_reads_weights_needs_no_plugin(lion: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ff.train(None, [CHOSEN, *SMALL, "train.steps=2"])
    words = ("checkpoint", "reshard", "runs/lion", "--layout", "dp=2,zero=3", "-o", "runs/two")
    done = fivefold(*words, cwd=tmp_path)  # test_trust.py has the other commands
    assert done.returncode == 0, done.stderr
    assert f"weights and {NAME}'s states" in fivefold("inspect", "runs/two/checkpoints/latest", cwd=tmp_path).stdout
    resumed = ff.train("runs/two", ["train.steps=3"])  # the states were written again, too
    whole = ff.train(None, [CHOSEN, *SMALL, "train.steps=3", "run.name=whole"])
    assert resumed.losses[-1] == pytest.approx(whole.losses[-1], abs=1e-10)


def test_an_object_of_a_class_that_ranks_cannot_import_is_refused(lion: Path) -> None:
    from fivefold_lion import Lion  # type: ignore[import-not-found,unused-ignore]

    class Local(Lion, frozen=True, kw_only=True):  # type: ignore[misc,unused-ignore]
        pass

    job = ff.Job(model=ff.preset("tiny"), optimizer=Local())
    with pytest.raises(UserError, match="write it at the top level of a module of its own") as refused:
        ff.train(job)
    assert refused.value.codes == ["plugin.module"]
