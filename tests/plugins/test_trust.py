"""What is stored or sent names a module of an attacker's: it is refused, and nothing is imported.

The module is where Python looks first, the current directory, and leaves a file when it is imported.
"""

import secrets
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

import fivefold as ff
from fivefold.checkpoint.find import find
from fivefold.checkpoint.manifest import MANIFEST
from fivefold.cli.commands import _refuse
from fivefold.job.reading import job_from, read_job
from fivefold.launch.handshake import Facts, Statement, odd_ones, seal, settings_of, unseal
from fivefold.spec.model import ModelSpec
from fivefold.support import plugins
from fivefold.support.errors import UserError
from fivefold.web.question import Ask
from fivefold.web.views import answer
from tests.commands import fivefold
from tests.refusals import refusal

NAME = "evil:Evil"
SMALL = ["model.layers=1", "model.hidden=32", "model.ffn=32", "data.seq=16", "train.batch=2", "train.steps=1",
         "train.eval_samples=0", "train.device=cpu", "run.name=stolen"]  # fmt: skip
EVIL = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
from fivefold.optim.adamw import AdamW
from fivefold.spec.mixers import GroupedQueryAttention
class Evil(AdamW, frozen=True, kw_only=True, tag="evil:Evil"):
    pass
class Mixer(GroupedQueryAttention, frozen=True, kw_only=True, tag="evil:Mixer"):
    pass
"""
MIXER = "evil:Mixer"
PLUGIN_FREE = [  # reads weights or records alone
    ["inspect", "runs/stolen"],
    ["inspect", "runs/stolen/checkpoints/latest"],
    ["inspect", "runs/stolen", "--html", "page.html"],
    ["checkpoint", "ls", "runs/stolen", "--verify"],
    ["checkpoint", "reshard", "runs/stolen", "--layout", "tp=2", "-o", "runs/again"],
    ["hf", "export", "runs/stolen", "-o", "hf"],
    ["generate", "runs/stolen", "--prompt", "def", "--count", "1", "--device", "cpu"],
    ["train", "run.weights=runs/stolen", *SMALL, "run.name=own"],
]
REFUSED = [  # goes on with the job
    ["train", "runs/stolen"],
    ["train", "runs/stolen", "--nproc", "2", "layout=dp=2"],
    ["train", "runs/stolen", "--check"],
    ["train", "runs/stolen/job.toml"],
    ["train", "runs/stolen/logs/deeper/job.toml", "--check"],
    ["train", "runs/stolen/checkpoints/../job.toml", "--check"],
    ["train", "link.toml", "--check"],
    ["verify", "--curve", "runs/stolen/job.toml"],
    ["plan", "runs/stolen/job.toml", "--cluster", "2xH100"],
    ["dryrun", "runs/stolen/job.toml"],
    ["trace", "runs/stolen/job.toml"],
    ["doctor", "runs/stolen/job.toml"],
    ["launch", "runs/stolen/job.toml", "--torchrun", "--nodes", "1"],
]
PATTERN = ["train runs/pattern", "train runs/pattern/job.toml --check", "generate runs/pattern --prompt a",
           "hf export runs/pattern -o hf", "plan runs/pattern/job.toml --cluster 2xH100"]  # fmt: skip


@pytest.fixture(scope="module")
def stolen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run that names the module, in job.toml and in its checkpoint, which is sealed anew."""
    home = tmp_path_factory.mktemp("stolen")
    result = ff.train(None, [*SMALL, f"run.dir={home / 'runs'}"])
    run = result.directory
    job = (run / "job.toml").read_text()
    assert 'name = "adamw"' in job
    (run / "job.toml").write_text(job.replace('name = "adamw"', f'name = "{NAME}"'))
    forge(run, optimizer={"name": NAME})
    (deeper := run / "logs" / "deeper").mkdir(parents=True)
    (deeper / "job.toml").write_text((run / "job.toml").read_text())
    (home / "evil.py").write_text(EVIL)
    (home / "link.toml").symlink_to(run / "job.toml")
    return home


def forge(run: Path, **changes: dict[str, Any]) -> None:
    """Other settings in a checkpoint, which is sealed anew."""
    checkpoint = find(run)
    job = checkpoint.manifest.job
    forged = job | {section: job[section] | settings for section, settings in changes.items()}
    assert isinstance(checkpoint.path, Path)
    (checkpoint.path / MANIFEST).write_bytes(msgspec.structs.replace(checkpoint.manifest, job=forged).text())


