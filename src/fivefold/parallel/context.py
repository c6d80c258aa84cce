"""Context parallelism: the cp ranks share every sequence, in one of three ways.

ring        keys and values travel around the ranks   zigzag shares
allgather   every rank gathers all keys and values    zigzag shares
ulysses     ranks trade tokens for heads              contiguous shares
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
from fivefold.layout.layout import Layout
from fivefold.layout.sharding import context_share
from fivefold.model import kernels
from fivefold.model.layers import TokenPositions, accum_dtype
from fivefold.model.masks import Documents, WindowMask, causal_spans, check_runs, full_spans
from fivefold.model.ops import LocalAttention
from fivefold.model.recompute import save_output
from fivefold.parallel.collectives import RingExchange, all_gather, all_to_all, reduce_scatter, wait
from fivefold.parallel.mesh import Axis, Mesh

# ---- tiles ----------------------------------------------------------------------------------------------------------
# Tiles: the blocks of the causal score matrix that each rank of a zigzag works on. Pure arithmetic.
#
# A row of S tokens is cut into 2c pieces; rank r of c holds pieces r and 2c-1-r, in that order, so that places within
# its share ascend like positions. Of another rank's keys it needs
#
#     from an earlier rank   its early piece, seen by all queries here; its late piece lies in the future
#     from a later rank      both pieces, seen by the late queries here; the early ones come before both
#     its own                the lower triangle
#
# Each of the first two is half a square and one kernel call, so all ranks do the same work in every step.


@dataclass(frozen=True)
class Tile:
    queries: range  # places in this rank's share
    keys: range  # places among the keys at hand
    causal: bool = False  # a square, of which the lower triangle is seen; else all of it

    @property
    def scores(self) -> int:
        n = len(self.queries)
        return n * (n + 1) // 2 if self.causal else n * len(self.keys)


def own_tile(share: int) -> Tile:
    return Tile(range(share), range(share), causal=True)


def ring_tile(rank: int, source: int, share: int) -> Tile:
    """What `rank` computes with the `share` keys that `source` holds; keys are places in that share."""
    if source == rank:
        return own_tile(share)
    half = share // 2
    if source < rank:
        return Tile(range(share), range(half))
    return Tile(range(half, share), range(share))


def gathered_tiles(rank: int, ranks: int, share: int) -> list[Tile]:
    """What `rank` computes beside its own tile where all keys are at hand; keys are positions.

    All its earlier ranks' tiles in one, and all its later ranks' tiles in one: both are without gaps.
    """
    half = share // 2
    before = Tile(range(share), range(rank * half))
    between = Tile(range(half, share), range((rank + 1) * half, (2 * ranks - 1 - rank) * half))
    return [tile for tile in (before, between) if tile.keys]


# ---- masked tiles ---------------------------------------------------------------------------------------------------
# A tile with the documents or the window in it, and how its part is added to a rank's results.


class Places(NamedTuple):
    """Where tokens stand: their positions [S], ascending, and documents [B, S]."""

    positions: NDArray[np.int64]
    documents: Documents | None

    def at(self, places: NDArray[np.int64] | slice) -> "Places":
        return Places(self.positions[places], None if self.documents is None else self.documents[:, places])

    def part(self, places: range) -> "Places":
        return self.at(slice(places.start, places.stop))


@dataclass(frozen=True)
class MaskedTile:
    tile: Tile
    mask: kernels.TileMask = None  # None: no document ends within the tile

    @classmethod
    def within(
        cls, tile: Tile, queries: Places, keys: Places, window: int, device: torch.device
    ) -> "MaskedTile | None":
        """What is left of a tile in a window."""
        q_tokens, k_tokens = queries.part(tile.queries), keys.part(tile.keys)
        q_documents, k_documents = q_tokens.documents, k_tokens.documents
        documents = None if q_documents is None or k_documents is None else (q_documents, k_documents)
        mask = WindowMask.of(q_tokens.positions, k_tokens.positions, documents, window, device)
        return cls(tile, mask) if mask.bands else None

    @classmethod
    def of(cls, tile: Tile, queries: Places, keys: Places, device: torch.device) -> "MaskedTile | None":
        """What is left of a tile within documents. `queries` and `keys` are the tokens here and those whose keys are at
        hand. None: nothing sees anything.

        Where documents end early, a rank has less to do, and how much is no longer the same on all ranks.
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
    """Which keys a rank's tokens see, part by part. A compiled graph takes this object as it is. It would look into a
    list, and with PyTorch 2.11 into a frozen dataclass, and be compiled anew wherever another part is empty."""

    tiles: MaskedTiles


