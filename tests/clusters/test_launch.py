"""`fivefold launch`: what it says, refuses, and leaves to be filled in."""

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.clusters.deployment import KINDS
from fivefold.job.config import read_job
from fivefold.planner.plan import simulate
from fivefold.support.errors import UserError

JOB = '[model]\npreset = "tiny"\n[layout]\ndp = 4\n[run]\ncluster = "2x2xH100"\n'


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    Path("hosts").write_text("# two of them\nnode1\nme@node2  # the second\n")
    return tmp_path


def said(line: str) -> str:
    result = CliRunner().invoke(app, ["launch", *shlex.split(line)])
    assert result.exit_code == 0, result.exception
    return result.output


def refused(line: str) -> str:
    result = CliRunner().invoke(app, ["launch", *shlex.split(line)])
    assert isinstance(result.exception, UserError), result.output
    return str(result.exception)


def test_one_kind_has_to_be_chosen(job: Path) -> None:
    sentence = refused("job.toml")
    assert all(f"--{kind} ({what})" in sentence for kind, what in KINDS.items())
    assert "and --slurm --torchrun are 2" in refused("job.toml --slurm --torchrun")


@pytest.mark.parametrize(
    ("words", "file", "start"),
    [
        ("--slurm", "job.sbatch", "sbatch job.sbatch"),
        ("--kubernetes", "job.yaml", "kubectl apply --filename job.yaml"),
        ("--trainjob -o 't j.yaml'", "t j.yaml", "kubectl apply --filename 't j.yaml'"),
        ("--ssh hosts", "job.sh", "bash job.sh"),
        ("--torchrun -o line.sh", "line.sh", "on each of the 2 nodes: bash line.sh"),
    ],
)
def test_each_kind_writes_its_file_and_says_how_to_start_it(job: Path, words: str, file: str, start: str) -> None:
    told = json.loads(said(f"job.toml train.steps=7 {words} --json"))
    assert (told["output"], told["start"], told["nodes"], told["ranks_per_node"]) == (file, [start], 2, 2)
    assert Path(file).read_text() == told["text"]
    assert "train.steps=7" in told["text"] or "steps = 7" in told["text"]
    assert [place for place in told["fill_in"] if place.split(" ")[0] not in told["text"]] == []


def test_what_is_left_to_fill_in(job: Path) -> None:
    both = said("job.toml --slurm")
    assert "fill in: FILL_IN_ACCOUNT in job.sbatch, or give --account" in both
    assert "fill in" not in said("job.toml --slurm --account lab --partition gpu")
    assert "fill in" not in said("job.toml --kubernetes --container lab/image:1 --claim shared")
    assert "start it: on the node: the above" in " ".join(said("job.toml layout.dp=2 --nodes 1 --torchrun").split())
    large = said("model=llama3-8b layout=dp=4 data.seq=512 --nodes 1 --torchrun --host node1")
    assert "fill in: data.path=DIRECTORY: a directory that `fivefold data prepare` has made" in large


def test_data_that_is_elsewhere_is_not_checked_and_data_that_is_here_is(job: Path) -> None:
    assert "is not on this machine and was not checked" in said("job.toml data.path=/cluster/tokens --slurm")
    (job / "empty").mkdir()
    assert "index.json" in refused("job.toml data.path=empty --slurm")
    assert not Path("job.sbatch").exists() or Path("job.sbatch").read_text().count("empty") == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--torchrun --account lab", "--account belongs to --slurm, not to --torchrun"),
        ("--ssh hosts --submit", "--submit belongs to --slurm, not to --ssh"),
        ("--ssh hosts --elastic", "--elastic belongs to --slurm and --torchrun, not to --ssh"),
        ("--slurm --elastic elastic.least=5", "elastic.least=5 is more than the 4 ranks of 2 nodes x 2 GPUs"),
        ("--slurm --elastic checkpoint.save=false", "--elastic goes on from checkpoints, and checkpoint.save=false"),
        ("--slurm --elastic layout.dp=2 --nodes 1", "--elastic is for nodes that are lost, and 1 node x 2 GPUs"),
        ("--slurm --claim x", "--claim belongs to --kubernetes and --trainjob, not to --slurm"),
        ("--slurm --time soon", "--time 'soon' is no time limit of Slurm; write for example 24:00:00 or 7-00"),
        ("--slurm --restarts -1", "--restarts -1 must be between 0 and 1000"),
        ("--slurm --account 'a b'", "--account 'a b' is no name"),
        ("--torchrun --host=-oProxyCommand=x", "--host '-oProxyCommand=x' is no name"),
        ("--slurm -o job.toml", "-o job.toml is the job file itself; give another name"),
        ("--slurm -o no/where.sbatch", "no/where.sbatch cannot be written: there is no directory no"),
        ("--slurm layout.tp=3 --nodes 6", "layout.tp=3 does not divide the 4 attention heads of tiny; nearest: "),
        ("--slurm layout.dp=8", "the layout dp=8 has 8 ranks, and 2 nodes x 2 GPUs are 4; nearest: --nodes 4 or"),
    ],
)  # fmt: skip
def test_refusals(job: Path, words: str, sentence: str) -> None:
    assert refused(f"job.toml {words}").startswith(sentence)


LAYOUT = "dp=16,zero=3,microbatches=8,recompute=full"
LARGE = f"model=llama3-8b layout={LAYOUT} train.batch=512 data.seq=8192 train.dtype=bfloat16"


def test_the_planner_knows_what_does_not_fit_and_how_long_a_step_is(job: Path) -> None:
    text = json.loads(said(f"{LARGE} --cluster 2x8xA10G --slurm --json"))
    seconds = simulate(read_job(None, shlex.split(LARGE)), LAYOUT, "2x8xA10G").option.seconds
    notice = int(text["text"].split("B:USR1@")[1].split("\n")[0])
    assert notice >= 300 + seconds > 360
    short = json.loads(said(f"{LARGE} --cluster 2x8xH100 --slurm --json"))
    assert not [note for note in short["notes"] if "fit" in note]
    whole = json.loads(said(f"{LARGE} layout.zero=0 --cluster 2x8xA10G --slurm --json"))
    assert [note for note in whole["notes"] if note.startswith("as planned, this does not fit: the fullest rank needs")]
    older = json.loads(said(f"{LARGE} --cluster 2x8xV100 --slurm --json"))
    assert [note for note in older["notes"] if note.startswith("time and memory are not known on 2x8xV100: ")]


def test_a_large_model_without_data_is_not_submitted(job: Path) -> None:
    words = "model=llama3-8b layout=dp=4 data.seq=512 --nodes 2 --slurm --account a --partition b --submit"
    assert "--submit: data.path is not filled in" in refused(words)


def test_names_and_words_are_quoted(job: Path) -> None:
    Path("a $(touch x).toml").write_text(JOB.replace("[run]", '[run]\nname = "x; touch y"'))
    text = json.loads(said("'a $(touch x).toml' --slurm -o out --json"))["text"]
    assert "--job-name=x-touch-y\n" in text
    assert "fivefold train 'a $(touch x).toml' &" in text
