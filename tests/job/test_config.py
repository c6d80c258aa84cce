"""Job files: defaults, changes, round trips, and all mistakes at once."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fivefold.job.config import Job, RunConfig
from fivefold.job.reading import job_from, read_job
from fivefold.job.toml_writer import commented_toml, to_toml
from fivefold.layout.layout import Layout
from fivefold.spec.hf import to_hf_config
from fivefold.spec.presets import PRESETS, preset
from fivefold.support.errors import Note
from tests.refusals import refusal


def job_file(tmp_path, text: str):
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


def test_no_file_is_the_default_job() -> None:
    job = read_job()
    assert job == Job(model=preset("tiny"), run=RunConfig(name="run"))
    assert job.problems(world=1) == []


def test_changes_lie_over_the_file(tmp_path) -> None:
    path = job_file(tmp_path, 'model = "small"\n[optimizer]\nlr = 1e-4\nwarmup = 5\n[train]\nsteps = 7\n')
    job = read_job(path, ["optimizer.lr=3e-4", "train.dtype=bfloat16", "model.layers=2", "data.path=a b"])
    assert (job.optimizer.lr, job.optimizer.warmup, job.train.steps) == (3e-4, 5, 7)
    assert (job.model.name, job.model.layers, job.train.dtype, job.data.path) == ("small", 2, "bfloat16", "a b")
    assert job.run.name == "job"


def test_a_value_of_another_type_hides_no_other_problem(tmp_path) -> None:
    file = ['model = {preset = "tiny", layers = "x", heads = -3}', 'run = {name = "a/b"}', "layout = {dp = 0}",
            'train = {steps = -4, batch = "z", eval_every = -1}', "data = {seq = -4}",
            'watch = {spike = "rollback"}', "checkpoint = {save = false}"]  # fmt: skip
    assert refusal(lambda: read_job(job_file(tmp_path, "\n".join(file)))).codes == [
        "model.layers.type", "model.heads.range", "train.batch.type", "train.steps.range", "train.eval_every.range",
        "data.seq.range", "run.name.plain", "layout.dp.range",
    ]  # fmt: skip
    rollback = ["watch.spike=rollback", "checkpoint.save=false"]
    both = refusal(lambda: read_job(None, ["run=3", "layout.tp=3", *rollback]))
    assert both.codes == ["run.type", "watch.rollback.checkpoint", "layout.tp.heads"]
    other = refusal(lambda: read_job(None, ["model.layers=x", "layout.tp=3"]))  # which heads the model has is not known
    assert other.codes == ["model.layers.type"]


def test_a_layout_is_a_string_or_a_table_or_both(tmp_path) -> None:
    expected = Layout.parse("dp=2,tp=4,zero=1")
    assert read_job(None, ["layout=dp=2,tp=2,zero=1", "layout.tp=4"]).layout == expected
    assert read_job(job_file(tmp_path, 'layout = "dp=2,tp=2,zero=1"'), ["layout.tp=4"]).layout == expected
    assert read_job(job_file(tmp_path, "[layout]\ndp=2\ntp=4\nzero=1")).layout == expected
    assert read_job(None, ["layout.pp=2", "layout.split=1,3"]).layout == Layout.parse("pp=2,split=1,3")


def test_a_model_comes_from_a_preset_a_config_or_its_numbers(tmp_path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 300, '
                      '"n_positions": 64, "attn_pdrop": 0}')  # fmt: skip
    assert read_job(None, [f"model.config={config}", "model.layers=3"]).model.norm == "layernorm"
    assert read_job(None, ["model.hidden=256"]).model == preset("tiny", hidden=256)
    numbers = job_file(tmp_path, "[model]\nlayers=1\nhidden=32\nheads=4\nvocab=257\n")
    assert read_job(numbers).model.head_dim == 8
    every_number = ["model.layers=2", "model.hidden=128", "model.heads=4", "model.vocab=257"]
    assert read_job(None, every_number).model == preset("tiny", layers=2)  # changes of tiny, however many
    file = job_file(tmp_path, "[model]\nlayers=1\n[optimizer]\nlearning_rate = 1\nwarm_up = 3\n[trian]\nsteps = 2\n")
    missing = [f"model.{key}.missing" for key in ("hidden", "heads", "vocab")]
    assert refusal(lambda: read_job(file)).codes == ["setting.unknown", "setting.unknown", *missing, "setting.unknown"]


@pytest.mark.parametrize("model", PRESETS)
def test_the_resolved_job_is_a_job_file(tmp_path, model: str) -> None:
    changes = [f"model={model}", "layout=pp=2,split=1,3,sp,schedule=zb-v", "optimizer.lr=1e-5", 'run.name=a "b"']
    job = read_job(None, changes)
    assert read_job(job_file(tmp_path, to_toml(job))) == job


def test_a_missing_file_is_answered_with_its_neighbour(tmp_path) -> None:
    job_file(tmp_path, "")
    error = refusal(lambda: read_job(tmp_path / "jbo.toml"))
    assert (error.codes, str(error).endswith(f"did you mean '{tmp_path / 'job.toml'}'?")) == (["job.file"], True)
    assert refusal(lambda: read_job(job_file(tmp_path, "steps 3"))).codes == ["file.syntax"]
    assert refusal(lambda: read_job(tmp_path)).codes == ["file.read"]


def test_jobs_are_values() -> None:
    assert hash(read_job()) == hash(read_job())
    assert job_from(msgspec.json.decode(msgspec.json.encode(read_job()))) == read_job()


@pytest.mark.parametrize("name", ["demo", "demo.toml", "examples/demo.toml"])
def test_an_example_is_found_wherever_fivefold_is_installed(tmp_path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.warns(Note, match=f"no file {name} here; the job is Fivefold's own example .*examples/demo.toml"):
        job = read_job(name)
    assert (str(job.layout), job.run.name) == ("dp=2,tp=2,pp=2,microbatches=2", "demo")


def test_a_file_of_one_s_own_comes_before_an_example(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo.toml").write_text("[train]\nsteps = 7")
    assert read_job("demo.toml").train.steps == 7
    assert refusal(lambda: read_job("elsewhere/demo.toml")).codes == ["job.file"]


def test_a_presets_table_is_changed_setting_by_setting(tmp_path: Path) -> None:
    job = read_job(None, ["model=tiny-moe", "model.experts.top_k=1", "model.experts.balance_bias=true"])
    whole = preset("tiny-moe").experts
    assert whole is not None
    assert job.model.experts == msgspec.structs.replace(whole, top_k=1, balance_bias=True)
    file = tmp_path / "job.toml"
    file.write_text('[model]\npreset = "tiny-moe"\n[model.experts]\ncount = 4\n')
    assert read_job(file, ["model.experts.top_k=3"]).model.experts == msgspec.structs.replace(whole, count=4, top_k=3)
    file.write_text(to_toml(job))
    assert read_job(file).model == job.model
    assert job_from(msgspec.to_builtins(job)) == job


ODD = ["\x7f", "\x1b", "\x85", "\u2028", "\ufeff", "\0", '"', "\\", "\n", "\r\n", "\U0001f600"]


@pytest.mark.parametrize("write", [to_toml, lambda job: commented_toml(job, {})])
@pytest.mark.parametrize("odd", ODD)
def test_any_text_is_read_back_from_a_written_job(tmp_path: Path, odd: str, write: Callable[[Job], str]) -> None:
    model = msgspec.structs.replace(read_job().model, name=f"a{odd}b")
    job = Job(model=model, run=RunConfig(name="job", dir=f"{odd}x"))
    (tmp_path / "job.toml").write_text(write(job), encoding="utf-8", newline="")
    assert read_job(tmp_path / "job.toml") == job


def test_a_model_in_a_directory_whose_name_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "\udcff"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hf_config(preset("tiny"), "float32")))
    monkeypatch.chdir(folder)
    assert read_job(None, ["model.config=config.json"]).model.name == "\ufffd"
