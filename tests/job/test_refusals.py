"""What a job may not be: settings, changes and options, each with its code."""

import shlex
import sys
from functools import cache
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.job.reading import read_job
from fivefold.job.recipes import tokens_of
from fivefold.support.errors import UserError
from tests.refusals import refusal, same_words

MOE = "model=tiny-moe model.experts.top_k=2"
SETTINGS = {
    # names
    "optimizer.warm_up=3 foo=1 modle=tiny model.prset=small": "setting.unknown " * 4,
    f"{MOE} model.experts.topk=1": "setting.unknown",
    f"{MOE} model.experts.num_experts=4": "setting.unknown",
    f"{MOE} etp=2": "setting.unknown",
    "bf16=true epochs=3 micro_batch_size=2 world_size=8": "setting.unknown " * 4,
    # changes
    "model.preset=tiny model.config=x": "model.preset.config",
    f"{MOE} model.experts.top_k.x=1": "change.table",
    "'model.name=\udcff'": "change.text",
    "train.steps": "change.form",
    "layout=dp=8 zero=3": "layout.spaces",
    # types
    "train.steps=ten optimizer.lr=fast optimizer.betas=0.9 run=3": "optimizer.lr.type optimizer.betas.type "
    "train.steps.type run.type",
    "'train.steps=7\nother = 8'": "train.steps.type",
    "train.steps=" + "9" * 5000: "train.steps.type",
    "train.steps=0x" + "f" * 5000: "train.steps.type",
    f"{MOE} model.experts=null": "model.experts.type",
    f"{MOE} model.experts.count=null": "model.experts.count.type",
    "optimizer.name='[\"adamw\"]'": "optimizer.name.choice",
    "train.dtype=bf17": "train.dtype.choice",
    "train.dtype=float16": "train.dtype.fp16",
    "train.dtype=fp8": "train.dtype.fp8",
    "model.config=~nouser/x": "path.home",
    "model=" + "[" * 5000: "model.unknown",
    # ranges
    "optimizer.lr=nan": "optimizer.lr.range",
    "optimizer.betas=[0.9,1.0]": "optimizer.betas.range",
    "optimizer.eps=0": "optimizer.eps.range",
    "optimizer.weight_decay=-1": "optimizer.weight_decay.range",
    "optimizer.clip=-1": "optimizer.clip.range",
    "optimizer.warmup=-1": "optimizer.warmup.range",
    "optimizer.decay=2": "optimizer.decay.range",
    "optimizer.final=-0.1": "optimizer.final.range",
    "optimizer.schedule_steps=20": "optimizer.schedule_steps.warmup",
    "train.steps=0 train.batch=0 train.eval_every=-1 train.log_every=0": "train.steps.range train.batch.range "
    "train.eval_every.range train.log_every.range",
    "train.eval_samples=-1": "train.eval_samples.range",
    "train.label_smoothing=1": "loss.label_smoothing.range",
    "loss.z_loss=-1": "loss.z_loss.range",
    "data.seq=0": "data.seq.range",
    "model.layers=2000000": "model.layers.range",
    f"model.hidden={2**63 - 1}": "model.hidden.range",
    "layout.microbatches=10000000": "layout.microbatches.range",
    "layout.dp=1000000000": "layout.dp.range",
    "data.seq=1000000000000": "data.seq.range",
    "train.batch=1000000000000": "train.batch.range",
    "train.timeout=inf": "train.timeout.range",
    "run.name=..": "run.name.plain",
    "run.name=" + "a" * 300: "run.name.plain",
    # what does not go together
    "model=tiny-gpt model.context=64 data.seq=100": "data.seq.positions",
    "train.balance_loss=0.1": "train.balance_loss.dense",
    "train.router_z_loss=0.1": "train.router_z_loss.dense",
    "model=tiny-moe train.balance_rate=0.1": "train.balance_rate.bias",
    "model=tiny-deepseek train.balance_rate=-1": "train.balance_rate.range",
    "model=tiny-deepseek train.balance_loss=nan": "train.balance_loss.range",
    "train.fp8=true layout.tp=2": "train.fp8.dtype train.fp8.tp",
    "train.fp8=true train.dtype=bf16 model.ffn=100": "train.fp8.widths",
    "train.fp8=true train.dtype=bf16 layout=pp=2,schedule=zb-h1,microbatches=4": "train.fp8.schedule",
    "train.fp8_experts=true": "train.fp8_experts.dense",
    "model=tiny-moe train.fp8_experts=true model.experts.ffn=20": "train.fp8_experts.dtype train.fp8_experts.widths",
    "watch.spike=rollback checkpoint.save=false": "watch.rollback.checkpoint",
    "watch.nonfinite=rollback watch.rollback=500": "watch.rollback.steps",
    "watch.replay=5 train.deterministic=false": "watch.replay.deterministic",
    "watch.slow=0.5": "watch.slow.factor",
    "trace.steps=2 train.steps=4": "trace.steps.end",
    "checkpoint.url=memory://x layout=dp=2": "checkpoint.url.memory",
    "checkpoint.url=ftp://x": "url.protocol",
}  # fmt: skip
# By other systems' names, or without their section: the answer is what to type, and stands in the file of words.
OTHERS = """
    steps=5 lr=0.5 learning_rate=0.5 optimizer.learning_rate=0.5 train.lr=0.5 batch_size=8 training.seq_len=64
    max-seq-len=64 warmup_steps=3 max_grad_norm=1 tensor_model_parallel_size=2 pipeline_parallel=2 zero=3
    gradient_accumulation_steps=4 fp8=true seed=1 model.num_hidden_layers=2 stesp=5 data_path=tokens/ num_experts=8
    top_k=2 model.experts.moe_router_topk=2 moe_aux_loss_coeff=0.01 expert_model_parallel_size=2 ffn=64
"""
NAMES = OTHERS.split()
COMMANDS = {
    # a layout with spaces is answered with commas
    "train layout=dp=8 zero=3": "layout.spaces",
    "verify --layout dp=8 zero=3": "layout.spaces",
    "plan llama3-8b --layout dp=8 zero=3": "layout.spaces",
    "plan llama3-8b --layout tp=8 sp": "layout.spaces",
    "dryrun llama3-8b --layout dp=4 pp=2 zero=1": "layout.spaces",
    "train 'layout=dp=2 zero=3'": "layout.spaces",
    "verify --layout 'dp=8 zero=3'": "layout.spaces",
    "plan llama3-8b --layout 'tp=8 sp split=3 5, zero=3'": "layout.spaces",
    "dryrun llama3-8b --layout dp=8, zero=3": "layout.spaces",
    "plan llama3-8b --fix 'tp=8 microbatch=2'": "layout.spaces",
    # a setting that is typed as an option, with what to type
    "train --layout dp=8 zero=3": "option.unknown",
    "train --steps 5 --nproc 2 --learning-rate=3e-4": "option.unknown " * 2,
    "train --training.steps 5 --optimizer.lr 1": "option.unknown " * 2,
    "train --model tiny --bf16": "option.unknown " * 2,
    "train --config job.toml": "option.unknown",
    "train --nproc-per-node 8": "option.unknown",
    "plan llama3-8b --dtype bf16 --zero 3": "option.unknown " * 2,
    "plan --model llama3-8b": "option.unknown",
    "plan tiny --layout dp=2 --batch-size 4": "option.unknown",
    "generate . --precision bf16": "option.unknown",
}
TOKENS = {
    **dict.fromkeys(("0", "-1T", 0, "0.2", "1e99", "1001T"), "tokens.range"),
    **dict.fromkeys(("5X", "", "1,4T", "nan", float("inf"), True, "9" * 5000), "tokens.type"),
}


