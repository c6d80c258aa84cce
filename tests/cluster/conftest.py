"""Tests of whole runs on hosts and on a Slurm of their own: `make cluster-test`."""

import json
from pathlib import Path

import pytest

from tests.cluster import hosts, slurm

FAST = ["train.batch=4", "data.seq=16", "train.eval_samples=0", "model.layers=1", "model.hidden=32", "model.ffn=32",
        "train.device=cpu", "train.log_every=1"]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        item.add_marker("cluster")
        if reason := hosts.missing(*(() if item.path.name == "test_hosts.py" else slurm.TOOLS)):
            item.add_marker(pytest.mark.skip(reason=reason))


def losses(directory: Path) -> dict[int, float]:
    """By step, as metrics.jsonl has them."""
    records = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if record["kind"] == "step"}
