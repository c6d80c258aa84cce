"""A step's memory is asked of the operating system once."""

import os
import resource

import pytest
import torch
from torch import nn

from fivefold.prove import ranks
from fivefold.prove.ranks import Rank
from fivefold.train.allocator import keep_freed_memory


def faults_of_each_step(rank: Rank) -> list[int]:
    """Pages that the operating system had to provide, in a model with activations of 128 MB."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(16)))
    tokens = torch.ones(4096, 256)

    def step() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model(tokens).sum().backward()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    return [step() for _ in range(6)]


def test_what_one_step_frees_the_next_one_uses() -> None:
    *_, last = ranks.run(1, "tests.train.test_allocator:faults_of_each_step", timeout=60)[0]
    assert last < 100


def test_who_has_set_an_allocator_up_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {"MIMALLOC_PURGE_DELAY": "5", "MALLOC_ARENA_MAX": "2"}
    others = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    monkeypatch.setattr(os, "environ", others | mine)
    keep_freed_memory()
    assert os.environ == others | mine
