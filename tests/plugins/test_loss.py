"""A loss from outside the package: its value and gradient in every layout are those of one process."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fivefold as ff
from fivefold.job.reading import job_from, read_job
from fivefold.job.toml_writer import to_toml
from fivefold.losses import LOSSES
from fivefold.losses.base import Loss
from fivefold.losses.cross_entropy import CrossEntropy
from fivefold.model import compiler
from fivefold.model import linear_cross_entropy as fused
from fivefold.support import plugins
from tests.commands import fivefold
from tests.plugins.conftest import is_short_and_without_torch
from tests.refusals import refusal
from tests.verifier.cases import slow

PACKAGE, NAME = "focal_loss", "fivefold_focal_loss:Focal"
CHOSEN = f"loss.name={NAME}"
WITH_DECAY = (CHOSEN, "loss.decay=0.1")


@pytest.fixture(autouse=True)
def focal(package: Path) -> Path:
    return package


def test_it_is_a_short_package_of_its_own_that_imports_no_torch(focal: Path) -> None:
    is_short_and_without_torch(focal, "fivefold_focal_loss")


@pytest.mark.parametrize(
    "layout",
    [
        "tp=4,sp",  # a vocabulary of 10, 10, 10 and 7 words
        "pp=2,cp=2,schedule=zb-h1,microbatches=2",
        *slow(["dp=2,tp=2,zero=1", "dp=2,cp=2,zero=3"]),
    ],
)
def test_a_layout_computes_what_one_process_computes_in_float64(layout: str) -> None:
    """Loss, norm, gradients, parameters; and tp sends as many sums as the loss says."""
    changes = [*WITH_DECAY, "model.vocab=37", "model.heads=4", "model.kv_heads=2"]
    result = ff.verify(layout, changes, steps=2, seq=16, batch=4)
    assert result.ok, str(result)


def test_a_wrong_slope_is_found(focal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (focal / "fivefold_focal_loss.py").read_text()
    assert "2 * self.decay" in text
    wrong = text.replace("2 * self.decay", "2.001 * self.decay").replace("fivefold_focal_loss:", "wrong_loss:")
    (tmp_path / "wrong_loss.py").write_text(wrong)
    monkeypatch.syspath_prepend(str(tmp_path))
    result = ff.verify("dp=2", ["loss.name=wrong_loss:Focal", "loss.decay=0.1"], steps=1, seq=16)
    assert not result.ok
    assert "gradient" in str(result)


def test_a_slice_and_a_part_of_the_words_are_compiled_without_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "COMPILER_BACKEND", "aot_eager")
    fused._compile_kernels.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    loss = read_job(None, WITH_DECAY).loss
    torch.manual_seed(0)
    x, weight = torch.randn(2, 8, 6, dtype=torch.float64), torch.randn(20, 6, dtype=torch.float64)
    targets, mask = torch.randint(20, (2, 8)), torch.rand(2, 8) > 0.3
    x.requires_grad_()
    found = fused.linear_cross_entropy(
        x, weight, fused.Targets(targets, mask, loss), fused.Vocabulary(20), compile=True
    )
    found.backward()
    gradient, x.grad = x.grad, None
    wanted = fused.loss_sum(x @ weight.T, targets, mask, loss)
    wanted.backward()
    assert gradient is not None
    assert x.grad is not None
    assert torch.allclose(found, wanted, rtol=1e-12)
    assert torch.allclose(gradient, x.grad, rtol=1e-10, atol=1e-12)
    assert compiler.compilation()[1] == {}


@pytest.mark.slow
def test_a_run_with_it_goes_on_in_another_layout_and_asks_for_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = (*WITH_DECAY, "data.seq=32", "train.batch=4", "train.dtype=float64", "train.eval_samples=0",
             "train.device=cpu", "model.hidden=32", "model.ffn=48", "model.layers=1",
             "optimizer.schedule_steps=40")  # fmt: skip
    whole = ff.train(None, [*small, "train.steps=4", "run.name=whole"]).losses
    ff.train(None, [*small, "train.steps=2", "run.name=half"])
    resumed = ff.train("runs/half", ["train.steps=4", "layout=tp=2"]).losses
    assert resumed == pytest.approx(whole, abs=1e-10)
    done = fivefold("train", "runs/half", "train.steps=5", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"If you trust it: --plugin {NAME}" in done.stderr
    done = fivefold("inspect", "runs/half", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert NAME not in done.stdout  # what it shows is not the loss's


def test_cross_entropy_is_an_entry_of_the_table_and_its_old_settings_are_read(tmp_path: Path) -> None:
    assert {"cross_entropy": CrossEntropy} == LOSSES.table
    new = read_job(None, ["loss.label_smoothing=0.1", "loss.z_loss=0.01"])
    assert new.loss == CrossEntropy(label_smoothing=0.1, z_loss=0.01)
    assert read_job(None, ["train.label_smoothing=0.1", "train.z_loss=0.01"]) == new
    (tmp_path / "old.toml").write_text("[train]\nlabel_smoothing = 0.1\nz_loss = 0.01\n")
    assert read_job(tmp_path / "old.toml", ["run.name=run"]) == new
    (tmp_path / "new.toml").write_text(to_toml(new))
    assert read_job(tmp_path / "new.toml") == new
    import msgspec

    stored = msgspec.to_builtins(new)
    stored["train"] |= {"label_smoothing": 0.1, "z_loss": 0.01}  # as checkpoints of the first releases have it
    del stored["loss"]
    assert job_from(stored) == new
    assert refusal(lambda: read_job(None, ["loss.name=cross"])).codes == ["loss.name.choice"]


def test_what_is_wrong_with_a_loss_is_said_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = read_job(None, [CHOSEN, "loss.gamma=0", "loss.decay=-1"]).loss
    assert [problem.code for problem in wrong.problems()] == ["loss.gamma.range", "loss.decay.range"]
    assert refusal(lambda: read_job(None, [CHOSEN, "loss.gama=2"])).codes == ["setting.unknown"]

    class Half(Loss, frozen=True, kw_only=True, tag="half:Half"):
        def sums(self, logits: object, words: object) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
            return ()

    module = ModuleType("half")
    vars(module)["Half"] = Half
    monkeypatch.setitem(sys.modules, "half", module)
    error = refusal(lambda: read_job(None, ["loss.name=half:Half"]))
    assert set(error.codes) == {"plugin.protocol"}
    for method in ("value", "slope", "plain"):
        assert f"loss.name=half:Half has no method {method}(" in str(error)


def test_a_stored_name_imports_nothing() -> None:
    plugins._imported.clear()
    sys.modules.pop("fivefold_focal_loss", None)
    stored = LOSSES.stored({"name": NAME, "gamma": 3.0})
    assert (stored.name, stored.gamma) == (NAME, 3.0)  # type: ignore[attr-defined]
    assert [problem.code for problem in stored.problems()] == ["plugin.untrusted"]
    assert "fivefold_focal_loss" not in sys.modules
