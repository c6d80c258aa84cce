"""Checkpoints on a real S3-compatible server: moto's, a process of its own. `make extras-test` installs it."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fivefold.checkpoint import object_storage
from fivefold.checkpoint.storage import storage_of
from fivefold.checkpoint.store import Store
from fivefold.support.storage_place import RemotePlace, remote_of
from tests.checkpoint.runs import SMALL, Run, small_job
from tests.checkpoint.test_object_storage import names, save
from tests.commands import fivefold

pytestmark = pytest.mark.extras
for package in ("s3fs", "moto", "flask"):
    pytest.importorskip(package, reason=f'{package} is not installed: pip install "fivefold[s3-test]"')

BUCKET = "bucket"


@dataclass
class Server:
    port: int
    env: dict[str, str]
    more: dict[str, str] = field(default_factory=dict)
    process: Any = None

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(
            command, env={**os.environ, **self.more}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", self.port)):
            assert self.process.poll() is None, "moto has ended"
            assert time.monotonic() < deadline, "moto does not listen"
            time.sleep(0.1)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def bucket(self) -> None:
        import boto3

        boto3.client("s3", endpoint_url=self.env["AWS_ENDPOINT_URL"]).create_bucket(Bucket=BUCKET)


@pytest.fixture
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Its own for every test. Credentials and endpoint are where AWS has them: in the environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"AWS_ACCESS_KEY_ID": "id-of-nobody", "AWS_SECRET_ACCESS_KEY": "secret-of-nobody"}
    env |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    object_storage._object_storage_of.cache_clear()  # sessions know their endpoint
    one = Server(port, env, getattr(request, "param", {}))
    one.start()
    if not one.more:
        one.bucket()
    yield one
    one.stop()
    object_storage._object_storage_of.cache_clear()


def place(name: str) -> RemotePlace:
    return remote_of(f"s3://{BUCKET}/{name}")


def losses(directory: Path) -> dict[int, float]:
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def ranks(*words: object, cwd: Path, **env: str) -> Any:
    """A command with ranks. A launcher that has asked a server has threads, and forks from a server of its own: not
    from that of tests/commands.py, which prints elsewhere."""
    command = [sys.executable, "-m", "fivefold", *map(str, words), "--nproc", "2"]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **env, "COLUMNS": "200"}, capture_output=True, text=True)


WORDS = [*(word for word in SMALL if not word.startswith("train.timeout")), "train.dtype=float64", "train.steps=8",
         "checkpoint.every=2", "train.timeout=120"]  # fmt: skip


def test_a_run_that_was_killed_goes_on_in_another_layout_on_another_machine(
    server: Server, tokens: Path, tmp_path: Path
) -> None:
    """dp=2, zero=3 to S3, SIGKILL in step 6; tp=2 goes on from S3 in an empty directory: the curve of one process."""
    words = ["train", *WORDS, f"data.path={tokens}"]
    whole = fivefold(*words, "run.name=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    url = f"checkpoint.url=s3://{BUCKET}/runs"
    first = ranks(*words, url, "layout=dp=2,zero=3", cwd=tmp_path, FIVEFOLD_FAULT="kill@rank=1,step=6")
    assert first.returncode == 1, first.stderr
    saved = names(Store(place("runs/run/checkpoints")).complete())
    assert saved[0] in ("step-00000004", "step-00000002")  # rank 1 may be gone before the save of step 4 is over
    (tmp_path / "elsewhere").mkdir()
    second = ranks(*words, url, "layout=tp=2", cwd=tmp_path / "elsewhere")
    assert second.returncode == 0, second.stderr
    assert f"resumes from s3://{BUCKET}/runs/run/checkpoints/{saved[0]}" in second.stdout
    want, early = losses(tmp_path / "runs/whole"), losses(tmp_path / "runs/run")
    late = losses(tmp_path / "elsewhere/runs/run")
    assert sorted(late) == list(range(int(saved[0][5:]) + 1, 9))
    for step, loss in [*early.items(), *late.items()]:
        assert loss == pytest.approx(want[step], rel=1e-9)
    check = fivefold("checkpoint", "ls", "--verify", f"s3://{BUCKET}/runs/run", env=server.env)
    assert (check.returncode, check.stdout) == (0, "step-00000008  sound\nstep-00000006  sound\n")
    assert not list(tmp_path.rglob("*.tensors")) or all("whole" in str(file) for file in tmp_path.rglob("*.tensors"))
    for printed in (first, second, check):
        assert "of-nobody" not in printed.stdout + printed.stderr
    assert "of-nobody" not in (tmp_path / "runs/run/job.toml").read_text()


def test_a_flipped_byte_is_found_and_the_checkpoint_before_it_used(
    server: Server, tokens: Path, tmp_path: Path
) -> None:
    words = ["train", *WORDS, f"data.path={tokens}", f"checkpoint.url=s3://{BUCKET}/a", "optimizer.schedule=constant"]
    done = fivefold(*words, "train.steps=4", cwd=tmp_path, env=server.env)
    assert done.returncode == 0, done.stderr
    store = Store(place("a/run/checkpoints"))
    file = store.complete()[0].path / "rank-0.tensors"
    content = bytearray(store.storage.read(file, 1 << 24))
    content[5000] ^= 4
    store.storage.put(file, bytes(content))
    check = fivefold("checkpoint", "ls", "--verify", f"s3://{BUCKET}/a/run", env=server.env)
    assert check.returncode == 1
    assert f"{file} is damaged: its sha256 is" in check.stdout
    more = fivefold("train", f"s3://{BUCKET}/a/run", "train.steps=6", cwd=tmp_path, env=server.env)
    assert more.returncode == 0, more.stderr
    assert "skipping step-00000004 (set aside as step-00000004.damaged)" in more.stdout
    assert "step-00000002, after step 2" in more.stdout
    listed = fivefold("checkpoint", "ls", f"s3://{BUCKET}/a/run", env=server.env)
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:]] == [
        "step-00000004.2", "step-00000006", "step-00000004.damaged"
    ]  # fmt: skip


def test_a_kill_in_a_save_leaves_what_the_next_start_sets_aside(server: Server, tokens: Path, tmp_path: Path) -> None:
    words = ["train", *WORDS, f"data.path={tokens}", f"checkpoint.url=s3://{BUCKET}/a", "train.steps=4"]
    killed = fivefold(*words, cwd=tmp_path, env=server.env | {"FIVEFOLD_FAULT": "kill@at=commit,step=4"})
    assert killed.returncode == -9
    store = Store(place("a/run/checkpoints"))
    assert names(store.incomplete()) == ["step-00000004"]
    again = fivefold(*words, cwd=tmp_path, env=server.env)
    assert again.returncode == 0, again.stderr
    assert "step-00000004 was never finished; set aside as step-00000004.incomplete" in again.stdout
    assert names(store.complete()) == ["step-00000004.2", "step-00000002"]


def test_training_goes_on_without_the_server_and_saves_when_it_is_back(
    server: Server, tokens: Path, tmp_path: Path
) -> None:
    run = Run(small_job(tokens, "checkpoint.keep=9"), 1, place("a"))
    run.keeper.save(1)
    run.keeper.finish()
    assert not run.said
    server.stop()
    run.keeper.save(2)
    run.keeper.finish()
    (said,) = run.said
    assert said.startswith("the checkpoint of step 2 was not written: Could not connect to the endpoint URL")
    assert said.endswith("s3://bucket/a cannot be listed: " + said.rpartition("cannot be listed: ")[2])
    assert said.endswith("; training continues, and the next checkpoint tries again")
    server.start()
    server.bucket()  # moto forgets
    run.keeper.save(3)
    run.keeper.finish()
    assert len(run.said) == 1
    assert names(run.keeper.store.complete()) == ["step-00000003"]


def test_large_files_travel_in_parts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_storage, "_PART_BYTES", 5 << 20)
    storage, file = storage_of(place("a")), place("a/large")
    content = bytes(range(256)) * (13 << 12)  # 13 MiB
    with storage.create(file, lambda _: None) as stream:
        for start in range(0, len(content), 3 << 20):
            stream.write(content[start : start + (3 << 20)])
        made = stream.finish()
    assert (made.name, made.bytes) == ("large", len(content))
    assert storage.read(file, 1 << 24) == content
    part = bytearray(1000)
    with storage.open(file) as reader:
        reader.fill(memoryview(part), 7_000_001)
    assert part == content[7_000_001:7_001_001]
    with storage.create(place("a/half"), lambda _: None) as stream:
        stream.write(content)  # and is not finished
    assert not storage.file_exists(place("a/half"))


@pytest.mark.parametrize("server", [{"INITIAL_NO_AUTH_ACTION_COUNT": "0"}], indirect=True)
def test_wrong_credentials_are_a_sentence_without_them(server: Server, tokens: Path, tmp_path: Path) -> None:
    url = f"checkpoint.url=s3://{BUCKET}/a"
    done = fivefold("train", *WORDS, f"data.path={tokens}", url, "--nproc", "2", "layout=dp=2", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: checkpoint.url=s3://{BUCKET}/a cannot be used: access is denied (")
    assert "of-nobody" not in done.stderr


def test_no_credentials_no_bucket_and_no_server_are_each_a_sentence(
    server: Server, tokens: Path, tmp_path: Path
) -> None:
    words = ["train", *WORDS, f"data.path={tokens}", f"checkpoint.url=s3://{BUCKET}-2/a"]
    none = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true", "HOME": "/none"}
    away = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    for env, said in ((none, "access is denied ("), ({}, "The specified bucket does not exist"),
                      (away, 'Could not connect to the endpoint URL: "http://127.0.0.1:1/')):  # fmt: skip
        done = fivefold(*words, cwd=tmp_path, env=server.env | env)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr.startswith(f"error: checkpoint.url=s3://{BUCKET}-2/a cannot be used: {said}")
        assert done.stderr.count("\n") == 1


def test_a_server_that_accepts_and_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1",
                            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}"}.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        object_storage._object_storage_of.cache_clear()
        monkeypatch.setattr(object_storage, "_CALL_TIMEOUT", 3.0)
        start = time.monotonic()
        with pytest.raises(TimeoutError, match="the storage has not answered for 3 s"):
            Store(place("a")).complete()
        assert time.monotonic() - start < 60
    object_storage._object_storage_of.cache_clear()


def test_a_bucket_of_many_things_is_read_past_them(server: Server) -> None:
    store = Store(place("a/checkpoints"))
    save(store, 1)
    for key in (
        "notes.txt",
        "step-1/manifest.json",
        "step-00000002x/manifest.json",
        "other/step-00000003/manifest.json",
    ):
        store.storage.put(store.directory / key, b"{}")
    assert names(store.complete()) == ["step-00000001"]
    assert not store.incomplete()
    assert not store.set_aside_folders()
