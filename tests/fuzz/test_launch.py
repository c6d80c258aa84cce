"""What `launch` writes in other languages: a value arrives as it is, or is refused in a sentence.

Scripts are read by bash, and run with functions in the place of the programs that they start, which write down their
words. YAML is read by PyYAML. `FIVEFOLD_FUZZ=10000 python -m pytest tests/fuzz/test_launch.py -k any_text` tries 10,000
jobs, each in all five writers.
"""

import os
import re
import shlex
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import event, example, given
from hypothesis import strategies as st

from fivefold.clusters import kubernetes
from fivefold.clusters.deployment import Deployment
from fivefold.clusters.launch_files import LaunchResult, launch
from fivefold.clusters.machines import Machines
from fivefold.clusters.options import LaunchOptions
from fivefold.clusters.quoting import without_comments
from fivefold.job.config import Job
from fivefold.job.reading import read_job
from fivefold.render.blocks import to_text
from fivefold.support.errors import Note
from fivefold.support.parsing import toml_value
from tests.fuzz.cases import fuzz, survives

CANARY = "touch CANARY"
PIECES = [
    CANARY, f"; {CANARY};", f"$({CANARY})", f"`{CANARY}`", f"'; {CANARY} #", f'"; {CANARY} #', f"\n{CANARY}\n",
    f"\nEND\n{CANARY}\n", f"\r{CANARY}\r", f"\u2028{CANARY}\u2028", f"\u2029{CANARY}", f"\x85{CANARY}: x\x85",
    f"\\\n{CANARY}", f"& {CANARY} &", f"| {CANARY}", "END", "EOF", "'", '"', "\\", "\\'", "$", "$$", "$HOME", "${IFS}",
    "$(JOB_UID)", "%t", "%", "@NAME@", "@RANKS@", "\n", "\r", "\r\n", "\t", "\0", "\x1b[31m", "\x1b]0;x\x07", "\x7f",
    "\x9b", "\u2028", "\u2029", "\x85", "\ufeff", "\ud800", "\udcff", "\ufffe", "\u202e", "\U0001f600", "é", "模",
    "\xa0", "\u3000", "- ", "-", "--", "--x=1", "#", " # ", ": ", ":", ",", "? ", "! ", "&a", "*a", "|", ">", "{", "}",
    "[", "]", "%YAML", "---\n", "...\n", "~", "~/", "null", "true", "0x1", "1e3", "=", " ", "  ", "a" * 3000, "'" * 300,
    "*", "?", "!x", "x",
]  # fmt: skip
TEXT_SUFFIXES = st.one_of(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join), st.text(st.characters(), max_size=20)
)
SETTINGS = [
    "model.name",
    "data.path",
    "run.dir",
    "run.name",
    "run.weights",
    "elastic.fixed",
    "checkpoint.url",
    "layout.schedule",
]
OPTIONS = {
    "account": ["slurm"], "partition": ["slurm"], "time": ["slurm"], "host": ["torchrun"],
    "container": ["slurm", "kubernetes", "trainjob"], "claim": ["kubernetes", "trainjob"],
}  # fmt: skip
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, of which Kubernetes has a translation
KINDS = ["slurm", "torchrun", "ssh", "kubernetes", "trainjob"]
BASE = {"model.preset": "tiny", "layout.dp": 4, "train.device": "cuda"}

# Programs are functions of the shell that runs a script, and of those that it starts. The first word names the file.
STUBS = """
record() { printf '%s\\0' "$@" > "$RECORD/$1.$BASHPID"; }
srun() { record srun "$@"; }
torchrun() { record torchrun "$@"; }
mkdir() { record mkdir "$@"; [ -z "${run:-}" ] || logs=$RECORD; }  # the script for ssh writes there
ssh() { while [ "$1" != -- ]; do shift; done; bash -c "$3"; }
sleep() { command sleep 0.01; }  # bash's own `read -t` can miss its alarm on a busy machine, and wait for ever
squeue() { :; }; scontrol() { :; }; fivefold() { :; }; nproc() { echo 4; }; hostname() { echo here; }
date() { echo now; }; id() { echo me; }
export -f record torchrun nproc id
"""