@pytest.fixture(scope="module")
def pattern(stolen: Path) -> Path:
    """The same directory with a run whose pattern names one of the module's classes."""
    own = 'model.pattern=[{mixer = "attention", mlp = "dense"}]'
    run = ff.train(None, [own, *SMALL, f"run.dir={stolen / 'runs'}", "run.name=pattern"]).directory
    job = (run / "job.toml").read_text()
    assert 'name = "attention"' in job
    (run / "job.toml").write_text(job.replace('name = "attention"', f'name = "{MIXER}"'))
    forge(run, model={"pattern": [{"mixer": {"name": MIXER}, "mlp": {"name": "dense"}}]})
    return stolen


@pytest.mark.parametrize("words", PATTERN)
def test_a_stored_pattern_never_causes_an_import(pattern: Path, words: str) -> None:
    done = fivefold(*words.split(), cwd=pattern)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--plugin {MIXER}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (pattern / "imported").exists()


def test_the_user_of_a_stored_pattern_can_say_that_it_may(pattern: Path) -> None:
    done = fivefold("train", "runs/pattern", "--plugin", MIXER, "--check", cwd=pattern)
    assert done.returncode == 0, done.stderr
    (pattern / "imported").unlink()


def test_no_object_of_it_is_made_of_what_was_sent(pattern: Path, looked_for: Path) -> None:
    table = msgspec.to_builtins(read_job(None, []))
    table["model"]["pattern"] = [{"mixer": {"name": MIXER}}]
    ways: list[Callable[[], object]] = [
        lambda: job_from(table),
        lambda: msgspec.convert(table["model"], ModelSpec),
        lambda: ff.train("runs/pattern"),
        lambda: read_job("runs/pattern/job.toml", ["model.layers=2"]),
    ]
    for make in ways:
        assert refusal(make).codes == ["plugin.untrusted"]
    assert not looked_for.exists()


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_a_stored_job_never_causes_an_import(stolen: Path, words: list[str]) -> None:
    done = fivefold(*words, cwd=stolen)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--plugin {NAME}, or optimizer.name={NAME}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (stolen / "imported").exists()


@pytest.mark.parametrize("words", PLUGIN_FREE, ids=" ".join)
def test_what_reads_weights_alone_needs_no_import(stolen: Path, words: list[str]) -> None:
    done = fivefold(*words, cwd=stolen)
    assert done.returncode == 0, done.stderr
    assert not (stolen / "imported").exists()


def test_a_checkpoint_without_a_job_file_is_no_way_in(stolen: Path) -> None:
    (file := stolen / "runs" / "stolen" / "job.toml").rename(stolen / "aside.toml")
    try:
        done = fivefold("train", "runs/stolen", cwd=stolen)
    finally:
        (stolen / "aside.toml").rename(file)
    assert done.returncode == 2
    assert "plugin" in done.stderr
    assert not (stolen / "imported").exists()


@pytest.mark.parametrize("how", [["--plugin", NAME], [f"--plugin={NAME}"], [f"optimizer.name={NAME}"]], ids=" ".join)
def test_its_user_can_say_that_it_may(stolen: Path, how: list[str]) -> None:
    """So the refusals above are of a module that would have been found."""
    done = fivefold("train", "runs/stolen", *how, "--check", cwd=stolen)
    assert done.returncode == 0, done.stderr
    assert (stolen / "imported").exists()
    (stolen / "imported").unlink()


def test_a_stored_schedule_never_causes_an_import(stolen: Path) -> None:
    """Of job.toml and of a checkpoint alone."""
    shutil.copytree(stolen / "runs" / "stolen", run := stolen / "runs" / "schedule")
    job = (run / "job.toml").read_text().replace(NAME, "adamw").replace("[layout]", f'[layout]\nschedule = "{NAME}"')
    (run / "job.toml").write_text(job.replace('schedule = "1f1b"\n', ""))
    forge(run, optimizer={"name": "adamw"}, layout={"schedule": NAME})
    for words in (["inspect", "runs/schedule"], ["hf", "export", "runs/schedule", "-o", "other"]):
        done = fivefold(*words, cwd=stolen)
        assert done.returncode == 0, done.stderr
    for words in (["train", "runs/schedule"], ["train", "runs/schedule/job.toml"], ["plan", "runs/schedule/job.toml"]):
        done = fivefold(*words, cwd=stolen)
        assert done.returncode == 2
        assert f"layout.schedule={NAME} is stored" in done.stderr
    (run / "job.toml").unlink()
    assert fivefold("train", "runs/schedule", cwd=stolen).returncode == 2
    assert not (stolen / "imported").exists()


