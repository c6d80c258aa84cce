"""The loop: what a step computes, in every precision; the same bits twice; the same data whatever the microbatches."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fivefold.data.batch import Batch, read_batch
from fivefold.data.prepare import prepare
from fivefold.job.config import Job
from fivefold.job.preflight import preflight
from fivefold.job.reading import read_job
from fivefold.layout.layout import Layout
from fivefold.parallel.mesh import Mesh
from fivefold.support.errors import TrainingError
from fivefold.trainer.loop import Trainer
from fivefold.trainer.records import Evaluation, Step

SMALL = ["model.layers=2", "model.hidden=32", "model.ffn=48", "data.seq=24", "train.batch=4", "train.steps=6",
         "optimizer.warmup=2", "optimizer.lr=1e-2", "train.device=cpu"]  # fmt: skip


def small_job(tokens: Path, *changes: str) -> Job:
    whole_models = [change for change in changes if change.startswith("model=")]  # before the fields that change them
    return read_job(None, [*whole_models, *SMALL, f"data.path={tokens}", *(set(changes) - set(whole_models))])


def trainer(job: Job) -> Trainer:
    return Trainer(job, preflight(job, world=1), Mesh.of(job.layout, torch.device("cpu")))


class Recorder:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.evaluations: list[Evaluation] = []

    def on_step(self, record: Step) -> None:
        self.steps.append(record)

    def on_evaluation(self, record: Evaluation) -> None:
        self.evaluations.append(record)

    def close(self) -> None: ...


def run(job: Job) -> tuple[Trainer, Recorder]:
    made, recorder = trainer(job), Recorder()
    made.run([recorder])
    return made, recorder


def batch_of(made: Trainer, step: int) -> Batch:
    size = made.job.train.batch
    return read_batch(made.sources.train, made.job.data.seq, 0, range(step * size, (step + 1) * size))


def test_a_step_is_plain_adamw_on_the_mean_over_unmasked_targets(tokens: Path) -> None:
    """Against a second trainer's model driven by nothing but torch: one mean, one backward, clip, AdamW."""
    job = small_job(tokens, "train.dtype=float64", "layout.microbatches=4", "optimizer.clip=0.5")
    made, recorder = run(job)
    oracle = trainer(job).engine.model
    named = dict(oracle.named_parameters())
    decayed = {p.name for p in job.model.parameters() if p.kind == "linear"}
    adam = torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if n in decayed], "weight_decay": 0.1},
            {"params": [p for n, p in named.items() if n not in decayed], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
        foreach=False,
    )
    masked = 0
    for step, record in enumerate(recorder.steps):
        assert record.step == step + 1
        batch = batch_of(made, step)
        mask = torch.from_numpy(batch.loss_mask)
        masked += int((~mask).sum())
        logits = oracle(torch.from_numpy(batch.tokens))
        loss = F.cross_entropy(logits[mask], torch.from_numpy(batch.targets)[mask])
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)
        for group in adam.param_groups:
            group["lr"] = record.lr
        adam.step()
        assert record.loss == pytest.approx(loss.item(), rel=1e-12)
        assert record.grad_norm == pytest.approx(norm.item(), rel=1e-10)
        assert record.loss_tokens == int(mask.sum())
    assert masked > 0  # the corpus has prompts without loss, in unequal numbers per row
    for name, parameter in made.engine.model.named_parameters():
        assert torch.allclose(parameter, named[name], rtol=1e-9, atol=1e-12), name


