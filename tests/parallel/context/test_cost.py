"""What sharing a sequence costs: scores per rank, by the tiles and by what reaches the kernels; and what is sent."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.layout.context_split import context_share
from fivefold.layout.layout import Layout
from fivefold.parallel.context import Tile, gathered_tiles, own_tile, ring_tile
from tests.parallel.context.world import Case, Rank
from tests.ranks import run_ranks

KERNELS = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
SENDING = {
    "send": "send",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
}


class Watch(TorchDispatchMode):
    """What passes the dispatcher: messages, by kind, elements handed in and dtype; and the scores that kernels see."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, int, torch.dtype]] = Counter()
        self.scores: list[int] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        if op.namespace in ("c10d", "_c10d_functional") and name in SENDING:
            x = args[0][0] if name == "send" else args[0]
            self.sent[SENDING[name], x.numel(), x.dtype] += 1
        elif op.namespace == "c10d":
            assert name in ("recv_", "barrier"), name
        elif op.namespace == "_c10d_functional":
            assert name == "wait_tensor", name
        elif name in KERNELS:
            given = {a.name: value for a, value in zip(op._schema.arguments, args, strict=False)}  # not the defaults
            (batch, heads, queries, _), keys = given["query"].shape, given["key"].shape[2]
            seen = queries * (queries + 1) // 2 if given.get("is_causal") else queries * keys
            self.scores.append(batch * heads * seen)
        return op(*args, **(kwargs or {}))


def watched(rank: int, world: int, jobs: list[tuple[Case, str]]) -> list[tuple[Watch, Watch]]:
    """For each job what passed forward and backward."""
    results = []
    for case, recompute in jobs:
        here, forward, backward = Rank(case), Watch(), Watch()
        with forward:
            out = here.forward(recompute)
        with backward:
            here.backward(out)
        results.append((forward, backward))
    return results


# ---- work ----------------------------------------------------------------------------------------------------------


def tiles_of(kind: str, rank: int, ranks: int, share: int) -> list[Tile]:
    if kind == "ring":
        return [ring_tile(rank, source, share) for source in range(ranks)]
    return [own_tile(share), *gathered_tiles(rank, ranks, share)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_tiles_cover_the_causal_triangle_once_and_every_rank_has_an_equal_part(ranks: int) -> None:
    seq, layout = 4 * ranks, Layout(cp=ranks)
    shares = [[p for piece in context_share(seq, layout, rank) for p in piece] for rank in range(ranks)]
    triangle = {(query, key) for query in range(seq) for key in range(query + 1)}
    for kind in ("ring", "allgather"):
        seen: Counter[tuple[int, int]] = Counter()
        work = []
        for rank in range(ranks):
            tiles = tiles_of(kind, rank, ranks, len(shares[rank]))
            keys = shares if kind == "ring" else [shares[rank], *[list(range(seq))] * 2]
            for tile, held in zip(tiles, keys, strict=False):
                for a in tile.queries:
                    limit = a + 1 if tile.causal else tile.keys.stop
                    seen.update((shares[rank][a], held[b]) for b in range(tile.keys.start, limit))
            work.append(sum(tile.scores for tile in tiles))
        assert set(seen) == triangle
        assert set(seen.values()) == {1}
        assert set(work) == {len(triangle) // ranks}


def test_kernels_get_equal_work_on_all_ranks() -> None:
    calls = {"ring": {4}, "allgather": {2, 3}, "ulysses": {1}}
    jobs = [(Case(Layout(cp=4, cp_kind=kind), documents="none"), "none") for kind in calls]
    for results in run_ranks(4, watched, jobs):
        for (case, _), (forward, backward) in zip(jobs, results, strict=True):
            share = case.batch * case.heads * case.seq * (case.seq + 1) // 2 // 4
            assert sum(forward.scores) == sum(backward.scores) == share
            assert len(forward.scores) == len(backward.scores)
            assert len(forward.scores) in calls[case.layout.cp_kind]


def test_tiles_that_no_document_spans_are_not_computed() -> None:
    """Four documents of four tokens, and sixteen of one."""
    jobs = [(Case(Layout(cp=2, cp_kind=kind), documents="apart"), "none") for kind in ("ring", "allgather")]
    ranks = run_ranks(2, watched, jobs)
    for job in range(2):
        for direction in range(2):
            assert sum(sum(rank[job][direction].scores) for rank in ranks) == 4 * (4 * 10 + 16)


# ---- messages ------------------------------------------------------------------------------------------------------


def closed_form(case: Case) -> tuple[Counter[Any], Counter[Any]]:
    """What the docstrings say, forward and backward."""
    c, compute = case.layout.cp, case.dtype
    forward_backward = torch.float64 if compute == torch.float64 else torch.float32
    tokens = case.batch * case.seq // c * case.dim
    kv = 2 * tokens * case.kv_heads
    match case.layout.cp_kind:
        case "ring":
            sends = Counter({("send", kv, compute): c - 1})
            return sends, sends + Counter({("send", kv, forward_backward): c})
        case "allgather":
            gather = Counter({("all-gather", kv, compute): 1})
            return gather, gather + Counter({("reduce-scatter", c * kv, forward_backward): 1})
        case _:
            repeated = torch.tensor(case.kv_heads).lcm(torch.tensor(c)).item()
            there = Counter({("all-to-all", tokens * (case.heads + 2 * repeated), compute): 1})
            trades = there + Counter({("all-to-all", tokens * case.heads, compute): 1})
            return trades, trades


def test_messages_are_those_of_the_closed_form() -> None:
    choices = product(("ring", "allgather", "ulysses"), (2, 4), (torch.float64, torch.bfloat16))
    jobs = [(Case(Layout(cp=4, cp_kind=kind), dtype, kv_heads=kv), "none") for kind, kv, dtype in choices]
    for results in run_ranks(4, watched, jobs):
        for (case, _), (forward, backward) in zip(jobs, results, strict=True):
            assert (forward.sent, backward.sent) == closed_form(case), case


def test_full_recompute_sends_forward_again_and_selective_recompute_does_not() -> None:
    kinds = ("ring", "allgather", "ulysses")
    jobs = [(Case(Layout(cp=2, cp_kind=kind)), recompute) for kind in kinds for recompute in ("full", "selective")]
    for results in run_ranks(2, watched, jobs):
        for (case, recompute), (forward, backward) in zip(jobs, results, strict=True):
            sent, sent_back = closed_form(case)
            again = recompute == "full"
            assert forward.sent == sent
            assert backward.sent == (sent_back + sent if again else sent_back), (case, recompute)
            # A kernel's backward sees as many scores as its forward, which full recompute runs again.
            assert sum(backward.scores) == sum(forward.scores) * (2 if again else 1)