@dataclass(frozen=True)
class Case:
    file: str  # its name
    inside: dict[str, str]  # settings of the file
    changes: list[str]
    options: dict[str, str]
    output: str


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A job with an odd text in one place or in several."""
    odd = draw(
        st.dictionaries(
            st.sampled_from([*SETTINGS, *SETTINGS[:4], *OPTIONS, "file", "-o"]), TEXT_SUFFIXES, min_size=1, max_size=3
        )
    )
    settings = {key: text for key, text in odd.items() if key in SETTINGS}
    inside = {key for key in settings if draw(st.booleans())}
    return Case(
        odd.get("file", "job.toml"),
        {key: settings[key] for key in inside},
        [f"{key}={text}" for key, text in settings.items() if key not in inside],
        {key: text for key, text in odd.items() if key in OPTIONS},
        odd.get("-o", "out"),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current directory, which has nothing that a script might take for its own."""
    folder, before = tmp_path_factory.mktemp("launch"), Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def prepared(case: Case) -> None:
    """The job file, where a file can have that name and TOML those texts, and the hosts."""
    lines = [f"{key} = {toml_value(text)}" for key, text in (BASE | case.inside).items()]
    Path(case.file).write_text("\n".join(lines), encoding="utf-8")
    Path("hosts").write_text("node1\nme@node2\n")


def tried(case: Case, kind: str) -> LaunchResult | None:
    """What is written; None where it is refused, in a sentence."""
    given = {key: text for key, text in case.options.items() if kind in OPTIONS[key]}
    options = LaunchOptions(**given, hostfile=Path("hosts") if kind == "ssh" else None)  # type: ignore[arg-type]
    nodes = {} if kind == "ssh" else {"nodes": 2}
    found: list[LaunchResult] = []

    def question() -> None:
        found.append(launch(kind, case.file, case.changes, Path(case.output), options, per_node=2, **nodes))

    survives(question)
    return found[0] if found else None


def words_of(text: str, record: Path) -> dict[str, list[list[str]]]:
    """What the programs were told that bash has started for a script; it must be a script, and do nothing else."""
    if not record.exists():
        record.mkdir()
    for file in record.glob("*.*"):
        file.unlink()
    env = {"PATH": os.environ["PATH"], "HOME": "/home/me", "RECORD": str(record), "LC_ALL": "C.UTF-8"}
    env |= {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "4", "SLURM_JOB_NODELIST": "n", "SLURM_JOB_NUM_NODES": "2"}
    (record / "script").write_text(text, encoding="utf-8", newline="")
    whole = f'{STUBS}bash -n "$RECORD/script" && . "$RECORD/script"'
    done = subprocess.run(["bash", "-c", whole], env=env, capture_output=True, text=True, errors="replace", timeout=60)
    assert done.returncode == 0, done.stderr
    assert not Path("CANARY").exists()
    found: dict[str, list[list[str]]] = {}
    for file in record.glob("*.*[0-9]"):
        name, *words, end = file.read_bytes().decode("utf-8").split("\0")
        assert end == ""
        found.setdefault(name, []).append(words)
    return found


def at_home(path: str, home: str = "/home/me") -> str:
    """As the script's user has it, and as a program takes it for no option."""
    first, slash, rest = path.partition("/")
    path = f"{home}{slash}{rest}" if first == "~" else os.path.expanduser(path)
    return f"./{path}" if path.startswith("-") else path


def arrives(case: Case, kind: str, text: str, job: Job, folder: Path) -> None:
    """Every value is where it belongs, and as it was."""
    if kind in ("kubernetes", "trainjob"):
        in_yaml(case, kind, text, job)
        return
    told = words_of(text, folder.parent / "record")
    file = str(Path(case.file))
    ours = [f"./{file}" if file.startswith("-") else file, *case.changes]
    runs = at_home("runs" if "://" in job.run.dir else job.run.dir)
    *options, logs = told["mkdir"][0] if kind != "torchrun" else ("-p", "--", "")
    assert options == ["-p", "--"]
    if kind == "slurm":
        (words,) = told["srun"]
        assert words[-len(ours) - 2 :] == ["fivefold", "train", *ours]
        assert logs == f"{runs}/slurm-7"
        assert f"--output={os.path.join(folder, logs).replace('%', '%%')}/rank-%t.log" in words  # % is srun's
        (commented,) = re.findall(r"^# (srun \"\$.*)$", text, re.M)
        assert shlex.split(commented) == ["srun", "${flags[@]}", "fivefold", "doctor", *ours, "||", "exit", "1"]
        asked = dict(re.findall(r"^#SBATCH --(account|partition|time)=(.*)$", text, re.M))
        assert all(asked[key] == text for key, text in case.options.items() if key in asked and text)
        return
    assert len(told["torchrun"]) == (2 if kind == "ssh" else 1)
    host = "node1" if kind == "ssh" else case.options.get("host") or "FILL_IN_HOST"
    for words in told["torchrun"]:
        assert words[words.index("-m") :] == ["-m", "fivefold", "train", *ours]
        assert f"--rdzv-endpoint={host}:29400" in words
    assert kind == "torchrun" or logs.startswith(f"{runs}/ssh-")


