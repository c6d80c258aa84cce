"""Every gloo group has one worker thread: two would race (docs/gloo-race.md; tools/gloo_race.py lets them)."""

import os
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroupGloo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from fivefold.launch.group import one_gloo_worker
from fivefold.launch.rendezvous import GLOO_INTERFACE_ENV
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def backend(group: Any) -> ProcessGroupGloo:
    found = group._get_backend(CPU)
    assert isinstance(found, ProcessGroupGloo)
    return found


def threads() -> Counter[str]:
    return Counter(file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm"))


def count(rank: int, world: int) -> tuple[list[int], int]:
    """What the options of each group say, and how many workers there are; a thread has its name once it has run."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    made = [dist.new_group(backend="gloo"), dist.new_group(backend="cpu:gloo")]
    groups = list(dist.distributed_c10d._world.pg_map)
    assert {dist.group.WORLD, mesh.get_group("dp"), mesh.get_group("tp"), *made} <= set(groups)
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    return [backend(group).options._threads for group in groups], threads()["pt_gloo_runloop"]


def test_each_group_has_one_worker_thread() -> None:
    for said, workers in run_ranks(4, count):
        assert said == [1] * len(said)
        assert workers == len(said) >= 5


def group_on(interfaces: str, **options: Any) -> ProcessGroupGloo:
    os.environ[GLOO_INTERFACE_ENV] = interfaces
    return ProcessGroupGloo(HashStore(), 0, 1, **(options or {"timeout": timedelta(seconds=7)}))


def choose(rank: int, world: int) -> dict[str, Any]:
    """Of each choice, how many devices and workers a group has."""
    found = {names: group_on(names).options for names in ("lo", "lo,lo", "lo,")}
    assert all(one._timeout == timedelta(seconds=7) for one in found.values())
    with pytest.raises(RuntimeError, match="none-such-9"):
        group_on("none-such-9")
    return {names: (len(one._devices), one._threads) for names, one in found.items()}


def test_interfaces_are_those_that_the_user_names() -> None:
    (found,) = run_ranks(1, choose)
    assert found == {"lo": (1, 1), "lo,lo": (2, 1), "lo,": (1, 1)}


def stand(rank: int, world: int) -> None:
    """What torch and others do with the class goes on as before."""
    before = ProcessGroupGloo.__init__
    one_gloo_worker()
    one_gloo_worker()
    assert ProcessGroupGloo.__init__ is before
    assert dist.ProcessGroupGloo is dist.distributed_c10d.ProcessGroupGloo is type(backend(dist.group.WORLD))
    assert dist.get_backend() == "gloo"
    _set_pg_timeout(timedelta(seconds=9), dist.group.WORLD)
    assert backend(dist.group.WORLD).options._timeout == timedelta(seconds=9)
    assert ProcessGroupGloo(HashStore(), 0, 1).options._timeout == timedelta(minutes=30)
    assert ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=5)).options._timeout == timedelta(seconds=5)
    own = ProcessGroupGloo._Options()
    own._devices, own._threads = [ProcessGroupGloo.create_device(interface="lo")], 3
    assert ProcessGroupGloo(HashStore(), 0, 1, own).options._threads == 3
    assert group_on("lo", options=own).options._threads == 3


def test_twice_is_once_and_the_class_is_torchs_own() -> None:
    run_ranks(1, stand)


def many(rank: int, world: int) -> list[list[float]]:
    """Collectives of two groups, started by turns and waited for from the last to the first."""
    groups = [dist.group.WORLD, dist.new_group(backend="gloo")]
    values = [torch.full((3,), float(k + rank)) for k in range(12)]
    works = [dist.all_reduce(value, group=groups[k % 2], async_op=True) for k, value in enumerate(values)]
    for work in reversed(works):
        work.wait()
    return [value.tolist() for value in values]


def test_many_in_flight_come_to_an_end() -> None:
    assert run_ranks(2, many) == [[[2.0 * k + 1] * 3 for k in range(12)]] * 2
