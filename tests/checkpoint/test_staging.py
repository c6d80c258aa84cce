"""Snapshots: they keep what was, in memory that is made once."""

import errno
import mmap

import pytest
import torch

from fivefold.checkpoint.pieces import Piece
from fivefold.checkpoint.staging import PAGE, Staging
from fivefold.errors import TrainingError

CPU = torch.device("cpu")


def test_a_snapshot_keeps_what_was_in_memory_of_its_own() -> None:
    state = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(7, dtype=torch.bfloat16)}
    pieces = {name: Piece.whole(tensor) for name, tensor in state.items()}
    staging = Staging(CPU)
    places = []
    for _ in range(2):
        was = {name: tensor.clone() for name, tensor in state.items()}
        snapshot = staging.take(pieces)
        for tensor in state.values():
            tensor.add_(1)
        snapshot.arrive()
        kept = {name: piece.make() for name, piece in snapshot.pieces.items()}
        assert all(torch.equal(kept[name], was[name]) for name in was)
        # DCP writes a tensor's whole storage, or copies it once more.
        assert all(one.untyped_storage().nbytes() == one.nbytes for one in kept.values())
        assert all(one.data_ptr() % PAGE == 0 for one in kept.values())
        places.append([one.data_ptr() for one in kept.values()])
    assert places[0] == places[1]


def test_a_machine_without_the_memory_says_so(monkeypatch) -> None:
    def refused(*args, **kwargs):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refused)
    staging = Staging(CPU)
    with pytest.raises(TrainingError, match=r"a snapshot takes 4\.00 KiB of this machine's memory: Cannot allocate"):
        staging.take({"a": Piece.whole(torch.zeros(1024))})
