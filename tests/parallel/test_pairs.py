"""Joined pairs of a pipeline with experts: the same bits in turns as one half after the other, one order of
collectives on all ranks, which the schedule alone decides, and an end with a name where a half fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.job.config import Job
from fivefold.launch.processes import RankError
from fivefold.layout.stages import schedule_of, stages_of
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.traffic_counter import SPACES, group_of, kind_of, named_args
from fivefold.schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, Action
from fivefold.trainer.engine import Engine
from fivefold.verifier.cases import make_batch
from tests.ranks import run_ranks
from tests.verifier.mixtures import DEEPSEEK, job, moe

CPU = torch.device("cpu")
PAIRED = "pp=2,ep=2,schedule=dualpipe-v,microbatches=4"
LAYOUTS = [f"dp=2,{PAIRED},zero=2", f"tp=2,{PAIRED},dispatch=allgather,recompute=selective"]
SIX = moe(DEEPSEEK, layers=6)

Call = tuple[str, str]  # the action, and the group: forward passes' or backward passes'


class Order(TorchDispatchMode):
    """Which action called a collective of ep, in order; it is also the pipeline's watch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.names: dict[str, str] = {}
        self.action = ""

    @contextmanager
    def watch(self, action: Action) -> Iterator[None]:
        self.action = str(action)
        yield
        self.action = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in SPACES and kind_of(func) is not None:
            name = group_of(named_args(func, args, kwargs)).group_name
            if name in self.names:
                self.calls.append((self.action, self.names[name]))
        return func(*args, **(kwargs or {}))


def both_ways(rank: int, world: int, layout: str) -> tuple[list[float], list[dict[str, Tensor]], list[list[Call]]]:
    """Loss, gradients and collectives of a step, in turns and one after the other."""
    one, order = job(layout, SIX), Order()
    mesh = Mesh.of(one.layout, CPU, spec=one.model)
    engine = Engine(one, mesh, order.watch)
    assert mesh.backward_ep is not None
    assert engine.pipeline.pair_runner is not None
    order.names = {mesh.ep.group_name: "ep", mesh.backward_ep.group_name: "back"}
    losses, gradients, calls = [], [], []
    for in_turns in (True, False):
        engine.pipeline.overlap_pairs, order.calls = in_turns, []
        with order:
            losses.append(engine.forward_backward(make_batch(one, 0)).item())
        gradients.append({name: m.grad.clone() for name, m in engine.weights.masters.items() if m.grad is not None})
        calls.append(order.calls)
        engine.weights.sync_params()
        engine.weights.wait_params()
    return losses, gradients, calls


@pytest.mark.parametrize("layout", [LAYOUTS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in LAYOUTS[1:])])
def test_pairs_in_turns_give_the_same_bits_and_the_schedule_alone_orders_their_collectives(layout: str) -> None:
    """Every rank of a stage calls those of ep as the rule of turns has it."""
    for rank, (losses, (one, other), (turns, turn)) in enumerate(run_ranks(4, both_ways, layout)):
        assert losses[0] == losses[1]
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert one.keys() == other.keys()
        assert turns != turn  # ran in turns at all
        assert sorted(turns) == sorted(turn)  # and sent the same
        gathers, pp = one_job(layout).layout.dispatch == "allgather", one_job(layout).layout.coordinates(rank)["pp"]
        assert turns == expected(layout, pp, gathers, in_turns=True)
        assert turn == expected(layout, pp, gathers, in_turns=False)


def one_job(layout: str) -> Job:
    return job(layout, SIX)


def expected(layout: str, pp: int, gathers: bool, in_turns: bool) -> list[Call]:
    one = one_job(layout)
    every = stages_of(one.model, one.layout, one.data.seq)
    order, found = schedule_of(one.model, one.layout, one.data.seq).ranks[pp], list[Call]()

    def half(action: Action) -> list[list[Call]]:
        layers = [layer for layer in every[action.stage].layers if one.model.kinds(layer).routed]
        return stretches(action, len(layers), gathers)

    passes = iter([action for action in order if action.kind in (FORWARD, BACKWARD, INPUT_GRAD)])
    for action in passes:
        mine = half(action)
        if not (action.joined and in_turns):
            found += [call for stretch in mine for call in stretch]
            continue
        halves, holder = [mine, half(next(passes))], 0
        while any(halves):
            if halves[holder]:
                found += halves[holder].pop(0)
            holder = 1 - holder if halves[1 - holder] else holder
    return found


def stretches(action: Action, layers: int, gathers: bool) -> list[list[Call]]:
    """What a pass calls between two hand-overs: counts and rows, then what came of them; backward rows twice. Or
    tokens, weights and choices, then sums; backward what sums need, then tokens and weights."""
    there, back = ((3, 1), (1, 2)) if gathers else ((2, 1), (1, 1))
    numbers, group = (there, "ep") if action.kind is FORWARD else (back, "back")
    return [[(str(action), group)] * number for _ in range(layers) for number in numbers] + [[]]


# ---- faults ----------------------------------------------------------------------------------------------------------


def fail(rank: int, world: int, layout: str, moment: str) -> None:
    """Rank 1 fails in the second stretch of an action."""
    one, seen = job(layout, SIX), []

    @contextmanager
    def watch(action: Action) -> Iterator[None]:
        seen.append(str(action))
        if rank == 1 and seen.count(moment) == 2:
            raise ValueError("a broken half")
        yield

    mesh = Mesh.of(one.layout, CPU, 60.0, spec=one.model)
    Engine(one, mesh, watch).forward_backward(make_batch(one, 0))


@pytest.mark.parametrize("kind", [FORWARD, BACKWARD])
def test_a_half_that_fails_is_named_and_nobody_hangs(kind: str) -> None:
    layout = f"dp=2,{PAIRED}"
    one = job(layout, SIX)
    order = schedule_of(one.model, one.layout, one.data.seq).ranks[1]
    at = next(at for at, action in enumerate(order) if action.joined)
    moment = str(order[at] if kind == FORWARD else order[at + 1])
    with pytest.raises(RankError) as failure:
        run_ranks(4, fail, layout, moment, timeout=120, grace=60)
    assert (failure.value.rank, failure.value.error) == (1, "ValueError: a broken half")
    assert f"rank 1 (dp 0, pp 1) was at {moment}" in failure.value.stack
    others = [end for end in failure.value.ends if end.rank != 1]
    assert all("PeerLost: rank" in end.error for end in others), [end.error for end in others]