def expanded(text: str) -> str:
    """As Kubernetes does: $$ is $, and $(NAME) what the name stands for."""
    return re.sub(r"\$(\$|\(JOB_UID\))", lambda found: "$" if found[1] == "$" else "UID", text)


def in_yaml(case: Case, kind: str, text: str, job: Job) -> None:
    found = list(yaml.load_all(text, LOADER))
    image, claim = case.options.get("container") or "", case.options.get("claim") or ""
    make = kubernetes.indexed_job if kind == "kubernetes" else kubernetes.train_job
    it = Deployment(job, Machines(2, 2), case.file, tuple(case.changes))
    assert found == [without_comments(one) for one in make(it, image, claim, 3)]
    config, last = found[-2:]
    again = folder_job(config["data"]["job.toml"])
    assert again == job
    spec = last["spec"]["template"]["spec"]["containers"][0] if kind == "kubernetes" else last["spec"]["trainer"]
    assert spec["image"] == (image or kubernetes.IMAGE)
    env = {one["name"]: one.get("value", "") for one in spec["env"]}
    runs = "runs" if "://" in job.run.dir else job.run.dir
    place = "/work" if runs.startswith("~") else os.path.join("/work", runs)
    assert expanded(env["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]) == f"{place}/nccl-rank-"
    read_by_bash(spec["command"][2])


@cache
def read_by_bash(text: str) -> None:
    subprocess.run(["bash", "-n", "-c", text], check=True, capture_output=True)


def folder_job(text: str) -> Job:
    Path("again.toml").write_text(text, encoding="utf-8", newline="")
    return read_job("again.toml")


def judge(case: Case, folder: Path) -> int:
    """How many kinds are written; none has a value that is another one."""
    for file in folder.iterdir():
        file.unlink()
    try:
        prepared(case)
    except (OSError, ValueError):  # no file has such a name, or no TOML such a text
        return 0
    written = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Note)
        for kind in KINDS:
            if result := tried(case, kind):
                arrives(case, kind, result.file_text, read_job(case.file, case.changes), folder)
                assert result.file_text == Path(case.output).read_bytes().decode()
                shown = to_text(result.blocks())
                assert not re.search("[\0-\x08\x0b-\x1f\x7f-\x9f]", shown)
                written += 1
    return written


@fuzz
@given(cases())
@example(Case("job.toml", {}, ["data.path=~\0"], {}, "out"))
@example(Case("job.toml/", {}, [], {}, "out"))
def test_any_text_in_any_place(folder: Path, case: Case) -> None:
    event(f"{judge(case, folder)} of {len(KINDS)} are written")


ODD = [piece for piece in PIECES if len(piece) < 100]


def some(pieces: list[str]) -> list[Any]:
    """Every third of them in `make test`, all in `make prove`."""
    return [pytest.param(piece, marks=[pytest.mark.slow] * (at % 3 > 0)) for at, piece in enumerate(pieces)]


ENDS = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029]")  # which stay out of scripts, and are in manifests as escapes


@pytest.mark.parametrize("piece", some(ODD))
def test_each_odd_text_as_a_setting(folder: Path, piece: str) -> None:
    half = any("\ud800" <= letter <= "\udfff" for letter in piece)
    case = Case("job.toml", {}, [f"model.name=a{piece}b"], {}, "out")
    assert judge(case, folder) == (0 if half else 2 if ENDS.search(piece) else 5)


@pytest.mark.parametrize("piece", some(ODD))
def test_each_odd_text_in_a_job_file(folder: Path, piece: str) -> None:
    texts = dict.fromkeys(["model.name", "data.path", "run.dir"], f"{piece}b")
    written = judge(Case("job.toml", texts, [], {}, "out"), folder)
    assert written == 5 or not piece.isprintable() or piece in ("\\", "\\'", "~")
