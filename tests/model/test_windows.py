"""Sliding windows and sinks against the definition and gpt-oss's own attention; caches against whole sequences."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss import modeling_gpt_oss

from fivefold.generate.generator import Cache
from fivefold.model import rope
from fivefold.model.attention import Attend, by_definition
from fivefold.model.bands import _STRIP
from fivefold.model.decoder import Decoder
from fivefold.model.ops import LocalAttention, LocalOps
from fivefold.model.positions import TokenPositions
from fivefold.model.self_attention import Attention
from fivefold.spec.hf_attention import read_rope
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import preset
from fivefold.support.reading import read


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
@pytest.mark.parametrize(("seq", "window"), [(19, 0), (19, 1), (19, 7), (19, 50), (2 * _STRIP + 13, 40)])
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
    found = Attend.apply(q, k, v, None, LocalAttention().attention_mask(where, 3))
    assert (found - by_definition(q, k, v, where.mask(3))).abs().max() < 1e-14


@pytest.mark.parametrize("layer", [0, 1], ids=["window", "all"])
def test_attention_equals_gpt_oss(layer: int, monkeypatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    torch.manual_seed(layer)
    config = GptOssConfig(
        num_hidden_layers=2, hidden_size=30, num_attention_heads=6, num_key_value_heads=2, head_dim=10,
        sliding_window=4, num_local_experts=2, attn_implementation="eager",
    )  # fmt: skip
    theirs = modeling_gpt_oss.GptOssAttention(config, layer).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
    problems: list[str] = []
    numbers = {"layers": 2, "hidden": 30, "heads": 6, "kv_heads": 2, "head_dim": 10, "vocab": 9, "bias": True}
    spec = read(ModelSpec, numbers | read_rope(config.to_dict()), "model", problems)
    assert spec is not None, problems
    kinds = config.layer_types
    assert [kinds[0], kinds[1]] == ["sliding_attention", "full_attention"]
    spec = ModelSpec(**{f: getattr(spec, f) for f in spec.__struct_fields__} | _OSS)
    ours = Attention(spec, LocalOps(), spec.window_of(layer)).double()
    ours.load_state_dict({name.replace("_proj", ""): value for name, value in theirs.state_dict().items()})

    x = torch.randn(2, 11, 30, dtype=torch.float64, requires_grad=True)
    cos, sin = rope.tables(spec, 11).expand(2, -1, -1, -1).unbind(2)
    where = TokenPositions.of(torch.zeros(2, 11, dtype=torch.int64))
    seen = where.mask(spec.window_of(layer) or 11)
    blind = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    wanted, _ = theirs(x, (cos, sin), blind)
    found = ours(x, (cos[:, None], sin[:, None]), LocalOps().attention_mask(where, spec.window_of(layer), sinks=True))
    assert (found - wanted).abs().max() < 1e-12 * wanted.abs().max()
    grad = torch.randn_like(found)
    mine = torch.autograd.grad(found, (x, *ours.parameters()), grad)
    names = [name.replace(".", "_proj.") if "." in name else name for name, _ in ours.named_parameters()]
    of_theirs = dict(theirs.named_parameters())
    for a, b in zip(mine, torch.autograd.grad(wanted, (x, *map(of_theirs.get, names)), grad), strict=True):
        assert (a - b).abs().max() < 1e-11 * grad.abs().max() * x.abs().max()


_OSS = {"sinks": True, "window": 4, "window_period": 2}


@pytest.mark.parametrize("name", ["tiny-oss", "tiny-mla", "tiny"])
def test_a_cache_gives_what_the_whole_sequence_gives(name: str) -> None:
    spec, (prompt, more) = preset(name, layers=2), (13, 6)
    torch.manual_seed(0)
    model = Decoder(spec).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tokens = torch.randint(0, spec.vocab, (1, prompt + more))
    wanted = model(tokens)[0, prompt - 1 :]

    cache = Cache(prompt + more)
    cached = Decoder(spec, ops=LocalOps(attention=cache)).double()
    cached.load_state_dict(model.state_dict())
    steps, found = [range(prompt), *(range(at, at + 1) for at in range(prompt, prompt + more))], []
    with torch.no_grad():
        for step in steps:
            ids = torch.arange(step.start, step.stop)[None]
            where = TokenPositions(ids, torch.zeros(1, dtype=torch.int64), prompt + more)
            found.append(cached(tokens[:, step.start : step.stop], where)[0, -1])
    assert (torch.stack(found) - wanted).abs().max() < 1e-12
    kept = [sum(x[0, :, 0].numel() for x in layer) for layer in cache.kept]  # numbers a token
    if spec.mla:
        assert kept == [spec.mla.kv_rank + spec.mla.rope_dim] * 2
    if spec.window:
        assert [layer[0].shape[2] for layer in cache.kept] == [spec.window - 1, prompt + more]
