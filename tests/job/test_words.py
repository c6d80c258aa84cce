"""Settings by the names that others give them: the answer is what to type."""

import re
from pathlib import Path

import typer

from fivefold.cli import app
from fivefold.job.aliases import ALIASES, ANSWERS
from fivefold.job.config import SECTION_KEYS
from fivefold.job.reading import read_job
from fivefold.layout.layout import Layout
from fivefold.support.dtypes import dtype_of, precision_of
from tests.commands import fivefold
from tests.refusals import refusal


def test_every_alias_leads_to_a_setting_and_hides_none() -> None:
    settings = {f"{section}.{key}" for section, keys in SECTION_KEYS.items() for key in keys}
    assert set(ALIASES.values()) <= settings
    bare = {key for keys in SECTION_KEYS.values() for key in keys}
    assert (ALIASES.keys() | ANSWERS.keys()) & bare == {"steps"}  # of training, or to be traced: the first is meant


def test_precisions_have_the_same_words_everywhere() -> None:
    assert [read_job(None, [f"train.dtype={word}"]).train.dtype for word in ("bf16", "fp32", "fp64", "float32")] == [
        "bfloat16", "float32", "float64", "float32"
    ]  # fmt: skip
    assert (precision_of("bfloat16"), precision_of("torch.float16"), precision_of("FP8")) == ("bf16", "fp16", "fp8")
    assert (dtype_of("half"), dtype_of("auto"), precision_of("")) == ("float16", "auto", "")
    assert refusal(lambda: read_job(None, ["train.dtype=half"])).codes == ["train.dtype.fp16"]


def test_an_option_that_is_no_setting_is_answered_with_the_nearest(tmp_path) -> None:
    assert "--nproc" in fivefold("train", "--nproc2", "4", cwd=tmp_path).stderr


def test_spaces_that_stand_for_no_comma_stay_legal() -> None:
    assert Layout.parse(" dp = 2, tp=2 , split= 3, 5 ") == Layout(dp=2, tp=2, split=(3, 5))
    assert Layout.parse("pp=2,schedule=my schedules/a b.txt").schedule == "my schedules/a b.txt"
    assert str(refusal(lambda: Layout.parse("tp=2 pp=2"))).endswith("no spaces; write tp=2,pp=2")


def test_the_guide_says_which_command_has_which_option_of_precision() -> None:
    guide = (Path(__file__).parents[2] / "docs/jobs.md").read_text()
    said = re.search(r"The option is `--precision` for (.*?), and `--dtype` for\s+(.*?)\. ", guide, re.DOTALL)
    assert said
    top = typer.main.get_command(app)
    groups = [("", top), *((f"{name} ", one) for name, one in top.commands.items() if hasattr(one, "commands"))]
    for option, names in zip(("--precision", "--dtype"), said.groups(), strict=True):
        have = [f"{group}{name}" for group, of in groups for name, one in of.commands.items()
                if any(option in param.opts for param in one.params)]  # fmt: skip
        assert sorted(re.findall(r"`(.*?)`", names)) == sorted(have)


def test_plan_and_verify_take_either_word_for_a_precision(tmp_path) -> None:
    planned = fivefold("plan", "tiny", "--cluster", "H100", "--batch", "8", "--precision", "bfloat16", cwd=tmp_path)
    assert planned.returncode == 0
    assert "per step, bf16" in planned.stdout
    refused = fivefold("verify", "--dtype", "fp16", cwd=tmp_path)
    assert refused.returncode == 2
    assert "loss scale" in refused.stderr
