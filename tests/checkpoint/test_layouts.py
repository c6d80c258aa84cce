"""A checkpoint of one layout is read by any other: the gathered state is equal to the bit, and so is a resumed run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fivefold.checkpoint.find import find
from fivefold.checkpoint.reshard import boxes_of, reshard
from fivefold.checkpoint.shards import stored_buffers
from fivefold.checkpoint.store import Store
from fivefold.layout.layout import Layout
from tests.checkpoint.runs import Run, each, gathered, loaded, small_job, train
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


def by_world(function: Any, cases: dict[str, tuple[Any, ...]]) -> dict[str, list[Any]]:
    """What the ranks of each job have of it, by name; the jobs of equally many ranks share their ranks."""
    found: dict[str, list[Any]] = {}
    for world in {job.layout.world for job, *_ in cases.values()}:
        mine = {name: case for name, case in cases.items() if case[0].layout.world == world}
        ranks = run_ranks(world, each, function, [*mine.values()])
        found |= {name: [of_rank[at] for of_rank in ranks] for at, name in enumerate(mine)}
    return found


# Every second pair is enough for a layout to write or read, and one of ZeRO 3; all pairs are a long proof.
@pytest.mark.parametrize("writers", [(0, 2, 4, 6), pytest.param((1, 3, 5, 7, 8, 9), marks=pytest.mark.slow)])
def test_the_state_of_one_layout_is_that_of_the_next(tokens: Path, tmp_path: Path, writers: tuple[int, ...]) -> None:
    """In a ring: every layout writes one checkpoint and reads one."""
    jobs = {layout: small_job(tokens, *ODD, "train.steps=1", f"layout={layout}") for layout in LAYOUTS}
    pairs = {LAYOUTS[at]: LAYOUTS[(at + 1) % len(LAYOUTS)] for at in writers}
    written = by_world(train, {writer: (jobs[writer], tmp_path / writer) for writer in pairs})
    read = by_world(loaded, {writer: (jobs[reader], tmp_path / writer) for writer, reader in pairs.items()})
    for writer, reader in pairs.items():
        assert {step for step, _, _ in read[writer]} == {1}, reader
        state = gathered([state for _, state, _ in written[writer]])
        assert len(state) == 3 * len(list(jobs[writer].model.parameters()))
        assert gathered([state for _, state, _ in read[writer]]) == state, f"{reader} does not read {writer}"


DTYPES = {"pp=2,microbatches=2": "float32", "dp=2,zero=3": "bfloat16"}
MORE = {"dp=1": "float32", "dp=2,zero=1": "float32", "tp=2,sp": "float64"}


@pytest.mark.parametrize("dtypes", [DTYPES, pytest.param(MORE, marks=pytest.mark.slow)], ids=["two", "more"])
def test_a_run_that_was_cut_is_the_run_that_was_not_to_the_bit(
    tokens: Path, tmp_path: Path, dtypes: dict[str, str]
) -> None:
    """It goes on in other processes."""

    def jobs(steps: int, place: str) -> dict[str, tuple[Any, ...]]:
        settings = ["model.dropout=0.1", "optimizer.schedule=constant", f"train.steps={steps}"]
        words = {layout: [*settings, f"layout={layout}", f"train.dtype={dtype}"] for layout, dtype in dtypes.items()}
        places = {layout: f"{place} {layout}" for layout in dtypes}
        return {places[layout]: (small_job(tokens, *more), tmp_path / places[layout]) for layout, more in words.items()}

    before, after = by_world(train, jobs(2, "whole") | jobs(1, "cut")), by_world(train, jobs(2, "cut"))
    for layout in dtypes:
        whole, cut = before[f"whole {layout}"], before[f"cut {layout}"]
        for one, two, three in zip(whole, cut, after[f"cut {layout}"], strict=True):
            assert two[0] | three[0] == one[0], layout  # losses and norms, by step
            assert set(three[0]) == {2}
            assert three[1] == one[1], layout
            assert two[2] + three[2] == one[2] == list(range(16))


def test_states_that_only_some_parameters_have_go_from_layout_to_layout(tokens: Path, tmp_path: Path) -> None:
    """Muon's: a momentum of matrices, two moments of all others. A run that is cut is the whole run to the bit."""
    words = [*ODD, "optimizer.name=muon", "optimizer.schedule=constant", "layout=dp=2,zero=3"]
    job, short = (small_job(tokens, *words, f"train.steps={steps}") for steps in (2, 1))
    want = by_world(train, {"whole": (job, tmp_path / "whole"), "cut": (short, tmp_path / "cut")})["whole"]
    layout = Layout.parse("tp=2")
    reshard(find(tmp_path / "cut"), job.model, layout, job.data.seq, Store(tmp_path / "moved"), lambda _: None)
    for ranks in by_world(train, {place: (job, tmp_path / place) for place in ("cut", "moved")}).values():
        assert gathered([state for _, state, _ in ranks]) == gathered([state for _, state, _ in want])
        assert ranks[0][0] == {2: want[0][0][2]}
    state = gathered([state for _, state, _ in want])
    of_matrices = [name for name in state if name.startswith("momentum_buffer.")]
    assert len(of_matrices) == 7 * 3
    assert not [name for name in of_matrices if name.replace("momentum_buffer", "exp_avg") in state]


