"""Digests, and who differs: pure, without ranks."""

from itertools import combinations

import pytest
import torch

from fivefold.layout.layout import Layout
from fivefold.trainer import corruption as module
from fivefold.trainer.corruption import digest
from fivefold.trainer.replica_verdict import (
    CorruptionVerdict,
    Disagreement,
    ReplayDigests,
    all_replica_axes,
    corruption_verdict,
    find_disagreement,
    mismatched_pairs,
    replay_partners,
    replica_groups,
)

KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.float8_e4m3fn]


def bits(tensor: torch.Tensor) -> int:
    return 8 * tensor.nbytes


def flipped(tensor: torch.Tensor, *which: int) -> torch.Tensor:
    raw = tensor.clone().view(torch.uint8)
    for bit in which:
        raw[bit // 8] ^= 1 << bit % 8
    return raw.view(tensor.dtype)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_single_and_every_double_flip_changes_a_digest(kind: torch.dtype) -> None:
    tensor = torch.linspace(-3, 3, 4).to(kind)
    right, sides = int(digest(tensor)), range(bits(tensor))
    assert int(digest(tensor.clone())) == right
    assert all(int(digest(flipped(tensor, bit))) != right for bit in sides)
    some = combinations(sides if bits(tensor) < 130 else sides[::3], 2)
    assert all(int(digest(flipped(tensor, *pair))) != right for pair in some)


def test_a_digest_does_not_depend_on_how_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one go or in parts, the last of them shorter; and it is the sum that it is said to be, modulo 2^64."""
    tensor = torch.randn(1000)
    whole = int(digest(tensor))
    monkeypatch.setattr(module, "_CHUNK_WORDS", {"cpu": 64})
    assert int(digest(tensor)) == whole
    assert int(digest(tensor.view(10, 100).t().contiguous().t())) == whole  # in the order of its indices
    words = tensor.view(torch.int32).tolist()
    total = sum((2 * i + 1) * word for i, word in enumerate(words)) % 2**64
    assert whole % 2**64 == total


def test_three_copies_name_the_one_that_differs_and_two_the_pair() -> None:
    assert find_disagreement({0: 7, 1: 7}) is None
    assert find_disagreement({0: 7, 1: 8}) == Disagreement((0, 1), ())
    assert find_disagreement({0: 7, 1: 8, 2: 7}) == Disagreement((1,), (0, 2))
    assert find_disagreement({0: 7, 1: 8, 2: 9}) == Disagreement((0, 1, 2), ())
    assert find_disagreement({0: 7, 1: 7, 2: 9, 5: 9}) == Disagreement((0, 1, 2, 5), ())
    assert find_disagreement({3: 1, 4: 1, 5: 1, 6: 2, 7: 3}) == Disagreement((6, 7), (3, 4, 5))


def test_ranks_that_hold_the_same_stand_in_one_group() -> None:
    layout = Layout(dp=2, tp=2, pp=3)  # tp fastest, then pp, then dp
    assert all_replica_axes(Layout(), has_experts=False) == []
    assert all_replica_axes(Layout(dp=2), has_experts=False) == [("fsdp",)]
    assert ("embedding", "fsdp", "tp") in all_replica_axes(layout, has_experts=False)
    assert replica_groups(layout, ("fsdp",)) == [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]
    assert replica_groups(layout, ("fsdp", "tp")) == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    # The middle holds no embedding.
    assert replica_groups(layout, ("embedding", "fsdp", "tp")) == [[0, 1, 4, 5, 6, 7, 10, 11]]
    experts = Layout(dp=2, tp=2, ep=2)
    assert replica_groups(experts, ("efsdp",)) == [[0, 2], [1, 3]]
    assert ("stage",) in all_replica_axes(experts, has_experts=True)


def test_neighbours_have_the_same_weights_and_compute_with_the_same_places() -> None:
    assert replay_partners(Layout()) == {0: 0}
    assert replay_partners(Layout(dp=3)) == {0: 1, 1: 2, 2: 0}
    assert replay_partners(Layout(dp=2, tp=2)) == {0: 2, 1: 3, 2: 0, 3: 1}
    assert replay_partners(Layout(dp=2, ep=2)) == {0: 0, 1: 1}  # each needs the other's experts: its own once more
    assert replay_partners(Layout(dp=4, ep=2)) == {0: 2, 1: 3, 2: 0, 3: 1}
    for layout in (Layout(dp=4, tp=2, ep=4), Layout(dp=2, tp=2, ep=2), Layout(dp=4, pp=2, cp=2, ep=8)):
        for rank, other in replay_partners(layout).items():
            assert all(layout.position(axis, rank) == layout.position(axis, other) for axis in ("tp", "cp", "pp", "ep"))


def story(of: dict[int, int], wrong: dict[str, set[int]]) -> CorruptionVerdict:
    """All ranks compute the microbatch of a rank rightly as that rank's number, but for those that are wrong."""

    def run(which: str, whose: dict[int, int]) -> dict[int, int]:
        return {rank: other + 100 * (rank + 1) * (rank in wrong.get(which, ())) for rank, other in whose.items()}

    itself = {rank: rank for rank in of}
    runs = ReplayDigests(run("own", itself), run("others", of), run("own_again", itself), run("others_again", of))
    assert bool(mismatched_pairs(of, runs)) == any(wrong.values())
    return corruption_verdict(of, runs)


def test_who_computed_wrongly_is_named_where_it_can_be() -> None:
    two, three = {0: 1, 1: 0}, {0: 1, 1: 2, 2: 0}
    assert story(three, {}) == CorruptionVerdict((), (), ())
    assert story(two, {"own": {1}}) == CorruptionVerdict((1,), (), ())  # in the step, and never again
    assert story(two, {"others": {1}}) == CorruptionVerdict((1,), (), ())  # in the rehearsal
    assert story({0: 0}, {"own": {0}}) == CorruptionVerdict((0,), (), ())
    always = {which: {1} for which in ("own", "others", "own_again", "others_again")}
    assert story(three, always) == CorruptionVerdict((), (1,), ())
    assert story(two, always) == CorruptionVerdict((), (), (0, 1))
    assert story(three, {"own": {2}, "own_again": {2}}) == CorruptionVerdict((), (), (1, 2))  # of its own data only
