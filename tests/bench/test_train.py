"""Which systems `bench train` can compare, before any of them starts."""

import pytest

from fivefold.bench import comparison
from fivefold.bench.train import job_of, systems
from fivefold.support.errors import UserError


def against(*words: str) -> str:
    with pytest.raises(UserError) as refused:
        systems(job_of([*words]), "torchtitan")
    assert refused.value.codes == ["bench.against"]
    return str(refused.value)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("mixtral-8x7b", "torchtitan is measured with llama, qwen3, qwen3_moe, and mixtral-8x7b is mixtral"),
        ("llama3.2-1b", "untied"),
    ],
)
def test_models_that_torchtitan_has_not_are_refused(model: str, reason: str) -> None:
    assert reason in against(model)


@pytest.mark.parametrize(
    ("installed", "reason"), [(None, "it is not installed; nearest: pip install"), ("0.3.0", "0.2 is measured")]
)
def test_only_its_release_0_2_is_measured(monkeypatch: pytest.MonkeyPatch, installed: str | None, reason: str) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise comparison.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(comparison, "version", version)
    assert reason in against("llama3-8b")


def test_torchtitan_in_both_dtypes_trains_the_job_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "version", lambda name: "0.2.2")
    job = job_of(["llama3-8b", "model.layers=2"])
    found = systems(job, "torchtitan,torchtitan_bf16,hf")
    assert [*found] == ["fivefold", "torchtitan", "torchtitan, all bf16", "Hugging Face"]
    assert all(one == job for one in found.values())
