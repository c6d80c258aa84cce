"""Attention over the ranks that share a sequence is attention: three kinds, against stock attention of one process."""

import numpy as np
import pytest
import torch

from fivefold.layout.layout import Layout
from fivefold.model.layers import TokenPositions
from fivefold.parallel.context import ContextParallel, share_of
from fivefold.parallel.mesh import Axis, Mesh
from tests.parallel.context.world import DOCUMENTS, Case, Rank, shares, worst
from tests.ranks import run_ranks

KINDS = ["ring", "allgather", "ulysses"]


# Float32: sums of at most 16 terms and dot products of 6: tens of roundings of 2**-24, were all one way.
# Bfloat16: probabilities, parts and results are rounded to 2**-9 each; merging and summing in float32 adds no more.
BOUND = {torch.float64: 1e-10, torch.float32: 32 * 2**-24, torch.bfloat16: 4 * 2**-8}


def check(world: int, jobs: list[tuple[Case, str]]) -> None:
    ranks = run_ranks(world, shares, jobs)
    for (case, recompute), *parts in zip(jobs, *ranks, strict=True):
        assert worst(parts, case.expected()) <= BOUND[case.dtype], (case, recompute)


@pytest.mark.parametrize("world", [2, 4])
def test_documents_of_every_kind(world: int) -> None:
    layouts = [Layout(cp=world, cp_kind=kind) for kind in KINDS]
    check(world, [(Case(layout, documents=documents), "none") for layout in layouts for documents in DOCUMENTS])


def test_grouped_heads_and_narrow_dtypes() -> None:
    layouts, cases = [Layout(cp=4, cp_kind=kind) for kind in KINDS], []
    for layout in layouts:
        cases += [Case(layout, heads=heads, kv_heads=kv_heads) for heads, kv_heads in ((4, 4), (4, 1), (12, 6))]
        cases += [Case(layout, dtype) for dtype in (torch.float32, torch.bfloat16)]
    check(4, [(case, "none") for case in cases])


def test_computed_again_it_is_the_same() -> None:
    cases = [Case(Layout(cp=2, cp_kind=kind)) for kind in KINDS]
    check(2, [(case, recompute) for case in cases for recompute in ("full", "selective", "plain checkpoint")])


def test_rings_beside_each_other_keep_to_themselves() -> None:
    jobs = [(Case(Layout(dp=2, cp=2, cp_kind=kind)), "none") for kind in KINDS]
    ranks = run_ranks(4, shares, jobs)
    for replica in (ranks[:2], ranks[2:]):
        for (case, _), *parts in zip(jobs, *replica, strict=True):
            assert worst(parts, case.expected()) <= 1e-10, case


def test_a_share_holds_its_tokens_and_no_others() -> None:
    _, batch = Case(Layout()).whole()
    for kind in KINDS:
        parts = [share_of(batch, Layout(cp=4, cp_kind=kind), rank) for rank in range(4)]
        order = np.concatenate([part.positions[0] for part in parts])
        assert sorted(order) == list(range(16))
        for name in ("tokens", "targets", "loss_mask", "documents"):
            whole = np.concatenate([getattr(part, name) for part in parts], axis=1)
            assert np.array_equal(whole, getattr(batch, name)[:, order]), name
    assert parts[1].positions[0].tolist() == [4, 5, 6, 7]
    assert share_of(batch, Layout(cp=4), 1).positions[0].tolist() == [2, 3, 12, 13]


def test_what_does_not_divide_or_is_not_told_is_refused() -> None:
    _, batch = Case(Layout(), seq=12, documents="none").whole()
    with pytest.raises(ValueError, match="12 tokens does not divide into the 8 equal pieces of cp=4"):
        share_of(batch, Layout(cp=4), 0)
    assert share_of(batch, Layout(cp=4, cp_kind="ulysses"), 0).tokens.shape == (2, 3)
    context = ContextParallel(Mesh(Layout(cp=2), torch.device("cpu"), {"cp": Axis("cp", 2)}))
    place = TokenPositions(torch.zeros(1, 2), torch.zeros(1), 4, torch.zeros(1, 2))
    with pytest.raises(ValueError, match="need row_documents"):
        context.attention_mask(place)


def test_one_rank_needs_no_others() -> None:
    case = Case(Layout())
    here = Rank(case)
    out = here.forward()
    assert worst([(here.places, [out.detach(), *here.backward(out)])], case.expected()) <= 1e-10
