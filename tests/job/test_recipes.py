"""Recipes: what papers print comes out, what lies between follows, and a budget is read as people write it."""

from pathlib import Path

import pytest
from msgspec import structs

from fivefold.job.recipes import CHINCHILLA, fit, recipe, tokens_of, usable_batch, usual_batch
from fivefold.spec.presets import PRESETS, preset
from fivefold.support.errors import UserError

M = 1 << 20
PLANNER = Path(__file__).parents[2] / "docs/planner.md"


def of(name: str, tokens: str, key: str) -> object:
    spec = preset(name)
    return recipe(spec, min(spec.context, 8192), tokens_of(tokens))[key].value


@pytest.mark.parametrize(
    ("name", "tokens", "lr", "batch", "warmup", "final"),
    [
        ("llama2-7b", "2T", 3e-4, 4 * M, 2000, 0.1),  # arXiv 2307.09288, table 1
        ("llama2-70b", "2T", 1.5e-4, 4 * M, 2000, 0.1),
        ("llama3-8b", "15T", 3e-4, 4 * M, 2000, 0.1),  # arXiv 2407.21783, table 3
        ("llama3.1-70b", "15T", 1.5e-4, 4 * M, 2000, 0.1),
        ("llama3-405b", "15.6T", 8e-5, 16 * M, 8000, 0.01),  # section 3.4.1: 8e-7 at the end
        ("qwen3-8b", "3T", 3e-4, 4 * M, 2000, 0.1),  # arXiv 2309.16609, table 1
        ("gpt2-124m", "300B", 6e-4, M / 2, 2000, 0.1),  # arXiv 2005.14165, table 2.1
        ("gpt3-175b", "300B", 0.6e-4, 3.2e6, 2000, 0.1),
    ],
)
def test_what_is_published_comes_out(
    name: str, tokens: str, lr: float, batch: float, warmup: int, final: float
) -> None:
    assert of(name, tokens, "optimizer.lr") == lr
    assert of(name, tokens, "train.tokens") == batch
    assert of(name, tokens, "optimizer.warmup") == warmup
    assert of(name, tokens, "optimizer.final") == final


def test_deepseek_s_laws_say_what_its_paper_computes_with_them() -> None:
    """At its 7B run (2T tokens of 4,096: 4.2e-4 and 2,304 sequences) they were used with hardly a change."""
    spec = preset("llama2-7b", layers=30)
    compute = (spec.flops_per_token(4096) - 6 * spec.vocab * spec.hidden) * 2e12
    assert 0.3118 * compute**-0.125 == pytest.approx(4.2e-4, rel=0.06)
    assert 0.2920 * compute**0.3271 / 4096 == pytest.approx(2304, rel=0.06)


def test_a_small_model_follows_the_laws_with_size_and_budget() -> None:
    assert of("llama3.2-1b", "25B", "optimizer.lr") == 8.9e-4
    assert (
        of("llama3.2-1b", "9T", "optimizer.lr")
        < of("llama3.2-1b", "25B", "optimizer.lr")
        < of("qwen3-0.6b", "12B", "optimizer.lr")
    )
    assert of("llama3.2-1b", "9T", "train.tokens") > of("llama3.2-1b", "25B", "train.tokens")


def test_a_short_run_of_a_large_model_takes_a_smaller_batch() -> None:
    assert of("llama3-8b", "1B", "train.tokens") < M < of("llama3-8b", "1T", "train.tokens") == 4 * M


def test_every_preset_has_settings_that_make_sense() -> None:
    for name in PRESETS:
        spec = preset(name)
        found = recipe(spec, min(spec.context, 8192), CHINCHILLA * spec.parameter_count)
        assert 5e-5 < found["optimizer.lr"].value < 1e-2, name
        assert 1e3 < found["train.tokens"].value < 7e7, name  # DeepSeek-V3 took 63M
        assert all(choice.why for choice in found.values())


def test_a_model_beyond_the_table_says_so() -> None:
    assert "2.5 times as many" not in recipe(preset("llama3-405b"), 8192, 10**12)["optimizer.lr"].why
    assert "5.8 times as many parameters" in recipe(preset("megatron-1t"), 2048, 10**12)["optimizer.lr"].why


@pytest.mark.parametrize(
    ("wanted", "seq", "world", "batch"),
    [
        (4 * M, 8192, 64, 512),
        (4 * M, 8192, 24, 576),
        (16 * M, 8192, 16_384, 2048),  # more ranks than sequences
        (4 * M, 131_072, 64, 32),
        (3.2e6, 2048, 1024, 1536),  # 2,048 for dp=1024 would be 31% more
        (4 * M, 8192, 768, 576),  # 512 would leave a 3 to tp, pp or cp
        (10_000, 2048, 2, 4),
        (1, 8192, 64, 1),
    ],
)
def test_a_batch_divides_over_the_ranks(wanted: float, seq: int, world: int, batch: int) -> None:
    assert usable_batch(wanted, seq, world) == batch


