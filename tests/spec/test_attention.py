"""Attention as numbers: what is read, what is refused, what is counted."""

import msgspec
import pytest

from fivefold.job.config import Job
from fivefold.job.reading import job_from, read_job
from fivefold.job.toml_writer import to_toml
from fivefold.layout.layout import Layout
from fivefold.spec.blocks import LatentSpec, RopeScaling, Yarn
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import block
from fivefold.spec.pattern import Layer
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError


def test_the_two_stretches_of_rotary_positions_are_told_apart_by_their_kind(tmp_path) -> None:
    given = "model.rope_scaling.factor=4.0"
    assert read_job(None, [given]).model.rope_scaling == RopeScaling(factor=4.0)  # as before there were two
    job = read_job(None, [given, "model.rope_scaling.kind=yarn"])
    assert job.model.rope_scaling == Yarn(factor=4.0)
    (tmp_path / "job.toml").write_text(to_toml(job))
    assert read_job(tmp_path / "job.toml").model == job.model
    with pytest.raises(UserError, match=r"model\.rope_scaling\.kind='jarn' is not a choice; did you mean 'yarn'"):
        read_job(None, ["model.rope_scaling.kind=jarn"])
    with pytest.raises(UserError, match=r"model\.rope_scaling\.beta_fast is not a setting"):
        read_job(None, ["model.rope_scaling.beta_fast=3"])


def test_jobs_stored_before_there_were_two_stretches_are_read() -> None:
    job = Job(model=preset("llama3.1-8b"))
    stored = msgspec.to_builtins(job)
    assert stored["model"]["rope_scaling"].pop("kind") == "llama3"
    new = ("mla", "sinks", "window", "window_period", "rope_dim", "rope_interleaved")
    for field in new:
        del stored["model"][field]
    assert job_from(stored) == job
    other = Job(model=preset("tiny-oss"))
    assert job_from(msgspec.to_builtins(other)) == other


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"head_dim": 32}, "model.head_dim=32, and model.mla has head_dim=40"),
        ({"kv_heads": 2}, "model.kv_heads=2, and model.mla has kv_heads=4"),
        ({"window": 8}, "model.window=8, and model.mla has window=0"),
        ({"mla": LatentSpec(kv_rank=8, nope_dim=4, rope_dim=3, v_dim=4)}, "nearest: rope_dim=4"),
        ({"mla": LatentSpec(kv_rank=8, nope_dim=4, rope_dim=4, v_dim=9)}, "nearest: v_dim=8"),
        ({"rope_scaling": Yarn(beta_fast=1.0, beta_slow=2.0)}, "beta_fast >= beta_slow > 0, and has 32.0, 1.0 and 2.0"),
    ],
)
def test_nonsense_is_refused_with_the_nearest(changes: dict[str, object], sentence: str) -> None:
    problems = preset("tiny-mla", **changes).problems()
    assert any(sentence in problem for problem in problems), problems


def test_plain_attention_has_rules_too() -> None:
    [problem] = preset("tiny", rope_dim=31).problems()
    assert problem.endswith("nearest: rope_dim=32")
    [problem] = preset("tiny", window_period=2).problems()
    assert problem.endswith("nearest: window_period=1")
    [problem] = Layout(tp=3).problems(preset("tiny-mla"))[:1]
    assert problem.startswith("layout.tp=3 does not divide the 4 attention heads of tiny-mla")


def test_every_second_layer_of_gpt_oss_has_a_window() -> None:
    spec = preset("tiny-oss", layers=5)
    assert [_window(spec, spec.kinds(layer)) for layer in range(5)] == [10, 0, 10, 0, 10]
    spec = preset("tiny-oss", window_period=1)
    assert {_window(spec, kinds) for kinds in spec.counted()} == {10}


def test_flops_and_caches_count_what_is_seen_and_kept() -> None:
    spec = preset("tiny-mla")
    latent = block(spec).attention
    assert latent.flops(100) == 2 * 100 * 4 * (40 + 32)
    assert [_kept(spec, tp) for tp in (1, 2)] == [48, 48]  # whole on every tp rank
    assert [_kept(preset("tiny"), tp) for tp in (1, 2)] == [2 * 2 * 32, 2 * 32]
    oss = preset("tiny-oss")
    slides, sees_all = (block(oss, layer=oss.kinds(layer)).attention for layer in (0, 1))
    assert (slides.flops(100), slides.flops(5)) == (4 * 10 * 128, 4 * 5 * 128)
    assert sees_all.flops(100) == 4 * 100 * 128
    assert {_window(oss, kinds): count for kinds, count in oss.counted().items()} == {10: 2, 0: 2}
    assert oss.flops_per_token(100) - 6 * oss.matmul_parameters == 3 * (2 * slides.flops(100) + 2 * sees_all.flops(100))
    assert oss.flops_per_token(8, "causal") < oss.flops_per_token(8)


def _kept(spec: ModelSpec, tp: int) -> float:
    """Numbers of a token in the cache of the first layer."""
    mixer = spec.kinds(0).mixer
    cache = mixer.cache(spec, tp) if mixer else None
    return cache.numbers(1) if cache else 0


def _window(spec: ModelSpec, kinds: Layer) -> int:
    return block(spec, layer=kinds).attention.window
