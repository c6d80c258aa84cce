"""The load of experts: what is counted, when biases follow it, what is said of it."""

import json
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from fivefold.data.batch import Batch
from fivefold.job.config import Job
from fivefold.job.listeners import TensorBoard
from fivefold.job.preflight import preflight
from fivefold.job.toml_writer import to_toml
from fivefold.model.decoder import Decoder
from fivefold.model.init import initialise
from fivefold.model.layers import TokenPositions
from fivefold.model.router import Router
from fivefold.parallel.mesh import Mesh
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError
from fivefold.trainer.engine import routers
from fivefold.trainer.loop import Trainer
from fivefold.trainer.records import Load, MetricsFile, to_line
from fivefold.trainer.result import ExpertsResult, experts
from tests.commands import fivefold
from tests.ranks import run_ranks
from tests.trainer.test_loop import batch_of, run, small_job, trainer

MIXTURE = ["model=tiny-deepseek", "model.layers=3", "model.experts.ffn=16", "train.balance_rate=0.01"]


def mixture(tokens: Path, *changes: str) -> Trainer:
    return trainer(small_job(tokens, *MIXTURE, "model.layers=3", *changes))


def biases(made: Trainer) -> list[list[float]]:
    return [buffer.tolist() for buffer in made.engine.buffers.values()]


def step(made: Trainer, number: int, batch: Batch | None = None) -> Load:
    load = made.step(number, batch or batch_of(made, number - 1)).load
    assert load is not None
    return load


@pytest.mark.parametrize("how", ["microbatches=2", "recompute=full", "recompute=selective,microbatches=4"])
def test_biases_follow_the_load_of_the_global_batch_once_a_step(tokens: Path, how: str) -> None:
    """However the batch is cut, and however often a forward pass runs."""
    one, other = mixture(tokens, "train.log_every=1"), mixture(tokens, "train.log_every=1", f"layout={how}")
    want = torch.zeros(2, 8)
    for number in (1, 2, 3):
        load = step(one, number)
        assert load.tokens == step(other, number).tokens
        assert load.tokens is not None
        assert [sum(layer) for layer in load.tokens] == [4 * 24 * 2] * 2
        assert load.dropped == 0
        counts = torch.tensor(load.tokens)
        want += 0.01 * torch.sign(24.0 - counts)  # 192 visits to 8 experts
        assert list(one.engine.buffers) == ["layers.1.mlp.router.balance", "layers.2.mlp.router.balance"]
        torch.testing.assert_close(torch.stack([*one.engine.buffers.values()]), want)
    assert biases(other) == biases(one)
    assert want.abs().sum() > 0


def test_a_skipped_step_and_an_evaluation_move_no_bias(tokens: Path) -> None:
    made = mixture(tokens)
    step(made, 1)
    before = biases(made)
    batch = batch_of(made, 1)
    silent = replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
    assert step(made, 2, silent).fullest > 1  # it is counted, and said
    made.engine.evaluate(batch)
    loads = [router.tokens_per_expert for router in routers(made.engine.stages.values()).values()]
    assert [int(load.sum()) for load in loads if load is not None] == [4 * 24 * 2] * 2  # those of step 2
    assert biases(made) == before
    step(made, 3)
    assert biases(made) != before


def test_tokens_without_loss_count_and_what_fills_a_batch_up_is_not_routed(tokens: Path) -> None:
    made = mixture(tokens, "train.log_every=1")
    batch = batch_of(made, 0)
    half = replace(batch, loss_mask=batch.loss_mask & (np.arange(24) < 12))
    assert step(made, 1, half).tokens == step(mixture(tokens, "train.log_every=1"), 1, batch).tokens

    spec = preset("tiny-deepseek", layers=2, hidden=32)
    model = Decoder(spec).eval()
    initialise(model, spec, 0)
    router, seen = routers([model])[1], list[int]()

    def watched(scores: torch.Tensor) -> torch.Tensor:
        seen.append(len(scores))
        return router.top_k(scores)

    router.choose = watched
    ids = torch.arange(30).view(3, 10)
    with torch.no_grad():
        want = model(ids)
        padded = model(ids, replace(TokenPositions.of(ids), real=2))
        model(ids, replace(TokenPositions.of(ids), real=0))
    assert seen == [30, 20, 0]
    torch.testing.assert_close(padded[:2], want[:2])


def test_the_losses_are_said_where_they_are_asked_for(tokens: Path) -> None:
    load = step(mixture(tokens), 1)
    assert (load.balance_loss, load.z_loss) == (None, None)
    load = step(mixture(tokens, "train.balance_loss=0.01", "train.router_z_loss=0.001"), 1)
    assert load.balance_loss is not None
    assert load.z_loss is not None
    assert 0.9 < load.balance_loss < 8  # 1 where the load is even
    assert 1 < load.z_loss < 10  # the square of log(8) or so


def test_what_is_said_of_a_load() -> None:
    even, one = Load.of([[4, 4, 4, 4]], expected=16), Load.of([[16, 0, 0, 0], [4, 4, 4, 4]], expected=16)
    assert (even.fullest, even.entropy, even.dropped) == (1, 1, 0)
    assert (one.fullest, one.entropy) == (4, 0.5)
    assert Load.of([[3, 1]], expected=5).dropped == 1
    assert Load.of([[7]], expected=7).entropy == 1


