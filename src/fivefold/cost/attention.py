"""Context parallelism of one layer: ring, all-gather and Ulysses by bytes, seconds and memory.

    layer = LayerAttention(131072, heads=16, kv_heads=1, head_dim=128, device=device, topology=topology)  # a tp rank's
    compare(layer)["ring"].seconds

Bytes are those of `cost/block_collectives.py`, and of what `parallel/context.py` runs. A layer takes as long as its
slowest rank: attention in whole tiles, the merging of partial results, and the exposed communication.

    ring        a step's attention hides that step's sends, as far as it lasts, and a step ends when its slowest rank
                has finished; the last gradient is sent home after all attention
    allgather   all communication is exposed
    ulysses     all communication is exposed; attention is one call, over whole rows of a rank's own heads

(`parallel/context.py` runs a rank's own tile under the gather. `Method.spare` says how much that can hide; it
is not taken off.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, NamedTuple

from msgspec import structs

from fivefold.cost.block_collectives import Collective, context
from fivefold.cost.collective_time import Topology, wire
from fivefold.cost.kernels import ATTENTION_TILE, Device
from fivefold.cost.software import FIVEFOLD, Attention
from fivefold.layout.layout import ContextKind
from fivefold.support.dtypes import DTYPE_BYTES, wide_bytes
from fivefold.support.errors import UserError
from fivefold.support.text import either
from fivefold.support.tuple_arithmetic import plus, scaled

# ---- splits ---------------------------------------------------------------------------------------------------------
# How the tokens of a sequence are divided over cp ranks, and what each rank then computes. Exact, by counting.
#
#     zigzag(seq=131072, ranks=16).scores("earlier")      # causal scores between a rank and one before it
#
# Every split here gives out pieces of equal length in rounds, one piece to each rank per round. Contiguous is one
# round, the zigzag two (the second backwards), a stripe as many as it takes. So what a rank computes with another's
# keys depends only on which of the two comes first, and all counts are closed forms.
#
# Attention kernels work in tiles: a tile with a single unmasked score costs a whole one. They know two masks,
# everything and the lower triangle: anything else takes several calls, whose results are merged.


Side = Literal["own", "earlier", "later"]  # whose keys a rank reads: its own, or an earlier or later rank's
KEY_SIDES: tuple[Side, ...] = ("own", "earlier", "later")

STRIPE_TOKENS = (1, 128, 1024)  # tokens of a piece


@dataclass(frozen=True)
class KernelCall:
    """One run of an attention kernel: every query sees every key, or a square's lower triangle."""

    queries: int
    keys: int
    causal: bool = False
    diagonal: bool = True  # whether the triangle has it; without: shifted by one token

    @property
    def scores(self) -> int:
        if not self.causal:
            return self.queries * self.keys
        return self.queries * (self.queries + (1 if self.diagonal else -1)) // 2

    def computed(self, tile: int = ATTENTION_TILE) -> int:
        """Scores of all tiles that it touches."""
        rows, columns = math.ceil(self.queries / tile), math.ceil(self.keys / tile)
        return tile**2 * (rows * (rows + 1) // 2 if self.causal else rows * columns)


@dataclass(frozen=True)
class SequenceSplit:
    name: str
    ranks: int
    piece: int  # tokens
    rounds: int
    turns: bool = False  # every other round runs backwards

    @property
    def tokens(self) -> int:
        """Tokens of one rank."""
        return self.piece * self.rounds

    @property
    def seq(self) -> int:
        return self.tokens * self.ranks

    def places(self, rank: int) -> list[range]:
        """The positions of a rank's tokens, ascending."""
        starts = (self.piece * self._piece(rank, turn) for turn in range(self.rounds))
        return [range(start, start + self.piece) for start in starts]

    def _piece(self, rank: int, turn: int) -> int:
        """The number of the piece that a rank gets in a round."""
        return turn * self.ranks + (self.ranks - 1 - rank if self.turns and turn % 2 else rank)

    def scores(self, side: Side) -> int:
        """Causal scores of a rank's queries and the keys of one rank."""
        if side == "own":
            return self.tokens * (self.tokens + 1) // 2
        backwards = self.rounds // 2 if self.turns else 0
        extra = backwards if side == "later" else self.rounds - backwards
        return self.piece**2 * (self.rounds * (self.rounds - 1) // 2 + extra)

    @property
    def busiest(self) -> int:
        """Scores of the rank that has most: in the middle of the ranks there is a mean of first and last."""
        return self.scores("own") + (self.ranks - 1) * self._worst

    @property
    def balance(self) -> float:
        """The busiest rank's scores over the mean. A ring has the same, since its slowest rank is that one in all
        steps: the first looks at later ranks only, the last at earlier ones."""
        return self.busiest * self.ranks / (self.seq * (self.seq + 1) // 2)

    @property
    def worst_step(self) -> float:
        """The same within one step of a ring, the worst. In step s, s ranks look at later ones and the rest do not."""
        earlier, later = self.scores("earlier"), self.scores("later")
        means = ((step * later + (self.ranks - step) * earlier) / self.ranks for step in range(1, self.ranks))
        return max((self._worst / mean for mean in means if mean), default=1.0)

    @property
    def _worst(self) -> int:
        return max(self.scores("earlier"), self.scores("later"))

    def calls(self, side: Side) -> list[KernelCall]:
        """What a rank computes with the keys of one rank: a call for each set of queries that see the same keys."""
        if side == "own":
            return [KernelCall(self.tokens, self.tokens, causal=True)]
        if self.piece == 1 and not self.turns:
            return [KernelCall(self.tokens, self.tokens, causal=True, diagonal=side == "earlier")]
        # For the queries of each round, how many rounds of the other rank's keys come before them.
        before = (turn + (side == ("later" if self.turns and turn % 2 else "earlier")) for turn in range(self.rounds))
        alike = ((seen, len(list(group))) for seen, group in groupby(before))
        return [KernelCall(count * self.piece, seen * self.piece) for seen, count in alike if seen]

    def gathered(self, rank: int) -> list[KernelCall]:
        """What a rank computes where all keys are at hand: its own, and what lies between its pieces.

        Pieces of one token would leave a call for every query; then rank by rank, as in a ring.
        """
        if self.piece == 1 and not self.turns:
            earlier, later = self.calls("earlier"), self.calls("later")
            return [*self.calls("own"), *rank * earlier, *(self.ranks - 1 - rank) * later]
        calls, before = self.calls("own"), -1
        for turn in range(self.rounds):
            own = self._piece(rank, turn)
            if own - before > 1:
                calls.append(KernelCall((self.rounds - turn) * self.piece, (own - before - 1) * self.piece))
            before = own
        return calls

    @property
    def waste(self) -> float:
        """Scores that a ring's busiest rank computes, in whole tiles, over those that are seen."""
        own, earlier, later = (sum(call.computed() for call in self.calls(side)) for side in KEY_SIDES)
        return (own + (self.ranks - 1) * max(earlier, later)) / self.busiest


def contiguous(seq: int, ranks: int) -> SequenceSplit:
    return SequenceSplit("contiguous", ranks, seq // ranks, 1)


def zigzag(seq: int, ranks: int) -> SequenceSplit:
    """One early and one late piece each: what `ring` and `allgather` run."""
    return SequenceSplit("zigzag", ranks, seq // (2 * ranks), 2, turns=True)


def striped(seq: int, ranks: int, piece: int) -> SequenceSplit:
    return SequenceSplit(f"striped by {piece}", ranks, piece, seq // ranks // piece)


def splits(seq: int, ranks: int) -> list[SequenceSplit]:
    """Those to compare; a stripe is one if there are several rounds of it."""
    fine = [striped(seq, ranks, k) for k in reversed(STRIPE_TOKENS) if seq % (ranks * k) == 0 and seq > ranks * k]
    return [contiguous(seq, ranks), zigzag(seq, ranks), *fine]


# ---- methods --------------------------------------------------------------------------------------------------------


# Bytes that a call's result costs per element before it is part of the whole: forward, to float32 and interpolated into
# what was there; backward, the gradient of the queries, added up in float32.
MERGE = (18.0, 10.0)
CONTEXT_KINDS: tuple[ContextKind, ...] = ("ring", "allgather", "ulysses")


class Both(NamedTuple):
    """Seconds of a layer's forward and backward pass."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward


class KernelTime(NamedTuple):
    """Kernels that run one after the other."""

    attention: Both = Both()
    merging: Both = Both()

    @property
    def both(self) -> Both:
        return plus(self.attention, self.merging)


@dataclass(frozen=True)
class LayerAttention:
    """One layer's attention over sequences of one length, with the cp degree of `topology.layout`."""

    seq: int
    heads: int  # of one tp rank, and kv heads likewise
    kv_heads: int
    head_dim: int
    device: Device
    topology: Topology
    full_kernel: Attention = FIVEFOLD.attention  # over whole rows, as Ulysses has them
    # Over parts of rows: it must return the log-sum-exp, by which partial results are merged.
    partial_kernel: Attention = FIVEFOLD.cp_attention or FIVEFOLD.attention
    samples: int = 1  # sequences, which travel and are computed together
    activation_bytes: int = DTYPE_BYTES["bfloat16"]
    accum_bytes: int = wide_bytes("bfloat16")
    window: int = 0  # keys that a query sees, at most; 0: all before it. All keys travel nevertheless

    @property
    def ranks(self) -> int:
        return self.topology.layout.cp

    @property
    def tokens(self) -> int:
        """Tokens of one rank."""
        return self.seq // self.ranks

    def size(self, heads: int) -> int:
        """Elements of so many heads of a rank's tokens."""
        return self.samples * self.tokens * heads * self.head_dim

    @property
    def pair(self) -> int:
        """Elements of a rank's keys and values."""
        return 2 * self.size(self.kv_heads)

    @property
    def lcm(self) -> int:
        """Ulysses repeats kv heads until all ranks get as many."""
        return math.lcm(self.kv_heads, self.ranks)

    def collectives(self, kind: ContextKind) -> tuple[list[Collective], list[Collective]]:
        """The collectives of a forward and a backward pass."""
        head = self.size(1)
        both = context(kind, self.ranks, head, self.heads, self.kv_heads, self.activation_bytes, self.accum_bytes)
        return both["forward"], both["backward"]

    def moving(self, kind: ContextKind) -> Both:
        """Seconds of all of them."""
        forward, backward = (
            sum(self.topology.time(sent.kind, "cp", sent.payload, sent.calls) for sent in way)
            for way in self.collectives(kind)
        )
        return Both(forward, backward)

    def over(self, ranks: int) -> "LayerAttention":
        """The same sequence over another number of ranks."""
        return replace(self, topology=replace(self.topology, layout=structs.replace(self.topology.layout, cp=ranks)))

    def work(self, calls: Sequence[KernelCall], *, merged: bool = True, heads: int = 0) -> KernelTime:
        """Calls one after the other, of all heads or of some."""
        seconds, tile, heads = [KernelTime()], self.device.attention_tile, heads or self.heads
        kernel = self.partial_kernel if merged else self.full_kernel
        for call in calls:
            rows = math.ceil(call.queries / tile) * tile
            keys = call.computed(tile) / rows  # that a query is computed with, on average
            keys = min(keys, self.window) if self.window else keys
            forward_backward = Both(*self.device.attention(kernel, self.samples, heads, self.head_dim, rows, keys))
            parts = self.samples * call.queries * heads * self.head_dim * merged
            seconds.append(
                KernelTime(forward_backward, Both(*(self.device.stream(cost * parts, merged) for cost in MERGE)))
            )
        return plus(*seconds)

    def send(self, *payloads: int) -> float:
        """Seconds in which a rank passes messages on to the next, through one port."""
        return sum(self.topology.time("send", "cp", payload) for payload in payloads if payload)


@dataclass(frozen=True)
class Method:
    """What one kind of context parallelism costs a layer, forward and backward."""

    kind: ContextKind
    split: SequenceSplit
    sent: tuple[list[Collective], list[Collective]]  # forward, backward
    work: KernelTime  # of the slowest rank
    exposed: Both  # communication that compute does not hide
    kept: int  # bytes from forward to backward: q, k, v, the output and its LSE, as attention saw them
    buffers: int  # bytes beside them while it runs, at most
    backward_buffers: int  # likewise in backward, with all gradients and copies that it makes
    moving: Both  # all communication, exposed or hidden
    ring_wait: float = 0.0  # of the exposed seconds, those in which a ring's step waits for its sends
    stacked: int = 0  # bytes of own keys and values: full recompute lets go of them once they are stacked to be sent
    spare: float = 0.0  # seconds of attention that need no other rank's keys, and could hide as much

    @property
    def seconds(self) -> float:
        return self.work.both.total + self.exposed.total

    def wire_bytes(self, backward: bool) -> int:
        """Bytes that a rank sends."""
        return sum(int(wire(sent.kind, sent.calls * sent.payload, self.split.ranks)) for sent in self.sent[backward])


def ring(layer: LayerAttention, split: SequenceSplit | None = None) -> Method:
    split = split or zigzag(layer.seq, layer.ranks)
    c, pair, pair_grads = layer.ranks, layer.pair * layer.activation_bytes, layer.pair * layer.accum_bytes
    queries = layer.size(layer.heads)
    own, earlier, later = (layer.work(split.calls(side)) for side in KEY_SIDES)
    slower = max(earlier, later, key=lambda work: work.both.total)
    # A window reaches back over so many pieces: of an early piece ranks before this one hold them, of a late one those
    # after it. In the other steps nothing is computed.
    reach = math.ceil(layer.window / split.piece) if layer.window else c
    busy = [step for step in range(1, c) if min(step, c - step) <= reach]
    forward, backward, ring_wait = 0.0, layer.send(pair_grads), 0.0
    for step in range(c):
        behind = (slower if step in busy else own if not step else KernelTime()).both
        # While a rank works with some keys, they travel on, as does the gradient of the previous step's keys.
        pair_sent = pair * (step < c - 1)
        wait_forward = max(0.0, layer.send(pair_sent) - behind.forward)
        wait_backward = max(0.0, layer.send(pair_sent, pair_grads * (step > 0)) - behind.backward)
        forward += wait_forward
        backward += wait_backward
        ring_wait += wait_forward + wait_backward
    return Method(
        "ring",
        split,
        layer.collectives("ring"),
        plus(own, scaled(slower, len(busy))),
        Both(forward, backward),
        kept=_kept_bytes(layer, layer.kv_heads),
        buffers=2 * pair + 2 * pair_grads,  # at hand and arriving: keys and values, and their gradients
        # Gradients of keys as they are made, leave and arrive; that of the queries; what a kernel is given and writes.
        backward_buffers=3 * pair + 3 * pair_grads + queries * (2 * layer.activation_bytes + layer.accum_bytes),
        moving=layer.moving("ring"),
        ring_wait=ring_wait,
        stacked=pair,
    )


def allgather(layer: LayerAttention, split: SequenceSplit | None = None) -> Method:
    split = split or zigzag(layer.seq, layer.ranks)
    c, sent, moving = layer.ranks, layer.collectives("allgather"), layer.moving("allgather")
    gathered, gathered_grads = (collective.payload for collective in sent[1])
    # In rounds of one direction the last rank sees most; in a zigzag ranks differ by the shapes alone.
    works = [layer.work(split.gathered(rank)) for rank in (range(c) if split.turns else (c - 1,))]
    gather = moving.forward
    own = layer.work(split.calls("own")).both
    return Method(
        "allgather",
        split,
        sent,
        max(works, key=lambda work: work.both.total),
        moving,
        kept=_kept_bytes(layer, layer.kv_heads),
        buffers=gathered + gathered_grads,  # all keys and values, and their gradients
        # All keys as they come and by position; their gradients, by position and twice on the way to ranks; the own.
        backward_buffers=(
            2 * gathered
            + 3 * gathered_grads
            + (gathered + gathered_grads) // c
            + layer.size(layer.heads) * (layer.activation_bytes + layer.accum_bytes)
        ),
        moving=moving,
        stacked=gathered // c,
        spare=min(gather, own.forward) + min(gather, own.backward),
    )


def ulysses(layer: LayerAttention) -> Method:
    """Raises UserError where a rank would get a part of a head."""
    c = layer.ranks
    if layer.heads % c:
        fits = [n for n in range(1, layer.heads + 1) if layer.heads % n == 0]
        near = [*[n for n in fits if n < c][-1:], *[n for n in fits if n > c][:1]]
        raise UserError(
            f"cp={c} does not divide the {layer.heads} heads of a tp rank; nearest: cp={either(near)}",
            "layout.cp.heads",
        )
    sent, moving = layer.collectives("ulysses"), layer.moving("ulysses")
    there = sent[0][0].payload
    row = [KernelCall(layer.seq, layer.seq, causal=True)]
    return Method(
        "ulysses",
        contiguous(layer.seq, c),
        sent,
        layer.work(row, merged=False, heads=layer.heads // c),
        moving,
        kept=_kept_bytes(layer, layer.lcm),
        buffers=2 * there,  # gradients of q, k and v before and after the trade
        backward_buffers=2 * there,
        moving=moving,
    )


def _kept_bytes(layer: LayerAttention, kv_heads: int) -> int:
    return (
        2 * layer.size(layer.heads + kv_heads) * layer.activation_bytes
        + layer.samples * layer.tokens * layer.heads * layer.accum_bytes
    )


def compare(layer: LayerAttention) -> dict[ContextKind, Method | UserError]:
    """All three kinds, each over the split that it runs with; or why it cannot run."""
    last: Method | UserError
    try:
        last = ulysses(layer)
    except UserError as error:
        last = error
    return {"ring": ring(layer), "allgather": allgather(layer), "ulysses": last}


def possible(layer: LayerAttention) -> list[Method]:
    """The fastest first."""
    return sorted(
        (method for method in compare(layer).values() if isinstance(method, Method)), key=lambda method: method.seconds
    )
