"""What holds across devices; skipped where there is no GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fivefold.data.corpus import stdlib_corpus
from fivefold.model import random
from fivefold.model.decoder import Decoder
from fivefold.model.dropout import Dropout
from fivefold.model.init import draw, initialise
from fivefold.model.place import Place
from fivefold.parallel.mesh import Mesh
from fivefold.presets import preset
from fivefold.train.config import read_job
from fivefold.train.device import make_repeatable
from fivefold.train.loop import Trainer
from fivefold.train.preflight import preflight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3", "tiny-gpt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_initial_weights_are_the_same_bits_on_cpu_and_cuda(name: str, dtype: torch.dtype) -> None:
    spec = preset(name)
    here, there = Decoder(spec).to(dtype), Decoder(spec).to("cuda", dtype)
    initialise(here, spec, seed=0)
    initialise(there, spec, seed=0)
    for (key, a), b in zip(here.named_parameters(), there.parameters(), strict=True):
        assert torch.equal(a, b.cpu()), key


def test_a_hundred_million_normals_are_the_same_bits_on_cpu_and_cuda() -> None:
    key = random.key(0, "w")
    for row in range(0, 6400, 64):
        rows, columns = range(row, row + 64), range(16_384)
        assert torch.equal(random.normal(key, rows, columns), random.normal(key, rows, columns, "cuda").cpu())


def test_dropout_masks_are_the_same_bits_on_cpu_and_cuda() -> None:
    dropout = Dropout(0.1, seed=0, name="layers.0.mlp")
    tokens = torch.zeros(8, 128)
    place = replace(Place.of(tokens), samples=torch.arange(8) + 2**33)
    there = Place(place.positions.cuda(), place.samples.cuda(), place.length)
    x = torch.ones(8, 128, 512)
    assert torch.equal(dropout(x, place), dropout(x.cuda(), there).cpu())


def test_a_shard_of_a_large_matrix_is_drawn_alone() -> None:
    spec = preset("llama3-8b")
    parameter = next(p for p in spec.parameters() if p.name == "layers.31.mlp.down.weight")
    here, there = torch.empty(64, 100), torch.empty(64, 100, device="cuda")
    draw(spec, parameter, here, 0, range(4000, 4064), range(14_001, 14_101))
    draw(spec, parameter, there, 0, range(4000, 4064), range(14_001, 14_101))
    assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["tiny", "tiny-qwen3", "tiny-gpt"])
def test_the_same_run_twice_gives_the_same_bits_on_cuda(tmp_path: Path, model: str, dtype: str) -> None:
    changes = [f"model={model}", f"data.path={stdlib_corpus(tmp_path)}", f"train.dtype={dtype}", "train.steps=5"]
    job = read_job(None, [*changes, "layout.recompute=selective"])
    make_repeatable(job.train)
    try:
        weights = []
        for _ in range(2):
            trainer = Trainer(job, preflight(job, 1), Mesh.of(job.layout, torch.device("cuda")))
            trainer.run([])
            weights.append([p.detach().clone() for p in trainer.engine.model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_float64_run_on_cuda_is_the_run_on_the_cpu(tmp_path: Path) -> None:
    """The same weights, data and dropout: what differs is the order of additions."""
    changes = ["model=tiny-gpt", f"data.path={stdlib_corpus(tmp_path)}", "train.dtype=float64", "train.steps=5"]
    job = read_job(None, [*changes, "train.batch=4"])
    losses = []
    for device in ("cpu", "cuda"):
        trainer = Trainer(job, preflight(job, 1), Mesh.of(job.layout, torch.device(device)))
        steps: list[float] = []
        for step, read in enumerate(trainer.reads(), start=1):
            steps.append(trainer.step(step, read()).loss)
        losses.append(steps)
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
