"""Compiled blocks under tensor parallelism: the numbers of eager ones, and one graph however many layers there are."""

import torch

from fivefold.layout import Layout
from fivefold.model import compiled
from fivefold.model.decoder import Decoder
from fivefold.model.head import Aim
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.verbs import verbs_of
from fivefold.presets import preset
from tests.ranks import run_ranks


def graphs(rank: int, world: int, layers: int) -> tuple[int, dict[str, int], float, float]:
    """Graphs and breaks of a compiled decoder, and its loss beside that of an eager one with the same weights."""
    compiled.BACKEND = "aot_eager"
    spec, layout = preset("tiny", layers=layers), Layout(tp=world, sp=True)
    mesh = Mesh.of(layout, torch.device("cpu"))
    tokens = torch.arange(64).reshape(2, 32) % spec.vocab
    aim = Aim(tokens.roll(-1, 1), torch.ones_like(tokens, dtype=torch.bool))
    losses = []
    for quick in (False, True):
        verbs = verbs_of(spec, mesh)
        verbs.compiled = quick
        with torch.device("meta"):
            model = Decoder(spec, verbs=verbs, compile=quick)
        verbs.adopt(model)
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter.to_local(), std=0.02)  # type: ignore[operator]
        loss = model(tokens, aim=aim)
        loss.backward()
        losses.append(loss.item())
    return (*compiled.compilation(), *losses)


def test_layers_share_a_graph() -> None:
    for layers in (2, 9):
        for made, breaks, eager, quick in run_ranks(2, graphs, layers):
            assert (made, breaks) == (3, {})
            assert abs(eager - quick) < 1e-4 * eager