def test_the_mean_of_both_moments_is_not_zero_after_a_load(tokens: Path, tmp_path: Path) -> None:
    """Without the optimizer's state the curves above would differ; a state of zeros would be equal to itself."""
    job = small_job(tokens, "train.steps=2")
    train(0, 1, job, tmp_path)
    _, state, _ = loaded(0, 1, job, tmp_path)
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
    job = small_job(tokens, *ODD, "train.steps=1", "layout=dp=2,zero=3")
    written = run_ranks(2, train, job, tmp_path / "a")
    layout = Layout.parse("tp=2,pp=2")
    path = reshard(find(tmp_path / "a"), job.model, layout, job.data.seq, Store(tmp_path / "b"), lambda _: None)
    assert len(list(path.glob("*.tensors"))) == 4
    other = small_job(tokens, *ODD, "train.steps=1", f"layout={layout}")
    read = run_ranks(4, loaded, other, tmp_path / "b")
    assert gathered([state for _, state, _ in read]) == gathered([state for _, state, _ in written])


def test_biases_of_routers_are_state_and_zero_where_a_checkpoint_has_none(tokens: Path, tmp_path: Path) -> None:
    """A run that is cut is the whole run to the bit; so is one whose checkpoint was cut for another layout."""
    words = ["model=tiny-deepseek", "model.layers=3", "model.hidden=32", "model.experts.ffn=16"]
    whole = small_job(tokens, *words, "train.balance_rate=0.01", "train.steps=2", "optimizer.schedule=constant")
    want = train(0, 1, whole, tmp_path / "whole")
    short = msgspec.structs.replace(whole, train=msgspec.structs.replace(whole.train, steps=1))
    train(0, 1, short, tmp_path / "cut")
    checkpoint = find(tmp_path / "cut")
    layout = Layout.parse("dp=2,pp=2")
    reshard(checkpoint, whole.model, layout, 16, Store(tmp_path / "moved"), lambda _: None)
    for place in ("cut", "moved"):
        losses, state, _ = train(0, 1, whole, tmp_path / place)
        assert state == want[1]
        assert losses == {2: want[0][2]}
    assert len([name for name in want[1] if name.endswith("router.balance")]) == 2

    names = [name for name in find(tmp_path / "whole").tensors if name.endswith("router.balance")]
    assert len(names) == 2
    run = Run(whole, 1, tmp_path / "whole")
    buffers = run.trainer.engine.buffers
    assert stored_buffers(buffers, find(tmp_path / "whole")) == buffers
    assert stored_buffers(buffers, SimpleNamespace(tensors={})) == {}  # type: ignore[arg-type]
