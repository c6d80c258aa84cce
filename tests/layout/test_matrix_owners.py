"""Whole matrices dealt out to ranks: every element travels once, both ends agree, no rank has too much work."""

from collections import Counter
from itertools import accumulate, pairwise

import pytest

from fivefold.layout.layout import Layout
from fivefold.layout.matrix_owners import MatrixOwners, Part, Parts, Round, in_order, matrices_of, matrix_owners
from fivefold.optim.adamw import AdamW
from fivefold.optim.base import reads_whole
from fivefold.optim.muon import Muon
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import preset

MUON = Muon()
ODD = preset("tiny", layers=3, hidden=36, heads=4, kv_heads=1, head_dim=10, ffn=20, vocab=37)
MIXED = preset("tiny-deepseek", layers=3, hidden=32, vocab=37)
CASES = [
    (ODD, "dp=1"),
    (ODD, "dp=4"),
    (ODD, "tp=4,sp"),  # one kv head: all ranks hold k and v
    (ODD, "dp=2,tp=2,zero=1"),
    (ODD, "dp=2,cp=2,tp=2,zero=3"),
    (ODD, "dp=4,tp=2,zero=3,replicate=2"),
    (ODD, "dp=5,zero=2"),  # rows that do not divide, and ranks without any
    (ODD, "dp=2,tp=2,pp=2,zero=1,microbatches=2"),
    (MIXED, "dp=2,tp=2,ep=4"),
    (MIXED, "dp=4,ep=2,zero=1"),
    (MIXED, "dp=4,tp=2,ep=2,zero=3,replicate=2"),
]


def owners_by_stage(spec: ModelSpec, layout: Layout) -> list[MatrixOwners]:
    return [matrix_owners(spec, layout, 16, MUON, pp) for pp in range(layout.pp)]


def sizes(parts: Parts, rank: int) -> list[tuple[str, range, range]]:
    return [(part.name, part.rows, part.columns) for part in parts.get(rank, ())]


@pytest.mark.parametrize(("spec", "words"), CASES, ids=[f"{spec.name} {words}" for spec, words in CASES])
def test_every_matrix_has_one_owner_who_gets_every_element_once(spec: ModelSpec, words: str) -> None:
    layout = Layout.parse(words)
    owned: Counter[tuple[str, range]] = Counter()
    for owners in owners_by_stage(spec, layout):
        rounds = [[*owners.rounds(place)] for place in range(len(owners.ranks))]
        for owner, of_rank in enumerate(rounds):
            for round_ in of_rank:
                owned.update((matrix.parameter.name, matrix.rows) for matrix in round_.batch)
                assert len({matrix.shape for matrix in round_.batch}) <= 1
                came = [*round_.own, *(in_order(round_.to_owners.received) if round_.to_owners else [])]
                for number, matrix in enumerate(round_.batch):
                    parts = [part for part in came if part.number == number]
                    cells = Counter((row, column) for part in parts for row in part.rows for column in part.columns)
                    assert set(cells.values()) == {1}, (owner, matrix)
                    assert len(cells) == len(matrix.rows) * matrix.shape[1]
        # What one rank sends is what the other expects, call by call; and every part of every rank is updated once.
        for at, round_of in enumerate(zip(*rounds, strict=True)):
            assert len({len(round_.calls) for round_ in round_of}) == 1, at
            for calls in zip(*(round_.calls for round_ in round_of), strict=True):
                for a, one in enumerate(calls):
                    for b, other in enumerate(calls):
                        assert sizes(one.sent, b) == sizes(other.received, a)
            for round_ in round_of:
                if round_.gather is None:
                    updated = [part for call in round_.to_holders for part in in_order(call.received)]
                    assert Counter(map(id, [*round_.own, *updated])) == Counter(map(id, round_.held))
        gathered(rounds)
    read = [parameter for parameter in spec.parameters() if reads_whole(MUON, parameter)]
    assert owned == Counter((p.name, matrix.rows) for p in read for matrix in matrices_of(p))


def gathered(rounds: list[list[Round]]) -> None:
    """Where a round is gathered: all hold all of it, and every owner's updates lie where all others look for them."""
    for round_of in zip(*rounds, strict=True):
        gather = round_of[0].gather
        assert all(round_.gather is gather for round_ in round_of)
        if gather is None:
            continue
        for owner, round_ in enumerate(round_of):
            assert {(part.name, part.rows) for part in round_.held} == {
                (part.name, part.rows) for other in round_of for part in other.own
            }
            starts = dict(
                zip(map(place_of, gather.parts[owner]), accumulate(p.size for p in gather.parts[owner]), strict=True)
            )
            for part, end in zip(round_.own, accumulate(part.size for part in round_.own), strict=True):
                assert starts[place_of(part)] == round_.first + end
        assert [i for call in gather.calls for i in (call.start, call.stop)][-1] == gather.length
        assert all(a.stop == b.start for a, b in pairwise(gather.calls))
        assert sum(round_.last for round_ in rounds[0] if round_.gather is gather) == 1


