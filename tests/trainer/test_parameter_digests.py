"""Digests of parameters do not depend on the layout, and change with every bit; their sketches tell a distance."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fivefold.trainer import loop, parameter_digests
from fivefold.trainer.parameter_digests import _digest, _Signs
from fivefold.trainer.records import Digests
from tests.checkpoint.runs import Run, small_job
from tests.ranks import run_ranks

DIGEST = ["train.digest=true", "train.steps=1", "checkpoint.save=false"]
EXPERTS = ["model=tiny-deepseek", "model.layers=3", "model.hidden=32", "model.experts.ffn=16"]
BFLOAT16 = ["train.dtype=bfloat16", "model.tied=true"]
LAYOUTS = {
    2: [["tp=2"], ["dp=2,zero=1"], ["dp=2,zero=3"], ["pp=2,microbatches=2", *BFLOAT16], ["dp=2,zero=2", *BFLOAT16],
        ["dp=2,ep=2", *EXPERTS]],
    4: [["dp=2,tp=2,zero=3"], ["tp=2,pp=2,sp=true,microbatches=2"], ["dp=2,cp=2,zero=2"],
        ["dp=4,zero=3,replicate=2"], ["dp=2,tp=2,ep=2,zero=1", *EXPERTS], ["dp=4,ep=2,zero=3", *EXPERTS],
        ["dp=2,pp=2,zero=1,microbatches=2", *BFLOAT16]],
}  # fmt: skip


class Kept:
    def __init__(self) -> None:
        self.digests: list[Digests] = []

    def on_digests(self, record: Digests) -> None:
        self.digests.append(record)

    def on_step(self, record: object) -> None: ...

    def on_evaluation(self, record: object) -> None: ...

    def close(self) -> None: ...


def kept(rank: int, world: int, jobs: list[Any], directory: Path) -> list[list[Digests]]:
    found = []
    for number, job in enumerate(jobs):
        run, listener = Run(job, world, directory / str(number)), Kept()
        with patch.object(loop, "same_calls", lambda mesh: nullcontext()):
            run.trainer.run([run.recorder, listener])
        found.append(listener.digests)
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_same_weights_have_the_same_digests_in_every_layout(tokens: Path, tmp_path: Path, world: int) -> None:
    """Before the first step, since every layout rounds its updates in its own way; and no two ranks disagree."""
    jobs = [small_job(tokens, *DIGEST, f"layout={layout}", *more) for layout, *more in LAYOUTS[world]]
    alone = [small_job(tokens, *DIGEST, *more) for _, *more in LAYOUTS[world]]
    of_ranks = run_ranks(world, kept, jobs, tmp_path / "ranks")
    assert all(digests == [] for of_rank in of_ranks[1:] for digests in of_rank)
    for case, (before, after), (one, then) in zip(
        LAYOUTS[world], of_ranks[0], kept(0, 1, alone, tmp_path / "alone"), strict=True
    ):
        names = one.parameters.keys() & before.parameters.keys()
        assert {name for name in one.parameters if " " not in name} <= names
        for name in names:
            assert before.parameters[name].bits == one.parameters[name].bits, (case, name)
            np.testing.assert_allclose(before.parameters[name].sketch, one.parameters[name].sketch, atol=1e-9)
            assert after.parameters[name].norm == pytest.approx(then.parameters[name].norm, rel=1e-2)
        assert before.unequal == after.unequal == []
        assert (before.step, after.step) == (0, 1)
        assert any(before.parameters[name].bits != after.parameters[name].bits for name in names)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_flipped_bit_changes_it_and_its_parts_add_up(dtype: torch.dtype) -> None:
    shape = (6, 5)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    signs = _Signs(torch.device("cpu"))

    def digest(tensor: torch.Tensor, *box: range) -> int:
        return int(_digest(tensor, box, shape, signs)[0])

    all_of_it = (range(6), range(5))
    seen = {digest(whole, *all_of_it)}
    for number in range(whole.numel()):
        for byte in range(whole.element_size()):
            for bit in range(8):
                flipped = whole.clone()
                flipped.view(-1)[number : number + 1].view(torch.uint8)[byte : byte + 1].bitwise_xor_(1 << bit)
                seen.add(digest(flipped, *all_of_it))
    assert len(seen) == 1 + 8 * whole.nbytes
    boxes = [(rows, columns) for rows in (range(2), range(2, 6)) for columns in (range(3), range(3, 5))]
    parts = sum(digest(whole[rows.start : rows.stop, cols.start : cols.stop], rows, cols) for rows, cols in boxes)
    assert (parts - digest(whole, *all_of_it)) % (1 << 64) == 0


def test_chunks_change_nothing_and_so_do_more_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, signs = torch.randn(7, 4, 3), _Signs(torch.device("cpu"))
    box = (range(7), range(4), range(3))
    total, sums = _digest(whole, box, whole.shape, signs)
    monkeypatch.setitem(parameter_digests._CHUNK_WORDS, "cpu", 24)
    assert int(_digest(whole, box, whole.shape, signs)[0]) == int(total)
    torch.testing.assert_close(_digest(whole, box, whole.shape, signs)[1], sums)
    halves = [(range(7), rows, range(3)) for rows in (range(1), range(1, 4))]
    found = [_digest(whole[:, part[1].start : part[1].stop], part, whole.shape, signs) for part in halves]
    assert sum(int(one) for one, _ in found) % (1 << 64) == int(total) % (1 << 64)
    torch.testing.assert_close(found[0][1] + found[1][1], sums)
    empty = _digest(whole[:0], (range(0), range(4), range(3)), whole.shape, signs)
    assert (int(empty[0]), empty[1].tolist()) == (0, [0.0] * 5)


def test_the_sketch_of_a_difference_has_its_size() -> None:
    """Of one element exactly, of many within the chance of four sums: a factor of two in most of 200."""
    signs, box = _Signs(torch.device("cpu")), (range(40), range(30))
    one = torch.zeros(40, 30)
    one[3, 5] = 0.25
    assert _digest(one, box, one.shape, signs)[1].tolist()[0] == pytest.approx(0.0625)
    assert _digest(one, box, one.shape, signs)[1][1:].abs().tolist() == pytest.approx([0.25] * 4)
    generator = torch.Generator().manual_seed(1)
    ratios = []
    for _ in range(200):
        apart = torch.randn(40, 30, generator=generator)
        sketch = _digest(apart, box, apart.shape, signs)[1][1:]
        ratios.append(float(sketch.square().mean().sqrt() / apart.norm()))
    assert sum(0.5 < ratio < 2 for ratio in ratios) > 170
    assert sum(ratios) / len(ratios) == pytest.approx(0.94, abs=0.1)
