"""A checkpoint of one layout is read by any other: the gathered state is equal to the bit, and so is a resumed run."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from fivefold.checkpoint.find import find
from fivefold.checkpoint.load import boxes_of, reshard
from fivefold.checkpoint.shards import stored_buffers
from fivefold.checkpoint.store import Store
from fivefold.layout.layout import Layout
from tests.checkpoint.runs import Run, gathered, loaded, small_job, train
from tests.ranks import run_ranks

# Unequal rows, one kv head for two ranks, a vocabulary that does not divide, stages of unequal length, both ends tied.
ODD = ["model.kv_heads=1", "model.vocab=259", "model.layers=3", "model.tied=true"]
LAYOUTS = [
    "dp=1",
    "dp=2,zero=3",
    "dp=4,zero=1",
    "tp=2,pp=2",
    "tp=4,sp",
    "cp=2,dp=2,zero=2",
    "pp=2,microbatches=4,schedule=zb-v",
    "pp=4,microbatches=4,schedule=zb-h1,split=0,1,1,1",
    "dp=4,zero=3,replicate=2",
    "dp=2,tp=2,zero=3,sp",
]


# Every second pair is enough for each layout to write or read; all pairs are a long proof.
RING = [pytest.param(index, marks=[pytest.mark.slow] * (index % 2)) for index in range(len(LAYOUTS))]


@pytest.mark.parametrize("index", RING)
def test_the_state_of_one_layout_is_that_of_the_next(tokens: Path, tmp_path: Path, index: int) -> None:
    """In a ring: every layout writes one checkpoint and reads one."""
    writer, reader = LAYOUTS[index], LAYOUTS[(index + 1) % len(LAYOUTS)]
    job = small_job(tokens, *ODD, "train.steps=1", f"layout={writer}")
    written = run_ranks(job.layout.world, train, job, tmp_path)
    other = small_job(tokens, *ODD, "train.steps=1", f"layout={reader}")
    read = run_ranks(other.layout.world, loaded, other, tmp_path)
    assert {step for step, _, _ in read} == {1}
    state = gathered([state for _, state, _ in written])
    assert len(state) == 3 * len(list(job.model.parameters()))
    assert gathered([state for _, state, _ in read]) == state


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("dp=1", "float32"),
        ("dp=2,zero=1", "float32"),
        ("tp=2,sp", "float64"),
        ("pp=2,microbatches=2", "float32"),
        ("dp=2,zero=3", "bfloat16"),
    ],
)
def test_a_run_that_was_cut_is_the_run_that_was_not_to_the_bit(
    tokens: Path, tmp_path: Path, layout: str, dtype: str
) -> None:
    settings = [f"layout={layout}", f"train.dtype={dtype}", "model.dropout=0.1", "optimizer.schedule=constant"]
    whole = small_job(tokens, *settings, "train.steps=4")
    world = whole.layout.world
    want = run_ranks(world, train, whole, tmp_path / "whole")
    cut = small_job(tokens, *settings, "train.steps=2")
    first = run_ranks(world, train, cut, tmp_path / "cut")
    second = run_ranks(world, train, whole, tmp_path / "cut")
    for one, two, three in zip(want, first, second, strict=True):
        assert two[0] | three[0] == one[0]  # losses and norms, by step
        assert set(three[0]) == {3, 4}
        assert three[1] == one[1]
        assert two[2] + three[2] == one[2] == list(range(32))


def test_the_mean_of_both_moments_is_not_zero_after_a_load(tokens: Path, tmp_path: Path) -> None:
    """Without the optimizer's state the curves above would differ; a state of zeros would be equal to itself."""
    job = small_job(tokens, "train.steps=2")
    run_ranks(1, train, job, tmp_path)
    _, state, _ = run_ranks(1, loaded, job, tmp_path)[0]
    assert len({state["exp_avg.head.weight"], state["exp_avg_sq.head.weight"], state["master.head.weight"]}) == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_of_a_layout_cover_every_element_once(tokens: Path, layout: str) -> None:
    job = small_job(tokens, *ODD)
    wanted = {parameter.name: parameter.size for parameter in job.model.parameters()}
    found = dict.fromkeys(wanted, 0)
    for boxes in boxes_of(job.model, Layout.parse(layout), job.data.seq):
        for name, box in boxes.items():
            size = 1
            for side in box:
                size *= len(side)
            found[name] += size
    assert found == wanted


def test_resharding_keeps_every_bit_and_makes_the_files_of_the_layout(tokens: Path, tmp_path: Path) -> None:
    job = small_job(tokens, *ODD, "train.steps=2", "layout=dp=2,zero=3")
    written = run_ranks(2, train, job, tmp_path / "a")
    layout = Layout.parse("tp=2,pp=2")
    path = reshard(find(tmp_path / "a"), job.model, layout, job.data.seq, Store(tmp_path / "b"), lambda _: None)
    assert len(list(path.glob("*.tensors"))) == 4
    other = small_job(tokens, *ODD, "train.steps=2", f"layout={layout}")
    read = run_ranks(4, loaded, other, tmp_path / "b")
    assert gathered([state for _, state, _ in read]) == gathered([state for _, state, _ in written])


def test_biases_of_routers_are_state_and_zero_where_a_checkpoint_has_none(tokens: Path, tmp_path: Path) -> None:
    """A run that is cut is the whole run to the bit; so is one whose checkpoint was cut for another layout."""
    words = ["model=tiny-deepseek", "model.layers=3", "model.hidden=32", "model.experts.ffn=16"]
    whole = small_job(tokens, *words, "train.balance_rate=0.01", "train.steps=4", "optimizer.schedule=constant")
    want = train(0, 1, whole, tmp_path / "whole")
    short = msgspec.structs.replace(whole, train=msgspec.structs.replace(whole.train, steps=2))
    train(0, 1, short, tmp_path / "cut")
    checkpoint = find(tmp_path / "cut")
    layout = Layout.parse("dp=2,pp=2")
    reshard(checkpoint, whole.model, layout, 16, Store(tmp_path / "moved"), lambda _: None)
    for place in ("cut", "moved"):
        losses, state, _ = train(0, 1, whole, tmp_path / place)
        assert state == want[1]
        assert losses == {step: want[0][step] for step in (3, 4)}
    assert len([name for name in want[1] if name.endswith("router.balance")]) == 2

    names = [name for name in find(tmp_path / "whole").tensors if name.endswith("router.balance")]
    assert len(names) == 2
    run = Run(whole, 1, tmp_path / "whole")
    buffers = run.trainer.engine.buffers
    assert stored_buffers(buffers, find(tmp_path / "whole")) == buffers
    assert stored_buffers(buffers, SimpleNamespace(tensors={})) == {}  # type: ignore[arg-type]
