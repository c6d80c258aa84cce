"""W&B and MLflow with the released packages, offline. `make extras-test` installs them."""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import fivefold

pytestmark = pytest.mark.extras
for package in ("wandb", "mlflow"):
    pytest.importorskip(package, reason=f'{package} is not installed: pip install "fivefold[trackers-test]"')

SMALL = ["data.seq=16", "train.batch=4", "train.eval_every=2", "train.eval_samples=2", "model.layers=1",
         "model.hidden=32", "model.ffn=32", "train.device=cpu", "checkpoint.every=2", "run.name=own",
         "optimizer.schedule_steps=30"]  # fmt: skip
OFFLINE = {"WANDB_MODE": "offline"}


def train(folder: Path, tokens: Path, *words: str, **env: str) -> Any:
    plain = {name: "" for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))}
    return fivefold("train", *words, f"data.path={tokens}", cwd=folder, env={**plain, **OFFLINE, **env})


def steps_of(run: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "step"}


@pytest.fixture
def run(tmp_path: Path, tokens: Path) -> Path:
    """A run of two ranks, which was resumed with more steps."""
    words = [*SMALL, "layout=dp=2", "--nproc", "2", "run.listeners=wandb,mlflow"]
    for steps in (4, 6):
        done = train(tmp_path, tokens, *words, f"train.steps={steps}")
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
    return tmp_path / "runs/own"


def records(file: Path) -> Iterator[Any]:
    """What a file of W&B has: after 7 bytes, blocks of 32 KiB as of LevelDB's log, whose chunks have heads of 7."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := -at % (1 << 15)) and left < 7:  # no chunk begins there
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_wandb_has_the_settings_and_every_step_under_one_name(run: Path) -> None:
    name = (run / "wandb.id").read_text().strip()
    files = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [file.name for file in files] == [f"run-{name}.wandb"] * 2
    losses: dict[int, float] = {}
    held_out, config = [], {}
    for file in files:
        for record in records(file):
            row = {"/".join(it.nested_key) or it.key: json.loads(it.value_json) for it in record.history.item}
            if "train/loss" in row:
                losses[row["step"]] = row["train/loss"]
            held_out += [row["step"]] if "held_out/loss" in row else []
            for update in (*record.run.config.update, *record.config.update):
                config["/".join(update.nested_key) or update.key] = json.loads(update.value_json)
    assert losses == pytest.approx(steps_of(run))
    assert held_out == [2, 4, 6]
    assert config["train"]["steps"] == 6
    assert config["layout"]["dp"] == 2


def test_mlflow_has_the_settings_and_every_step_under_one_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client, name = MlflowClient(tracking_uri=(run / "mlflow").as_uri()), (run / "mlflow.id").read_text().strip()
    (found,) = client.search_runs([client.get_experiment_by_name("fivefold").experiment_id])
    assert found.info.run_id == name
    assert (found.info.run_name, found.info.status) == ("own", "FINISHED")
    assert {point.step: point.value for point in client.get_metric_history(name, "train/loss")} == steps_of(run)
    assert [point.step for point in client.get_metric_history(name, "held_out/loss")] == [2, 4, 6]
    assert (found.data.params["train.steps"], found.data.params["layout.dp"]) == ("4", "2")
    assert found.data.tags["changed after step 4: train.steps"] == "6"


def test_a_tracker_that_cannot_be_reached_is_a_sentence_and_the_steps_are_the_same(
    run: Path, tmp_path: Path, tokens: Path
) -> None:
    words = [*SMALL, "run.name=alone", "train.steps=6", "run.listeners=wandb", "optimizer.schedule_steps=30"]
    done = train(tmp_path, tokens, *words, WANDB_MODE="online", HOME=str(tmp_path), WANDB_CONFIG_DIR=str(tmp_path))
    said = "W&B takes no figures: no API key; `wandb login` asks for one, and WANDB_MODE=offline needs none"
    assert done.stdout.count(f"{said}; training continues without it") == 1
    assert done.returncode == 1
    assert done.stderr == f"error: all steps are done, but {said}\n"
    assert steps_of(tmp_path / "runs/alone") == pytest.approx(steps_of(run), rel=1e-4)


def test_a_server_of_mlflow_that_is_not_there_stops_no_training(tmp_path: Path, tokens: Path) -> None:
    env = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    done = train(tmp_path, tokens, *SMALL, "train.steps=4", "run.listeners=mlflow", **env)
    assert done.returncode == 1
    assert [*steps_of(tmp_path / "runs/own")] == [1, 2, 3, 4]
    assert done.stderr.startswith("error: all steps are done, but MLflow takes no figures: ")
    assert done.stderr.count("\n") == 1
