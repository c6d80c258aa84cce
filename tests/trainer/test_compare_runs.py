"""Two runs side by side: where they part, rounding told from the rest, and what is said of files that are missing."""

import json
import shutil
from pathlib import Path

import pytest

import fivefold as ff
from fivefold.render.paint import to_svg
from fivefold.support.errors import UserError
from fivefold.trainer.compare_runs import RunsResult, compare_runs
from fivefold.trainer.parting import ComparedFigures
from fivefold.trainer.records import Digest, Digests
from tests.commands import fivefold

SMALL = ["data.seq=16", "train.batch=4", "model.layers=2", "model.hidden=32", "model.ffn=512", "train.device=cpu",
         "train.eval_samples=0", "checkpoint.every=4", "watch.digests=0", "train.digest=true",
         "optimizer.schedule_steps=40"]  # fmt: skip
WEIGHT = "layers.0.mlp.gate.weight"  # the largest of this model, in which faults flip bits


def run(folder: Path, tokens: Path, name: str, *more: str, ranks: int = 1, fault: str = "") -> Path:
    words = [*SMALL, f"data.path={tokens}", f"run.name={name}", *more]
    done = fivefold("train", *words, "--nproc", str(ranks), cwd=folder, env={"FIVEFOLD_FAULT": fault})
    assert done.returncode == 0, done.stderr
    return folder / "runs" / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def plain(folder: Path, tokens: Path) -> Path:
    return run(folder, tokens, "plain", "train.steps=22", "layout=dp=2", ranks=2)


