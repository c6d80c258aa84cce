"""Which tiles of the scores repeatable attention looks at; what it computes is tested where there is a GPU."""

import pytest
import torch

from fivefold.model import tiles
from fivefold.model.local import Local
from fivefold.model.place import Place


@pytest.mark.parametrize("length", [128, 640])
def test_the_tiles_are_those_that_pytorch_finds_by_looking_at_every_score(length: int) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    ours = tiles.causal(torch.device("cpu"), length).mask
    theirs = create_block_mask(tiles._sees, None, None, length, length, device="cpu")
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
    assert Local().sight(Place.of(torch.zeros(2, 128, dtype=torch.int64))) is None
