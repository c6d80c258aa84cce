"""Context parallelism: every sequence is sharded over the cp ranks, with one of three kinds of attention.

ring        keys and values go around the ranks        zigzag shares
allgather   every rank gathers all keys and values     zigzag shares
ulysses     all-to-alls swap tokens for heads          contiguous shares

Which positions a rank holds is in `layout/context_split.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.data.batch import Batch
from fivefold.layout.context_split import context_share
from fivefold.layout.layout import Layout
from fivefold.model import kernels
from fivefold.model.layers import TokenPositions, accum_dtype
from fivefold.model.masks import Attended, Documents, causal_spans, check_runs, full_spans
from fivefold.model.ops import LocalAttention
from fivefold.model.recompute import save_output
from fivefold.model.sliding_window import WindowMask
from fivefold.parallel.collectives import RingExchange, all_gather, all_to_all, reduce_scatter, wait
from fivefold.parallel.mesh import Axis, Mesh

# ---- tiles ----------------------------------------------------------------------------------------------------------
# Tiles: the blocks of the causal score matrix that each rank of a zigzag computes. Pure arithmetic.
#
# A row of S tokens is cut into 2c pieces; rank r of c holds pieces r and 2c-1-r, in that order, so that places within
# its share ascend with the positions. Of the keys of each rank it needs
#
#     an earlier rank's   the early piece, for all queries; the late piece is in the future
#     a later rank's      both pieces, for the late queries; the early queries come before both
#     its own             the lower triangle
#
# Each of the first two is half a square and one kernel call, so all ranks do the same work in every step.


@dataclass(frozen=True)
class Tile:
    queries: range  # places in this rank's share
    keys: range  # places in the given keys
    causal: bool = False  # a square, of which only the lower triangle counts; else all of it

    @property
    def scores(self) -> int:
        n = len(self.queries)
        return n * (n + 1) // 2 if self.causal else n * len(self.keys)


def own_tile(share: int) -> Tile:
    return Tile(range(share), range(share), causal=True)


def ring_tile(rank: int, source: int, share: int) -> Tile:
    """The tile of `rank`'s queries and the `share` keys of `source`; keys are places in that share."""
    if source == rank:
        return own_tile(share)
    half = share // 2
    if source < rank:
        return Tile(range(share), range(half))
    return Tile(range(half, share), range(share))


def gathered_tiles(rank: int, ranks: int, share: int) -> list[Tile]:
    """The tiles of `rank` beside its own, if all keys are gathered; keys are positions.

    One tile for the keys of all earlier ranks, and one for those of all later ranks: both are contiguous.
    """
    half = share // 2
    before = Tile(range(share), range(rank * half))
    between = Tile(range(half, share), range((rank + 1) * half, (2 * ranks - 1 - rank) * half))
    return [tile for tile in (before, between) if tile.keys]


# ---- masked tiles ---------------------------------------------------------------------------------------------------
# Tiles with a mask for documents or a sliding window, and how their results are merged.


class Places(NamedTuple):
    """The positions of tokens [S], ascending, and their documents [B, S]."""

    positions: NDArray[np.int64]
    documents: Documents | None

    def at(self, places: NDArray[np.int64] | slice) -> "Places":
        return Places(self.positions[places], None if self.documents is None else self.documents[:, places])

    def part(self, places: range) -> "Places":
        return self.at(slice(places.start, places.stop))


@dataclass(frozen=True)
class MaskedTile:
    tile: Tile
    mask: kernels.TileMask = None  # None: no document ends in the tile

    @classmethod
    def within(
        cls, tile: Tile, queries: Places, keys: Places, window: int, device: torch.device
    ) -> "MaskedTile | None":
        """The part of a tile within a sliding window; None: nothing."""
        q_tokens, k_tokens = queries.part(tile.queries), keys.part(tile.keys)
        q_documents, k_documents = q_tokens.documents, k_tokens.documents
        documents = None if q_documents is None or k_documents is None else (q_documents, k_documents)
        mask = WindowMask.of(q_tokens.positions, k_tokens.positions, documents, window, device)
        return cls(tile, mask) if mask.bands else None

    @classmethod
    def of(cls, tile: Tile, queries: Places, keys: Places, device: torch.device) -> "MaskedTile | None":
        """The part of a tile within documents; None: nothing. `queries` and `keys` are this rank's tokens and those of
        the given keys.

        If documents are short, a rank computes less, and not all ranks the same amount.
        """
        q_documents, k_documents = queries.part(tile.queries).documents, keys.part(tile.keys).documents
        assert q_documents is not None
        assert k_documents is not None
        mask = causal_spans(q_documents, device) if tile.causal else full_spans(q_documents, k_documents, device)
        if not mask.spans:
            return None
        full_tile = (slice(0, len(tile.queries)), slice(0, len(tile.keys)))
        if len(mask.spans) == len(q_documents) and all(span[1:] == full_tile for span in mask.spans):
            return cls(tile)
        return cls(tile, mask)


