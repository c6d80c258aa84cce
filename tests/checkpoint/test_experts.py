"""Checkpoints of mixtures: experts of one ep are read by any other, masters, moments and biases, to the bit.

Two bugs that others have shipped are planted: one rank's experts alone are written; moments of experts are not read.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from fivefold.checkpoint import load as loading
from fivefold.checkpoint.store import Store
from fivefold.job.config import Job
from fivefold.layout.layout import Layout
from fivefold.trainer import checkpointing
from tests.checkpoint.runs import gathered, loaded, small_job, train
from tests.ranks import run_ranks

MIXTURE = ["model=tiny-deepseek", "model.layers=3", "model.hidden=32", "model.experts.ffn=16", "train.steps=1"]
READERS = ["tp=2,zero=3", "dp=2,ep=2,zero=3", "pp=2"]

Found = tuple[dict[str, str], list[dict[str, str]], dict[str, str], str]


def _without(words: str) -> Any:
    """Reads all but the tensors whose names have `words`."""
    load = loading.load
    return lambda checkpoint, pieces: load(checkpoint, {n: p for n, p in pieces.items() if words not in n})


def chain(rank: int, world: int, job: Job, home: Path) -> Found:
    """The state that was written, what every reader has of it, what one reads that forgets, what a bad save says."""
    _, wrote, _ = train(rank, world, job, home / "good")
    read = [
        loaded(rank, world, msgspec.structs.replace(job, layout=Layout.parse(one)), home / "good")[1] for one in READERS
    ]
    with patch.object(checkpointing, "load", _without("exp_avg.layers.1.mlp.experts")):
        forgetful = loaded(rank, world, job, home / "good")[1]
    every = checkpointing.Checkpoints.shards

    def first_alone(self: Any) -> Any:
        return {n: p for n, p in every(self).items() if rank == 0 or "mlp.experts" not in n}

    said = ""
    with patch.object(checkpointing.Checkpoints, "shards", first_alone):
        try:
            train(rank, world, job, home / "bad")
        except Exception as error:
            said = str(error)
    return wrote, read, forgetful, said


def test_experts_travel_to_any_other_ep_and_what_is_missing_is_named(tokens: Path, tmp_path: Path) -> None:
    job = small_job(tokens, *MIXTURE, "layout=dp=2,ep=2,zero=1")
    found = run_ranks(2, chain, job, tmp_path)
    state = gathered([wrote for wrote, *_ in found])
    assert len(state) == 3 * len(job.model.parameters()) + len(job.model.buffers())
    for number, layout in enumerate(READERS):
        assert gathered([read[number] for _, read, *_ in found]) == state, layout
    assert loaded(0, 1, small_job(tokens, *MIXTURE), tmp_path / "good")[1] == state  # one process

    forgetful = gathered([one for *_, one, _ in found])
    differ = {name for name in state if forgetful[name] != state[name]}
    assert differ == {f"exp_avg.layers.1.mlp.experts.{one}.weight" for one in ("gate", "up", "down")}
    assert all("mlp.experts" in said for *_, said in found)
    assert Store(tmp_path / "bad").complete() == []
