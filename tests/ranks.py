"""Run a function on N real gloo ranks, from a test:

    def total(rank: int, world: int, scale: float) -> float:  # at module level: it travels by name
        x = torch.tensor(rank * scale)
        dist.all_reduce(x)
        return x.item()

    def test_total():
        assert run_ranks(4, total, 10.0) == [60.0] * 4

    def test_a_lost_rank_is_named():
        with pytest.raises(RankError) as failure:
            run_ranks(4, lose_rank_2, timeout=20, env={"NAME": "value"})
        assert (failure.value.rank, failure.value.kind, failure.value.error) == (2, "died", "SIGKILL")

The ranks are those of `fivefold.launch.processes`, in one process group. Every rank has one thread, the caller's
directory and environment, and the RANK variables of torchrun. Values come back on the CPU, by value. What ranks print
is printed when they are done, rank by rank, for pytest to capture. All ranks have one hash seed: that a set has
another order on each rank does not show here.
"""

import io
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from fivefold.launch.processes import Rank, RankError, call

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "GLOO_LOG_LEVEL": "ERROR"}


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 180.0,
    grace: float = 1.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """What `function(rank, world, *args)` returned on each rank, or RankError.

    Ranks that run longer than `timeout` seconds have hung; after a first failure the others have `grace` seconds."""
    __tracebackhide__ = True
    name = getattr(function, "__qualname__", "")
    if "<" in name or getattr(function, "__module__", "") == "__main__":
        raise TypeError(f"{name} must be a def at the top level of an imported module: ranks find it by its name")
    env = {**os.environ, **ONE_THREAD, **LOOPBACK, **(env or {})}
    sent = (f"{__name__}:_act", _packed((function, args)), timeout)
    ends = call(world, *sent, timeout=timeout, grace=grace, env=env, threads=1)
    for rank, end in enumerate(ends):
        for line in end.output.splitlines():
            print(f"[rank {rank}] {line}")
        if end.kind == "returned":
            ends[rank] = replace(end, value=_unpacked(end.value))
    if any(end.kind != "returned" for end in ends):
        error = RankError(ends, timeout)
        for end in sorted(ends, key=lambda end: end.blame):
            said = f"rank {end.rank} {end.how}"
            whole = end.rank == error.rank or end.kind == "hung"
            error.add_note(f"{said}\n{end.stack}" if whole else said.partition("\n")[0][:200])
        raise error
    return [end.value for end in ends]


def _act(rank: Rank, sent: bytes, timeout: float) -> bytes:
    function, args = _unpacked(sent)
    rank.join("gloo", timeout + 60)  # behind the time limit of the call: a hang is to be seen as a hang
    return _packed(function(rank.number, rank.world, *args))


def _packed(value: Any) -> bytes:
    box = io.BytesIO()
    torch.save(value, box)
    return box.getvalue()


def _unpacked(box: bytes) -> Any:
    return torch.load(io.BytesIO(box), map_location="cpu", weights_only=False)
