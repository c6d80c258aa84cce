"""The sbatch file: what it asks for, and what it does with each code of the ranks. Slurm's commands are replaced by
scripts that write down how they were called; `make cluster-test` runs the file under Slurm itself."""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.clusters.options import LaunchOptions
from fivefold.support.errors import Note, UserError

JOB = '[model]\npreset = "tiny"\n[layout]\ndp = 4\n[run]\ncluster = "2x2x{}"\nname = "try out"\n'


def write_job(folder: Path, accelerator: str = "CPU") -> Path:
    file = folder / "job.toml"
    file.write_text(JOB.format(accelerator))
    return file


def launched(folder: Path, *words: str, accelerator: str = "CPU") -> str:
    """The file that `launch --slurm` writes."""
    output = folder / "job.sbatch"
    command = ["launch", str(write_job(folder, accelerator)), "--slurm", "-o", str(output), *words]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.exception or result.output
    return output.read_text()


def asked_for(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.M))


def test_the_file_asks_for_the_nodes_of_the_job(tmp_path: Path) -> None:
    text = launched(tmp_path, "--account", "lab", accelerator="H100")
    asked = asked_for(text)
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-node"]) == ("2", "2", "2")
    assert asked["account"] == "lab"
    assert asked["partition"] == "FILL_IN_PARTITION"
    assert asked["job-name"] == "try-out"
    assert asked["signal"] == "B:USR1@300"
    assert {"requeue", "exclusive"} <= asked.keys()
    # sbatch reads options up to the first command only
    assert text.rindex("#SBATCH") < text.index("set -u")
    assert "--gpus-per-task" not in text
    assert "export NCCL_DEBUG" in text


def test_a_cpu_cluster_has_no_gpus(tmp_path: Path) -> None:
    text = launched(tmp_path, "--partition", "")
    assert asked_for(text).keys().isdisjoint({"gpus-per-node", "partition"})
    assert "NCCL" not in text


def mounts(text: str) -> list[str]:
    line = re.search(r"--container-mounts=.*", text)
    assert line
    (word,) = shlex.split(line[0])
    return word.partition("=")[2].split(",")


def test_a_container_sees_the_directories(tmp_path: Path) -> None:
    paths = {"data.path": "/data/tokens", "run.dir": "/scratch/runs", "run.weights": "/w/checkpoints/step-00000000"}
    words = [f"{key}={path}" for key, path in paths.items()]
    text = launched(tmp_path, "--container", "reg/fivefold:1", *words)
    seen = sorted([*paths.values(), str(tmp_path)])
    assert mounts(text) == ["$PWD:$PWD", *(f"{path}:{path}" for path in seen)]
    assert "command -v fivefold" not in text
    text = launched(tmp_path, "--container", "nvcr.io#nvidia/pytorch:24.05-py3", "data.path=~/tok$ens")
    assert mounts(text)[2] == "$HOME/tok$ens:$HOME/tok$ens"
    assert "'/tok$ens'" in text or "'tok$ens'" in text


def test_data_that_is_still_open_has_to_be_known_to_a_container(tmp_path: Path) -> None:
    words = ["--nodes", "1", "model=llama3-8b", "data.seq=512", "layout=dp=2"]
    for more, again in ((["--container", "x"], True), ([], False)):
        command = ["launch", str(write_job(tmp_path)), "--slurm", "-o", str(tmp_path / "x"), *words, *more, "--json"]
        (blank,) = [
            line for line in json.loads(CliRunner().invoke(app, command).output)["fill_in"] if line.startswith("data")
        ]
        assert blank.endswith("launch again, so that the container sees it") == again


@pytest.mark.parametrize(
    ("given", "place"), [("/a b", "/a b"), ("~/r s", "/home/me/r s"), ("~", "/home/me"), ("r", "/now/r")]
)
def test_logs_and_traces_lie_in_the_runs_directory(tmp_path: Path, given: str, place: str) -> None:
    text = launched(tmp_path, f"run.dir={given}", accelerator="H100")
    lines = [line for line in text.splitlines() if re.match(r"logs=|\[\[ \$logs|export TORCH_NCCL_DEBUG_INFO", line)]
    script = "\n".join([*lines, 'echo "$logs|$TORCH_NCCL_DEBUG_INFO_TEMP_FILE"'])
    env = {"HOME": "/home/me", "PWD": "/now", "SLURM_JOB_ID": "7", "PATH": os.environ["PATH"]}
    said = subprocess.run(["bash", "-c", f"PWD=/now\n{script}"], env=env, capture_output=True, text=True, check=True)
    assert said.stdout == f"{place}/slurm-7|{place}/slurm-7/nccl-rank-\n"


