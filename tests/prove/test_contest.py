"""Contests of speed: that all systems compute the same, and that bad wishes get a sentence. Not how fast they are."""

import json

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.errors import UserError
from fivefold.prove.contest import Contest, base_job, check, layout_of
from fivefold.prove.scaling import layouts, predicted

TINY = [
    *("model.layers=2", "model.hidden=64", "model.heads=2", "model.kv_heads=2", "model.head_dim=32"),
    *("model.ffn=96", "model.vocab=256", "data.seq=32"),
]


def invoke(*words: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["bench", *words, *TINY, "--json"])
    assert result.exit_code == 0, result.output + str(result.exception)
    return json.loads(result.output)


def test_all_systems_take_the_same_step() -> None:
    found = invoke("peers", "--rounds", "1")
    systems = found["systems"]
    assert isinstance(systems, list)
    names = [one["system"] for one in systems]
    assert names[:2] == ["bare loop", "fivefold"]
    assert {"DDP dp=2", "FSDP2 dp=2,zero=3", "DTensor tp=2", "pipelining pp=2", "fivefold cp=2"} < set(names)
    assert found["agree"] is True
    assert all(one["seconds"] > 0 for one in systems)


def test_one_process_beside_a_bare_loop_and_hugging_face() -> None:
    found = invoke("overhead", "--rounds", "1")
    assert found["agree"] is True


def test_scaling_has_a_line_for_each_layout_and_the_simulators_word() -> None:
    found = invoke("scaling", "--rounds", "1", "--batch", "4", "--only", "dp,pp", "--accelerator", "CPU")
    lines = found["layouts"]
    assert isinstance(lines, list)
    assert [line["layout"] for line in lines] == ["dp=2", "pp=2"]
    assert all(line["agree"] and line["predicted_speed_up"] > 0 for line in lines)


def test_layouts_that_do_not_fit_are_left_out() -> None:
    job = base_job(TINY, microbatches=4)
    assert layouts(job, 8, ["tp", "dp", "3d"]) == ["dp=2", "dp=4", "tp=2", "dp=2,tp=2,pp=2"]
    assert predicted(job, ["dp=2"], "CPU")["dp=2"] > 1
    with pytest.raises(UserError, match="--only zp is not a choice"):
        layouts(job, 4, ["zp"])


def test_a_contest_has_one_world() -> None:
    job = base_job(TINY)
    assert str(layout_of(job, "fivefold dp=2")) == "dp=2,microbatches=2"
    with pytest.raises(UserError, match="neither one rank nor 4"):
        check(Contest(job, ("bare loop", "fivefold dp=2", "fivefold dp=4")))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("peers --ranks 1", "is no company"),
        ("peers --only dp,xp", "--only xp is not a choice"),
        ("peers --rounds 0", "--rounds 0 must be at least 1"),
        ("peers --ranks 3", "fivefold dp=3"),
        ("scaling --ranks 1", "leaves nothing to compare"),
        ("train tiny --against nobody", "--against nobody is not a choice"),
        ("overhead train.dtype=bfloat16", "contests are in float32"),
        ("overhead model.qk_norm=true", "the model must be a Llama"),
        ("peers optimizer.clip=0", "all systems clip"),
        ("overhead -o /nowhere/at/all.json", "there is no directory /nowhere/at"),
        ("train tiny-qwen3 --against hf", "another model than tiny-qwen3"),
        ("train tiny --steps 0", "--steps 0 must be at least 1"),
        ("train tiny train.batch=0", "train.batch=0 must be at least 1"),
    ],
)
def test_bad_wishes_get_a_sentence(words: str, sentence: str) -> None:
    result = CliRunner().invoke(app, ["bench", *words.split()])
    assert isinstance(result.exception, UserError)
    assert sentence in str(result.exception)


def test_a_jobs_steps_are_timed() -> None:
    line = "bench train tiny data.seq=32 train.batch=2 train.dtype=float32 --steps 2 --against hf --json"
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert [one["system"] for one in found["systems"]] == ["fivefold", "Hugging Face"]
    assert all(len(one["seconds"]) == 2 and one["memory"] > 0 for one in found["systems"])
