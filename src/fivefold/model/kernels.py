"""Attention kernels that return the output and the log-sum-exp (LSE) of the scores, and their backward passes.

With the LSE, parts of a row of scores can be computed separately and merged. The kernels by device and dtype:

cpu                 aten's flash kernel for CPUs; spans one by one
cuda, 16 bits       flash attention; all spans at once, by its variable-length form
cuda, 32, 64 bits   plain matmuls with all scores in memory: the flash kernel does not support these dtypes

All support fewer kv heads than heads. Causal tiles are square: for others the kernels disagree about the diagonal.
Shapes: B batch, H heads, K kv heads, Sq queries, Sk keys, D head dim.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fivefold.model.layers import TokenPositions, accum_dtype
from fivefold.model.masks import Attended, DocumentMask, PackedSpans, causal_spans, check_runs
from fivefold.model.recompute import save_output
from fivefold.model.sliding_window import WindowMask, window_backward, window_forward

_aten = torch.ops.aten
HALF_DTYPES = (torch.bfloat16, torch.float16)


TileMask = DocumentMask | WindowMask | None  # which queries of a tile see which keys; None: all that causality allows


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: TileMask = None) -> tuple[Tensor, Tensor]:
    """q [B, H, Sq, D], k and v [B, K, Sk, D] -> output [B, H, Sq, D], LSE [B, H, Sq].

    Queries outside of all spans of a mask see no keys: their output is 0 and their LSE -inf.
    """
    if mask is None:
        return _forward(q, k, v, causal)
    if isinstance(mask, WindowMask):
        return window_forward(q, k, v, mask)
    if takes_flash(q):
        return _packed_forward(q, k, v, causal, mask)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full(q.shape[:-1], -math.inf, dtype=accum_dtype(q.dtype))
    for row, queries, keys in mask.spans:
        at_q, at_k = (slice(row, row + 1), slice(None), queries), (slice(row, row + 1), slice(None), keys)
        out[at_q], lse[at_q] = _forward(q[at_q], k[at_k], v[at_k], causal)
    return out, lse


def backward(grad: Tensor, of: Attended, causal: bool, mask: TileMask = None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    if mask is None:
        return _backward(grad, of, causal)
    if isinstance(mask, WindowMask):
        return window_backward(grad, of, mask)
    if takes_flash(of.q):
        return _packed_backward(grad, of, causal, mask)
    q, k, v, out, lse = of
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for row, queries, keys in mask.spans:
        at_q, at_k = (slice(row, row + 1), slice(None), queries), (slice(row, row + 1), slice(None), keys)
        span = Attended(q[at_q], k[at_k], v[at_k], out[at_q], lse[at_q])
        grads = _backward(grad[at_q], span, causal)
        dq[at_q], dk[at_k], dv[at_k] = grads  # no two spans share a query or a key
    return dq, dk, dv


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge the result over other keys into out and lse, in place; these two are in the accumulate dtype.

    A row without keys on both sides (LSE -inf) is unchanged.
    """
    total = torch.logaddexp(lse, new_lse)
    weight = torch.exp(new_lse - total.masked_fill(total == -math.inf, 0.0))  # -inf - -inf would be NaN
    out.lerp_(new_out.to(out.dtype), weight[..., None])
    lse.copy_(total)


# ---- sinks ----------------------------------------------------------------------------------------------------------


def sink_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Add one logit for each head [H] to full rows of scores, in place; its value vector is zero (gpt-oss).

    Once, after all parts of a row are merged. Backward takes the resulting output and LSE.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    out.mul_(torch.exp(lse - total)[..., None])
    lse.copy_(total)