class OnlineSoftmax:
    """What queries have seen so far: output [B, H, S/c, D] and LSE [B, H, S/c], in the accumulate dtype."""

    def __init__(self, q: Tensor):
        self.q, dtype = q, accum_dtype(q.dtype)
        self.out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        self.lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)

    def add(self, masked: MaskedTile | None, kv: Tensor) -> None:
        """Let the tile's queries see the keys and values at hand, [2, B, K, keys, D]."""
        if masked is None:
            return
        tile = masked.tile
        q, (k, v) = _part(self.q, tile.queries), _part(kv, tile.keys)
        out, lse = (_part(x, tile.queries) for x in (self.out, self.lse))
        kernels.merge_(out, lse, *kernels.forward(q, k, v, tile.causal, masked.mask))

    def finish(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output and LSE, when all keys have been seen."""
        if sinks is not None:
            kernels.sink_(self.out, self.lse, sinks)
        return self.out.to(self.q.dtype), self.lse


Forward = Callable[[Tensor, Tensor, Tensor, MaskedTiles, Axis], OnlineSoftmax]


class AttentionGrads:
    """The backward pass of what `OnlineSoftmax` made: gradients of q and of the sinks, as tile after tile is added."""

    def __init__(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None):
        self.saved = (grad, q, out, lse)
        self.dq = torch.zeros(q.shape, dtype=accum_dtype(q.dtype), device=q.device)
        self.dsinks = None if sinks is None else kernels.sink_grad(grad, out, lse, sinks)

    def zeros(self, kv: Tensor) -> Tensor:
        """For the gradient of keys and values, in the accumulate dtype."""
        return torch.zeros(kv.shape, dtype=self.dq.dtype, device=kv.device)

    def add(self, masked: MaskedTile | None, kv: Tensor, kv_grad: Tensor) -> None:
        """Adds to the gradient of q, and to that of the keys and values at hand; both in the accumulate dtype."""
        if masked is None:
            return
        tile = masked.tile
        (grad, q, out, lse), (k, v) = (_part(x, tile.queries) for x in self.saved), _part(kv, tile.keys)
        dq, dk, dv = kernels.backward(grad, q, k, v, out, lse, tile.causal, masked.mask)
        _part(self.dq, tile.queries).add_(dq)
        for total, part in zip(_part(kv_grad, tile.keys), (dk, dv), strict=True):
            total.add_(part)

    def finish(self, kv_grad: Tensor) -> tuple[Tensor | None, ...]:
        """What the autograd functions below return: for q, k, v, sinks, tiles and axis."""
        dtype = self.saved[1].dtype
        dk, dv = kv_grad.to(dtype)
        return self.dq.to(dtype), dk, dv, self.dsinks, None, None


def forward_and_save(
    ctx: Any, forward: Forward, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, tiles: MaskedTiles, axis: Axis
) -> Tensor:
    """The forward pass of an autograd function over `forward`; backward needs its output and LSE."""
    out, lse = save_output(lambda: forward(q, k, v, tiles, axis).finish(sinks), 2, q)
    ctx.save_for_backward(q, k, v, sinks, out, lse)
    ctx.tiles, ctx.axis = tiles, axis
    return out


def start_backward(ctx: Any, grad: Tensor) -> tuple[AttentionGrads, Tensor, MaskedTiles, Axis]:
    """What `forward_and_save` left: the gradients, still zero, this rank's keys and values, its tiles, the axis."""
    q, k, v, sinks, out, lse = ctx.saved_tensors
    return AttentionGrads(grad, q, out, lse, sinks), torch.stack((k, v)), ctx.tiles, ctx.axis


def _part(x: Tensor, places: range) -> Tensor:
    """Some tokens of [B, heads, S, D], of [B, heads, S], or of a stack of the former."""
    dim = 2 if x.ndim < 5 else 3
    return x.narrow(dim, places.start, len(places))


# ---- allgather ------------------------------------------------------------------------------------------------------
# All-gather attention (Llama 3's, arXiv 2407.21783, section 3.3.2): every rank gets all keys and values at once.
#
# The zigzag's shares are kept, for the balance. A rank's own tile needs nothing of the others and runs under the
# gather; what is left is two rectangles. Only the rank's own keys and values are kept for backward, which gathers
# again.
#
# What a rank hands in, for a layer and a microbatch of B rows of S tokens, K kv heads (of this tp rank) of D:
#
#     forward    1 all-gather     2 B K S/c D elements, in the compute dtype
#     backward   1 all-gather     2 B K S/c D elements, in the compute dtype
#                1 reduce-scatter 2 B K S D   elements, in the accumulate dtype (float32, or float64)
#
# Full recompute gathers once more; selective recompute keeps output and LSE, and does not.


def by_position(shares: Tensor, ranks: int) -> Tensor:
    """Shares one after the other, [c * 2, B, K, S/c, D] -> [2, B, K, S, D]."""
    early, late = shares.unflatten(0, (ranks, 2)).chunk(2, dim=-2)
    return torch.cat((*early, *late.flip(0)), dim=-2)


def by_rank(rows: Tensor, ranks: int) -> Tensor:
    """The way back: [2, B, K, S, D] -> [c * 2, B, K, S/c, D]."""
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
# Ring attention: keys and values travel around the ranks, and each merges what its queries see in them.
#
# In each of c steps a rank works with the keys of one rank, while they travel on to the next. Backward goes around
# again; the gradient of the keys and values follows them one step behind, and the last step brings it home.
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
        earlier_grad: RingExchange | None = None  # of these keys and values, from the ranks that had them before
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
# Ulysses (arXiv 2309.14509): for attention, ranks trade tokens for heads; each sees whole rows, of its heads only.
#
# Where c does not divide the kv heads, they are repeated until it does, to the least common multiple L of K and c; the
# copies' gradients add up. Then attention is what it is on one device.
#
# Payload of a rank, for a layer and a microbatch of B rows of S tokens, H heads and K kv heads (of this tp rank) of D,
# in the compute dtype:
#
#     forward    1 all-to-all of B (H + 2 L) S/c D elements, 1 of B H S/c D
#     backward   the same two, the latter first
#
# Of each, a rank keeps 1/c for itself. Full recompute trades forward's two again; selective recompute keeps what was
# traded, and trades nothing.


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, axis: Axis, sinks: Tensor | None = None) -> Tensor:
    """q [B, H, S/c, D], k and v [B, K, S/c, D], sinks [H] -> [B, H, S/c, D].

    `mask` is `LocalAttention`'s, of whole rows.
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
    """Each head `copies` times. Not repeat_interleave, whose gradient is added up in no fixed order on CUDA."""
    return x if copies == 1 else x[:, :, None].expand(-1, -1, copies, -1, -1).flatten(1, 2)


class _AllToAllFn(torch.autograd.Function):
    """Part i of dim 0 goes to rank i. Done twice it undoes itself, so backward is the same again."""

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
    row_documents: NDArray[np.int32]  # [B, S] of whole rows: every cp rank reads them, so none has to ask

    def with_documents(self, positions: TokenPositions) -> TokenPositions:
        """The positions of these tokens, told of their documents."""
        documents = torch.from_numpy(self.documents).to(positions.position_ids.device, non_blocking=True)
        return replace(positions, documents=documents, row_documents=torch.from_numpy(self.row_documents))


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
    def __init__(self, mesh: Mesh):
        self.axis, self.layout = mesh.cp, mesh.layout
        self.kind = mesh.layout.cp_kind if mesh.cp.size > 1 else "local"

    def share(self, batch: Batch) -> CpShare:
        """This rank's part of every row of a batch."""
        return share_of(batch, self.layout, self.axis.rank)

    def attention_mask(
        self, positions: TokenPositions, window: int = 0, sinks: bool = False, dtype: torch.dtype = torch.float32
    ) -> Any:
        """What `attend` needs to know of which tokens see which, for all layers with such a window. Nothing is sent."""
        if self.kind == "local":
            return LocalAttention().attention_mask(positions, window, sinks, dtype)
        if positions.documents is not None and positions.row_documents is None:
            raise ValueError(
                f"with cp={self.axis.size} positions with documents need row_documents, those of whole rows"
            )
        if self.kind == "ulysses":
            return LocalAttention().attention_mask(_full_rows(positions), window, sinks, dtype)
        return PartsMask(self._masked_tiles(positions, window))

    def extend_kv(self, *tensors: Tensor, window: int = 0) -> tuple[Tensor, ...]:
        return tensors

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Tensor | None = None) -> Tensor:
        """q [B, H, S/c, D], k and v [B, K, S/c, D], of this rank's tokens -> [B, H, S/c, D]."""
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
        """Ring: one for each step. All-gather: this rank's own tile, then those that look at all keys."""
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
    """The positions of whole rows, of which a rank holds a share."""
    device, batch = positions.position_ids.device, positions.position_ids.shape[0]
    ids = torch.arange(positions.length, device=device).expand(batch, -1)
    documents = None if positions.row_documents is None else positions.row_documents.to(device, non_blocking=True)
    return TokenPositions(ids, positions.samples, positions.length, documents, positions.row_documents)
