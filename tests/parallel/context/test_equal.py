"""Attention over the ranks that share a sequence is attention: three kinds, against stock attention of one process."""

import numpy as np
import pytest
import torch

from fivefold.layout import Layout
from fivefold.model.place import Place
from fivefold.parallel.context import Context
from fivefold.parallel.context.share import share_of
from fivefold.parallel.mesh import Mesh
from tests.parallel.context.world import Case, Rank, shares, worst
from tests.ranks import run_ranks

KINDS = ["ring", "allgather", "ulysses"]


def error(world: int, case: Case, recompute: str = "none") -> float:
    return worst(run_ranks(world, shares, case, recompute), case.expected())


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_every_kind_in_float64(kind: str, world: int) -> None:
    for documents in ("none", "one", "crossing", "apart"):
        case = Case(Layout(cp=world, cp_kind=kind), documents=documents)
        assert error(world, case) <= 1e-10, documents


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (12, 6)])
def test_grouped_heads(kind: str, heads: int, kv_heads: int) -> None:
    case = Case(Layout(cp=4, cp_kind=kind), heads=heads, kv_heads=kv_heads)
    assert error(4, case) <= 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_off_by_roundings_only(kind: str) -> None:
    """A sum of at most 16 scores' terms and 6 of a dot product: some tens of roundings of 2**-24, were all one way."""
    assert error(4, Case(Layout(cp=4, cp_kind=kind), torch.float32)) <= 32 * 2**-24


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_merged_and_summed_in_float32(kind: str) -> None:
    """Probabilities, parts and results are rounded to 2**-9 each; summing over 4 ranks adds no more."""
    assert error(4, Case(Layout(cp=4, cp_kind=kind), torch.bfloat16)) <= 4 * 2**-8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", ["full", "selective", "plain checkpoint"])
def test_computed_again_it_is_the_same(kind: str, recompute: str) -> None:
    assert error(2, Case(Layout(cp=2, cp_kind=kind)), recompute) <= 1e-10


def rank_of_a_grid(rank: int, world: int, case: Case) -> tuple[int, np.ndarray, list[torch.Tensor]]:
    here = Rank(case)
    out = here.forward()
    return here.mesh.dp.rank, here.places, [out.detach(), *here.backward(out)]


@pytest.mark.parametrize("kind", KINDS)
def test_rings_beside_each_other_keep_to_themselves(kind: str) -> None:
    case = Case(Layout(dp=2, cp=2, cp_kind=kind))
    results = run_ranks(4, rank_of_a_grid, case)
    for replica in range(2):
        assert worst([(places, parts) for dp, places, parts in results if dp == replica], case.expected()) <= 1e-10


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
    layout = Layout(cp=2)
    context = Context(Mesh(layout, torch.device("cpu")))
    context.kind = "ring"
    place = Place(torch.zeros(1, 2), torch.zeros(1), 4, torch.zeros(1, 2))
    with pytest.raises(ValueError, match="needs row_documents"):
        context.sight(place)


def test_one_rank_needs_no_others() -> None:
    case = Case(Layout())
    here = Rank(case)
    out = here.forward()
    assert worst([(here.places, [out.detach(), *here.backward(out)])], case.expected()) <= 1e-10
