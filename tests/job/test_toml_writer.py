"""A job file for people reads back as the same job, with nothing in it that nobody decided."""

import tomllib
from pathlib import Path

import pytest
from msgspec import structs

from fivefold.job.config import Job
from fivefold.job.reading import read_job
from fivefold.job.toml_writer import commented_toml
from fivefold.layout.layout import Layout
from fivefold.spec.blocks import RopeScaling
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import PRESETS, preset


def again(job: Job, tmp_path: Path, **words: object) -> Job:
    (tmp_path / "job.toml").write_text(commented_toml(job, {}, **words))  # type: ignore[arg-type]
    return read_job(tmp_path / "job.toml")


@pytest.mark.parametrize(
    "model",
    [
        *map(preset, PRESETS),
        preset("llama3-8b", layers=6, vocab=1000),
        preset("tiny-gpt", heads=8),  # kv_heads follows
        preset("tiny-gpt", heads=8, kv_heads=4),  # and here it does not, though it is the preset's own
        preset("llama3.1-8b", rope_scaling=RopeScaling(factor=4.0)),
        preset("llama3.1-8b", rope_scaling=None),
        ModelSpec(name="mine", layers=2, hidden=64, heads=4, vocab=100, rope_scaling=RopeScaling(factor=2.0)),
    ],
    ids=lambda spec: spec.name,
)
def test_a_model_is_its_preset_and_what_changes_it(model: ModelSpec, tmp_path: Path) -> None:
    assert again(Job(model=model), tmp_path).model == model


def test_every_section_reads_back(tmp_path: Path) -> None:
    job = read_job(
        None,
        [
            "optimizer.lr=1.25e-4",
            "optimizer.betas=[0.8, 0.9]",
            "train.dtype=bfloat16",
            "run.name=a",
            "data.path=a\\b",
            "layout=dp=2,pp=2,schedule=zb-v,microbatches=4,split=1,1,1,1",
            "checkpoint.every=7",
            "trace.steps=2",
        ],
    )
    assert again(job, tmp_path) == job
    text = (tmp_path / "job.toml").read_text()
    assert "lr = 1.25e-4\n" in text
    assert not tomllib.loads(text).keys() - {
        "model",
        "layout",
        "data",
        "optimizer",
        "train",
        "checkpoint",
        "watch",
        "trace",
        "run",
    }
    assert "weight_decay" not in text  # its default, and nobody has a reason for it


def test_reasons_stand_beside_or_above_and_hold_no_letter_that_toml_refuses(tmp_path: Path) -> None:
    job = Job(model=preset("tiny"), layout=Layout(dp=2))
    why = {"optimizer.lr": "short\x01\nreason", "optimizer.clip": "long " * 40}
    text = commented_toml(job, why, ["head\x7f"], {"data": 'path = "..."'})
    assert "lr = 3e-3               # short?" in text
    assert "# long long" in text
    (tmp_path / "job.toml").write_text(text)
    assert read_job(tmp_path / "job.toml") == structs.replace(job, run=structs.replace(job.run, name="job"))
    assert max(map(len, text.splitlines())) <= 110