MaskedTiles = list[MaskedTile | None]


@dataclass(eq=False)
class PartsMask:
    """Which keys a rank's tokens see, tile by tile. To a compiled graph this object is opaque. It would guard on the
    elements of a list (with PyTorch 2.11 also of a frozen dataclass), and recompile whenever another tile is empty."""

    tiles: MaskedTiles


class OnlineSoftmax:
    """Running output [B, H, S/c, D] and log-sum-exp [B, H, S/c] over the keys so far, in the accumulate dtype."""

    def __init__(self, q: Tensor):
        self.q, dtype = q, accum_dtype(q.dtype)
        self.out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        self.lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)

    def add(self, masked: MaskedTile | None, kv: Tensor) -> None:
        """Merge the attention of the tile's queries over keys and values [2, B, K, keys, D]."""
        if masked is None:
            return
        tile = masked.tile
        q, (k, v) = _part(self.q, tile.queries), _part(kv, tile.keys)
        out, lse = (_part(x, tile.queries) for x in (self.out, self.lse))
        kernels.merge_(out, lse, *kernels.forward(q, k, v, tile.causal, masked.mask))

    def finish(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output and LSE over all keys."""
        if sinks is not None:
            kernels.sink_(self.out, self.lse, sinks)
        return self.out.to(self.q.dtype), self.lse


Forward = Callable[[Tensor, Tensor, Tensor, MaskedTiles, Axis], OnlineSoftmax]


class AttentionGrads:
    """The backward pass of `OnlineSoftmax`: gradients of q and of the sinks, accumulated tile by tile."""

    def __init__(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None):
        self.saved = (grad, q, out, lse)
        self.dq = torch.zeros(q.shape, dtype=accum_dtype(q.dtype), device=q.device)
        self.dsinks = None if sinks is None else kernels.sink_grad(grad, out, lse, sinks)

    def zeros(self, kv: Tensor) -> Tensor:
        """A buffer for the gradient of keys and values, in the accumulate dtype."""
        return torch.zeros(kv.shape, dtype=self.dq.dtype, device=kv.device)

    def add(self, masked: MaskedTile | None, kv: Tensor, kv_grad: Tensor) -> None:
        """Add a tile's gradients to that of q, and to that of these keys and values; both in the accumulate dtype."""
        if masked is None:
            return
        tile = masked.tile
        (grad, q, out, lse), (k, v) = (_part(x, tile.queries) for x in self.saved), _part(kv, tile.keys)
        dq, dk, dv = kernels.backward(grad, Attended(q, k, v, out, lse), tile.causal, masked.mask)
        _part(self.dq, tile.queries).add_(dq)
        for total, part in zip(_part(kv_grad, tile.keys), (dk, dv), strict=True):
            total.add_(part)

    def finish(self, kv_grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that `backward` of the functions below returns: of q, k, v, sinks, tiles and axis."""
        dtype = self.saved[1].dtype
        dk, dv = kv_grad.to(dtype)
        return self.dq.to(dtype), dk, dv, self.dsinks, None, None


def forward_and_save(
    ctx: Any, forward: Forward, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, tiles: MaskedTiles, axis: Axis
) -> Tensor:
    """The forward pass of an autograd function: run `forward`, and save the output and LSE for backward."""
    out, lse = save_output(lambda: forward(q, k, v, tiles, axis).finish(sinks), 2, q)
    ctx.save_for_backward(q, k, v, sinks, out, lse)
    ctx.tiles, ctx.axis = tiles, axis
    return out


def start_backward(ctx: Any, grad: Tensor) -> tuple[AttentionGrads, Tensor, MaskedTiles, Axis]:
    """What `forward_and_save` saved: zero gradients, this rank's keys and values, its tiles, the axis."""
    q, k, v, sinks, out, lse = ctx.saved_tensors
    return AttentionGrads(grad, q, out, lse, sinks), torch.stack((k, v)), ctx.tiles, ctx.axis


def _part(x: Tensor, places: range) -> Tensor:
    """A slice along the sequence of [B, heads, S, D], [B, heads, S] or [2, B, heads, S, D]."""
    dim = 2 if x.ndim < 5 else 3
    return x.narrow(dim, places.start, len(places))


# ---- allgather ------------------------------------------------------------------------------------------------------
# All-gather attention (Llama 3's, arXiv 2407.21783, section 3.3.2): every rank gets all keys and values at once.
#
# Shares are a zigzag, for balance. A rank's own tile overlaps with the all-gather; the rest is two rectangles. Only the
# rank's own keys and values are saved for backward, which gathers again.
#
# What a rank passes in, for a layer and a microbatch of B rows of S tokens, K kv heads (of this tp rank) of D:
#
#     forward    1 all-gather     2 B K S/c D elements, in the compute dtype
#     backward   1 all-gather     2 B K S/c D elements, in the compute dtype
#                1 reduce-scatter 2 B K S D   elements, in the accumulate dtype (float32, or float64)
#
# Full recompute gathers once more; selective recompute keeps output and LSE, and does not.


def by_position(shares: Tensor, ranks: int) -> Tensor:
    """Keys and values by rank -> by position: [c * 2, B, K, S/c, D] -> [2, B, K, S, D]."""
    early, late = shares.unflatten(0, (ranks, 2)).chunk(2, dim=-2)
    return torch.cat((*early, *late.flip(0)), dim=-2)


def by_rank(rows: Tensor, ranks: int) -> Tensor:
    """The inverse: [2, B, K, S, D] -> [c * 2, B, K, S/c, D]."""
    early, late = rows.unflatten(-2, (2, ranks, -1)).unbind(-4)  # [2, B, K, c, S/2c, D]
    return torch.cat((early, late.flip(-3)), dim=-2).movedim(-3, 0).flatten(0, 1)


def _allgather_forward(q: Tensor, k: Tensor, v: Tensor, tiles: MaskedTiles, axis: Axis) -> OnlineSoftmax:
    softmax, kv = OnlineSoftmax(q), torch.stack((k, v))
    gathering = all_gather(kv, axis)
    softmax.add(tiles[0], kv)
    all_kv = by_position(wait(gathering, axis), axis.size)
    for masked in tiles[1:]:
        softmax.add(masked, all_kv)
    return softmax


class AllGatherAttention(torch.autograd.Function):
    """q [B, H, S/c, D], k and v [B, K, S/c, D] -> [B, H, S/c, D]. `tiles`: the own tile, then those of all keys."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, tiles: MaskedTiles, axis: Axis
    ) -> Tensor:
        return forward_and_save(ctx, _allgather_forward, q, k, v, sinks, tiles, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads, kv, tiles, axis = start_backward(ctx, grad)
        gathering = all_gather(kv, axis)
        own_grad = grads.zeros(kv)
        grads.add(tiles[0], kv, own_grad)
        all_kv = by_position(wait(gathering, axis), axis.size)
        all_grad = grads.zeros(all_kv)
        for masked in tiles[1:]:
            grads.add(masked, all_kv, all_grad)
        return grads.finish(wait(reduce_scatter(by_rank(all_grad, axis.size), axis), axis) + own_grad)


# ---- ring -----------------------------------------------------------------------------------------------------------
# Ring attention: keys and values go around the ranks, and each rank merges the attention of its queries over them.
#
# In each of c steps a rank computes with the keys of one rank, while it sends them to the next. Backward goes around
# again; the gradient of the keys and values follows one step behind, and the last step returns it to their owner.
#
# Payload of a rank, for a layer and a microbatch of B rows of S tokens, K kv heads (of this tp rank) of D:
#
#     forward    c-1 sends of 2 B K S/c D elements, in the compute dtype
#     backward   c-1 sends of 2 B K S/c D elements, in the compute dtype
#                c   sends of 2 B K S/c D elements, in the accumulate dtype (float32, or float64)
#
# and as many receives. Full recompute sends forward's again; selective recompute keeps output and LSE, and sends
# nothing.


def _ring_forward(q: Tensor, k: Tensor, v: Tensor, tiles: MaskedTiles, axis: Axis) -> OnlineSoftmax:
    softmax, kv = OnlineSoftmax(q), torch.stack((k, v))
    for masked in tiles[:-1]:
        next_kv = RingExchange(kv, axis)
        softmax.add(masked, kv)
        kv = next_kv.wait()
    softmax.add(tiles[-1], kv)
    return softmax


class RingAttention(torch.autograd.Function):
    """q [B, H, S/c, D], k and v [B, K, S/c, D] -> [B, H, S/c, D]. `tiles` are in the order of the steps."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, tiles: MaskedTiles, axis: Axis
    ) -> Tensor:
        return forward_and_save(ctx, _ring_forward, q, k, v, sinks, tiles, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads, kv, tiles, axis = start_backward(ctx, grad)
        earlier_grad: RingExchange | None = None  # the gradient of these keys and values from the previous ranks
        for step, masked in enumerate(tiles):
            next_kv = RingExchange(kv, axis) if step < len(tiles) - 1 else None
            kv_grad = grads.zeros(kv)
            grads.add(masked, kv, kv_grad)
            if earlier_grad is not None:
                kv_grad += earlier_grad.wait()
            earlier_grad = RingExchange(kv_grad, axis)
            if next_kv is not None:
                kv = next_kv.wait()
        assert earlier_grad is not None
        return grads.finish(earlier_grad.wait())


# ---- ulysses --------------------------------------------------------------------------------------------------------
# Ulysses (arXiv 2309.14509): all-to-alls swap tokens for heads, so each rank has whole rows, of its heads only.
#
# If c does not divide the kv heads, they are repeated to the least common multiple L of K and c; the copies' gradients
# add up. Then attention is that of one device.
#
# Payload of a rank, for a layer and a microbatch of B rows of S tokens, H heads and K kv heads (of this tp rank) of D,
# in the compute dtype:
#
#     forward    1 all-to-all of B (H + 2 L) S/c D elements, 1 of B H S/c D
#     backward   the same two, the latter first
#
# Of each, a rank keeps 1/c for itself. Full recompute repeats the forward's two; selective recompute keeps the received
# tensors, and sends nothing.


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, axis: Axis, sinks: Tensor | None = None) -> Tensor:
    """q [B, H, S/c, D], k and v [B, K, S/c, D], sinks [H] -> [B, H, S/c, D].

    `mask` is that of `LocalAttention`, for whole rows.
    """
    copies = axis.size // math.gcd(k.shape[1], axis.size)
    qkv = (q, _repeat(k, copies), _repeat(v, copies))
    by_rank = [x.unflatten(1, (axis.size, -1)).transpose(0, 1) for x in qkv]  # [c, B, heads/c, S/c, D] each
    heads = [x.shape[2] for x in by_rank]
    received = _AllToAllFn.apply(torch.cat(by_rank, dim=2), axis)  # [c, B, (H + 2 L)/c, S/c, D]
    rows = received.movedim(0, 2).flatten(2, 3)  # [B, (H + 2 L)/c, S, D]
    q, k, v = rows.split(heads, dim=1)
    sinks = None if sinks is None else sinks.chunk(axis.size)[axis.rank]
    out = LocalAttention().attend(q, k, v, mask, sinks)  # [B, H/c, S, D]
    out = _AllToAllFn.apply(out.unflatten(2, (axis.size, -1)).movedim(2, 0), axis)  # [c, B, H/c, S/c, D]
    return out.transpose(0, 1).flatten(1, 2)


def _repeat(x: Tensor, copies: int) -> Tensor:
    """Each head `copies` times. Not repeat_interleave, whose gradient is not deterministic on CUDA."""
    return x if copies == 1 else x[:, :, None].expand(-1, -1, copies, -1, -1).flatten(1, 2)


class _AllToAllFn(torch.autograd.Function):
    """Part i of dim 0 goes to rank i. It is its own inverse, so backward is the same all-to-all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        (received,) = save_output(lambda: (wait(all_to_all(x, axis), axis),), 1, x)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return wait(all_to_all(grad, ctx.axis), ctx.axis), None


# ---- context --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CpShare:
    """The tokens of a batch that one cp rank works on."""

    tokens: NDArray[np.int64]  # [B, S/c], like the next four
    targets: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    documents: NDArray[np.int32]
    positions: NDArray[np.int64]
    row_documents: NDArray[np.int32]  # [B, S] of whole rows: every cp rank reads them from its files

    def with_documents(self, positions: TokenPositions) -> TokenPositions:
        """The given positions with the documents of these tokens."""
        documents = torch.from_numpy(self.documents).to(positions.position_ids.device, non_blocking=True)
        return replace(positions, documents=documents, row_documents=self.row_documents)


def share_of(batch: Batch, layout: Layout, rank: int) -> CpShare:
    rows, seq = batch.tokens.shape
    pieces = layout.cp * (2 if layout.cp > 1 and layout.cp_kind != "ulysses" else 1)
    if seq % pieces:
        raise ValueError(f"a sequence of {seq} tokens does not divide into the {pieces} equal pieces of {layout}")
    places = _places(seq, layout, rank)
    return CpShare(
        tokens=batch.tokens[:, places],
        targets=batch.targets[:, places],
        loss_mask=batch.loss_mask[:, places],
        documents=batch.documents[:, places],
        positions=np.tile(places, (rows, 1)),
        row_documents=batch.documents,
    )


class ContextParallel:
    """The attention ops of a decoder over the cp axis, and the share of a batch that this rank gets."""

    def __init__(self, mesh: Mesh):
        self.axis, self.layout = mesh.cp, mesh.layout
        self.kind = mesh.layout.cp_kind if mesh.cp.size > 1 else "local"

    def share(self, batch: Batch) -> CpShare:
        """This rank's tokens of every row of a batch."""
        return share_of(batch, self.layout, self.axis.rank)

    def attention_mask(
        self, positions: TokenPositions, window: int = 0, *, sinks: bool = False, dtype: torch.dtype = torch.float32
    ) -> Any:
        """The mask that `attend` takes, for all layers with this window; computed without communication."""
        if self.kind == "local":
            return LocalAttention().attention_mask(positions, window, sinks=sinks, dtype=dtype)
        if positions.documents is not None and positions.row_documents is None:
            raise ValueError(
                f"with cp={self.axis.size} positions with documents need row_documents, those of whole rows"
            )
        if self.kind == "ulysses":
            return LocalAttention().attention_mask(_full_rows(positions), window, sinks=sinks, dtype=dtype)
        return PartsMask(self._masked_tiles(positions, window))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Tensor | None = None) -> Tensor:
        """q [B, H, S/c, D], k and v [B, K, S/c, D] of this rank's tokens -> [B, H, S/c, D]."""
        match self.kind:
            case "ring":
                return RingAttention.apply(q, k, v, sinks, mask.tiles, self.axis)
            case "allgather":
                return AllGatherAttention.apply(q, k, v, sinks, mask.tiles, self.axis)
            case "ulysses":
                return ulysses_attention(q, k, v, mask, self.axis, sinks)
            case _:
                return LocalAttention().attend(q, k, v, mask, sinks)

    def _masked_tiles(self, positions: TokenPositions, window: int) -> MaskedTiles:
        """Ring: one tile for each step. All-gather: this rank's own tile, then those over all keys."""
        rank, ranks, share = self.axis.rank, self.axis.size, positions.position_ids.shape[1]
        if self.kind == "ring":
            sources = [(rank - step) % ranks for step in range(ranks)]
            tiles = [ring_tile(rank, source, share) for source in sources]
        else:
            sources = [rank]
            tiles = [own_tile(share), *gathered_tiles(rank, ranks, share)]
        documents, device = positions.host_documents(), positions.position_ids.device
        if documents is None and not window:
            return [MaskedTile(tile) for tile in tiles]
        if documents is not None:
            check_runs(documents)
        full_rows = Places(np.arange(positions.length), documents)
        shares = [full_rows.at(_places(positions.length, self.layout, source)) for source in sources]
        queries, all_keys = shares[0], [*shares, *[full_rows] * (len(tiles) - len(shares))]
        if window:
            return [
                MaskedTile.within(tile, queries, keys, window, device)
                for tile, keys in zip(tiles, all_keys, strict=True)
            ]
        return [MaskedTile.of(tile, queries, keys, device) for tile, keys in zip(tiles, all_keys, strict=True)]


def _places(seq: int, layout: Layout, rank: int) -> NDArray[np.int64]:
    """The positions that a cp rank holds."""
    return np.concatenate([np.arange(piece.start, piece.stop) for piece in context_share(seq, layout, rank)])


def _full_rows(positions: TokenPositions) -> TokenPositions:
    """The `TokenPositions` of whole rows, of which this rank has a share."""
    device, batch = positions.position_ids.device, positions.position_ids.shape[0]
    ids = torch.arange(positions.length, device=device).expand(batch, -1)
    whole = positions.row_documents
    documents = None if whole is None else torch.from_numpy(whole).to(device, non_blocking=True)
    return TokenPositions(ids, positions.samples, positions.length, documents, whole)