@pytest.fixture
def copied(plain: Path, tmp_path: Path) -> Path:
    shutil.copytree(plain, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=1"])
def test_a_bit_that_flips_on_one_rank_is_found_with_its_step_and_parameter(
    folder: Path, tokens: Path, plain: Path, layout: str
) -> None:
    name = layout.replace("=", "").replace(",", "-")
    fault = "flip@rank=1,step=20"
    other = run(folder, tokens, name, "train.steps=22", f"layout={layout}", ranks=2, fault=fault)
    done = fivefold("compare", "runs", str(plain), str(other), "--json", cwd=folder)
    assert done.returncode == 1
    result = json.loads(done.stdout)
    first = result["parted"][0]
    held = " as the model has it" if "zero" in layout else ""
    assert (first["kind"], first["name"]) == ("copies", f"copies of {WEIGHT}{held} in B")
    assert first["parted"]["step"] == 20
    assert result["bits_expected"] == (layout == "dp=2")
    text = str(compare_runs(plain, other))
    assert f"A and B part in step 20: after it not all copies of {WEIGHT}{held} in B hold the same bits" in text


def test_a_flip_in_what_no_other_rank_holds_is_found_in_the_weight_that_it_moves(
    folder: Path, tokens: Path, plain: Path
) -> None:
    """In a moment, of a layout that may round otherwise: that it does not, the weights before the flip say."""
    more = ["train.steps=22", "layout=dp=2,zero=1"]
    other = run(folder, tokens, "shard", *more, ranks=2, fault="flip@rank=1,step=20,at=shard")
    result = compare_runs(plain, other)
    assert not result.bits
    assert result.first is not None
    assert result.first.parted is not None
    assert (result.first.name, result.first.parted.step) == (WEIGHT, 21)
    assert result.first.parted.distance > 0
    assert "layout.zero" in {setting.name for setting in result.settings}


def test_layouts_differ_by_rounding_and_a_seed_does_not(folder: Path, tokens: Path, plain: Path) -> None:
    cut = run(folder, tokens, "cut", "train.steps=6", "layout=tp=2", ranks=2)
    rounded = compare_runs(plain, cut)
    assert rounded.ok
    assert rounded.verdict.startswith("A and B differ by rounding alone")
    assert [figure.first.step for figure in rounded.figures if figure.name == WEIGHT and figure.first] == [1]
    assert "Compared are steps 1 to 6, which both have." in str(rounded)
    seed = run(folder, tokens, "seed", "train.steps=3", "train.seed=1", "layout=tp=2", ranks=2)
    parted = compare_runs(plain, seed)
    assert parted.first is not None
    assert parted.verdict.startswith("A and B part before their first step: ")
    assert [it.effect for it in parted.settings if it.name == "train.seed"] == ["updates"]
    assert to_svg(parted.scene()).count('<path d="M') >= 3  # type: ignore[arg-type]


def test_the_same_job_gives_the_same_bits_also_when_it_is_resumed(folder: Path, tokens: Path, plain: Path) -> None:
    run(folder, tokens, "resumed", "train.steps=8", "layout=dp=2", ranks=2)
    done = fivefold("train", "runs/resumed", "train.steps=22", "--nproc", "2", cwd=folder)
    assert done.returncode == 0, done.stderr
    result = compare_runs(plain, folder / "runs/resumed")
    assert result.verdict == ("A and B are the same to the bit in 22 steps: loss, gradient norm and every parameter")
    assert result.figures.digested == 23  # the weights before the first step are among them
    assert any("was last started after step 8" in note for note in result.notes)
    assert not any(figure.first for figure in result.figures)


def edited(run: Path, change: str, to: str, file: str = "job.toml") -> None:
    text = (run / file).read_text()
    assert change in text
    (run / file).write_text(text.replace(change, to, 1))


def test_what_is_missing_is_a_note(plain: Path, copied: Path) -> None:
    for name in ("job.toml", "environment.json", "digests.jsonl"):
        (copied / name).unlink()
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"kind":"step","st')
    result = compare_runs(plain, copied)
    assert result.ok
    text = str(result)
    assert f"there is no {copied}/job.toml: its settings are not compared" in text
    assert f"there is no {copied}/environment.json: its versions are not compared" in text
    assert "B has no digests.jsonl, which train.digest=true writes: parameters are not compared" in text
    assert "B: 1 line of its metrics, damaged or half written, left out" in text
    (copied / "job.toml").write_text("[[[")
    assert "job.toml cannot be read as TOML" in str(compare_runs(plain, copied))


def test_a_version_a_setting_and_other_samples_are_named(plain: Path, copied: Path) -> None:
    edited(copied, '"torch": "', '"torch": "9.', "environment.json")
    edited(copied, "lr = ", "lr = 1", "job.toml")
    edited(copied, "every = 4", "every = 5", "job.toml")
    lines = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["crc"]
        if line["kind"] == "step" and line["step"] > 5:
            line["samples"] += 4
    (copied / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    result = compare_runs(plain, copied)
    assert result.verdict == "A and B part in step 6: it trains on other samples, or on other tokens of them"
    assert {setting.name: setting.effect for setting in result.settings} == {
        "torch": "rounding", "optimizer.lr": "updates", "checkpoint.every": "nothing",
    }  # fmt: skip
    assert "Without effect: checkpoint.every" in str(result)


def test_what_cannot_be_compared_is_a_sentence(plain: Path, copied: Path, tmp_path: Path) -> None:
    for other, code in ((plain, "compare.same"), ("s3://bucket/run", "compare.place"), (tmp_path, "run.missing")):
        with pytest.raises(UserError) as refused:
            compare_runs(plain, other)
        assert refused.value.codes == [code]
    lines = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_text("".join(lines[:3]))
    edited(copied, '"step":1,', '"step":91,', "metrics.jsonl")
    (copied / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"has no step yet: no step is in both") as refused:
        compare_runs(plain, copied)
    assert refused.value.codes == ["compare.steps"]
    done = fivefold("compare", "runs", str(plain), str(plain), cwd=tmp_path)
    assert done.returncode == 2
    assert "are one directory; a run is compared with another" in done.stderr


def test_a_rollback_is_told(plain: Path, copied: Path) -> None:
    from fivefold.trainer.records import StepDecision, to_line

    decision = StepDecision(
        step=9, first=32, samples=36, why="spike", action="rollback", loss=9.0, grad_norm=1.0, back=4, back_samples=16
    )
    with (copied / "metrics.jsonl").open("ab") as file:
        file.write(to_line(decision))
    assert "B: step 9: loss 9, gradient norm 1: a spike; samples 32 to 35; rolled back" in str(
        compare_runs(plain, copied)
    )


def _digests(step: int, scale: float) -> Digests:
    return Digests(step=step, parameters={"w": Digest(f"{hash((step, scale)):016x}", 1.0, (scale, 0.0, 0.0, 0.0))})


def test_a_jump_is_no_rounding_and_growth_is() -> None:
    """A distance that doubles with each step stays rounding, however large; 30 times as much at once does not."""
    growing, jumping = ComparedFigures("float32", bits=False), ComparedFigures("float32", bits=False)
    for step in range(20):
        far = 1e-7 * 2.0**step
        growing.see_digests(_digests(step, 1.0), _digests(step, 1.0 + far))
        jumping.see_digests(_digests(step, 1.0), _digests(step, 1.0 + (100 * far if step == 12 else far)))
    assert growing.parted == []
    assert [(one.name, one.parted and one.parted.step) for one in jumping.parted] == [("w", 12)]


def test_it_is_a_function_of_the_api(plain: Path, copied: Path) -> None:
    assert isinstance(ff.compare_runs(plain, copied), RunsResult)
