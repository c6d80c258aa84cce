"""`fivefold verify` as a user meets it."""

import json
from pathlib import Path

import pytest

from tests.commands import fivefold, here
from tests.refusals import refusal

SMALL = ["model.hidden=32", "model.ffn=24", "--seq", "16", "--steps", "2"]


def test_a_layout_is_proven_in_a_table(tmp_path: Path) -> None:
    done = fivefold("verify", "--layout", "dp=2,zero=1", *SMALL, cwd=tmp_path, env={"COLUMNS": "80"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    for words in (
        "loss, step 2",
        "norm, step 2",
        "worst gradient",
        "worst parameter",
        "dp  reduce-scatter",
        "the same",
    ):
        assert words in done.stdout
    assert "passed" in done.stdout
    assert "FAILS" not in done.stdout


@pytest.mark.slow
def test_a_sample_says_how_much_of_everything_it_is(tmp_path: Path) -> None:
    words = ["--all", "--world", "2", "--sample", "2", "--jobs", "2"]
    done = fivefold("verify", *words, *SMALL, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert (told["passed"], told["sampled"], told["failed"]) == (True, 2, 0)
    assert told["total"] > 100
    for layout in told["layouts"]:
        assert layout["worst_gradient"]["error"] < 1e-12
        assert layout["worst_gradient"]["name"]
        assert all(one["counted"] == one["expected"] for one in layout["traffic_per_step"])


def test_a_pipeline_is_proven_with_a_model_that_fills_its_stages(tmp_path: Path) -> None:
    layout = "pp=4,schedule=zb-v,microbatches=4"
    done = fivefold("verify", "--layout", layout, *SMALL, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["passed"]
    sends = [one for one in told["traffic_per_step"] if (one["axis"], one["kind"]) == ("pp", "send")]
    assert sends[0]["counted"] == sends[0]["expected"]
    assert sends[0]["counted"]["calls"] == 2 * 4  # the first rank: activations of stage 0, gradients of stage 7


def test_a_layout_that_fails_ends_with_1_and_the_parameters_name(tmp_path: Path) -> None:
    """No bug needed: float32, an eps that turns rounding noise into whole steps, and large ones."""
    words = ["--layout", "tp=2", "--dtype", "float32", "optimizer.lr=3", "optimizer.eps=1e-30"]
    done = fivefold("verify", *words, "model.hidden=32", "--seq", "16", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fails: the parameter " in done.stdout
    assert ".weight is off by" in done.stdout


REFUSED = {
    "--layout tp=3": "tp=3 does not divide the 4 attention heads of tiny; nearest: tp=2 or tp=4",
    "--layout pp=2,schedule=interleaved": "microbatches=1, and schedule=interleaved and pp=2 need at least 2",
    "--layout dp=3": "a global batch of 8 sequences does not divide over dp=3",
    "--world 4": "--world and --sample belong to --all",
    "model.kvheads=1": "model.kvheads is not a setting; did you mean 'kv_heads'?",
    "--layout dp=2 train.fp8=true train.dtype=bfloat16": "layouts agree as far as 8 bits do",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_proven_is_refused_in_a_sentence(words: str) -> None:
    assert REFUSED[words] in str(refusal(lambda: here("verify", *words.split())))
