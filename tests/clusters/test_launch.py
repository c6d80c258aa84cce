"""`fivefold launch`: what it says, refuses, and leaves to be filled in."""

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.clusters.options import LAUNCHERS
from fivefold.job.reading import read_job
from fivefold.planner.plan import simulate
from fivefold.support.errors import UserError
from tests.refusals import same_words

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


def refused(line: str) -> UserError:
    result = CliRunner().invoke(app, ["launch", *shlex.split(line)])
    assert isinstance(result.exception, UserError), result.output
    assert not list(Path().glob("job.s*"))
    return result.exception


def test_one_kind_has_to_be_chosen(job: Path) -> None:
    error = refused("job.toml")
    assert error.codes == ["launch.kind"]
    assert all(f"--{kind} ({launcher.writes})" in str(error) for kind, launcher in LAUNCHERS.items())


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
    assert "so not checked: data.path=/cluster/tokens;" in said("job.toml data.path=/cluster/tokens --slurm")
    Path("job.sbatch").unlink()
    assert refused("job.toml data.path=. --slurm").codes == ["data.index.missing"]
    assert refused("job.toml --slurm -o no/where.sbatch").problems == [
        "no/where.sbatch cannot be written: there is no directory no"
    ]


REFUSED = {
    "job.toml --slurm --torchrun": "launch.kind",
    "job.toml --torchrun --account lab": "launch.option.kind",
    "job.toml --ssh hosts --submit": "launch.option.kind",
    "job.toml --ssh hosts --elastic": "launch.option.kind",
    "job.toml --slurm --claim x": "launch.option.kind",
    "job.toml --slurm --elastic elastic.least=5": "elastic.least.ranks",
    "job.toml --slurm --elastic checkpoint.save=false": "elastic.save",
    "job.toml --slurm --elastic layout.dp=2 --nodes 1": "elastic.nodes",
    "job.toml --slurm --time soon": "launch.time",
    "job.toml --slurm --time 2:٣0": "launch.time",
    "job.toml --slurm --time ٣": "launch.time",
    "job.toml --slurm --restarts -1": "option.range",
    "job.toml --slurm --account 'a b'": "launch.option.name",
    "job.toml --torchrun --host=-oProxyCommand=x": "launch.option.name",
    "job.toml --slurm --submit --account lab": "launch.submit.names",
    "job.toml --slurm -o job.toml": "output.taken",
    "job.toml --slurm layout.tp=3 --nodes 6": "layout.tp.heads",
    "job.toml --slurm layout.dp=8": "launch.ranks",
    "job.toml --slurm run.dir=a\\\\b": "launch.characters",
    "job.toml --slurm data.path=/a:b --container x": "launch.characters",
    "job.toml --slurm 'model.name=x\ty'": "launch.characters",
    f"job.toml --ssh hosts model.name={'é' * 13_000}": "launch.command.length",
    "job.toml --slurm data.path=.": "data.index.missing",
    "model=llama3-8b layout=dp=4 data.seq=512 --nodes 2 --slurm --account a --partition b "
    "--submit": "data.path.missing",
}


@pytest.mark.parametrize("line", REFUSED)
def test_refusals(job: Path, line: str) -> None:
    assert refused(line).codes == [REFUSED[line]]


def test_the_words_of_refusals(job: Path) -> None:
    same_words(__file__, {line: refused(line).problems for line in REFUSED})


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
    assert [
        note for note in whole["notes"] if note.startswith("as planned, this does not fit: the most loaded rank needs")
    ]
    older = json.loads(said(f"{LARGE} --cluster 2x8xV100 --slurm --json"))
    assert [note for note in older["notes"] if note.startswith("time and memory are not known on 2x8xV100: ")]


def test_names_and_words_are_quoted(job: Path) -> None:
    Path("a $(touch x).toml").write_text(JOB.replace("[run]", '[run]\nname = "x; touch y"'))
    text = json.loads(said("'a $(touch x).toml' --slurm -o out --json"))["text"]
    assert "--job-name=x-touch-y\n" in text
    assert "fivefold train 'a $(touch x).toml' &" in text