def place_of(part: Part) -> tuple[str, range]:
    return part.name, part.rows


@pytest.mark.parametrize("kept", [1, 1 << 12, 1 << 30])
def test_updates_that_all_hold_are_gathered_in_calls_of_a_bounded_size(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of ranks: their calls do not grow with it, nor does what a rank holds in one."""
    monkeypatch.setattr("fivefold.layout.matrix_owners.MAX_WAITING_ELEMENTS", kept)
    monkeypatch.setattr("fivefold.layout.matrix_owners.MAX_GATHERED_ELEMENTS", 1 << 12)
    monkeypatch.setattr("fivefold.layout.matrix_owners.MAX_BATCH_ELEMENTS", 1 << 11)
    for dp in (2, 5, 64):
        owners = MatrixOwners.of(ODD.parameters(), ODD, Layout(dp=dp), MUON, 0)
        rounds = [[*owners.rounds(place)] for place in range(dp)]
        gathered(rounds)
        gathers = {id(round_.gather): round_.gather for round_ in rounds[0]}.values()
        assert all(gather is not None and dp * len(call) <= 1 << 12 for gather in gathers for call in gather.calls)
        assert all(not round_.calls for round_ in rounds[0])
    assert len(gathers) == (1 if kept > 1 else owners.num_rounds)


def test_what_nobody_reads_advances_in_lists_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.layout.matrix_owners.MAX_BATCH_ELEMENTS", 36 * 40 * 2)
    owners = MatrixOwners.of(ODD.parameters(), ODD, Layout(dp=8), MUON, 0)
    for round_ in owners.rounds(3):
        unread = [part for parts in round_.unread for part in parts]
        assert Counter(map(id, [*round_.read, *unread])) == Counter(map(id, round_.held))
        assert all(sum(part.size for part in parts) <= 36 * 40 * 2 for parts in round_.unread)


def test_an_update_waits_for_the_owner_with_most_of_each_round() -> None:
    """Rounds whose updates are gathered together are one: nobody waits in between."""
    (whole,), (cut,) = (owners_by_stage(ODD, Layout.parse(words)) for words in ("dp=4", "dp=4,zero=1"))
    assert whole.longest == max(whole.costs)
    by_round = [[sum(MUON.matrix_flops(*m.shape) for m in batch) for batch in cut._at(number)]
                for number in range(cut.num_rounds)]  # fmt: skip
    assert cut.longest == pytest.approx(sum(map(max, by_round)))
    assert max(cut.costs) <= cut.longest


@pytest.mark.parametrize(("spec", "words"), CASES, ids=[f"{spec.name} {words}" for spec, words in CASES])
def test_no_rank_computes_more_than_its_share_and_a_matrix(spec: ModelSpec, words: str) -> None:
    """A rank that gets a matrix had the least so far: not more than the mean."""
    for owners in owners_by_stage(spec, Layout.parse(words)):
        largest = max(MUON.matrix_flops(*m.shape) for owned in owners.batches for batch in owned for m in batch)
        assert max(owners.costs) <= sum(owners.costs) / len(owners.costs) + largest


def test_experts_stay_with_the_ranks_that_hold_them() -> None:
    layout = Layout.parse("dp=4,ep=4")
    owners = matrix_owners(MIXED, layout, 16, MUON, 0)
    for place, batches in enumerate(owners.batches):
        experts = [matrix for batch in batches for matrix in batch if matrix.parameter.experts]
        assert experts
        assert {m.rows.start * 4 // m.parameter.shape[0] for m in experts} == {
            layout.position("ep", owners.ranks[place])
        }


def test_a_large_matrix_is_a_batch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.layout.matrix_owners.MAX_BATCH_ELEMENTS", 36 * 40 * 2)
    parameters = ODD.parameters()
    owners = MatrixOwners.of(parameters, ODD, Layout(), MUON, 0)
    q = [batch for batch in owners.batches[0] if batch[0].parameter.name.endswith("attention.q.weight")]
    assert [len(batch) for batch in q] == [2, 1]
    assert max(sum(len(m.rows) * m.shape[1] for m in batch) for batch in owners.batches[0]) <= 36 * 40 * 2


def test_an_optimizer_of_elements_reads_none() -> None:
    assert not any(reads_whole(AdamW(), parameter) for parameter in ODD.parameters())
