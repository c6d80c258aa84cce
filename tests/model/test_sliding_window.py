"""Sliding windows and sinks against the definition, and caches against whole sequences.

test_experts_parity.py holds them against gpt-oss's own code.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from fivefold.generation.generator import LaterQueries
from fivefold.model.decoder import Decoder
from fivefold.model.kernels import Attend, by_definition
from fivefold.model.layers import TokenPositions
from fivefold.model.ops import LocalAttention, LocalOps
from fivefold.model.sliding_window import _MIN_STRIP
from fivefold.spec.presets import preset


def drawn(seq: int, heads: int = 6, kv: int = 2, rows: int = 2) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(seq)
    shapes = [(rows, heads, seq, 5), (rows, kv, seq, 5), (rows, kv, seq, 5), (heads,)]
    return [torch.randn(*shape, dtype=torch.float64, generator=numbers).requires_grad_() for shape in shapes]


def places(seq: int, documents: bool, rows: int = 2) -> TokenPositions:
    where = TokenPositions.of(torch.zeros(rows, seq, dtype=torch.int64))
    if not documents:
        return where
    cuts = np.random.default_rng(seq).random((rows, seq)) < 0.1
    return TokenPositions(where.position_ids, where.samples, seq, torch.from_numpy(cuts.cumsum(1)))


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize(("seq", "window"), [(19, 0), (19, 1), (19, 7), (19, 50), (2 * _MIN_STRIP + 13, 40)])
def test_windows_and_sinks_are_their_definition(seq: int, window: int, documents: bool) -> None:
    where, local = places(seq, documents), LocalAttention()
    q, k, v, sinks = drawn(seq)
    found = local.attend(q, k, v, local.attention_mask(where, window, sinks=True), sinks)
    wanted = by_definition(q, k, v, where.mask(window or seq), sinks)
    grad = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(1))
    assert (found - wanted).abs().max() < 1e-14
    both = [torch.autograd.grad(one, (q, k, v, sinks), grad) for one in (found, wanted)]
    for mine, theirs in zip(*both, strict=True):
        assert (mine - theirs).abs().max() < 1e-12 * theirs.abs().max()


def test_a_window_without_sinks() -> None:
    q, k, v, _ = drawn(9)
    where = places(9, documents=False)
    found = Attend.apply(q, k, v, LocalAttention().attention_mask(where, 3), None)
    assert (found - by_definition(q, k, v, where.mask(3))).abs().max() < 1e-14


@pytest.mark.parametrize("name", ["tiny-oss", "tiny-mla", "tiny"])
def test_a_cache_gives_what_the_whole_sequence_gives(name: str) -> None:
    spec, (prompt, more) = preset(name, layers=2), (13, 6)
    torch.manual_seed(0)
    model = Decoder(spec).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tokens = torch.randint(0, spec.vocab, (1, prompt + more))
    wanted = model(tokens)[0, prompt - 1 :]

    cached = Decoder(spec, ops=LocalOps(attention=LaterQueries())).double()
    cached.begin_text(prompt + more)
    cached.load_state_dict(model.state_dict())
    steps, found = [range(prompt), *(range(at, at + 1) for at in range(prompt, prompt + more))], []
    with torch.no_grad():
        for step in steps:
            ids = torch.arange(step.start, step.stop)[None]
            where = TokenPositions(ids, torch.zeros(1, dtype=torch.int64), prompt + more)
            found.append(cached(tokens[:, step.start : step.stop], where)[0, -1])
    assert (torch.stack(found) - wanted).abs().max() < 1e-12
    kept = [sum(x[0, :, 0].numel() for x in layer.tensors) for layer in cached.caches]  # numbers a token
    if spec.mla:
        assert kept == [spec.mla.kv_rank + spec.mla.rope_dim] * 2
    if spec.window:
        assert [layer.tensors[0].shape[2] for layer in cached.caches] == [spec.window - 1, prompt + more]