def test_decay_spares_norms_and_embeddings(tokens: Path) -> None:
    made = trainer(small_job(tokens))
    names = {group.settings.weight_decay: group.names for group in made.engine.optimizer.param_groups}
    assert {*names} == {0.1, 0.0}
    decayed, spared = names[0.1], names[0.0]
    assert set(spared) == {p.name for p in made.job.model.parameters() if p.kind in ("norm", "embedding", "bias")}
    assert {*spared, *decayed} == {p.name for p in made.job.model.parameters()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_same_run_twice_gives_the_same_bits(tokens: Path, dtype: str) -> None:
    job = small_job(tokens, f"train.dtype={dtype}", "model.dropout=0.1", "layout.microbatches=2", "train.steps=3")
    (first, a), (second, b) = run(job), run(job)
    assert [(s.loss, s.grad_norm) for s in a.steps] == [(s.loss, s.grad_norm) for s in b.steps]
    for (name, p), q in zip(first.engine.model.named_parameters(), second.engine.model.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("model", ["tiny", pytest.param("tiny-qwen3", marks=pytest.mark.slow), "tiny-gpt"])
def test_microbatches_and_recompute_leave_the_run_as_it_is(tokens: Path, model: str) -> None:
    """Dropout included: the mask follows the sample, not its place in a microbatch."""
    changes = [f"model={model}", "train.dtype=float64", "train.steps=3"]
    _, whole = run(small_job(tokens, *changes))
    for layout in ("microbatches=4", "microbatches=2,recompute=full", "recompute=selective"):
        _, parts = run(small_job(tokens, *changes, f"layout={layout}"))
        for a, b in zip(whole.steps, parts.steps, strict=True):
            assert b.loss == pytest.approx(a.loss, rel=1e-11)
            assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-9)


def test_bfloat16_keeps_float32_masters_and_follows_float32(tokens: Path) -> None:
    _, single = run(small_job(tokens))
    made, half = run(small_job(tokens, "train.dtype=bfloat16"))
    assert {p.dtype for p in made.engine.weights.masters.values()} == {torch.float32}
    norms = {one.name for one in made.engine.job.model.parameters() if one.kind == "norm"}
    for name, p in made.engine.model.named_parameters():
        assert p.dtype == (torch.float32 if name in norms else torch.bfloat16), name
        assert torch.equal(p, made.engine.weights.masters[name].to(p.dtype)), name
    # bfloat16 keeps 8 bits: a logit of size ~1 is off by 2^-9 per rounding, and the loss is a mean of such errors.
    for a, b in zip(single.steps, half.steps, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=2**-7)


def test_bfloat16_masters_take_steps_that_bfloat16_cannot(tokens: Path) -> None:
    """A rate so small that every update is below half an ulp of bfloat16: the masters still move."""
    job = small_job(tokens, "train.dtype=bfloat16", "optimizer.lr=1e-7", "optimizer.warmup=0", "train.steps=1")
    before = {name: p.clone() for name, p in trainer(job).engine.weights.masters.items()}
    made, _ = run(job)
    name = "layers.0.mlp.up.weight"
    assert not torch.equal(before[name], made.engine.weights.masters[name])
    assert torch.equal(before[name].to(torch.bfloat16), dict(made.engine.model.named_parameters())[name])


def test_bfloat16_gradients_add_up_in_float32(tokens: Path) -> None:
    """Sixteen microbatches in bfloat16 sums would lose the small ones; against the same gradients added in float64."""
    job = small_job(tokens, "train.dtype=bfloat16", "train.batch=16", "layout.microbatches=16", "optimizer.clip=0")
    made = trainer(job)
    batch = batch_of(made, 0)
    exact: dict[str, torch.Tensor] = {}
    for part in batch.split(16):
        alone = trainer(msgspec.structs.replace(job, layout=Layout())).engine
        alone.pipeline.run([alone._microbatch(part)], partial(alone._scaled_loss, count=batch.loss_tokens))
        alone.weights.finish_grad_sync()
        for name, master in alone.weights.masters.items():
            assert master.grad is not None
            exact[name] = exact.get(name, 0) + master.grad.double()
    made.engine.forward_backward(batch)
    for name, master in made.engine.weights.masters.items():
        assert master.grad is not None
        error = (master.grad.double() - exact[name]).abs().max() / exact[name].abs().max()
        assert error < 16 * 2**-24, name  # sixteen roundings of float32


def test_a_batch_without_targets_changes_nothing(tokens: Path) -> None:
    """Not even by weight decay or by the momentum of the step before."""
    made = trainer(small_job(tokens))
    made.step(1, batch_of(made, 0))
    before = {name: p.clone() for name, p in made.engine.model.named_parameters()}
    batch = batch_of(made, 1)
    said: list[str] = []
    made.policy.say = said.append
    for number in (2, 3):
        record = made.step(number, replace(batch, loss_mask=np.zeros_like(batch.loss_mask)))
        assert (record.loss, record.grad_norm, record.loss_tokens) == (None, 0.0, 0)
    assert len(said) == 1, "it is said once"
    assert "step 2: none of its target tokens carries loss (samples 4 to 7): it has no loss" in said[0]
    assert len(made.policy.recent) == 1, "a step without a loss is none that spikes are measured by"
    assert all(torch.equal(p, before[name]) for name, p in made.engine.model.named_parameters())


def test_an_evaluation_without_a_target_that_carries_loss_is_said_once(tokens: Path) -> None:
    made = trainer(small_job(tokens, "train.eval_samples=2"))
    if made.sources.valid is None:
        pytest.skip("the corpus has nothing held out")
    said: list[str] = []
    made.policy.say = said.append
    read = made.guard.read

    def masked(*arguments):  # type: ignore[no-untyped-def]
        found = read(*arguments)
        return replace(found, mine=replace(found.mine, loss_mask=np.zeros_like(found.mine.loss_mask)), loss_tokens=0)

    made.guard.read = masked  # type: ignore[method-assign]
    assert made.evaluate(1) is None
    assert made.evaluate(2) is None
    assert said == [
        "none of the first 2 held-out samples has a target that carries loss: there is no held-out loss; "
        "train.eval_samples=2 says how many are read"
    ]


def test_a_run_in_which_no_target_carries_loss_is_no_success(tmp_path: Path) -> None:
    record = {"segments": [{"text": "all of this is context " * 20, "loss": False}]}
    (tmp_path / "masked.jsonl").write_text("\n".join([json.dumps(record)] * 9))
    prepare([tmp_path / "masked.jsonl"], tmp_path / "tokens")
    with pytest.raises(TrainingError, match="no target carried loss"):
        run(small_job(tmp_path / "tokens"))


def test_a_resumed_run_is_judged_by_all_its_steps(tmp_path: Path) -> None:
    """The steps that are left may carry no loss, if those before the checkpoint did."""
    (tmp_path / "text.jsonl").write_text('{"segments": [{"text": "' + "no loss here " * 40 + '", "loss": false}]}\n')
    prepare([tmp_path / "text.jsonl"], tmp_path / "tokens", valid=0)
    made = trainer(small_job(tmp_path / "tokens", "train.steps=3"))
    made.done, made.samples = 1, made.job.train.batch
    made.engine.optimizer.restore(1)  # as a checkpoint of step 1 does
    recorder = Recorder()
    made.run([recorder])
    assert [record.loss_tokens for record in recorder.steps] == [0, 0]


def test_a_held_out_loss_that_is_not_finite_is_no_success(tokens: Path) -> None:
    with pytest.raises(TrainingError, match="held-out loss after step 1 is nan"):
        run(small_job(tokens, "train.steps=1", "optimizer.lr=1e30", "optimizer.warmup=0"))


def test_speed_and_utilisation_are_what_they_are_called(tokens: Path) -> None:
    made = trainer(small_job(tokens))
    made.peak = 1e12
    record = made.step(1, batch_of(made, 0))
    assert record.tokens == 4 * 24
    assert record.tokens_per_second == pytest.approx(record.tokens / record.seconds)
    flops = record.tokens * made.job.model.flops_per_token(24, "full")
    assert record.mfu == pytest.approx(flops / record.seconds / 1e12)
    made.peak = None
    assert made.step(2, batch_of(made, 1)).mfu is None


def test_a_gradient_that_is_not_finite_stops_the_run_and_spares_the_weights(tokens: Path) -> None:
    made = trainer(small_job(tokens))
    with torch.no_grad():
        made.engine.model.norm.weight[0] = float("inf")  # type: ignore[index, operator]
    before = {name: p.clone() for name, p in made.engine.model.named_parameters()}
    with pytest.raises(TrainingError, match=r"step 4: loss nan .* samples 12 to 15"):
        made.step(4, batch_of(made, 3))
    assert all(torch.equal(p, before[name]) for name, p in made.engine.model.named_parameters())


def test_document_masks_reach_attention(tokens: Path) -> None:
    _, open_run = run(small_job(tokens))
    _, masked = run(small_job(tokens, "data.document_mask=true"))
    assert [step.loss for step in open_run.steps] != [step.loss for step in masked.steps]


def test_evaluation_is_the_mean_over_held_out_targets(tokens: Path) -> None:
    job = small_job(tokens, "train.eval_every=3", "train.eval_samples=5", "model.dropout=0.2")
    made, recorder = run(job)
    assert [record.step for record in recorder.evaluations] == [3, 6]
    assert made.engine.model.training  # the look is over: dropout is on again
    assert made.sources.valid is not None
    batch = read_batch(made.sources.valid, 24, 0, range(5))
    mask = torch.from_numpy(batch.loss_mask)
    with torch.no_grad():
        logits = made.engine.model.eval()(torch.from_numpy(batch.tokens))
    loss = F.cross_entropy(logits[mask], torch.from_numpy(batch.targets)[mask]).item()
    assert recorder.evaluations[-1].held_out_loss == pytest.approx(loss, rel=1e-5)
    assert recorder.evaluations[-1].samples == 5


def test_the_model_learns(tokens: Path) -> None:
    _, recorder = run(small_job(tokens, "train.steps=40", "train.batch=8"))
    assert recorder.steps[-1].loss < 0.6 * recorder.steps[0].loss
