"""Host copies for ranks that share a GPU change no result: the same on CPUs, told to stage."""

from dataclasses import replace

import numpy as np
import torch

from fivefold.job.reading import read_job
from fivefold.launch.device import choose_backend
from fivefold.layout.layout import Layout
from fivefold.parallel.collectives import full_tensor
from fivefold.parallel.mesh import Mesh
from fivefold.trainer.engine import Engine
from fivefold.verifier.cases import make_batch
from tests.parallel.zero.world import each
from tests.ranks import run_ranks


def one_step(rank: int, world: int, text: str, staged: bool) -> tuple[float, dict[str, np.ndarray]]:
    small = ["model.layers=1", "model.hidden=16", "model.head_dim=4", "model.ffn=16", "model.vocab=17"]
    job = read_job(None, [*small, f"layout={text}", "data.seq=8", "train.batch=4", "train.dtype=float64"])
    mesh = Mesh.of(job.layout, torch.device("cpu"))
    if staged:
        mesh = replace(mesh, axes={name: replace(axis, staged=True) for name, axis in mesh.axes.items()})
    engine = Engine(job, mesh)
    loss = engine.forward_backward(make_batch(job, 0)).item()
    gradients = {name: full_tensor(gradient).numpy() for name, gradient in engine.gradients().items()}
    engine.step(1e-3, engine.gradient_norm())
    engine.weights.wait_params()
    weights = {f"new {name}": full_tensor(weight).numpy() for name, weight in engine.parameters().items()}
    return loss, gradients | weights


LAYOUTS = ["tp=2,sp", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "cp=2,cp_kind=allgather", "cp=2"]


def test_staging_changes_no_bit() -> None:
    for steps in run_ranks(2, each, one_step, [(text, staged) for text in LAYOUTS for staged in (False, True)]):
        for text, (loss, tensors), (other, others) in zip(LAYOUTS, steps[::2], steps[1::2], strict=True):
            assert loss == other, text
            assert all(np.array_equal(tensors[name], others[name]) for name in tensors), text
            assert len(tensors) == len(others) > 0


def test_cpus_talk_through_gloo() -> None:
    assert choose_backend(torch.device("cpu"), 8) == "gloo"


def test_a_mesh_of_one_rank_needs_no_process_group() -> None:
    mesh = Mesh.of(Layout(), torch.device("cpu"))
    assert not mesh.roots
    assert [mesh.tp.size, mesh.fsdp.size, mesh.world.size] == [1, 1, 1]