def test_a_recipe_of_the_package_needs_no_file_on_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.warns(Note, match="Fivefold's own"):
        result = CliRunner().invoke(app, ["launch", "recipes/llama3-8b-8xH100.toml", "--slurm", "--json"])
    told = json.loads(result.stdout)
    assert "no recipes/" not in told["text"]
    assert "[ -f " not in told["text"]
    assert "directory that has" not in told["text"]
    assert told["fill_in"][-1].startswith("data.path=DIRECTORY")


def test_the_line_that_starts_it_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(app, ["launch", str(write_job(tmp_path)), "--slurm", "-o", "my job;x.sbatch"])
    assert "sbatch 'my job;x.sbatch'" in Path("my job;x.sbatch").read_text()


# ---- what the script does -------------------------------------------------------------------------------------------

FAKES = {
    "srun": "trap 'echo ranks told >> calls; exit 143' USR1; echo srun >> calls\n"
    '[ -z "${WAITS:-}" ] || while :; do sleep 0.05; done; exit $CODE',
    "sleep": '[ "$1" = 1 ] || exec /bin/sleep "$1"; exec /bin/sleep 0.02',  # between looks
    "squeue": "echo ${STATE:-RUNNING}",
    "scontrol": 'echo "scontrol $*" >> calls',
    "fivefold": "exit 1",
}


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A directory in which the script can run: its job, and commands that stand for Slurm's."""
    text = launched(tmp_path, "--restarts", "2")
    (tmp_path / "job.sbatch").write_text(text.replace(str(tmp_path / "job.toml"), "job.toml"))
    for name, lines in FAKES.items():
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\n{lines}\n")
        file.chmod(0o755)
    return tmp_path


def start(node: Path, **env: str) -> "subprocess.Popen[str]":
    more = {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "8", "SLURM_JOB_NODELIST": "n[1-2]", **env}
    path = f"{node / 'bin'}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", "job.sbatch"], cwd=node, env={**os.environ, **more, "PATH": path}, stdout=subprocess.PIPE, text=True
    )


def until_called(node: Path, word: str = "", times: int = 1) -> None:
    deadline, calls = time.monotonic() + 60, node / "calls"
    while not (calls.exists() and calls.read_text().count(word) >= times) and time.monotonic() < deadline:
        time.sleep(0.02)


def ran(node: Path, **env: str) -> tuple[int, str, list[str]]:
    with start(node, **env) as script:
        output, _ = script.communicate(timeout=60)  # of all processes that it has started, too
    calls = (node / "calls").read_text().splitlines()
    (node / "calls").unlink()
    return script.returncode, output, calls


AGAIN = ["srun", "scontrol requeue 7"]


@pytest.mark.parametrize("code", [0, 2, 130, 143, 138, 1, 3, 137, 139])
def test_ends_that_another_start_may_help_are_queued_again(node: Path, code: int) -> None:
    ended, _, called = ran(node, CODE=str(code))
    assert (ended, called) == (code, ["srun"] if code in (0, 2, 130) else AGAIN)


def test_failures_in_a_row_have_an_end(node: Path) -> None:
    for _ in range(2):
        assert ran(node, CODE="3")[2] == AGAIN
    code, output, calls = ran(node, CODE="3")
    assert (code, calls) == (3, ["srun"])
    assert "not started again" in output


def test_a_checkpoint_at_the_limit_forgives_failures(node: Path) -> None:
    for code in ("3", "3", "143", "3", "3"):
        assert ran(node, CODE=code)[2] == AGAIN


@pytest.mark.parametrize("code", ["143", "137"])
def test_a_cancelled_job_stays_cancelled_and_the_loss_of_a_node_is_no_failure_of_it(node: Path, code: str) -> None:
    assert ran(node, CODE=code, STATE="COMPLETING")[2] == ["srun"]
    assert not list(node.glob("runs/slurm-7/failures"))


