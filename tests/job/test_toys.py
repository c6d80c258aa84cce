"""Toy presets take their vocabulary from the data; published models keep theirs."""

import tomllib
from pathlib import Path

import pytest

from fivefold.job.preflight import preflight
from fivefold.job.reading import job_of, read_job
from fivefold.spec.presets import TOY_PRESETS, preset
from fivefold.verifier.cases import write_tokens
from fivefold.verifier.verify import verify
from tests.commands import fivefold
from tests.refusals import refusal

FAST = ["train.batch=2", "data.seq=16", "train.eval_samples=0", "model.layers=1", "model.hidden=32", "train.device=cpu"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """Another vocabulary than that of bytes."""
    write_tokens(folder := tmp_path_factory.mktemp("toys"), vocab=611, count=400)
    return folder


def test_the_toys_are_those_without_a_published_vocabulary() -> None:
    tiny = ("qwen2", "qwen3", "mla", "oss", "moe", "deepseek", "gpt")
    assert set(TOY_PRESETS) == {"tiny", "small", *(f"tiny-{kind}" for kind in tiny)}


def test_a_toy_has_the_vocabulary_of_the_data_unless_it_is_given(tokens: Path) -> None:
    data = f"data.path={tokens}"
    assert read_job(None, [data]).model.vocab == 611
    assert read_job(None, ["model=small", data]).model == preset("small", vocab=611)
    assert job_of("tiny-gpt", [data])[0].model.vocab == 611
    assert read_job(None, [data, "model.vocab=700"]).model.vocab == 700
    assert read_job(None, ["model=llama3.2-1b", data]).model.vocab == 128_256
    assert read_job(None, ["data.path=nowhere"]).model.vocab == 257  # preflight says what is wrong with it


def test_a_toy_trains_on_any_data_and_resumes(tokens: Path, tmp_path) -> None:
    words = ["train", f"data.path={tokens}", "model=tiny", *FAST]
    checked = fivefold(*words, "train.steps=2", "--check", cwd=tmp_path)
    assert tomllib.loads(checked.stdout)["model"]["vocab"] == 611
    first = fivefold(*words, "train.steps=2", "optimizer.schedule=constant", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    more = fivefold(*words, "train.steps=3", "optimizer.schedule=constant", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert "resum" in more.stdout


def test_a_model_with_too_few_tokens_is_refused(tokens: Path) -> None:
    job = read_job(None, [f"data.path={tokens}", "model.vocab=100", *FAST])
    error = refusal(lambda: preflight(job, world=1))
    assert error.codes == ["data.vocab"]
    assert str(error).endswith("has a vocabulary of 611, and model.vocab=100; nearest: model.vocab=611")


def test_proofs_see_the_same_number(tokens: Path) -> None:
    [(case, _)] = verify("dp=1", [f"data.path={tokens}"], steps=1).verdicts
    assert case.job.model.vocab == 611
