"""Snapshots: they keep what was, in memory that is made once."""

import errno
import mmap

import pytest
import torch

from fivefold.checkpoint.shards import Shard
from fivefold.checkpoint.staging import PAGE_BYTES, Staging
from fivefold.job.reading import read_job
from fivefold.parallel.mesh import Mesh
from fivefold.support.errors import TrainingError
from fivefold.trainer.engine import Engine
from fivefold.verifier.cases import plain_batch

CPU = torch.device("cpu")


def test_a_snapshot_keeps_what_was_in_memory_of_its_own() -> None:
    state = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(7, dtype=torch.bfloat16)}
    pieces = {name: Shard.whole(tensor) for name, tensor in state.items()}
    staging = Staging(CPU)
    places = []
    for _ in range(2):
        was = {name: tensor.clone() for name, tensor in state.items()}
        snapshot = staging.take(pieces)
        for tensor in state.values():
            tensor.add_(1)
        snapshot.wait()
        kept = {name: piece.make() for name, piece in snapshot.shards.items()}
        assert all(torch.equal(kept[name], was[name]) for name in was)
        assert all(one.data_ptr() % PAGE_BYTES == 0 for one in kept.values())
        places.append([one.data_ptr() for one in kept.values()])
    assert places[0] == places[1]


def test_a_machine_without_the_memory_says_so(monkeypatch) -> None:
    def refused(*args, **kwargs):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refused)
    staging = Staging(CPU)
    with pytest.raises(TrainingError, match=r"a snapshot takes 4\.00 KiB of this machine's memory: Cannot allocate"):
        staging.take({"a": Shard.whole(torch.zeros(1024))})


def test_memory_is_made_once_and_a_rank_without_pieces_needs_none(monkeypatch) -> None:
    made: list[int] = []
    real = mmap.mmap

    def counted(fileno: int, size: int, **flags: int) -> mmap.mmap:
        made.append(size)
        return real(fileno, size, **flags)

    monkeypatch.setattr(mmap, "mmap", counted)
    pieces, staging = {"a": Shard.whole(torch.zeros(1025))}, Staging(CPU)
    staging.prepare(pieces)
    place = staging.take(pieces).shards["a"].make().data_ptr()
    staging.prepare(pieces)  # what a GPU has locked must not move
    assert staging.take(pieces).shards["a"].make().data_ptr() == place
    assert made == [2 * PAGE_BYTES]
    nobody = Staging(CPU)
    for _ in range(2):
        assert nobody.take({}).shards == {}
    assert made == [2 * PAGE_BYTES]


class Event:
    """Of the device, as far as the engine knows it."""

    def __init__(self, engine: Engine):
        self.engine, self.weights_then = engine, None

    def wait(self) -> None:
        self.weights_then = next(iter(self.engine.weights.masters.values())).detach().clone()


def test_an_update_waits_for_the_snapshot_under_way() -> None:
    job = read_job(None, ["model=tiny", "model.layers=1", "data.seq=16", "train.batch=2"])
    engine = Engine(job, Mesh.of(job.layout, CPU))
    event = Event(engine)
    before = next(iter(engine.weights.masters.values())).detach().clone()
    engine.forward_backward(plain_batch(job.model.vocab, 2, 16))
    engine.snapshot_copied = event
    engine.step(1e-2, engine.gradient_norm())
    assert event.weights_then is not None
    assert torch.equal(event.weights_then, before)
    assert not torch.equal(next(iter(engine.weights.masters.values())), before)
    assert engine.snapshot_copied is None