def sink_grad(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sinks, [H]; `out` and `lse` include the sinks."""
    share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    return -(share * (grad * out).sum(-1, dtype=lse.dtype)).sum((0, 2)).to(sinks.dtype)


class Attend(torch.autograd.Function):
    """Causal attention of full rows by the kernels of this file: within a window, with sinks, or both."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, sinks: Tensor | None) -> Tensor:
        def compute() -> tuple[Tensor, ...]:
            out, lse = forward(q, k, v, causal=True, mask=mask)
            if sinks is not None:
                sink_(out, lse, sinks)
            return out, lse

        out, lse = save_output(compute, 2, q)
        ctx.save_for_backward(q, k, v, out, lse, *([] if sinks is None else [sinks]))
        ctx.mask = mask
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *sinks = ctx.saved_tensors
        grads = backward(grad, Attended(q, k, v, out, lse), causal=True, mask=ctx.mask)
        return *grads, None, sink_grad(grad, out, lse, *sinks) if sinks else None


def by_definition(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Softmax over all scores under PyTorch's autograd: the reference for tests. `seen`: bool [.., 1, Sq, Sk]."""
    dtype = accum_dtype(q.dtype)
    copies = q.shape[1] // k.shape[1]
    k, v = (x[:, :, None].expand(-1, -1, copies, -1, -1).flatten(1, 2).to(dtype) for x in (k, v))
    scores = (q.to(dtype) @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -math.inf)
    if sinks is not None:
        logits = sinks.to(dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        return (torch.cat((scores, logits), dim=-1).softmax(-1)[..., :-1] @ v).to(q.dtype)
    return (scores.softmax(-1) @ v).to(q.dtype)


# ---- whole tiles ---------------------------------------------------------------------------------------------------


def flash_supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether flash attention on a GPU is for tensors of this device and dtype."""
    return device.type == "cuda" and dtype in HALF_DTYPES


def takes_flash(q: Tensor) -> bool:
    return flash_supports(q.device, q.dtype)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    if takes_flash(q):
        width = q.shape[-1]
        q, k, v = (_to_eights(x) for x in (q, k, v))
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=width**-0.5)
        return out[..., :width], lse
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return products(q, k, v, causal)


def _backward(grad: Tensor, of: Attended, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = of
    if takes_flash(q):
        width = q.shape[-1]
        grad, q, k, v, out = (_to_eights(x) for x in (grad, q, k, v, out))
        rows, bounds = lse.contiguous(), (None, None, q.shape[2], k.shape[2])  # the kernel reads LSE as if contiguous
        op = _aten._scaled_dot_product_flash_attention_backward
        grads = op(grad, q, k, v, out, rows, *bounds, 0.0, causal, *_no_dropout(q), scale=width**-0.5)
        dq, dk, dv = (x[..., :width] for x in grads)
        return dq, dk, dv
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    return products_backward(grad, of, causal)


def _to_eights(x: Tensor) -> Tensor:
    """Pad the head dim to a multiple of 8, as flash attention requires; zeros change no score."""
    return F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """The random state arguments of backward, which are not read without dropout."""
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return state, state[0]


# ---- spans, packed for flash attention -----------------------------------------------------------------------------


def document_spans(positions: TokenPositions) -> DocumentMask:
    """The document mask of full rows."""
    documents = positions.host_documents()
    assert documents is not None
    check_runs(documents)
    return causal_spans(documents, positions.position_ids.device)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, packed: PackedSpans) -> Tensor:
    """Causal attention within spans that cover every row, under PyTorch's autograd. 16 bits, CUDA."""
    width = q.shape[-1]
    assert packed.query_index is None
    assert packed.key_index is None
    flat = (_to_eights(_pack(x, None)) for x in (q, k, v))
    bounds = (packed.cu_seqlens_q, packed.cu_seqlens_k, packed.max_seqlen_q, packed.max_seqlen_k)
    out = _aten._flash_attention_forward(*flat, *bounds, 0.0, True, False, scale=width**-0.5)[0]
    return out[..., :width].unflatten(0, (q.shape[0], -1)).transpose(1, 2)


def _packed_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: DocumentMask) -> tuple[Tensor, Tensor]:
    packed, (batch, heads, seq, width) = mask.packed, q.shape
    indices = (packed.query_index, packed.key_index, packed.key_index)
    flat = (_to_eights(_pack(x, index)) for x, index in zip((q, k, v), indices, strict=True))
    bounds = (packed.cu_seqlens_q, packed.cu_seqlens_k, packed.max_seqlen_q, packed.max_seqlen_k)
    packed_out, packed_lse, *_ = _aten._flash_attention_forward(*flat, *bounds, 0.0, causal, False, scale=width**-0.5)
    out = _unpack(packed_out[..., :width], packed.query_index, batch, seq)
    if packed.query_index is None:
        lse = packed_lse
    else:
        lse = packed_lse.new_full((heads, batch * seq), -math.inf)
        lse[:, packed.query_index] = packed_lse
    return out, lse.unflatten(1, (batch, seq)).transpose(0, 1)


def _packed_backward(grad: Tensor, of: Attended, causal: bool, mask: DocumentMask) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = of
    packed, batch, width = mask.packed, q.shape[0], q.shape[-1]
    queries, keys = packed.query_index, packed.key_index
    indices = (queries, queries, keys, keys, queries)
    flat = [_to_eights(_pack(x, index)) for x, index in zip((grad, q, k, v, out), indices, strict=True)]
    rows = lse.transpose(0, 1).flatten(1)  # [H, B * Sq]
    rows = (rows if queries is None else rows[:, queries]).contiguous()
    bounds = (packed.cu_seqlens_q, packed.cu_seqlens_k, packed.max_seqlen_q, packed.max_seqlen_k)
    grads = _aten._flash_attention_backward(*flat, rows, *bounds, 0.0, causal, *_no_dropout(q), scale=width**-0.5)
    dq, dk, dv = (
        _unpack(part[..., :width], index, batch, x.shape[2])
        for part, index, x in zip(grads, (queries, keys, keys), (q, k, v), strict=True)
    )
    return dq, dk, dv


def _pack(x: Tensor, index: Tensor | None) -> Tensor:
    """[B, H, S, D] -> [rows, H, D]"""
    flat = x.transpose(1, 2).flatten(0, 1)
    return flat if index is None else flat[index]


def _unpack(x: Tensor, index: Tensor | None, batch: int, seq: int) -> Tensor:
    """[rows, H, D] -> [B, H, S, D], zero where no row is."""
    if index is not None:
        x = x.new_zeros(batch * seq, *x.shape[1:]).index_copy_(0, index, x)
    return x.unflatten(0, (batch, seq)).transpose(1, 2)


# ---- plain matmuls --------------------------------------------------------------------------------------------------


def products(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention by plain matmuls, with all scores in memory."""
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(-1)
    out = torch.exp(scores - lse[..., None]) @ v[:, :, None]
    return out.flatten(1, 2), lse.flatten(1, 2)


def products_backward(grad: Tensor, of: Attended, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = of
    groups, scale = (k.shape[1], -1), q.shape[-1] ** -0.5
    grad, grouped_q, out, rows = (x.unflatten(1, groups) for x in (grad, q, out, lse))  # [B, K, H/K, Sq, ...]
    p = torch.exp(_scores(q, k, causal) - rows[..., None])
    ds = p * (grad @ v[:, :, None].mT - (grad * out).sum(-1, keepdim=True)) * scale
    return (ds @ k[:, :, None]).flatten(1, 2), (ds.mT @ grouped_q).sum(2), (p.mT @ grad).sum(2)


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """[B, K, H/K, Sq, Sk]"""
    scores = q.unflatten(1, (k.shape[1], -1)) @ k[:, :, None].mT * q.shape[-1] ** -0.5
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores


# ---- deterministic attention ----------------------------------------------------------------------------------------
# Causal attention that gives the same bits every time, on a GPU: FlexAttention's kernels, inside a compiled block.
#
# cuDNN's backward pass, the fastest, accumulates in no fixed order; flash attention 2's takes more than twice as long
# in its deterministic mode. FlexAttention is deterministic by construction, at a speed in between (docs/speed.md).


_TILE = 128  # side of a tile
_HEAD_DIMS = (64, 128)  # for which there are tuned kernels


@dataclass(frozen=True)
class Tiles:
    """The tiles of a full row's scores that are computed."""

    length: int
    mask: Any  # a BlockMask; its module imports the compiler, so it is imported late


def uses_deterministic_tiles(device: torch.device, length: int) -> bool:
    """Whether rows of this length are computed in tiles: in deterministic mode, if whole tiles cover them."""
    return device.type == "cuda" and length % _TILE == 0 and torch.are_deterministic_algorithms_enabled()


@lru_cache(maxsize=4)
def causal_tiles(device: torch.device, length: int) -> Tiles:
    """Full tiles below the diagonal, partial ones on it. Built by tile: a mask of all scores would take gigabytes."""
    from torch.nn.attention.flex_attention import BlockMask

    tiles = torch.arange(length // _TILE, dtype=torch.int32, device=device)
    columns = tiles.expand(1, 1, len(tiles), -1).contiguous()
    # In each row of tiles one is partial, that on the diagonal: listed first, with a count of one.
    partial, from_diagonal = torch.ones_like(tiles)[None, None], (columns + tiles[:, None]) % len(tiles)
    mask = BlockMask.from_kv_blocks(partial, from_diagonal, tiles[None, None], columns, _TILE, _causal)
    return Tiles(length, mask)


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def fit_tiles(q: Tensor, tiles: Tiles) -> bool:
    """Whether `attend_tiles` supports q. Outside of a compiled block FlexAttention would materialise all scores."""
    known = q.dtype in HALF_DTYPES and q.shape[-1] in _HEAD_DIMS and q.shape[2] == tiles.length
    return known and torch.compiler.is_compiling()


def attend_tiles(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> Tensor:
    """q [B, H, S, D], k and v [B, K, S, D] -> [B, H, S, D]"""
    from torch.nn.attention.flex_attention import flex_attention

    out = flex_attention(q, k, v, block_mask=tiles.mask, enable_gqa=k.shape[1] < q.shape[1])
    assert isinstance(out, Tensor)
    return out