def test_the_load_of_a_run_is_in_its_metrics_a_table_and_a_picture(tokens: Path, tmp_path: Path) -> None:
    job = small_job(tokens, *MIXTURE, "model.layers=3", "train.steps=5", "train.log_every=2", f"run.dir={tmp_path}")
    _, recorder = run(job)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for record in recorder.steps:
        file.on_step(record)
    file.close()
    board = TensorBoard()
    board.start(job, tmp_path, 0)
    board.step(recorder.steps[0])
    board.end(1)
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert all(name in events.read_bytes() for name in (b"load/fullest", b"load/entropy", b"load/dropped"))
    found = ExpertsResult.read(tmp_path, job.model)
    assert [one.step for one in found.steps] == [1, 2, 4, 5]
    assert found.to_dict()["layers"] == [1, 2]
    assert found.to_dict()["fullest"]["times_the_mean"] == max(one.load.fullest for one in recorder.steps if one.load)
    assert found.svg().count("<rect") > 2 * 8
    with pytest.raises(UserError, match=r"tiny, which .* trains, has no experts"):
        ExpertsResult.read(tmp_path, preset("tiny"))
    with pytest.raises(UserError, match=r"neither job.toml nor a checkpoint"):
        experts(tmp_path)
    assert recorder.steps[0].load is not None
    below = msgspec.structs.replace(recorder.steps[0].load, tokens=[[3, -3], [1, 1]])
    (tmp_path / "metrics.jsonl").write_bytes(to_line(msgspec.structs.replace(recorder.steps[0], load=below)))
    with pytest.raises(UserError, match=r"no step with a load; 1 line of its metrics.jsonl cannot be read"):
        ExpertsResult.read(tmp_path, job.model)
    (tmp_path / "job.toml").write_text(to_toml(job))
    (tmp_path / "metrics.jsonl").rename(tmp_path / "elsewhere")
    (tmp_path / "metrics.jsonl").symlink_to("elsewhere")
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be read: "):
        experts(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").write_text("damaged\n")
    with pytest.raises(UserError, match=r"no step with a load; 1 line of its metrics.jsonl cannot be read"):
        ExpertsResult.read(tmp_path, job.model)


def test_the_command_reads_a_run_that_draws_its_own_picture(tokens: Path, tmp_path: Path) -> None:
    words = [*MIXTURE, "model.layers=3", "model.hidden=32", "data.seq=24", "train.steps=3", "train.batch=4",
             f"data.path={tokens}", "train.device=cpu"]  # fmt: skip
    trained = fivefold("train", *words, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "fullest expert" in trained.stdout
    assert "by expert" in trained.stdout
    assert (tmp_path / "runs/run/load.svg").read_text().startswith("<svg")
    shown = fivefold("inspect", "runs/run", "--json", "-o", "mine-load.svg", cwd=tmp_path)
    table = json.loads(shown.stdout)["experts"]
    assert (tmp_path / "mine-load.svg").read_text() == (tmp_path / "runs/run/load.svg").read_text()
    plain = fivefold("inspect", "runs/run", cwd=tmp_path).stdout
    assert "by expert" in plain
    assert "any other reads it" in plain  # of its checkpoint
    assert [one["step"] for one in table["steps"]] == [1, 3]
    assert table["dropped"] == 0
    assert fivefold("inspect", "runs/none", cwd=tmp_path).returncode == 2


def on_ranks(rank: int, world: int, job: Job) -> tuple[list[Load | None], dict[str, list[float]], float, int]:
    """The loads and biases of three steps; a held-out loss of three rows, and how many tokens were routed for it."""
    made = Trainer(job, preflight(job, world), Mesh.of(job.layout, torch.device("cpu"), spec=job.model))
    loads = [made.step(number, batch_of(made, number - 1)).load for number in (1, 2, 3)]
    routed = 0

    def watched(router: Router, scores: torch.Tensor) -> torch.Tensor:
        nonlocal routed
        routed += len(scores)
        return router.top_k(scores)

    for router in routers(made.engine.stages.values()).values():
        router.choose = partial(watched, router)
    whole = batch_of(made, 0)
    few = Batch(*(getattr(whole, field.name)[:3] for field in fields(whole)))
    loss = made.engine.evaluate(few)
    return loads, {name: buffer.tolist() for name, buffer in made.engine.buffers.items()}, loss, routed


QUICK = ["dp=2,ep=2,zero=3", "pp=2,microbatches=2,schedule=zb-v"]
SLOW = ["tp=2,ep=2", "cp=2,ep=2", "dp=4,tp=2,ep=4,sp,zero=1"]


@pytest.mark.parametrize("layout", [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)])
def test_every_layout_has_the_load_and_the_biases_of_one_process(tokens: Path, layout: str) -> None:
    words = [*MIXTURE, "train.dtype=float64", "train.log_every=1", "model.layers=3", "train.balance_loss=0.01"]
    want = on_ranks(0, 1, small_job(tokens, *words))
    job = small_job(tokens, *words, f"layout={layout}")
    found = run_ranks(job.layout.world, on_ranks, job)
    biases: dict[str, list[float]] = {}
    for loads, held, loss, _ in found:
        assert [load and load.tokens for load in loads] == [load and load.tokens for load in want[0]]
        assert [load and load.balance_loss for load in loads] == pytest.approx(
            [load and load.balance_loss for load in want[0]], rel=1e-10
        )
        biases |= held
        assert loss == pytest.approx(want[2], rel=1e-10)
    assert biases == want[1]
    assert sum(routed for *_, routed in found) == want[3] == 2 * 3 * 24
