"""Every stage computes what one process with stock AdamW computes on the whole batch."""

from functools import cache

import pytest
import torch

from fivefold.layout.layout import Layout
from fivefold.spec.presets import preset
from tests.parallel.zero.world import BOUND, SMALL, Run, apart, each, reference, train
from tests.ranks import run_ranks

MODELS = {
    "small": SMALL,
    "uneven": preset("tiny", layers=1, hidden=10, heads=1, kv_heads=1, head_dim=10, ffn=7, vocab=257, tied=True),
    "short": preset("tiny", layers=1, hidden=8, heads=2, kv_heads=1, head_dim=2, ffn=3, vocab=5),
    "one kv": preset("tiny", layers=1, hidden=12, heads=2, kv_heads=1, head_dim=6, ffn=6, vocab=19),
    "gpt": preset(
        "tiny-gpt", layers=1, hidden=16, heads=4, kv_heads=4, head_dim=4, ffn=24, vocab=37, context=8, dropout=0.0
    ),
}
COUNT = 8  # sequences of the global batch
EMPTY = {"masked": (4, 5, 6, 7)}  # all that the last of two ranks gets
CASES = [
    *(("small", text) for text in ("dp=1", "zero=1,microbatches=2,recompute=full")),
    *(("masked", f"dp=2,zero={stage},microbatches=2") for stage in range(4)),
    *(("uneven", f"dp=4,zero={stage},microbatches=2") for stage in (1, 3)),
    *(("short", f"dp=4,zero={stage}") for stage in (2, 3)),
    ("gpt", "dp=2,tp=2,sp,zero=0"),
    ("one kv", "dp=2,tp=2,zero=2"),
]
# tests/verifier/test_verify.py proves the like of these, too.
SLOW = [
    *(("small", text) for text in ("microbatches=4", "zero=2", "dp=2,zero=3,replicate=2", "tp=2,sp")),
    *(("small", f"dp=2,zero=3,recompute={how}") for how in ("full", "selective")),
    ("uneven", "dp=4,zero=0,microbatches=2"),
    ("small", "dp=4,zero=3,replicate=2,microbatches=2"),
    *(("small", f"dp=2,tp=2,sp,zero={stage},microbatches=2") for stage in (1, 2, 3)),
    ("gpt", "dp=2,tp=2,sp,zero=3"),
]


@cache
def results(world: int, slow: bool) -> dict[tuple[str, str], list[Run]]:
    """What the ranks saw, in every case of that many ranks."""
    cases = [case for case in (SLOW if slow else CASES) if Layout.parse(case[1]).world == world]
    calls = [(MODELS.get(name, SMALL), Layout.parse(text), COUNT, EMPTY.get(name, ())) for name, text in cases]
    by_rank = [each(0, 1, train, calls)] if world == 1 else run_ranks(world, each, train, calls)
    return {case: [runs[number] for runs in by_rank] for number, case in enumerate(cases)}


@pytest.mark.parametrize(("name", "text"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_a_layout_equals_one_process(name: str, text: str) -> None:
    layout = Layout.parse(text)
    runs = results(layout.world, (name, text) in SLOW)[name, text]
    expected = reference(MODELS.get(name, SMALL), COUNT, EMPTY.get(name, ()))
    assert len(runs) == layout.world
    for run in runs:
        assert run.norms == pytest.approx(expected.norms, rel=BOUND)
        assert apart(run.gradients, expected.gradients) < BOUND
        assert apart(run.masters, expected.masters) < BOUND
        assert apart(run.moments, expected.moments) < BOUND
        assert all(torch.equal(run.model[parameter], run.masters[parameter]) for parameter in expected.masters)
    losses = [sum(run.losses[step] for run in runs) / layout.tp for step in range(len(expected.losses))]
    assert losses == pytest.approx(expected.losses, rel=BOUND)
