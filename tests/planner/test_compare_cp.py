"""Context parallelism on paper: counts against brute force, bytes against traffic.py, calls against what runs."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.cost.attention import (
    KEY_SIDES,
    KernelCall,
    LayerAttention,
    Method,
    SequenceSplit,
    Side,
    allgather,
    compare,
    contiguous,
    possible,
    ring,
    splits,
    striped,
    ulysses,
    zigzag,
)
from fivefold.cost.collective_time import Topology, total
from fivefold.cost.kernels import ATTENTION_TILE, Device
from fivefold.cost.traffic import expected_traffic
from fivefold.hardware.accelerators import find_accelerator
from fivefold.layout.context_split import context_share
from fivefold.layout.layout import Layout
from fivefold.planner import compare_cp
from fivefold.spec.presets import preset
from fivefold.support.dtypes import DTYPE_BYTES
from fivefold.support.errors import UserError

H100 = Device.of(find_accelerator("H100"))


def made(seq: int, cp: int, heads: int = 16, kv_heads: int = 1, tp: int = 8) -> LayerAttention:
    return LayerAttention(seq, heads, kv_heads, 128, H100, Topology(H100, 8, Layout(tp=tp, cp=cp)))


# ---- splits ----------------------------------------------------------------------------------------------------------

SMALL = [
    contiguous(48, 4), zigzag(48, 4), zigzag(18, 3), striped(48, 4, 1), striped(48, 4, 3), striped(36, 3, 4),
    SequenceSplit("finer zigzag", 3, 2, 4, turns=True), contiguous(10, 2),
]  # fmt: skip


def side(rank: int, source: int) -> Side:
    return "own" if rank == source else "earlier" if source < rank else "later"


def held(split: SequenceSplit, rank: int) -> list[int]:
    return [place for piece in split.places(rank) for place in piece]


@pytest.mark.parametrize("split", SMALL, ids=str)
def test_counts_are_those_of_counting(split: SequenceSplit) -> None:
    places = [held(split, rank) for rank in range(split.ranks)]
    assert sorted(place for mine in places for place in mine) == list(range(split.seq))
    counted = [[int(np.greater_equal.outer(mine, keys).sum()) for keys in places] for mine in places]
    for rank, row in enumerate(counted):
        for source, count in enumerate(row):
            assert split.scores(side(rank, source)) == count
            assert sum(call.scores for call in split.calls(side(rank, source))) == count
        assert sum(call.scores for call in split.gathered(rank)) == sum(row)
    loads = [sum(row) for row in counted]
    assert split.busiest == max(loads)
    assert split.balance == pytest.approx(max(loads) / np.mean(loads))
    steps = [[row[(rank - step) % split.ranks] for rank, row in enumerate(counted)] for step in range(split.ranks)]
    assert split.worst_step == pytest.approx(max(max(step) / np.mean(step) for step in steps))
    assert sum(max(step) for step in steps) == split.busiest  # a ring waits for the same rank all along


def test_contiguous_leaves_the_last_rank_twice_the_mean_and_the_zigzag_nobody_more() -> None:
    assert contiguous(1 << 20, 64).balance == pytest.approx(2 - 1 / 64, rel=1e-4)
    assert contiguous(1 << 20, 64).worst_step == pytest.approx(64)
    assert zigzag(1 << 20, 64).balance == zigzag(1 << 20, 64).worst_step == 1
    stripes = [striped(1 << 17, 16, piece).balance for piece in (1, 128, 1024, 4096)]
    assert stripes == sorted(stripes)
    assert 1 < stripes[0] < 1.001


def test_the_zigzag_is_the_one_that_runs() -> None:
    from fivefold.parallel.context import gathered_tiles, own_tile, ring_tile

    seq, ranks = 96, 4
    split, layout = zigzag(seq, ranks), Layout(cp=ranks)
    for rank in range(ranks):
        assert split.places(rank) == context_share(seq, layout, rank)
        assert contiguous(seq, ranks).places(rank) == context_share(seq, Layout(cp=ranks, cp_kind="ulysses"), rank)
        share = seq // ranks
        tiles = [own_tile(share), *gathered_tiles(rank, ranks, share)]
        assert split.gathered(rank) == [KernelCall(len(t.queries), len(t.keys), t.causal) for t in tiles]
        for source in range(ranks):
            tile = ring_tile(rank, source, share)
            assert split.calls(side(rank, source)) == [KernelCall(len(tile.queries), len(tile.keys), tile.causal)]


def test_sequences_of_a_microbatch_travel_together() -> None:
    one = made(4096, cp=4)
    four = replace(one, samples=4)
    for kind in (ring, allgather, ulysses):
        alone, together = kind(one), kind(four)
        assert together.wire_bytes(False) == 4 * alone.wire_bytes(False)
        assert alone.moving.total < together.moving.total < 4 * alone.moving.total  # a message's latency is paid once


def test_a_tile_that_is_partly_masked_costs_a_whole_one() -> None:
    """Against a mask: count the tiles in which anything is seen."""
    for split in (zigzag(2048, 2), striped(2048, 2, 1), striped(2048, 2, 256)):
        for of in KEY_SIDES:
            mine, keys = {"own": (0, 0), "earlier": (1, 0), "later": (0, 1)}[of]
            mask = np.greater_equal.outer(held(split, mine), held(split, keys))
            tiles = (
                mask.reshape(split.tokens // ATTENTION_TILE, ATTENTION_TILE, -1, ATTENTION_TILE).any(axis=(1, 3)).sum()
            )
            assert sum(call.computed() for call in split.calls(of)) == tiles * ATTENTION_TILE**2
    # A diagonal in every step of the ring, in place of one.
    fine, coarse = striped(8192, 16, 1).waste, zigzag(8192, 16).waste
    assert fine > 1.2 > 1.02 > coarse > 1


def test_stripes_of_several_tokens_need_a_call_for_each() -> None:
    calls = {split.name: len(split.calls("earlier")) for split in splits(131072, 16)}
    assert calls == {"contiguous": 1, "zigzag": 1, "striped by 1024": 8, "striped by 128": 64, "striped by 1": 1}


# ---- methods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("kind", ["ring", "allgather", "ulysses"])
def test_bytes_are_those_of_the_closed_forms(kind: str, tp: int, cp: int) -> None:
    spec, seq = preset("llama3-70b", layers=1, vocab=512, ffn=1024), 4096
    layout = Layout(tp=tp, cp=cp, cp_kind=kind)  # type: ignore[arg-type]
    one = compare(LayerAttention(seq, 64 // tp, max(1, 8 // tp), 128, H100, Topology(H100, 8, layout)))[layout.cp_kind]
    assert isinstance(one, Method)
    kinds = {sent.kind for sent in (*one.sent[0], *one.sent[1])}
    rows = [row for row in expected_traffic(spec, layout, seq, 1, "bfloat16") if row.axis == "cp" and row.kind in kinds]
    ours = {name: [0, 0] for name in kinds}
    for sent in (*one.sent[0], *one.sent[1]):
        ours[sent.kind][0] += sent.calls
        ours[sent.kind][1] += sent.calls * sent.payload
    assert {row.kind: [row.calls, row.payload] for row in total(rows)} == ours
    assert one.wire_bytes(False) + one.wire_bytes(True) == sum(row.wire for row in rows)


def test_ulysses_is_refused_where_heads_do_not_divide() -> None:
    with pytest.raises(UserError, match="cp=32 does not divide the 16 heads of a tp rank; nearest: cp=16"):
        ulysses(made(131072, 32))
    with pytest.raises(UserError, match="nearest: cp=4 or 8"):
        ulysses(made(131072, 6))
    assert [one.kind for one in possible(made(131072, 32))] == ["ring", "allgather"]


def test_memory() -> None:
    case = made(131072, 16)
    pair = 2 * 8192 * 128 * DTYPE_BYTES["bfloat16"]
    assert ring(case).buffers == 6 * pair  # two in 2 bytes, two in 4
    assert allgather(case).buffers == 16 * 3 * pair
    assert ring(case).kept == allgather(case).kept < ulysses(case).kept  # which keeps repeated kv heads
    plain = made(131072, 16, kv_heads=16)
    assert ring(plain).kept == ulysses(plain).kept


def test_a_ring_exposes_what_its_steps_cannot_hide() -> None:
    """The way home of the last gradient always; all of it, where attention takes no time."""
    long = ring(made(1 << 20, 16))
    assert long.ring_wait == 0
    assert long.exposed.forward == 0
    assert long.exposed.backward == pytest.approx(made(1 << 20, 16).send(2 * 65536 * 128 * 4))
    fast = H100.achieving(flash2=1e9, flash3=1e9, stream=1e9, launch=0.0)
    case = replace(made(131072, 16), device=fast)
    narrow, wide = case.pair * 2, case.pair * 4
    bare = ring(case).exposed
    assert bare.forward == pytest.approx(15 * case.send(narrow), rel=1e-3)
    assert bare.backward == pytest.approx(15 * case.send(narrow) + 16 * case.send(wide), rel=1e-3)


def test_the_balanced_splits_are_the_fast_ones() -> None:
    case = made(131072, 16)
    for way in (ring, allgather):
        assert way(case, contiguous(131072, 16)).seconds > 1.7 * way(case).seconds
        assert way(case, striped(131072, 16, 128)).seconds > 1.1 * way(case).seconds


# ---- crossovers ------------------------------------------------------------------------------------------------------


def test_changes_are_found_to_the_step() -> None:
    found = compare_cp.find_changes(lambda n: (n >= 300) + (n >= 420) + (n >= 1000), [64 << p for p in range(6)], 4)
    assert [(one.start, one.answer) for one in found] == [(64, 0), (300, 1), (420, 2), (1000, 3)]


def test_what_is_called_a_crossover_is_one() -> None:
    case, step = made(131072, 16), 2 * 16 * ATTENTION_TILE
    [_, free] = compare_cp.ring_hidden_by_length(case)
    assert ring(replace(case, seq=free.start)).ring_wait == 0 < ring(replace(case, seq=free.start - step)).ring_wait
    for one in compare_cp.best_by_length(case)[1:]:
        assert possible(replace(case, seq=one.start))[0].kind == one.answer
        assert possible(replace(case, seq=one.start - step))[0].kind != one.answer


def test_a_slower_link_makes_a_ring_free_later_and_more_kv_heads_too() -> None:
    def free(case: LayerAttention) -> int:
        return compare_cp.ring_hidden_by_length(case)[-1].start

    case = made(131072, 16)
    slow = H100.achieving(across=0.1)
    assert free(case) < free(replace(case, topology=replace(case.topology, device=slow)))
    assert free(case) < free(made(131072, 16, kv_heads=16))


def test_degrees_go_as_far_as_there_are_ranks() -> None:
    found = compare_cp.by_degree(made(131072, 16), 64)
    assert [one.ranks for one in found] == [2, 4, 8, 16, 32, 64]
    assert [one.ranks for one in found if one.seconds["ulysses"] is None] == [32, 64]
    assert [one.ranks for one in compare_cp.by_degree(made(96, 6), 8)] == [2, 4, 6, 8]


# ---- the command -----------------------------------------------------------------------------------------------------


def say(line: str) -> str:
    result = CliRunner().invoke(app, ["compare", "cp", *line.split()])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_answers_scripts() -> None:
    told = json.loads(say("--seq 131072 --cp 16 --model llama3-405b --tp 8 --cluster 16x8xH100 --json"))
    assert [told[key] for key in ("seq", "tp", "cp", "heads", "kv_heads", "head_dim")] == [131072, 8, 16, 16, 1, 128]
    rows = {row["kind"]: row for row in told["methods"]}
    assert told["best"] == min(rows, key=lambda kind: rows[kind]["seconds"])
    assert told["best"] in {row["best"] for row in told["by_cp"] if row["cp"] == 16}
    assert rows["ring"]["sent_forward"] == 15 * 2 * 8192 * 128 * 2
    assert {row["split"] for row in told["splits"]} >= {"contiguous", "zigzag", "striped by 1"}


def test_the_command_speaks() -> None:
    text = say("--seq 98304 --cp 12 --heads 24 --kv-heads 8 --tp 2 --cluster 4x8xH100")
    for words in ("zigzag", "allgather", "best: ", "why: ", "by length, cp=12: ", "by cp, 98,304 tokens: "):
        assert words in text
    assert "ulysses cannot run: cp=8 does not divide the 12 heads" in " ".join(
        say("--seq 65536 --cp 8 --heads 24 --kv-heads 8 --tp 2 --cluster 4x8xH100").split()
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--seq 1000 --cp 16", "nearest: seq=992 or seq=1024"),
        ("--seq 4096 --cp 1", "cp=1 must be at least 2; one rank divides nothing"),
        ("--seq 0 --cp 2", "seq=0 must be at least 1"),
        ("--seq 4096 --cp 4 --kv-heads 3", "kv_heads=3 needs heads; give heads too"),
        ("--seq 4096 --cp 4 --model tiny --heads 4", "leave one of them out"),
        ("--seq 4096 --cp 4 --heads 0", "heads=0 must be at least 1"),
        ("--seq 4096 --cp 4 --tp 3", "nearest: tp=2 or tp=4"),
        ("--seq 4096 --cp 32 --tp 8", "needs 256 GPUs, and 16x8xH100 has 128; nearest: cp=16 or cluster=32x8xH100"),
        ("--seq 4096 --cp 4 --cluster 8xH100+8xA100-80", "nearest: cluster=8xH100"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(line: str, words: str) -> None:
    error = CliRunner().invoke(app, ["compare", "cp", *line.split()]).exception
    assert isinstance(error, UserError)
    assert words in str(error)


@pytest.mark.parametrize("kind", [ring, allgather, ulysses])
def test_a_window_leaves_less_to_compute_and_all_keys_to_send(kind: Callable[[LayerAttention], Method]) -> None:
    whole, near = (kind(replace(made(131_072, 8, kv_heads=8), window=window)) for window in (0, 128))
    assert near.work.attention.total < 0.1 * whole.work.attention.total
    assert (near.sent, near.moving, near.kept) == (whole.sent, whole.moving, whole.kept)
    assert near.exposed.total >= whole.exposed.total
    assert kind(replace(made(131_072, 8, kv_heads=8), window=131_072)).work == whole.work


def test_a_ring_computes_in_the_steps_that_a_window_reaches() -> None:
    """Of 16 pieces each query sees its own and the one before: two of the other seven ranks have such a one."""
    near = replace(made(131_072, 8), window=8192)
    own, earlier, later = (near.work(zigzag(131_072, 8).calls(side)) for side in KEY_SIDES)
    slower = max(earlier, later, key=lambda work: work.both.total)
    assert ring(near).work.both.total == pytest.approx(own.both.total + 2 * slower.both.total)
