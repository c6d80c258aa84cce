"""Comparisons of speed: all systems compute the same, and bad input gets a sentence. Not how fast they are."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replace_struct
from typer.testing import CliRunner

from fivefold.bench import train as bench_train
from fivefold.bench.comparison import Comparison, ComparisonResult, base_job, layout_of, limit, predict
from fivefold.bench.harness import OURS, Machine, RoundTimes, choices
from fivefold.bench.scaling import EXPERTS_CHANGES, layouts
from fivefold.bench.train_rank import Profile
from fivefold.cli import app
from fivefold.hardware.accelerators import find_accelerator
from fivefold.render.blocks import to_text
from fivefold.support.errors import Note, UserError
from fivefold.trainer.records import Step

TINY = [
    *("model.layers=2", "model.hidden=64", "model.heads=2", "model.kv_heads=2", "model.head_dim=32"),
    *("model.ffn=96", "model.vocab=256", "data.seq=32"),
]

MACHINE = Machine(cores=2, torch="2", name="here")
LARGER = [*TINY, "model.layers=4", "model.heads=16", "model.kv_heads=4", "model.head_dim=4"]


def invoke(*words: str) -> Any:
    result = CliRunner().invoke(app, ["bench", *words, *TINY, "--json"])
    assert result.exit_code == 0, result.output + str(result.exception)
    return json.loads(result.stdout)


def test_all_systems_take_the_same_step() -> None:
    found = invoke("peers", "--rounds", "1")
    systems = found["systems"]
    names = [one["system"] for one in systems]
    assert names[:2] == ["bare loop", "fivefold"]
    assert {"DDP dp=2", "FSDP2 dp=2,zero=3", "DTensor tp=2", "pipelining pp=2", "fivefold cp=2"} < set(names)
    assert found["agree"] is True
    assert all(one["seconds"] > 0 for one in systems)
    assert [one["limit"] for one in systems[:2]] == [None, None]
    assert all(0.5 <= one["limit"] < 1 for one in systems[2:])


def test_a_limit_has_what_ranks_repeat_and_bubbles_and_nothing_that_is_sent() -> None:
    job = base_job([])
    assert limit(job, OURS) == 1
    assert limit(job, "FSDP2 dp=2,zero=3") == pytest.approx(0.5, rel=1e-4)
    assert 0.5 < limit(job, "fivefold dp=2") < 0.52  # the whole update on each
    assert limit(job, "DTensor tp=2") == limit(job, "fivefold tp=2") > 0.5  # norms
    # 4 microbatches through 5 layers, and through 3 and the head: a fifth of the time waits.
    assert limit(job, "fivefold pp=2") == pytest.approx(0.634, abs=0.005)
    assert 0.5 < limit(job, "fivefold pp=2,schedule=zb-h1") < 0.6


def test_one_process_beside_a_bare_loop_and_hugging_face() -> None:
    found = invoke("peers", "--overhead", "--rounds", "1")
    assert found["agree"] is True


@pytest.mark.slow
def test_scaling_has_a_line_for_each_layout_and_the_simulators_word(monkeypatch) -> None:
    monkeypatch.setattr("fivefold.machines.calibrate.CORE_ROUNDS", 1)
    found = invoke("peers", "--scaling", "--rounds", "1", "--batch", "4", "--only", "dp,pp", "--predict")
    lines = found["layouts"]
    assert [line["layout"] for line in lines] == ["dp=2", "pp=2,microbatches=4"]
    predicted_keys = ("predicted_seconds", "predicted_one_process_seconds", "predicted_speed_up")
    assert all(line[key] > 0 for line in lines for key in predicted_keys)
    cores = found["cores_by_ranks"]
    assert set(cores) == {"1", "2"}
    assert all(value > 0 for core in cores.values() for value in core.values())
    assert [run["ranks"] for run in found["runs"]] == [2]  # layouts of as many ranks share one process's steps
    assert all(run["agree"] for run in found["runs"])


def test_experts_are_a_fraction_of_one_process_beside_the_limit_and_their_real_load() -> None:
    found = invoke("peers", "--scaling", "--rounds", "1", "--batch", "4", "--only", "ep", "model.experts.ffn=32")
    lines = found["layouts"]
    assert [line["layout"] for line in lines] == ["dp=2", "dp=2,ep=2", "dp=2,ep=2,dispatch=allgather"]
    assert all(line["of_one"] == pytest.approx(1 / line["speed_up"]) for line in lines)
    whole, sent, gathered = (line["imbalance"] for line in lines)
    assert whole is None  # every rank has all experts
    assert 1 <= sent <= 2
    assert sent == pytest.approx(gathered, rel=0.05)  # the same tokens; roundings may turn a choice after some steps
    assert lines[1]["limit_of_one"] > 0.5
    assert all(run["agree"] for run in found["runs"])


def test_a_limit_waits_for_the_fullest_rank() -> None:
    job = base_job(list(EXPERTS_CHANGES), microbatches=1)
    even, uneven = (limit(job, "dp=2,ep=2", imbalance=imbalance) for imbalance in (1.0, 1.5))
    assert 0.5 < even < 0.55
    assert even < uneven < 1.5 * even
    core = find_accelerator("CPU")
    crowded = replace_struct(core, peak=replace_struct(core.peak, fp32=core.rate("fp32") / 2))
    assert even < limit(job, "dp=2,ep=2", (core, crowded)) < 2 * even  # cores beside others are slower


def pretend(monkeypatch: pytest.MonkeyPatch, seconds: list[float], apart: float) -> None:
    """Every system takes these seconds, and each has a first loss that lies so far from that of the one before."""

    def measured(case: Comparison) -> ComparisonResult:
        losses = {system: [5.0 + apart * number, 4.0] for number, system in enumerate(case.systems)}
        return ComparisonResult(case, RoundTimes(dict.fromkeys(case.systems, seconds)), losses, MACHINE)

    monkeypatch.setattr("fivefold.bench.comparison.measure", measured)


@pytest.mark.parametrize("words", [["peers"], ["peers", "--scaling"]])
def test_who_computes_something_else_has_not_won(monkeypatch, words: list[str]) -> None:
    pretend(monkeypatch, [1.0], apart=1.0)
    result = CliRunner().invoke(app, ["bench", *words, *TINY])
    assert result.exit_code == 1
    assert "differ" in result.output


@pytest.mark.filterwarnings("ignore::fivefold.support.errors.Note")
def test_figures_that_could_not_be_kept_are_told_and_the_command_fails(monkeypatch) -> None:
    pretend(monkeypatch, [1.0, 1.5], apart=0.0)
    monkeypatch.setattr(Path, "write_text", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, ["bench", "peers", "--scaling", "-o", "x.json", "--ranks", "16", *LARGER])
    assert result.exit_code == 1
    assert "x.json was not written: No space left on device" in result.output
    assert "dp=4,tp=2,pp=2     16  1.250  1.250      1.00" in result.output
    assert "takes up to 1.50 times its fastest" in result.output


@pytest.mark.filterwarnings("ignore::fivefold.support.errors.Note")
def test_layouts_that_do_not_fit_are_left_out() -> None:
    job = base_job(TINY, microbatches=1)
    assert layouts(job, 8, "tp,dp,3d") == ["dp=2", "dp=4", "tp=2", "dp=2,tp=2,pp=2,microbatches=2"]
    core = find_accelerator("CPU")
    assert predict(job, "fivefold dp=2", core) < predict(job, OURS, core)
    assert layouts(job, 8, "tp,dp,3d", min_ranks=8) == ["dp=2,tp=2,pp=2,microbatches=2"]
    with pytest.raises(UserError, match="with 16 to 8 ranks"):
        layouts(job, 8, "dp", min_ranks=16)
    with pytest.raises(UserError, match="--only zp is not a choice"):
        layouts(job, 4, "zp")
    with pytest.warns(Note, match=r"dp=2 is left out: .*batch"):
        assert layouts(base_job([*TINY, "train.batch=3"], microbatches=1), 2, "dp,tp") == ["tp=2"]


def test_a_comparison_has_one_world() -> None:
    job = base_job(TINY)
    assert str(layout_of(job, "fivefold dp=2")) == "dp=2,microbatches=2"
    with pytest.raises(UserError, match="neither one rank nor 4"):
        Comparison("peers", job, ("bare loop", "fivefold dp=2", "fivefold dp=4")).check()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("peers --ranks 1", "--ranks=1 must be at least 2"),
        ("peers --only dp,xp", "--only xp is not a choice"),
        ("peers --rounds 0", "--rounds=0 must be at least 1"),
        ("peers --ranks 3", "fivefold dp=3"),
        ("peers --scaling --ranks 3 --min-ranks 3", "no power of two lies between them"),
        ("peers --scaling --only dp,ep", "nearest: --only dp"),
        ("train tiny --against nobody", "--against nobody is not a choice"),
        ("peers --overhead train.dtype=bfloat16", "comparisons are in float32"),
        ("peers --overhead model.activation=gelu", "Hugging Face has no such model"),
        ("peers --overhead model.tied=true", "must not be tied"),
        ("peers --overhead -o .", ". should end in .json or .csv"),
        ("peers --only ,", "--only is empty"),
        ("train tiny run.dir=/proc/x", "cannot be made: No such file"),
        ("train tiny run.dir=/etc/passwd", "is not a directory that can be written to"),
        ("train tiny layout.recompute=full model.dropout=0.1 --against hf", "model.dropout=0.1 is Fivefold's alone"),
        ("peers optimizer.clip=0", "all systems clip"),
        ("peers optimizer.name=muon", "only Fivefold brings matrices together"),
        ("peers --overhead -o /nowhere/at/all.json", "there is no directory /nowhere/at"),
        ("train tiny-moe --against hf train.balance_loss=0.1", "Fivefold's alone here"),
        ("train tiny --rounds 0", "--rounds=0 must be at least 1"),
        ("train tiny train.fp8=true --against fp8", "leave one of the two out"),
        ("train tiny train.dtype=float32 --against fp8", "fivefold, 8-bit products: train.fp8=true rounds from"),
        ("train tiny --steps 0", "--steps=0 must be at least 1"),
        ("train tiny train.batch=0", "train.batch=0 must be at least 1"),
        ("train tiny layout=tp=2", "layout=tp=2 has 2 ranks, and the job is to be one process's"),
        ("train tiny train.compile=off --against eager", "is not compiled here itself"),
        ("train tiny train.device=cpu --against eager", "with train.compile=auto the job is not compiled here itself"),
        ("train tiny train.deterministic=true --against deterministic", "leave one of the two out"),
        ("peers layout.tp=2", "`fivefold bench peers --ranks 2` measures several"),
        ("peers --scaling train.batch=3 --batch 5", "say the same thing twice"),
        ("peers --overhead -o /proc/x.json", "/proc/x.json cannot be written: No such file"),
        ("peers --only tp model.kv_heads=1", "DTensor tp=2: it splits whole heads, and model.kv_heads=1 is not"),
    ],
)
def test_bad_wishes_get_a_sentence(words: str, sentence: str) -> None:
    result = CliRunner().invoke(app, ["bench", *words.split()])
    assert isinstance(result.exception, UserError)
    assert sentence in str(result.exception)


def test_a_jobs_steps_are_timed_in_turns_and_a_checkpoint_beside_them(tmp_path: Path) -> None:
    small = f"data.seq=32 train.batch=2 train.dtype=float32 train.device=cpu run.dir={tmp_path}/runs"
    line = f"bench train tiny {small} --steps 2 --against hf"
    result = CliRunner().invoke(app, [*line.split(), "--rounds", "1", "--checkpoint", "--profile", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [one["system"] for one in found["systems"]] == ["fivefold", "Hugging Face"]
    turns = [one["turns"] for one in found["systems"]]
    assert all(len(turn["seconds"]) == 2 and turn["memory"] > 0 for (turn,) in turns)
    ours, theirs = (turn["loss"] for (turn,) in turns)
    assert ours == pytest.approx(theirs, rel=1e-5)
    saved = turns[0][0]["saved"]
    assert saved["bytes"] > 12 * found["parameters"]  # the master and two moments, in float32
    assert saved["snapshot"] > 0
    assert saved["writing"] > 0
    kinds = {one["kind"] for one in turns[0][0]["kernels"]}
    assert {"products", "attention", "AdamW"} < kinds
    assert not list(tmp_path.iterdir())


def test_what_is_named_twice_takes_part_once() -> None:
    assert choices("tp, dp,tp,", "--only", ["dp", "tp"]) == ["tp", "dp"]
    job = bench_train.job_of(["tiny", "train.compile=on"])
    found = bench_train.systems(job, "eager,none,eager,deterministic")
    assert list(found) == ["fivefold", "fivefold, eager", "fivefold, same bits"]
    assert [one.train.deterministic for one in found.values()] == [False, False, True]


def test_a_profile_ends_where_the_devices_counters_cannot_be_read(monkeypatch) -> None:
    profile = Profile(after=1, steps=1, device=torch.device("cpu"))
    monkeypatch.setattr(profile, "_read", list)
    for number in (1, 2):
        assert not profile.done()
        profile.on_step(Step(**dict.fromkeys(Step.__struct_fields__, 0) | {"step": number}))
    assert profile.done()
    assert profile.kernels == []


def test_a_job_file_that_asks_for_the_same_bits_gets_them(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[train]\ndeterministic = true\n[trace]\nsteps = 2\n")
    job = bench_train.job_of([str(tmp_path / "job.toml")])
    assert job.train.deterministic
    assert job.trace.steps == 0
    assert not bench_train.job_of(["tiny"]).train.deterministic


def turn(*seconds: float, saved: bench_train.Saved | None = None) -> bench_train.TrainTurn:
    return bench_train.TrainTurn("NVIDIA H200", "2.13", list(seconds), 0, 9.0, 5.0, 0, {}, "", saved)


def test_of_turns_every_rounds_own_ratio_counts() -> None:
    saved = bench_train.Saved(bytes=12, snapshot=1.0, writing=4.5, beside=[3.0, 2.0])
    job = bench_train.job_of(["tiny", "checkpoint.every=4"])
    turns = {"fivefold": [turn(1.0, 1.0, 9.0, saved=saved), turn(2.0)], "Hugging Face": [turn(2.0), turn(6.0)]}
    result = bench_train.TrainBenchResult(job, turns)
    assert result.step("fivefold") == 1.5
    assert result.faster("Hugging Face") == pytest.approx((1 / 2 + 2 / 6) / 2)
    assert result.with_checkpoints(saved, every=4) == (3 + 2 + 1.5 + 1.5) / 4
    assert result.with_checkpoints(saved, every=1) == 5.0, "the next one waits until this one is written"
    flops = job.train.batch * job.data.seq * job.model.flops_per_token(job.data.seq)
    assert result.mfu(1.5) == pytest.approx(flops / 1.5 / 989e12, rel=1e-2)


def test_the_times_of_a_gpu_are_a_table_and_no_records() -> None:
    job = bench_train.job_of(["llama3-8b", "model.layers=12", "train.batch=2", "data.seq=8192"])
    names = ("fivefold", *bench_train.AGAINST.values())
    turns = {name: [replace(turn(0.6124, 1.2031), memory=90 << 30, parameters="bf16, no masters")] for name in names}
    for width in (80, 120):
        lines = to_text(bench_train.TrainBenchResult(job, turns).blocks(), width).splitlines()
        assert max(map(len, lines)) <= width
        assert not any("…" in line for line in lines)
        assert [line.split() for line in lines if "ms/step" in line] == [
            ["system", "ms/step", "from", "to", "tokens/s", "MFU", "faster", "memory"]
        ]
