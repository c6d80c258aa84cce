"""The describing and planning side needs no torch and starts at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold import cli
from fivefold.cli import commands
from fivefold.spec.hf import to_hf_config
from fivefold.spec.presets import preset
from tests.layers import pure_modules
from tests.web.a_run import a_run

SENTENCE = 'error: this needs PyTorch: pip install "fivefold[train]"\n'
# Every command, with words that bring it to what it needs; {} is a directory. What needs no torch ends with 0.
NEED_TORCH = {
    "dryrun": "tiny --layout dp=2", "train": "run.dir={}/runs", "verify": "--layout dp=2", "doctor": "run.dir={}/runs",
    "trace": "run.dir={}/runs -o {}/trace.json", "generate": "{}/hf --tokens 1,2", "calibrate": "",
    "checkup": "run.dir={}/runs -o {}/checkup",
    "checkpoint reshard": "{} --layout tp=2 -o {}/x", "hf import": "{}/hf -o {}/x", "hf export": "{} -o {}/x",
    "bench checkpoint": "", "bench optimizer": "tiny", "bench peers": "", "bench train": "tiny",
    "lab check": "{}/lab", "lab bench": "{}/lab",
}  # fmt: skip
NEED_NOTHING = {
    "plan": "tiny --cluster 2xCPU --batch 8 --seq 64 --layout dp=2 --html {}/plan.html", "serve": "tiny --prompt 64",
    "goodput": "tiny", "accuracy": "--sources", "launch": "layout=dp=2 --slurm --nodes 2 -o {}/job.sbatch",
    "list models": "", "list accelerators": "", "draw": "1f1b --pp 2 -m 2 --html {}/s.html",
    "compare schedules": "", "compare zero": "tiny", "compare cp": "--seq 4096 --cp 2", "compare mixed": "--help",
    "compare runs": "{}/a-run {}/b-run",
    "data prepare": "{}/text.txt -o {}/tokens", "data check": "{}/tokens", "checkpoint ls": "{}/empty",
    "inspect": "{}/a-run -o {}/loss.svg --html {}/run.html", "ui": "--help", "lab start": "linear {}/lab", "": "--help",
}  # fmt: skip
ALSO_NEED_TORCH = ("verify --curve run.dir={}/runs", "bench peers --overhead", "bench peers --scaling",
                   "bench checkpoint --recovery", "bench train --cases llama3-8b")  # fmt: skip


def of_one_process(folder: Path) -> str:
    """What a fresh interpreter says: of `import fivefold`, of each public name and each module that should need no
    torch, one after the other; then, with a finder that stands in for an environment without torch, of each command."""
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(to_hf_config(preset("tiny"), "float32")))
    (folder / "text.txt").write_text("a few words " * 100)
    (folder / "empty" / "checkpoints").mkdir(parents=True)
    lines = {**NEED_NOTHING, **NEED_TORCH}
    asked = {f"{name} {words}".replace("{}", str(folder)): name in NEED_TORCH for name, words in lines.items()}
    asked |= dict.fromkeys((line.replace("{}", str(folder)) for line in ALSO_NEED_TORCH), True)
    asked |= dict.fromkeys(("train --help", "verify --help"), False)
    a_run(folder / "a-run")
    a_run(folder / "b-run", 12)
    code = f"""
import sys
import fivefold as ff
early = [name for name in ('numpy', 'msgspec', 'rich', 'typer') if name in sys.modules]
assert not early, ('import fivefold', early)
import contextlib, importlib, io
def alone(name):
    brought = [heavy for heavy in ('torch', 'transformers', 'tokenizers', 'safetensors') if heavy in sys.modules]
    assert not brought, (name, brought)
for name in ff.__all__:
    getattr(ff, name)
    alone(name)
for name in {pure_modules()!r}:
    importlib.import_module(name)
    alone(name)
print('no torch comes along')
import typer
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('torch', 'tokenizers', 'safetensors', 'transformers'):
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, NoTorch())
from fivefold import cli
from fivefold.cli import commands
def walk(group, path=()):
    for name, command in group.commands.items():
        yield from walk(command, (*path, name)) if hasattr(command, 'commands') else [' '.join((*path, name))]
assert set(walk(typer.main.get_command(cli.app))) == set({[name for name in lines if name]!r})
wrong = []
for line, needs_torch in {asked!r}.items():
    sys.argv = ['fivefold', *line.split()]
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as end:
        code = end.code or 0
    said = err.getvalue()
    if code != (2 if needs_torch else 0) or (needs_torch and said != {SENTENCE!r}):
        wrong.append((line, code, said or out.getvalue()[-200:]))
print(*(wrong or ['every command works or says why not']), sep='\\n')
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return of_one_process(tmp_path_factory.mktemp("purity")).splitlines()


def test_importing_descriptions_and_using_public_names_brings_no_torch_and_importing_the_package_nothing(
    said: list[str],
) -> None:
    """As the layers' table says, now for real: other packages could bring torch along, too. The first that does is
    named."""
    assert said[0] == "no torch comes along", said


def test_a_command_works_without_torch_or_says_in_a_sentence_that_it_needs_it(said: list[str]) -> None:
    assert said[1:] == ["every command works or says why not"]


def test_an_import_that_is_a_bug_stays_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ModuleNotFoundError("No module named 'torch.nothing'", name="torch.nothing"), ImportError("torch")):

        def broken(error: ImportError = error) -> None:
            raise error

        monkeypatch.setattr(commands, "app", broken)
        with pytest.raises(ImportError) as raised:
            cli.main()
        assert raised.value is error


@pytest.mark.alone
def test_help_starts_well_under_a_second() -> None:
    """By the processor's time, the best of five, so that a busy machine does not decide; about 0.2 s on a laptop."""
    times = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, "-m", "fivefold", "--help"], check=True, capture_output=True)
        after = os.times()
        times.append(sum(after[2:4]) - sum(before[2:4]))  # of children, in user and system
    assert min(times) < 1.0, times
