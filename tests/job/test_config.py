"""Job files: defaults, changes, round trips, and all mistakes at once."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fivefold.job.config import Job, RunConfig, job_from, read_job, to_toml
from fivefold.job.recipes import written
from fivefold.layout.layout import Layout
from fivefold.spec.hf import to_hf_config
from fivefold.spec.presets import PRESETS, preset
from fivefold.support.errors import Note, UserError


def job_file(tmp_path, text: str):
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


def problems_of(*changes: str, path=None) -> list[str]:
    with pytest.raises(UserError) as error:
        read_job(path, list(changes))
    return error.value.problems


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
    assert "model.heads is missing" in problems_of(path=job_file(tmp_path, "[model]\nlayers=1"))[1]
    assert "exclude each other" in problems_of("model.preset=tiny", "model.config=x")[0]
    assert "did you mean 'preset'" in problems_of("model.prset=small")[0]


@pytest.mark.parametrize("model", PRESETS)
def test_the_resolved_job_is_a_job_file(tmp_path, model: str) -> None:
    changes = [f"model={model}", "layout=pp=2,split=1,3,sp,schedule=zb-v", "optimizer.lr=1e-5", 'run.name=a "b"']
    job = read_job(None, changes)
    assert read_job(job_file(tmp_path, to_toml(job))) == job


def test_misspelled_keys_get_the_nearest_right_one(tmp_path) -> None:
    path = job_file(tmp_path, "[optimizer]\nlearning_rate = 1\nwarm_up = 3\n[trian]\nsteps = 2\n")
    assert problems_of(path=path) == [
        "optimizer.learning_rate is not a setting; write optimizer.lr=1",
        "trian.steps is not a setting; write train.steps=2",
        "optimizer.warm_up is not a setting; did you mean 'warmup'?",
    ]


def test_wrong_types_are_all_named() -> None:
    found = problems_of("train.steps=ten", "optimizer.lr=fast", "train.dtype=fp8", "optimizer.betas=0.9", "run=3", "x")
    assert len(found) == 6
    assert "train.steps='ten' is not a whole number" in found
    assert "optimizer.betas=0.9 is not a list of 2 numbers" in found


def test_wrong_values_are_all_named() -> None:
    changes = [
        "optimizer.lr=nan", "optimizer.betas=[0.9,1.0]", "optimizer.eps=0", "optimizer.weight_decay=-1",
        "optimizer.clip=-1", "optimizer.warmup=-1", "optimizer.decay=2", "optimizer.final=-0.1", "train.steps=0",
        "train.batch=0", "train.eval_every=-1", "train.eval_samples=-1", "train.log_every=0", "data.seq=0",
        "run.name=..",
    ]  # fmt: skip
    job = read_job(None, changes)
    assert len(job.problems()) == len(changes)


def test_a_learned_table_bounds_the_sequence() -> None:
    job = read_job(None, ["model=tiny-gpt", "model.context=64", "data.seq=100"])
    assert any("longer than the 64 learned positions" in problem for problem in job.problems())
    assert read_job(None, ["model.context=64", "data.seq=100"]).problems() == []


def test_a_missing_file_is_answered_with_its_neighbour(tmp_path) -> None:
    job_file(tmp_path, "")
    assert "did you mean" in problems_of(path=tmp_path / "jbo.toml")[0]
    assert "cannot be read as TOML" in problems_of(path=job_file(tmp_path, "steps 3"))[0]
    assert "cannot read" in problems_of(path=tmp_path)[0]


def test_jobs_are_values() -> None:
    assert hash(read_job()) == hash(read_job())
    assert msgspec.json.decode(msgspec.json.encode(read_job()), type=Job) == read_job()


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
    assert "no job file elsewhere/demo.toml" in problems_of(path="elsewhere/demo.toml")[0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("model.layers=2000000", "model.layers=2000000 is more than 10000"),
        (f"model.hidden={2**63 - 1}", f"model.hidden={2**63 - 1} is more than 1000000"),
        ("layout.microbatches=10000000", "layout.microbatches=10000000 is more than 262144"),
        ("layout.dp=1000000000", "layout.dp=1000000000 is more than 10000000"),
        ("data.seq=1000000000000", "data.seq=1000000000000 is more than 1000000000"),
        ("train.batch=1000000000000", "train.batch=1000000000000 is more than 1000000000"),
        ("train.timeout=inf", "train.timeout=inf is more than 100000000"),
        ("run.name=" + "a" * 300, "must be a plain name, of less than 200 bytes"),
    ],
)
def test_absurd_numbers_are_refused_before_anything_loops_over_them(change: str, sentence: str) -> None:
    assert any(sentence in problem for problem in read_job(None, [change]).problems())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("optimizer.name=[]", "optimizer.name=[] is not a choice"),
        ("train.steps=" + "9" * 5000, "is not a whole number"),
        ("train.steps=0x" + "f" * 5000, "is not a whole number"),
        ("model=" + "[" * 5000, "unknown model"),
        ("model.config=~nouser/x", "names the home of a user, ~nouser"),
    ],
)
def test_texts_that_break_parsers_are_refused(change: str, sentence: str) -> None:
    assert sentence in problems_of(change)[0]


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


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        (["model.experts=null"], ["model.experts='null' is not a table; write model.experts.count=... and the like, "
                                  "or take a preset without experts"]),
        (["model.experts.count=null"], ["model.experts.count='null' is not a whole number"]),
        (["model.experts.top_k.x=1"], ["model.experts.top_k.x: top_k is a value, not a table"]),
        (["model.experts.topk=1"], ["model.experts.topk is not a setting; did you mean 'top_k'?"]),
        (["model.experts.num_experts=4"], ["model.experts.num_experts is not a setting; write model.experts.count=4"]),
        (["etp=2"], ["etp is not a setting: an expert is whole on its rank; leave it out"]),
    ],
)  # fmt: skip
def test_mistakes_in_a_table_of_the_model(words: list[str], sentences: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        read_job(None, ["model=tiny-moe", "model.experts.top_k=2", *words])
    assert caught.value.problems == sentences


@pytest.mark.parametrize(
    ("model", "word", "sentence"),
    [
        ("tiny", "balance_loss=0.1", "train.balance_loss=0.1 is for experts, and tiny has none"),
        ("tiny", "router_z_loss=0.1", "train.router_z_loss=0.1 is for experts, and tiny has none"),
        ("tiny-moe", "balance_rate=0.1", "train.balance_rate=0.1 moves the biases of model.experts.balance_bias=true, "
                                         "and tiny-moe has none"),
        ("tiny-deepseek", "balance_rate=-1", "train.balance_rate=-1.0 must be at least 0; 0 moves no bias"),
        ("tiny-deepseek", "balance_loss=nan", "train.balance_loss=nan must be at least 0; 0 means none"),
    ],
)  # fmt: skip
def test_what_keeps_experts_even_is_refused_where_it_would_do_nothing(model: str, word: str, sentence: str) -> None:
    assert read_job(None, [f"model={model}", f"train.{word}"]).problems() == [sentence]


ODD = ["\x7f", "\x1b", "\x85", "\u2028", "\ufeff", "\0", '"', "\\", "\n", "\r\n", "\U0001f600"]


@pytest.mark.parametrize("write", [to_toml, lambda job: written(job, {})])
@pytest.mark.parametrize("odd", ODD)
def test_any_text_is_read_back_from_a_written_job(tmp_path: Path, odd: str, write: Callable[[Job], str]) -> None:
    model = msgspec.structs.replace(read_job().model, name=f"a{odd}b")
    job = Job(model=model, run=RunConfig(name="job", dir=f"{odd}x"))
    (tmp_path / "job.toml").write_text(write(job), encoding="utf-8", newline="")
    assert read_job(tmp_path / "job.toml") == job


def test_a_change_is_one_value() -> None:
    with pytest.raises(UserError, match=r"train.steps='7\\nother = 8' is not a whole number"):
        read_job(None, ["train.steps=7\nother = 8"])
    with pytest.raises(UserError, match="is not of a text in UTF-8"):
        read_job(None, ["model.name=\udcff"])


def test_a_model_in_a_directory_whose_name_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "\udcff"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hf_config(preset("tiny"), "float32")))
    monkeypatch.chdir(folder)
    assert read_job(None, ["model.config=config.json"]).model.name == "\ufffd"