def test_a_controller_that_does_not_answer_is_asked_again(node: Path) -> None:
    (node / "bin/squeue").write_text("#!/bin/sh\nexit 1\n")
    (node / "bin/scontrol").write_text('#!/bin/sh\necho "scontrol $*" >> calls\n[ $(wc -l < calls) -gt 2 ]\n')
    (node / "bin/sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.02\n")
    assert ran(node, CODE="143")[2] == ["srun", "scontrol requeue 7", "scontrol requeue 7"]


@pytest.mark.parametrize(("reason", "tries"), [("Requested operation is presently disabled", 1), ("busy", 4)])
def test_a_requeue_that_is_refused_is_said(node: Path, reason: str, tries: int) -> None:
    (node / "bin/scontrol").write_text(f'#!/bin/sh\necho "scontrol $*" >> calls\necho "{reason}" >&2\nexit 1\n')
    (node / "bin/sleep").write_text('#!/bin/sh\n[ "$1" = 1 ] || echo "sleep $1" >> calls\nexec /bin/sleep 0.02\n')
    code, output, calls = ran(node, CODE="143")
    assert (code, calls.count("scontrol requeue 7"), calls[-1]) == (143, tries, "scontrol requeue 7")
    assert reason in output
    last = output.splitlines()[-1]
    assert last.startswith("not queued again: Slurm has refused that; to go on from the last checkpoint: sbatch ")
    assert last.endswith("job.sbatch")


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("2:30", 150), ("24:00:00", 86400), ("7-00", 604800), ("1-12:30", 131400), ("0-0:05:30", 330)],
)
def test_time_limits_are_read_as_slurm_reads_them(time: str, seconds: int) -> None:
    assert LaunchOptions(time=time).time_limit == seconds


def test_a_short_limit_leaves_half_of_it_to_train(tmp_path: Path) -> None:
    text = launched(tmp_path, "--time", "2")
    assert asked_for(text)["signal"] == "B:USR1@60"
    assert "sleep 30 &&" in text


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_reaches_the_ranks_and_their_code_is_seen(node: Path, number: int) -> None:
    with start(node, CODE="0", WAITS="yes") as script:
        until_called(node)
        script.send_signal(number)
        output, _ = script.communicate(timeout=60)
    assert script.returncode == 143
    assert "told to stop" in output
    assert (node / "calls").read_text().splitlines() == ["srun", "ranks told", "scontrol requeue 7"]


def test_what_is_missing_on_the_node_is_refused(node: Path) -> None:
    (node / "job.toml").unlink()
    with start(node, CODE="0") as script:
        assert script.wait(60) == 2
    assert not (node / "calls").exists()


# ---- what the script of an elastic job does --------------------------------------------------------------------------


@pytest.fixture
def elastic(node: Path) -> Path:
    """Of two nodes, or one; it looks every second for the other one, and Slurm has it."""
    text = launched(node, "--elastic").replace(str(node / "job.toml"), "job.toml")
    assert "\ngrow=600 " in text
    (node / "job.sbatch").write_text(text.replace("\ngrow=600 ", "\ngrow=1 "))
    test = 'echo "sbatch $*" >> calls; echo "sbatch: Job 8 to start at $(date -d "$AT" +%FT%T) using 2 processors"'
    (node / "bin/sbatch").write_text(f"#!/bin/bash\n{test} >&2\n")
    (node / "bin/sbatch").chmod(0o755)
    (node / "bin/squeue").write_text('#!/bin/bash\n[[ $* = *PENDING* ]] && echo "$PENDING" || echo RUNNING\n')
    return node


ONE = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_PARTITION": "all", "CODE": "0", "AT": "now", "PENDING": "Dependency"}


def test_an_elastic_job_asks_for_nodes_and_not_for_tasks(tmp_path: Path) -> None:
    text = launched(tmp_path, "--elastic", accelerator="H100")
    asked = asked_for(text)
    assert (asked["nodes"], asked["mincpus"], asked["gpus-per-node"]) == ("1-2", "2", "2")
    assert "ntasks-per-node" not in asked  # it would be queued again for as many tasks as it had
    assert '--nodes="$SLURM_JOB_NUM_NODES" --ntasks="$((SLURM_JOB_NUM_NODES * 2))" --ntasks-per-node=2' in text
    assert " --elastic &\n" in text
    assert "restarts=10 " in text
    assert asked_for(launched(tmp_path, "--elastic", "elastic.least=3"))["nodes"] == "2-2"


