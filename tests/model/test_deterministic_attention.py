"""Which tiles of the scores repeatable attention looks at; what it computes is tested where there is a GPU."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from fivefold.model import kernels as repeatable
from fivefold.model import recompute
from fivefold.model.layers import TokenPositions
from fivefold.model.ops import LocalOps


@pytest.mark.parametrize("length", [128, 640])
def test_the_tiles_are_those_that_pytorch_finds_by_looking_at_every_score(length: int) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    ours = repeatable.causal_tiles(torch.device("cpu"), length).mask
    theirs = create_block_mask(repeatable._causal, None, None, length, length, device="cpu")
    assert ours.shape == theirs.shape
    for whole in ("", "full_"):
        for side in ("kv", "q"):
            counts = getattr(ours, f"{whole}{side}_num_blocks")
            assert torch.equal(counts, getattr(theirs, f"{whole}{side}_num_blocks"))
            mine, other = (getattr(mask, f"{whole}{side}_indices") for mask in (ours, theirs))
            for row, count in enumerate(counts.flatten().tolist()):  # beyond the count they may say anything
                assert mine[0, 0, row, :count].tolist() == other[0, 0, row, :count].tolist()


def test_a_cpu_has_no_tiles() -> None:
    """Its kernels have a fixed order of their own."""
    assert LocalOps().attention_mask(TokenPositions.of(torch.zeros(2, 128, dtype=torch.int64))) is None


@pytest.mark.parametrize(
    ("shape", "dtype", "tiled"),
    [
        ((2, 4, 256, 64), torch.bfloat16, True),
        ((2, 4, 256, 64), torch.float32, False),
        ((2, 4, 256, 32), torch.bfloat16, False),
        ((2, 4, 128, 64), torch.bfloat16, False),  # not the rows that the tiles are of
    ],
)
def test_a_compiled_block_takes_flex_attention_for_what_it_knows(
    shape: tuple[int, ...], dtype: torch.dtype, tiled: bool
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def look(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    sight = repeatable.causal_tiles(torch.device("cpu"), 256)
    q = torch.zeros(shape, dtype=dtype)
    kv = torch.zeros(shape[0], 2, *shape[2:], dtype=dtype)
    with torch.no_grad():  # a CPU's kernel has no backward pass
        torch.compile(LocalOps().attend, backend=look)(q, kv, kv, sight)
    called = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert any("flex_attention" in name for name in called) == tiled
    assert any("scaled_dot_product" in name for name in called) != tiled


def test_selective_recompute_keeps_what_flex_attention_gives() -> None:
    policy = recompute._graph_policy(None, torch.ops.higher_order.flex_attention)
    assert policy == CheckpointPolicy.MUST_SAVE
