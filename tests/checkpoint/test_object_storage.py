"""Checkpoints on object storage, with fsspec's own backends: memory, and files of this machine.

A real server is in tests/extras/test_s3.py."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
import torch

from fivefold.checkpoint import object_storage
from fivefold.checkpoint.find import find
from fivefold.checkpoint.inspect import list_checkpoints, verify_checkpoints
from fivefold.checkpoint.load import load
from fivefold.checkpoint.manifest import Checkpoint, Manifest
from fivefold.checkpoint.retention import prune, retain
from fivefold.checkpoint.save import write_alone
from fivefold.checkpoint.shards import Shard
from fivefold.checkpoint.storage import check_storage_is_writable, storage_of
from fivefold.checkpoint.store import Store
from fivefold.job.config import Job
from fivefold.job.toml_writer import to_toml
from fivefold.launch.processes import RankError
from fivefold.support.errors import UserError
from fivefold.support.storage_place import Place, RemotePlace, place_of, remote_of
from fivefold.trainer.directories import resumable_checkpoints, run_directory, run_place
from tests.checkpoint.runs import Run, small_job, train
from tests.commands import fivefold, here
from tests.ranks import run_ranks

MANIFEST = Manifest(fivefold="0", torch="0", step=1, samples=0, updates=0, optimizer=False, data="", job={})


@pytest.fixture(params=["memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> RemotePlace:
    return remote_of(f"memory:/{tmp_path}" if request.param == "memory" else f"file://{tmp_path}/there")


def save(store: Store, step: int, tensor: torch.Tensor | None = None) -> Place:
    of = torch.arange(6.0) if tensor is None else tensor
    return write_alone(store, [{"model.a": Shard.whole(of)}], msgspec.structs.replace(MANIFEST, step=step))


def half(store: Store, step: int) -> Place:
    path = store.new(step)
    with store.storage.create(path / "rank-0.tensors", lambda _: None) as file:
        file.write(b"half")
        file.finish()
    return path


def names(found: list[Any]) -> list[str]:
    return [(one.path if isinstance(one, Checkpoint) else one).name for one in found]


def test_a_store_is_what_it_is_on_a_disk(place: RemotePlace) -> None:
    store = Store(place / "run" / "checkpoints")
    assert store.complete() == store.incomplete() == store.set_aside_folders() == []
    for step in range(1, 6):
        save(store, step)
    cut = half(store, 9)
    store.storage.put(store.directory / "notes.txt", b"of somebody else")
    store.storage.put(store.directory / "other" / "manifest.json", b"{}")
    assert names(store.complete()) == [f"step-0000000{step}" for step in (5, 4, 3, 2, 1)]
    assert store.incomplete() == [cut]
    assert store.set_aside(cut, "incomplete").name == "step-00000009.incomplete"
    assert store.set_aside(store.complete()[0].path, "damaged").name == "step-00000005.damaged"
    assert names(store.set_aside_folders()) == ["step-00000005.damaged", "step-00000009.incomplete"]
    assert store.new(9).name == "step-00000009.2"  # what is set aside keeps its keys
    later = half(store, 10)
    assert names(retain(store, keep=1, every=2)) == ["step-00000003", "step-00000001"]
    assert names(store.complete()) == ["step-00000004", "step-00000002"]
    assert not store.storage.folder_exists(later)
    store.set_aside(half(store, 11), "incomplete")
    prune(store)
    assert names(store.set_aside_folders()) == ["step-00000005.damaged", "step-00000011.incomplete"]
    assert not store.storage.file_exists(store.directory / "step-00000009.incomplete")
    for path in (place / "run", place / "run" / "checkpoints", store.complete()[0].path):
        assert find(str(path)).step == 4
    assert [row["name"] for row in list_checkpoints(str(place / "run")).checkpoints] == names(store.complete())[::-1]


def test_what_a_kill_left_half_deleted_goes_with_the_next(place: RemotePlace) -> None:
    store = Store(place)
    path = save(store, 1)
    save(store, 2)
    store.storage.rename(path, path.with_name("step-00000001.deleting"))
    assert names(store.complete()) == ["step-00000002"]
    prune(store)
    assert not store.storage.folder_exists(path)
    assert store.new(1) == path


@pytest.mark.parametrize(("content", "said"), [
    (lambda whole: whole[:-1] + b"\xff", "is damaged: its sha256 is"),
    (lambda whole: whole[:3], "is short: 3 bytes, and the manifest promises 24"),
    (None, "is missing: the manifest promises 24 bytes"),
])  # fmt: skip
def test_harm_is_named_by_file(place: RemotePlace, content: Any, said: str) -> None:
    store = Store(place)
    file = save(store, 1) / "rank-0.tensors"
    assert verify_checkpoints(str(place)).ok
    if content is None:
        store.storage.driver.rm_file(str(file))  # type: ignore[attr-defined]
    else:
        store.storage.put(file, content(store.storage.read(file, 100)))
    found = verify_checkpoints(str(place))
    assert not found.ok
    assert said in str(found)


def test_only_the_rows_that_are_needed_are_read(place: RemotePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_storage, "_READ_AHEAD_BYTES", 64)
    whole = torch.arange(4096.0).reshape(64, 64)
    checkpoint = Checkpoint(save(Store(place), 1, whole))
    assert checkpoint.tensors
    driver, asked = checkpoint.storage.driver, []  # type: ignore[attr-defined]
    plain = driver.cat_file

    def counted(path: str, start: int, end: int) -> bytes:
        asked.append((start, end))
        return plain(path, start=start, end=end)

    monkeypatch.setattr(driver, "cat_file", counted)
    part = torch.empty(8, 64)
    load(checkpoint, {"model.a": Shard.of(part, (64, 64), (range(16, 24), range(64)))})
    assert torch.equal(part, whole[16:24])
    assert asked == [(16 * 256, 24 * 256)]


def test_a_run_of_two_ranks_that_is_killed_goes_on_in_another_layout(tokens: Path, tmp_path: Path) -> None:
    """dp=2 with zero=3 saves, is killed before a manifest is written, and tp=2 goes on; one process never stopped."""
    url = remote_of(f"file://{tmp_path}/there")
    settings = ["train.dtype=float64", "train.steps=6", "checkpoint.every=2", "optimizer.schedule=constant"]
    want, _, _ = train(0, 1, small_job(tokens, *settings), tmp_path / "whole")
    first = small_job(tokens, *settings, "layout=dp=2,zero=3")
    with pytest.raises(RankError):
        run_ranks(2, train, first, url, env=dict(os.environ) | {"FIVEFOLD_FAULT": "kill@at=commit,rank=0,step=4"})
    assert names(Store(url).complete()) == ["step-00000002"]
    assert names(Store(url).incomplete()) == ["step-00000004"]
    second = run_ranks(2, train, small_job(tokens, *settings, "layout=tp=2"), url)[0][0]
    assert sorted(second) == [3, 4, 5, 6]
    for step, numbers in second.items():
        assert numbers == pytest.approx(want[step], rel=1e-9)
    assert names(Store(url).set_aside_folders()) == ["step-00000004.incomplete"]
    assert names(Store(url).complete()) == ["step-00000006", "step-00000004.2"]


def test_a_server_that_fails_costs_a_save_and_not_the_run(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-print-me")
    run = Run(small_job(tokens, "train.steps=3", "checkpoint.every=1"), 1, remote_of(f"memory:/{tmp_path}"))
    kind = fsspec.get_filesystem_class("memory")
    plain, calls = kind.pipe_file, []

    def failing(self: Any, path: str, *args: Any, **more: Any) -> Any:
        calls.append(path)
        if "step-00000002" in path:
            raise ValueError("500 Internal Error, do-not-print-me")  # drivers raise what they like
        return plain(self, path, *args, **more)

    monkeypatch.setattr(kind, "pipe_file", failing)
    run.trainer.run([], checkpointing=run.keeper)
    assert run.said == [
        "the checkpoint of step 2 was not written: 500 Internal Error, ***; the last good one is step-00000001; "
        "training continues, and the next checkpoint tries again"
    ]
    assert names(run.keeper.store.complete()) == ["step-00000003", "step-00000001"]
    assert not run.keeper.store.incomplete()


def test_a_damaged_checkpoint_is_set_aside_and_a_silent_server_is_not_damage(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = remote_of(f"memory:/{tmp_path}")
    train(0, 1, job := small_job(tokens, "train.steps=2", "checkpoint.every=1"), url)
    store = Store(url)
    file = store.complete()[0].path / "rank-0.tensors"
    content = bytearray(store.storage.read(file, 1 << 20))
    content[1000] ^= 1
    store.storage.put(file, bytes(content))

    def broken(*_: Any, **more: Any) -> bytes:
        raise ConnectionError("connection reset")

    with monkeypatch.context() as patch:
        patch.setattr(store.storage.driver, "cat_file", broken)  # type: ignore[attr-defined]
        with pytest.raises(UserError, match=r"cannot read .*step-00000002/manifest.json: connection reset"):
            Run(job, 1, url).keeper.restore()
    assert not store.set_aside_folders()
    run = Run(job, 1, url)
    assert run.keeper.restore() is not None
    assert run.trainer.done == 1
    assert "rank-0.tensors is damaged" in run.said[0]
    assert run.said[1] == "skipping step-00000002 (set aside as step-00000002.damaged); trying the previous checkpoint"


def test_every_question_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_storage, "_CALL_TIMEOUT", 0.1)
    with pytest.raises(TimeoutError, match="the storage has not answered for 0 s"):
        object_storage.call_driver(lambda: time.sleep(3))


def test_what_drivers_raise_becomes_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "abcdefghijkl")
    said = object_storage.as_os_error(ValueError("no way\n to http://user:word@host/abcdefghijkl"))
    assert (said.errno, said.strerror) == (errno.EREMOTEIO, "no way to http://host/***")
    assert object_storage.as_os_error(PermissionError("Forbidden")).errno == errno.EACCES
    assert object_storage.as_os_error(OSError(errno.EIO, "busy")).errno == errno.EREMOTEIO  # which is no damage
    missing = object_storage.as_os_error(FileNotFoundError("The specified bucket does not exist"))
    assert not isinstance(missing, FileNotFoundError)


def test_a_runs_home_is_below_the_url(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that sees a run for the first time goes on with it; --fresh does not, wherever the old one lies."""
    url = f"memory:/{tmp_path}"

    def job(*changes: str) -> Job:
        return small_job(tokens, f"checkpoint.url={url}", *changes)

    here, again = {"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"}
    first = run_directory(job(f"run.dir={tmp_path}/one"), fresh=False, env=here)
    assert first == tmp_path / "one" / "run"
    assert str(run_place(job(), first)) == f"{url}/run"
    save(Store(run_place(job(), first) / "checkpoints"), 1)
    other = job(f"run.dir={tmp_path}/two")
    assert run_directory(other, fresh=False, env={}) == tmp_path / "two" / "run"
    assert run_directory(job(f"run.dir={tmp_path}/three"), fresh=True, env=here) == tmp_path / "three" / "run-2"
    # The identity has run.dir in it, so that the restarted one is that of the same job.
    monkeypatch.chdir(tmp_path)
    begun = run_directory(job("run.name=second"), fresh=True, env=here)
    save(Store(run_place(job(), begun) / "checkpoints"), 1)
    begun.rename(tmp_path / "gone")
    assert run_directory(job("run.name=second"), fresh=True, env=again) == begun
    assert begun.is_dir()