def test_another_plugin_that_is_allowed_allows_no_other(stolen: Path) -> None:
    (stolen / "good.py").write_text("Good = 3\n")
    done = fivefold("train", "runs/stolen", "--plugin", "good:Good", "--check", cwd=stolen)
    assert done.returncode == 2
    assert not (stolen / "imported").exists()


def test_a_launch_file_says_what_its_user_has_said(stolen: Path) -> None:
    done = fivefold("launch", "runs/stolen/job.toml", "--torchrun", "--nodes", "1", "--plugin", NAME, cwd=stolen)
    assert done.returncode == 0, done.stderr
    assert f"runs/stolen/job.toml --plugin={NAME}" in done.stdout
    (stolen / "imported").unlink()


@pytest.fixture
def looked_for(stolen: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In this process, too, the module would be found."""
    monkeypatch.chdir(stolen)
    sys.path.insert(0, str(stolen))
    return stolen / "imported"


def test_a_peer_that_names_a_module_is_refused(looked_for: Path) -> None:
    """A rank's statement has the settings of its job: they are compared as text."""
    mine, secret = settings_of(read_job(None, [])), secrets.token_bytes(32)
    facts = Facts(2, "run", 0, "2", "c", "d", "j")
    theirs = msgspec.structs.replace(facts, job="k", plugins="e" * 32)
    evil = Statement(b"", 1, theirs, mine | {"optimizer.name": f'"{NAME}"'})
    received, proven = unseal(seal(evil, secret), Statement, secret)
    assert received == evil
    assert proven
    [(place, said)] = odd_ones([Statement(b"", 0, facts, mine), received]).items()
    assert place == 1
    assert f'optimizer.name is "{NAME}" there and "adamw" elsewhere' in said
    assert "it has other plugins: their files have digest eeeeeeee, and the others' none" in said
    assert not looked_for.exists()


@pytest.mark.parametrize("word", ["model", "cluster", "software", "precision", "layout", "optimizer", "schedule"])
@pytest.mark.parametrize("view", ["plan", "mesh", "schedule"])
def test_a_page_that_asks_for_a_module_gets_a_sentence(looked_for: Path, view: str, word: str) -> None:
    value = f"schedule={NAME}" if word == "layout" else NAME
    with pytest.raises(UserError):
        answer(view, "", Ask({word: value}))
    assert not looked_for.exists()


def test_a_page_shows_the_run_and_imports_nothing(looked_for: Path, stolen: Path) -> None:
    answer("run", "", Ask({}, (stolen / "runs",)))
    answer("run", "", Ask({"runs": "stolen"}, (stolen / "runs",)))
    assert not looked_for.exists()


def test_a_module_that_this_process_has_is_used_and_asked_for_nothing(
    tmp_path: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of stored names: what a program has imported by itself is there; what a module makes up when asked is not."""
    lazy: Any = type(sys)("lazy_module")
    lazy.__getattr__ = lambda name: pytest.fail("a module was asked for a stored name")
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    job = tmp_path / "runs" / "old" / "job.toml"
    job.parent.mkdir(parents=True)
    (job.parent / "metrics.jsonl").touch()
    for name in ("lazy_module:Evil", "subprocess:Popen", "os:system", "fivefold.optim.base:nothing"):
        job.write_text(f'[optimizer]\nname = "{name}"\n')
        with pytest.raises(UserError) as refused:
            read_job(job)
        assert refused.value.codes == ["plugin.untrusted"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(EVIL)
    job.write_text(f'[optimizer]\nname = "{NAME}"\n')
    with pytest.raises(UserError):
        read_job(job)
    monkeypatch.syspath_prepend(tmp_path)
    import evil  # type: ignore[import-not-found]

    assert type(read_job(job).optimizer) is evil.Evil
    assert plugins.imported_plugins() == [NAME]


def test_what_several_stored_names_need_is_one_line_to_copy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["fivefold", "train", "runs/my run"])
    problems = [plugins.untrusted_problem(setting, name) for setting, name in [
        ("optimizer.name", "a:A"), ("model.pattern[0].mixer", "b:B"), ("model.pattern[1].mlp", "b:B")]]  # fmt: skip
    with pytest.raises(SystemExit):
        _refuse(Console(stderr=True, soft_wrap=True), UserError(problems))
    assert capsys.readouterr().err.splitlines()[-1].endswith("fivefold train 'runs/my run' --plugin a:A --plugin b:B")