def test_it_is_queued_again_when_it_would_get_more_nodes(elastic: Path) -> None:
    code, output, calls = ran(elastic, **ONE, WAITS="yes")
    assert calls == ["srun", "sbatch --test-only --nodes=1-1 job.sbatch", "ranks told", "scontrol requeue 7"]
    assert "1 of 2 nodes; looks for more every 1 s" in output
    assert "told to stop (to grow: it has 1 of 2 nodes, and would get more)" in output
    # It got no more, and so waits longer; then it does, and that is forgotten.
    assert "looks for more every 2 s" in ran(elastic, **ONE)[1]
    assert "looks for more" not in ran(elastic, **{**ONE, "SLURM_JOB_NUM_NODES": "2"})[1]
    assert "looks for more every 1 s" in ran(elastic, **ONE)[1]
    assert code == 143


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"AT": "1 hour"}, "no other node is free"),
        ({"PENDING": "Resources"}, "other jobs wait, and would take its nodes"),
        ({"AT": "never"}, "Slurm says: date: invalid date"),
    ],
)
def test_it_does_not_grow(elastic: Path, env: dict[str, str], why: str) -> None:
    if env.get("AT") == "never":
        (elastic / "bin/sbatch").write_text('#!/bin/bash\necho "sbatch x" >> calls; date -d never >&2\n')
    with start(elastic, **{**ONE, **env, "WAITS": "yes"}) as script:
        until_called(elastic, "sbatch", 2)
        script.send_signal(signal.SIGUSR1)
        output, _ = script.communicate(timeout=60)
    assert output.count(f"it does not grow now: {why}") == 1
    assert "to grow" not in output.replace("not grow", "")


def test_signals_at_any_moment_are_heard(elastic: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """bash 5.2 gives up a loop in which a trap is due while it reads a $(...)."""
    file = elastic / "job.sbatch"
    text = file.read_text()
    assert text.count("next=$((SECONDS + look))") == 2
    file.write_text(text.replace("next=$((SECONDS + look))", "next=0"))  # it asks Slurm again and again
    ranks = "trap : USR1; echo srun >> calls; until [ -f end ]; do /bin/sleep 0.01; done; exit 143"
    (elastic / "bin/srun").write_text(f"#!/bin/bash\n{ranks}\n")
    with start(elastic, **{**ONE, "AT": "1 hour"}) as script:
        until_called(elastic)
        for _ in range(200):
            script.send_signal(signal.SIGTERM)
            time.sleep(random.random() / 100)
        (elastic / "end").touch()
        output, _ = script.communicate(timeout=60)
    assert capfd.readouterr().err == ""
    assert script.returncode == 143
    assert output.count("told to stop (by Slurm)") > 1
    assert (elastic / "calls").read_text().splitlines()[-1] == "scontrol requeue 7"


# ---- submitting -----------------------------------------------------------------------------------------------------


def submit(folder: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str | None, *words: str):
    (folder / "bin").mkdir()
    if sbatch is not None:
        (folder / "bin/sbatch").write_text(f"#!/bin/sh\n{sbatch}\n")
        (folder / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder / "bin"))
    command = ["launch", str(write_job(folder)), "--slurm", "-o", str(folder / "x.sbatch"), "--submit", *words]
    return CliRunner().invoke(app, command)


NAMES = ("--account", "lab", "--partition", "gpu")


def test_submit_says_the_number_and_how_to_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = submit(tmp_path, monkeypatch, "echo '4711;cluster'", *NAMES).output
    for words in ("submitted as Slurm job 4711", "tail -F try-out-4711.out", "scancel 4711"):
        assert words in output


@pytest.mark.parametrize(
    ("sbatch", "code", "end"),
    [
        ("echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1", "launch.sbatch.refused",
         "x.sbatch: invalid partition specified: gpu"),
        (None, "launch.sbatch.missing", ""),
    ],
)  # fmt: skip
def test_submit_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str | None, code: str, end: str
) -> None:
    error = submit(tmp_path, monkeypatch, sbatch, *NAMES).exception
    assert isinstance(error, UserError)
    assert error.codes == [code]
    assert str(error).endswith(end)
    assert (tmp_path / "x.sbatch").exists()