def test_checkpoints_on_disk_are_not_left_for_a_place_without_any(tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    save(Store(tmp_path / "run" / "checkpoints"), 1)
    job = small_job(tokens, f"checkpoint.url=memory:/{tmp_path}", f"run.dir={tmp_path}")
    with pytest.raises(UserError, match=r"run/checkpoints has checkpoints, and memory:/.*/run has none; 'fivefold che"):
        run_directory(job, fresh=False, env={})


@pytest.mark.parametrize("now", ["", "memory:/{}/new"])
def test_checkpoints_at_a_url_are_not_left_either(tokens: Path, tmp_path: Path, now: str) -> None:
    url = f"memory:/{tmp_path}/old"
    before, after = (
        small_job(tokens, f"checkpoint.url={one}", f"run.dir={tmp_path}") for one in (url, now.format(tmp_path))
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run/job.toml").write_text(to_toml(before))
    assert resumable_checkpoints(after, tmp_path / "run") == []  # there is nothing to leave
    save(Store(run_place(before, tmp_path / "run") / "checkpoints"), 1)
    with pytest.raises(UserError, match=f"has no checkpoints, and {url}/run has them; .* with checkpoint.url={url}, "):
        resumable_checkpoints(after, tmp_path / "run")
    assert len(resumable_checkpoints(before, tmp_path / "run")) == 1


def test_commands_take_urls(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/there"
    settings = ["model.layers=1", "model.hidden=32", "model.ffn=48", "data.seq=16", "train.batch=4", "train.steps=2"]
    words = [*settings, f"data.path={tokens}", "train.eval_samples=0", "train.device=cpu", f"checkpoint.url={url}"]
    done = fivefold("train", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs" / "run" / "checkpoints").exists()
    for command, sign in {
        f"checkpoint ls {url}/run": "step-00000002",
        f"inspect {url}/run": "tiny after step 2",
        f"checkpoint ls --verify {url}/run": "step-00000002  sound",
        f"generate {url}/run --tokens 1,2 -n 2": "1 2",
        f"hf export {url}/run -o hf": "tiny after step 2",
        f"checkpoint reshard {url}/run --layout tp=2 -o {url}/two": f"checkpoint.url={url} run.name=two",
        f"checkpoint reshard {url}/two --layout dp=1 -o back": "fivefold train back/job.toml",
    }.items():
        assert sign in here(*command.split()), command
    again = fivefold("train", "back/job.toml", "train.steps=3", cwd=tmp_path)
    assert "resumes from" in again.stdout
    assert "back/checkpoints/step-00000002" in again.stdout
    refused = fivefold("train", *words, "checkpoint.url=file:///proc/none", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: checkpoint.url=file:///proc/none cannot be used: ")


def test_a_place_that_takes_no_files_is_said_before_a_run(place: RemotePlace) -> None:
    check_storage_is_writable(str(place))
    assert not storage_of(place).folder_exists(place)
    with pytest.raises(UserError, match=r"checkpoint.url=file:///proc/none cannot be used"):
        check_storage_is_writable("file:///proc/none")
    assert isinstance(place_of(str(place)), RemotePlace)


def test_a_server_that_fails_while_it_is_looked_at_is_a_sentence(
    place: RemotePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store := Store(place / "run" / "checkpoints"), 1)
    driver = store.storage.driver  # type: ignore[attr-defined]
    plain = driver.info

    def failing(path: Any, **more: Any) -> Any:
        if str(path).endswith("step-00000001/manifest.json"):
            raise RuntimeError("503 Slow Down")
        return plain(path, **more)

    monkeypatch.setattr(driver, "info", failing)
    for look in (list_checkpoints, verify_checkpoints, find):
        with pytest.raises(UserError, match=r"cannot look at .*run: 503 Slow Down"):
            look(str(place / "run"))