@cache
def of_settings(words: str) -> UserError:
    """Of their form, or of their values."""
    try:
        return UserError(read_job(None, shlex.split(words)).problems())
    except UserError as error:
        return error


@cache
def of_command(words: str) -> UserError:
    with patch.object(sys, "argv", ["fivefold", *shlex.split(words)]):  # what an option is answered by
        result = CliRunner().invoke(app, sys.argv[1:])
    assert isinstance(result.exception, UserError), result.output
    assert result.stdout == ""
    return result.exception


@pytest.mark.parametrize("words", SETTINGS)
def test_settings_that_are_refused(words: str) -> None:
    assert of_settings(words).codes == SETTINGS[words].split()


@pytest.mark.parametrize("words", NAMES)
def test_a_name_of_another_system_or_without_its_section_is_no_setting(words: str) -> None:
    assert of_settings(words).codes == ["setting.unknown"]


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_that_are_answered_with_what_to_type(words: str) -> None:
    assert of_command(words).codes == COMMANDS[words].split()


@pytest.mark.parametrize("text", TOKENS, ids=lambda text: str(text)[:9])
def test_what_is_no_budget_is_refused(text: str | float) -> None:
    assert refusal(lambda: tokens_of(text)).codes == [TOKENS[text]]


def test_the_words_of_refusals() -> None:
    said = {words: of_settings(words).problems for words in (*SETTINGS, *NAMES) if len(words) < 1000}
    said |= {words: of_command(words).problems for words in COMMANDS}
    said |= {f"tokens={text!r}": refusal(lambda text=text: tokens_of(text)).problems for text in TOKENS}
    same_words(__file__, said)