def test_a_batch_is_no_further_off_than_its_grid() -> None:
    for world in range(8, 2049, 8):
        assert usable_batch(3.2e6, 2048, world) * 2048 / 3.2e6 == pytest.approx(1, abs=0.23), world


def test_the_reasons_of_the_documentation_are_those_of_a_job() -> None:
    """Schedules differ between papers, as the ends of their rates do."""
    rows = [line for line in PLANNER.read_text().splitlines() if line.startswith("|")]
    for key, choice in recipe(preset("llama3-8b"), 8192, 10**12).items():
        if key.removeprefix("optimizer.") in ("betas", "weight_decay", "clip", "schedule", "final"):
            (row,) = [row for row in rows if f"`{key.removeprefix('optimizer.')}`" in row.split("|")[1]]
            assert f"({choice.why.removeprefix('of the peak rate: ')})" in row, key


def test_a_budget_becomes_steps() -> None:
    found = recipe(preset("llama3-70b"), 8192, 10**12)
    choices = fit(found, 512, 8192, 10**12, given=False)
    assert choices["train.steps"].value == -(-(10**12) // (512 * 8192))
    assert choices["optimizer.warmup"].value == 2000
    assert "Llama 2 70B: 4M tokens" in choices["train.batch"].why
    assert "GPT-3 175B: 3.2M tokens" in recipe(preset("gpt3-175b"), 2048, 3 * 10**11)["train.tokens"].why
    short = fit(found, 512, 8192, 512 * 8192 * 100, given=False)
    assert (short["train.steps"].value, short["optimizer.warmup"].value) == (100, 10)
    with pytest.raises(UserError, match="less than one step: 512 sequences of 8192 tokens; nearest: tokens=4194304"):
        fit(found, 512, 8192, 10**6, given=True)


def test_a_smaller_batch_of_the_user_s_takes_a_smaller_rate() -> None:
    found = recipe(preset("llama3-70b"), 8192, 10**12)
    assert fit(found, 128, 8192, 10**12, given=True)["optimizer.lr"].value == 0.75e-4  # half for a quarter
    assert fit(found, 1024, 8192, 10**12, given=True)["optimizer.lr"].value == 1.5e-4


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1.4T", 14 * 10**11),
        ("300B", 3 * 10**11),
        ("15t", 15 * 10**12),
        ("2e9", 2 * 10**9),
        ("20 M", 2 * 10**7),
        ("1_000", 1000),
        ("0.5k", 500),
        (3e11, 3 * 10**11),
        (7, 7),
    ],
)
def test_tokens_are_read_as_people_write_them(text: str | float, tokens: int) -> None:
    assert tokens_of(text) == tokens


@pytest.mark.parametrize(("model", "lr"), [("deepseek-v3", 2.2e-4), ("deepseek-v2-lite", 4.2e-4), ("kimi-k2", 2e-4)])
def test_a_model_takes_the_rate_of_its_own_published_run(model: str, lr: float) -> None:
    found = recipe(preset(model), 4096, 10**13)["optimizer.lr"]
    assert found.value == lr
    assert found.why.startswith(("DeepSeek-V", "Kimi K2"))
    other = structs.replace(preset(model), layers=preset(model).layers // 2)
    assert recipe(other, 4096, 10**13)["optimizer.lr"].value != lr, "a model of another size is another one"


@pytest.mark.parametrize(
    ("model", "seq", "world", "batch"),
    [
        ("llama3-405b", 8192, 16384, 2048),  # 16M tokens, as its owners; not a sequence for each GPU
        ("llama3-70b", 8192, 1024, 512),
        ("llama3-70b", 8192, 64, 512),
        ("llama3-70b", 8192, 48, 528),  # in whole sequences for each of 48
        ("deepseek-v3", 4096, 2048, 16384),
        ("llama3.2-1b", 8192, 4096, 512),
    ],
)
def test_the_usual_batch_is_that_of_published_runs_whatever_the_cluster(
    model: str, seq: int, world: int, batch: int
) -> None:
    found = usual_batch(preset(model), seq, world)
    assert found.value == batch
    assert "--batch changes it" in found.why


@pytest.mark.parametrize(
    ("model", "tokens", "batch"),
    [("deepseek-v3", 14_800 * 10**9, 62.9e6), ("kimi-k2", 15_500 * 10**9, 67e6), ("kimi-k2", 10**15, 67e6)],
)
def test_a_model_with_a_run_of_its_own_has_its_batch(model: str, tokens: int, batch: float) -> None:
    found = recipe(preset(model), 4096, tokens)["train.tokens"]
    assert found.value == pytest.approx(batch, rel=2e-3)
    assert "law" not in found.why


def test_a_shorter_run_of_it_has_a_smaller_batch_and_says_why() -> None:
    found = recipe(preset("deepseek-v3"), 4096, 1_480 * 10**9)["train.tokens"]
    assert found.value == pytest.approx(15360 * 4096 * 0.1**0.3271)
    assert "DeepSeek-V3: " in found.why
    assert "x 0.47 for a shorter run" in found.why
