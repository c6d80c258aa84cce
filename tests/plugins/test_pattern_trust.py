"""A stored pattern that names a module of an attacker's: it is refused, and nothing is imported."""

import sys
from pathlib import Path

import msgspec
import pytest

import fivefold as ff
from fivefold.checkpoint.find import find
from fivefold.checkpoint.manifest import MANIFEST
from fivefold.job.config import job_from, read_job
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError
from tests.commands import fivefold

NAME = "evil:Evil"
EVIL = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
from fivefold.spec.mixers import GroupedQueryAttention
class Evil(GroupedQueryAttention, frozen=True, kw_only=True, tag="evil:Evil"):
    pass
"""
SMALL = ["model.layers=1", "model.hidden=32", "model.ffn=32", "data.seq=16", "train.batch=2", "train.steps=1",
         "train.eval_samples=0", "train.device=cpu", "run.name=stolen"]  # fmt: skip
READERS = ["train runs/stolen", "train runs/stolen/job.toml --check", "generate runs/stolen --prompt a",
           "hf export runs/stolen -o hf", "plan runs/stolen/job.toml --cluster 2xH100"]  # fmt: skip


@pytest.fixture(scope="module")
def stolen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose pattern names the module, in job.toml and in its checkpoint, which is sealed anew."""
    home = tmp_path_factory.mktemp("stolen")
    own = 'model.pattern=[{mixer = "attention", mlp = "dense"}]'
    run = ff.train(None, [own, *SMALL, f"run.dir={home / 'runs'}"]).directory
    job = (run / "job.toml").read_text()
    assert 'name = "attention"' in job
    (run / "job.toml").write_text(job.replace('name = "attention"', f'name = "{NAME}"'))
    checkpoint = find(run)
    table = checkpoint.manifest.job
    model = table["model"] | {"pattern": [{"mixer": {"name": NAME}, "mlp": {"name": "dense"}}]}
    forged = msgspec.structs.replace(checkpoint.manifest, job=table | {"model": model})
    assert isinstance(checkpoint.path, Path)
    (checkpoint.path / MANIFEST).write_bytes(forged.text())
    (home / "evil.py").write_text(EVIL)
    return home


@pytest.mark.parametrize("words", READERS)
def test_a_stored_pattern_never_causes_an_import(stolen: Path, words: str) -> None:
    done = fivefold(*words.split(), cwd=stolen)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--plugin {NAME}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (stolen / "imported").exists()


def test_its_user_can_say_that_it_may(stolen: Path) -> None:
    """So the refusals above are of a module that would have been found."""
    done = fivefold("train", "runs/stolen", "--plugin", NAME, "--check", cwd=stolen)
    assert done.returncode == 0, done.stderr
    (stolen / "imported").unlink()


def test_no_object_of_it_is_made_of_what_was_sent(
    stolen: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stolen)
    sys.path.insert(0, str(stolen))
    table = msgspec.to_builtins(read_job(None, []))
    table["model"]["pattern"] = [{"mixer": {"name": NAME}}]
    ways = [
        lambda: job_from(table),
        lambda: msgspec.convert(table["model"], ModelSpec),
        lambda: ff.train("runs/stolen"),
        lambda: read_job("runs/stolen/job.toml", ["model.layers=2"]),
    ]
    for make in ways:
        with pytest.raises(UserError) as refused:
            make()
        assert refused.value.codes == ["plugin.untrusted"]
    assert not (stolen / "imported").exists()
