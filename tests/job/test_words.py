"""Settings by the names that others give them: the answer is what to type."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from fivefold.cli import app
from fivefold.job.aliases import ALIASES, SAID
from fivefold.job.config import KEYS, read_job
from fivefold.layout.layout import Layout
from fivefold.support.dtypes import dtype_of, precision_of
from fivefold.support.errors import UserError
from tests.commands import fivefold


def problems(*changes: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        read_job(None, changes)
    return caught.value.problems


@pytest.mark.parametrize(
    ("typed", "right"),
    [
        ("steps=5", "train.steps=5"),
        ("lr=0.5", "optimizer.lr=0.5"),
        ("learning_rate=0.5", "optimizer.lr=0.5"),
        ("optimizer.learning_rate=0.5", "optimizer.lr=0.5"),
        ("train.lr=0.5", "optimizer.lr=0.5"),
        ("batch_size=8", "train.batch=8"),
        ("training.seq_len=64", "data.seq=64"),
        ("max-seq-len=64", "data.seq=64"),
        ("warmup_steps=3", "optimizer.warmup=3"),
        ("max_grad_norm=1", "optimizer.clip=1"),
        ("tensor_model_parallel_size=2", "layout.tp=2"),
        ("pipeline_parallel=2", "layout.pp=2"),
        ("zero=3", "layout.zero=3"),
        ("gradient_accumulation_steps=4", "layout.microbatches=4"),
        ("fp8=true", "train.fp8=true"),
        ("seed=1", "data.seed=1 or train.seed=1"),
        ("model.num_hidden_layers=2", "model.layers=2"),
        ("stesp=5", "train.steps=5"),
        ("data_path=tokens/", "data.path=tokens/"),
        ("num_experts=8", "model.experts.count=8"),
        ("top_k=2", "model.experts.top_k=2"),
        ("model.experts.moe_router_topk=2", "model.experts.top_k=2"),
        ("moe_aux_loss_coeff=0.01", "train.balance_loss=0.01"),
        ("expert_model_parallel_size=2", "layout.ep=2"),
        ("ffn=64", "model.ffn=64"),
    ],
)
def test_a_name_of_another_system_or_without_its_section_is_answered_with_what_to_type(typed: str, right: str) -> None:
    [sentence] = problems(typed)
    assert sentence == f"{typed.partition('=')[0]} is not a setting; write {right}"


def test_all_of_a_job_in_foreign_words_is_answered_at_once() -> None:
    found = problems("bf16=true", "epochs=3", "micro_batch_size=2", "world_size=8", "foo=1", "modle=tiny")
    assert len(found) == 6
    for answer in ("write train.dtype=bfloat16", "x tokens of the data", "layout.microbatches", "--nproc 8", "'model'"):
        assert any(answer in sentence for sentence in found), answer


def test_every_alias_leads_to_a_setting_and_hides_none() -> None:
    settings = {f"{section}.{key}" for section, keys in KEYS.items() for key in keys}
    assert set(ALIASES.values()) <= settings
    bare = {key for keys in KEYS.values() for key in keys}
    assert (ALIASES.keys() | SAID.keys()) & bare == {"steps"}  # of training, or to be traced: the first is meant


def test_precisions_have_the_same_words_everywhere() -> None:
    assert [read_job(None, [f"train.dtype={word}"]).train.dtype for word in ("bf16", "fp32", "fp64", "float32")] == [
        "bfloat16", "float32", "float64", "float32"
    ]  # fmt: skip
    assert (precision_of("bfloat16"), precision_of("torch.float16"), precision_of("FP8")) == ("bf16", "fp16", "fp8")
    assert (dtype_of("half"), dtype_of("auto"), precision_of("")) == ("float16", "auto", "")
    assert "loss scale" in problems("train.dtype=fp16")[0]
    assert "nearest: train.dtype=bfloat16" in problems("train.dtype=float16")[0]
    assert "write train.dtype=bfloat16 train.fp8=true" in problems("train.dtype=fp8")[0]
    assert problems("train.dtype=bf17") == ["train.dtype='bf17' is not a choice; did you mean 'bfloat16'?"]


@pytest.mark.parametrize(
    ("command", "right"),
    [
        ("train layout=dp=8 zero=3", "write layout=dp=8,zero=3"),
        ("verify --layout dp=8 zero=3", "write --layout dp=8,zero=3"),
        ("plan llama3-8b --layout dp=8 zero=3", "write --layout dp=8,zero=3"),
        ("plan llama3-8b --layout tp=8 sp", "write --layout tp=8,sp"),
        ("dryrun llama3-8b --layout dp=4 pp=2 zero=1", "write --layout dp=4,pp=2,zero=1"),
        ("train 'layout=dp=2 zero=3'", "write layout=dp=2,zero=3"),
        ("verify --layout 'dp=8 zero=3'", "write --layout dp=8,zero=3"),
        ("plan llama3-8b --layout 'tp=8 sp split=3 5, zero=3'", "write --layout tp=8,sp,split=3,5,zero=3"),
        ("dryrun llama3-8b --layout dp=8, zero=3", "write --layout dp=8,zero=3"),
        ("plan llama3-8b --fix 'tp=8 microbatch=2'", "write --fix tp=8,microbatch=2"),
    ],
)
def test_a_layout_with_spaces_is_answered_with_commas(command: str, right: str, tmp_path) -> None:
    done = fivefold(*shlex.split(command), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("error:") == 1
    assert done.stderr.strip().endswith(right)


@pytest.mark.parametrize(
    ("command", "right"),
    [
        ("train --layout dp=8 zero=3", ["--layout is not an option; write layout=dp=8,zero=3"]),
        ("train --steps 5 --nproc 2 --learning-rate=3e-4", ["write train.steps=5", "write optimizer.lr=3e-4"]),
        ("train --training.steps 5 --optimizer.lr 1", ["write train.steps=5", "write optimizer.lr=1"]),
        ("train --model tiny --bf16", ["write model=tiny", "--bf16 is not an option: write train.dtype=bfloat16"]),
        ("train --config job.toml", ["write job.toml as the first word"]),
        ("train --nproc-per-node 8", ["write --nproc 8"]),
        ("plan llama3-8b --dtype bf16 --zero 3", ["write --precision bf16", "write --fix zero=3"]),
        ("plan --model llama3-8b", ["write llama3-8b as the first word"]),
        ("plan tiny --layout dp=2 --batch-size 4", ["write --batch 4"]),
        ("generate . --precision bf16", ["write --dtype bf16"]),
    ],
)
def test_a_setting_that_is_typed_as_an_option_is_answered_with_what_to_type(command, right, tmp_path) -> None:
    done = fivefold(*command.split(), cwd=tmp_path)
    said = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(said)) == (2, "", len(right))
    assert all(line.startswith("error: --") and line.endswith(end) for line, end in zip(said, right, strict=True))


def test_an_option_that_is_no_setting_is_answered_with_the_nearest(tmp_path) -> None:
    assert "--nproc" in fivefold("train", "--nproc2", "4", cwd=tmp_path).stderr


def test_spaces_that_stand_for_no_comma_stay_legal() -> None:
    assert Layout.parse(" dp = 2, tp=2 , split= 3, 5 ") == Layout(dp=2, tp=2, split=(3, 5))
    assert Layout.parse("pp=2,schedule=my schedules/a b.txt").schedule == "my schedules/a b.txt"
    with pytest.raises(UserError, match="a layout has commas and no spaces; write tp=2,pp=2"):
        Layout.parse("tp=2 pp=2")


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
