"""What one rank computes and sends for one microbatch in one block, and in embedding and head, in seconds by cause.

Letters: T tokens of a microbatch on this rank, E hidden, D head dim; of a tp rank H and K query and kv
heads, F feed-forward columns, V vocabulary rows.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import msgspec

from fivefold.cost import attention
from fivefold.cost.block_collectives import BlockCollectives, Collective
from fivefold.cost.collective_time import Topology
from fivefold.cost.forms import ZeroCost, exposed_seconds
from fivefold.cost.kernels import Device, copied, remade, score_dim
from fivefold.cost.moe import MoEBlock, ParamShare, Travel, block_share, dense_gemms
from fivefold.cost.software import CAST, MOVED, NARROW, WIDE, SoftwareProfile
from fivefold.layout.layout import ContextKind, Layout
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import BlockOperations, block, head
from fivefold.spec.pattern import Layer

ROWWISE = 2.0  # times as long as cuBLAS's fp8 with one scale: torch's row-wise matmul was another kernel (2024)


class Seconds(NamedTuple):
    """Where time goes. Of collectives, only the exposed part counts."""

    gemm: float = 0.0
    attention: float = 0.0
    memory: float = 0.0  # kernels that are bound by it: norms, activation functions, residual sums, the loss
    recompute: float = 0.0  # with tp's collectives; cp's and ep's that are sent again are theirs
    host: float = 0.0  # the device waits for its next kernel
    tp: float = 0.0
    cp: float = 0.0
    zero: float = 0.0
    ep: float = 0.0  # dispatch and combine of tokens, those of recomputation too

    @property
    def total(self) -> float:
        return sum(self)


NOTHING = Seconds()


class PassTimes(NamedTuple):
    """One microbatch through a part of the model: forward, and backward in its two halves."""

    forward: Seconds
    inputs: Seconds  # gradients of the inputs, and recomputation
    weights: Seconds


NO_PASSES = PassTimes(NOTHING, NOTHING, NOTHING)


@dataclass(frozen=True)
class BlockCost:
    """A microbatch of `samples` sequences under a layout, on a device, as a software runs it."""

    spec: ModelSpec
    layout: Layout
    device: Device
    topology: Topology
    software: SoftwareProfile
    samples: int
    seq: int
    precision: str = "bf16"
    imbalance: float = 1.0  # of experts: tokens of the most loaded rank over the mean
    layer: Layer | None = None  # its kinds; None: the last layer's

    @property
    def kinds(self) -> Layer:
        return self.layer or self.spec.kinds(self.spec.layers - 1)

    @property
    def tokens(self) -> int:
        return self.samples * self.seq // self.layout.cp

    @property
    def activation_bytes(self) -> int:
        """Bytes of an activation."""
        return WIDE.get(self.precision, 2)

    @cached_property
    def operations(self) -> BlockOperations:
        """The operations of a block on one tp rank."""
        return block(self.spec, self.layout.tp, self.kinds)

    def of(self, kinds: Layer) -> "BlockCost":
        """The same microbatch in a layer of other kinds."""
        if kinds not in self._others:
            self._others[kinds] = replace(self, layer=kinds)
        return self._others[kinds]

    @cached_property
    def _others(self) -> dict[Layer, "BlockCost"]:
        return {}

    @cached_property
    def mixture(self) -> MoEBlock | None:
        """Its experts, where it has any."""
        if not self.kinds.routed:
            return None
        sizes = (self.tokens, self.activation_bytes, self.precision, self.imbalance)
        return MoEBlock(self.spec, self.kinds, self.layout, self.device, self.topology, self.software, *sizes)

    @cached_property
    def gemms(self) -> list[tuple[int, int, int]]:
        """Forward GEMMs of a block but for those of experts: rows, columns, inner."""
        part = self.layout.tp if self.layout.sp else 1
        return dense_gemms(self.operations.matmuls, self.tokens, self.software.columns_apart, part)

    @cached_property
    def block(self) -> PassTimes:
        return self._passes(self.mixture)

    @cached_property
    def around(self) -> PassTimes:
        """The block without its experts."""
        return self._passes(None)

    def _passes(self, mixture: MoEBlock | None) -> PassTimes:
        forward, inputs, weights = (
            self._slower * seconds for seconds in _matmuls(self.device, tuple(self.gemms), self.precision)
        )
        attend, attend_back = self._attention
        point, point_back = self._pointwise
        ep = ep_back = 0.0
        if mixture is not None:
            forward, inputs, weights = map(sum, zip((forward, inputs, weights), mixture.matmuls, strict=True))
            point, point_back = map(sum, zip((point, point_back), mixture.memory, strict=True))
            ep, ep_back = (sent - less for sent, less in zip(mixture.sent, Travel(mixture).hidden, strict=True))
        ahead = Seconds(gemm=forward, attention=attend, memory=point)
        tp, tp_back = self._tensor(forward, inputs + weights, weights)
        if mixture is not None:
            tp, tp_back = map(sum, zip((tp, tp_back), mixture.gathered, strict=True))
        cp, cp_back = self._context()
        again, resent = self._again(ahead, tp), ep if self.layout.recompute == "full" else 0.0
        gather, scatter = self._sharded(ahead.total, inputs + weights + attend_back + point_back + again + resent)
        ahead = ahead._replace(tp=tp, cp=cp, zero=gather, ep=ep)
        back = Seconds(inputs, attend_back, point_back, again, 0.0, tp_back, cp_back, scatter, ep_back + resent)
        late = Seconds(gemm=weights, memory=self.added(self.block_parameters))
        # A device that is faster than its host waits for it, in forward and backward alike; one that is its host, too.
        behind = 0.0 if self.software.computes_itself else ahead.total + back.total + late.total
        launching, passes = self.launching, self._forwards + 1
        wait = max(0.0, launching - behind)
        share = 1 / passes
        return PassTimes(ahead._replace(host=share * wait), back._replace(host=(1 - share) * wait), late)

    @property
    def _forwards(self) -> int:
        return 2 if self.layout.recompute == "full" else 1

    @property
    def launching(self) -> float:
        """Seconds in which the host launches a block's passes, forward and backward."""
        own = self.device.reached.host if self.software.computes_itself else 0.0
        pace = own or self.software.host * self.software.reached.host
        if self.mixture is not None and self.software.experts.graphs:
            return 0.0
        if self.mixture is not None:
            pace += (own or self.software.reached.host) * self.software.experts.host
        return (self._forwards + 1) * pace

    def added(self, parameters: float) -> float:
        """Adding up gradients in kernels of their own."""
        return self.device.stream(parameters * self.software.accumulate_bytes, 0)

    @property
    def _slower(self) -> float:
        return ROWWISE if self.software.rowwise and self.precision == "fp8" else 1.0

    def _gemm(self, m: int, n: int, k: int) -> float:
        return self._slower * self.device.gemm(m, n, k, self.precision)

    @cached_property
    def _attention(self) -> tuple[float, float]:
        """Forward and backward, all of this rank's queries; with cp what its slowest rank does."""
        if not self.operations.attention.heads:
            return 0.0, 0.0
        if self._over_ranks is not None:
            work = self._over_ranks.work
            parts = work.both if self.software.merges else work.attention
            return parts.forward, parts.backward
        own = self.operations.attention
        dim = score_dim(self.software, own)
        return self.device.attention(
            self.software.attention, self.samples, own.heads, dim, self.seq, own.keys(self.seq / 2)
        )

    @cached_property
    def _over_ranks(self) -> attention.Method | None:
        """The microbatch over the cp ranks (`cost/attention.py` says what each way costs)."""
        if self.layout.cp == 1 or not self.operations.attention.heads:
            return None
        full_kernel, partial_kernel = self.software.attention, self.software.cp_attention or self.software.attention
        topology = replace(
            self.topology, layout=msgspec.convert(self.layout.degrees, Layout)
        )  # found again: no more matters
        sizes = (self.samples, self.activation_bytes, max(4, self.activation_bytes))  # sums are in float32 at least
        own = self.operations.attention
        case = attention.LayerAttention(
            self.seq,
            own.heads,
            own.kv_heads,
            own.head_dim,
            self.device,
            topology,
            full_kernel,
            partial_kernel,
            *sizes,
            window=own.window,
        )
        return _method(self.layout.cp_kind, case)

    @cached_property
    def _pointwise(self) -> tuple[float, float]:
        """What is bound by memory, forward and backward. The norms of q and k are not counted."""
        slower = self.software.reached.norm if self.software.norm == "eager" else 1.0
        norm = [slower * bytes_ for bytes_ in getattr(MOVED[self.software.norm], self.spec.norm)]
        moved = MOVED[self.software.pointwise]._asdict() | {"norm": norm}
        # Inputs of narrow matmuls are cast, forward, and again transposed for the weights' gradients.
        own = self.operations
        plain = [group[0] for group in own.groups if group[0].dense]
        cast = sum(matmul.inputs for matmul in plain) * CAST.get(self.precision, 0.0)
        cast += copied(own, self.software)
        kernels = 8 if self.software.pointwise != "eager" else 20
        shares = [
            (self.tokens * operation.share(self.layout.tp, self.layout.sp), moved.get(operation.kind, operation.moved))
            for operation in own.elementwise
        ]
        forward, backward = (sum(share * each[at] for share, each in shares) + self.tokens * cast for at in (0, 1))
        wider = self.activation_bytes / 2  # the bytes above are of 2-byte activations
        return self.device.stream(wider * forward, kernels), self.device.stream(wider * backward, kernels)

    def _again(self, forward: Seconds, sent: float) -> float:
        """Recomputation: of the whole block, or of operations whose outputs are cheap and large."""
        if self.layout.recompute == "none":
            if not (self.software.remakes_heads and self.operations.latent):
                return 0.0
            made = sum(self._gemm(*shape) for shape in remade(self.operations, self.tokens))
            moved = self.activation_bytes / 2 * self.tokens * copied(self.operations, self.software)
            return made + self.device.stream(moved)
        if self.layout.recompute == "full":
            stops = self.software.stops_early and self.layout.tp == 1 and not self.layout.splits_backward
            # A shared expert is the last where nothing travels; elsewhere it computes while tokens do.
            stops = stops and (self.mixture is None or (self.mixture.experts.shared > 0 and self.layout.ep == 1))
            return forward.total + sent - (self._gemm(*self.gemms[-1]) if stops and self.gemms else 0.0)
        if self.software.selective == "attention":
            return forward.attention
        return forward.memory + (0.5 * forward.gemm if self.software.selective == "half" else 0.0)

    def _tensor(self, forward: float, backward: float, weights: float) -> tuple[float, float]:
        """The exposed seconds of tp's collectives, but for those of experts, forward and backward."""
        if self.layout.tp == 1:
            return 0.0, 0.0
        hides, sent_back = self.software.hides, self._tp_backward
        # In pieces behind their own GEMMs: by peer memory, which ends with the node.
        pieces = hides("tp") if self.topology.by_peers("tp") else 0.0
        ahead = exposed_seconds(self._tp_forward, forward, pieces)
        if pieces:
            return ahead, exposed_seconds(sent_back, backward, pieces)
        # A schedule that puts the weights' gradients off has nothing to hide the inputs' behind.
        behind = 0.0 if self.layout.splits_backward else weights
        share = max(hides("tp_backward"), self.software.reached.tp_backward * (self.software.overlap.tp > 0))
        return ahead, exposed_seconds(sent_back, behind, share)

    @cached_property
    def collectives(self) -> BlockCollectives:
        """The collectives of one microbatch, but for those over ep: `moe.py` knows their rows."""
        return BlockCollectives(
            self.spec, self.layout, self.tokens, self.activation_bytes, max(4, self.activation_bytes), self.kinds
        )

    @property
    def _tp_forward(self) -> float:
        return self._over_tp((*self.collectives.mixer(), *self.collectives.mlp()))

    @cached_property
    def _tp_backward(self) -> float:
        return self._over_tp((*self.collectives.mixer_back(), *self.collectives.mlp_back()))

    def _over_tp(self, collectives: Iterable[Collective]) -> float:
        alike = Counter((sent.kind, sent.payload) for sent in collectives if sent.axis == "tp")
        return sum(self.topology.time(kind, "tp", payload, calls) for (kind, payload), calls in alike.items())

    def _context(self) -> tuple[float, float]:
        """The exposed exchange of keys and values; a recomputed block exchanges again."""
        if self._over_ranks is None:
            return 0.0, 0.0
        share = self.software.hides("cp") if self.layout.cp_kind == "ring" else 1.0
        least, most = self._over_ranks.exposed, self._over_ranks.moving
        forward, backward = (
            all_seconds - share * (all_seconds - rest) for all_seconds, rest in zip(most, least, strict=True)
        )
        return forward, backward + (forward if self.layout.recompute == "full" else 0.0)

    def _sharded(self, forward: float, backward: float) -> tuple[float, float]:
        """ZeRO 3: weights gathered in forward and backward, gradients scattered, in every microbatch."""
        if not self.layout.fully_shards(self.spec):
            return 0.0, 0.0
        zero = ZeroCost(self.spec, self.software, self.topology)
        free = max(0.0, backward - self.port)
        gather, scatter = zero.in_block(self.own, forward, free, self.layout.recompute == "full")
        return gather, scatter

    @cached_property
    def port(self) -> float:
        """Seconds of a block's backward in which tp or cp holds the node's ports, so that dp cannot."""
        busy = 0.0
        if self.layout.tp > 1 and self.topology.across("tp"):
            busy += self._tp_backward
        if self._over_ranks is not None and self.topology.across("cp"):
            busy += self._over_ranks.moving[1]
        return busy

    @property
    def mlp_backward_bytes(self) -> float:
        """Bytes that a block's backward needs beside what is saved: gradients of the feed-forward part's intermediates
        and largest weight; with tp, of both weights that share an input, and of that input, gathered."""
        if not self.operations.matmuls:
            return 0.0
        down = self.operations.matmuls[-1]
        bytes_ = self.activation_bytes * (2.0 * self.tokens * down.inputs + down.size)
        if self.layout.tp > 1:
            bytes_ += self.activation_bytes * (down.size + (2 if self.layout.sp else 1) * self.tokens * down.outputs)
        return bytes_

    @property
    def cp_buffer_bytes(self) -> float:
        """Bytes that cp needs beside the activations while attention runs."""
        return self._over_ranks.buffers if self._over_ranks else 0.0

    @property
    def cp_backward_buffer_bytes(self) -> float:
        """Bytes that cp needs beside the activations while attention runs backward."""
        if self._over_ranks is None:
            return 0.0
        freed = self._over_ranks.stacked if self.layout.recompute == "full" else 0
        return float(self._over_ranks.backward_buffers - freed)

    @property
    def own(self) -> ParamShare:
        """Parameters of a block on one rank."""
        return block_share(self.spec, self.layout.tp, self.layout.ep, self.kinds)

    @property
    def block_parameters(self) -> float:
        return self.own.total

    @cached_property
    def bottom(self) -> PassTimes:
        """The embedding: rows looked up, and added into."""
        moved = 2.0 * self.activation_bytes * self.tokens * self.spec.hidden
        sums, *gathers = self.collectives.embedding()
        look = Seconds(memory=self.device.stream(moved, 2), tp=self._over_tp([sums]))
        table = head(self.spec).size / self.layout.tp * (self.spec.vocab > 1)
        back = self.device.stream(2 * moved, 2) + self.added(table)
        return PassTimes(look, Seconds(tp=self._over_tp(gathers)), Seconds(memory=back))

    @cached_property
    def top(self) -> PassTimes:
        """The last norm, the head and the loss."""
        spec, t = self.spec, self.layout.tp
        m, n, k = self.tokens, head(spec, t).outputs, spec.hidden
        precision = "bf16" if self.precision in NARROW else self.precision  # the head is never in 8 bits
        gathered = self.software.gathers_logits and t > 1
        loss = self.device.stream(self.software.logit_bytes * m * (spec.vocab if gathered else n) / 2, 6)
        *gathers, sums = self.collectives.head()  # the loss's own, a few bytes a token, are not counted
        trade = (
            self.topology.time("all-gather", "tp", float(self.activation_bytes) * m * spec.vocab) if gathered else 0.0
        )
        return PassTimes(
            Seconds(gemm=self.device.gemm(m, n, k, precision), memory=loss, tp=self._over_tp(gathers) + trade),
            Seconds(gemm=self.device.gemm(m, k, n, precision), memory=loss, tp=self._over_tp([sums])),
            Seconds(gemm=self.device.gemm(n, k, m, precision), memory=self.added(n * k)),
        )


@lru_cache(maxsize=4096)
def _matmuls(device: Device, shapes: tuple[tuple[int, int, int], ...], precision: str) -> tuple[float, float, float]:
    """Seconds forward, and backward for inputs and weights. Many layouts share the shapes."""
    return (
        sum(device.gemm(m, n, k, precision) for m, n, k in shapes),
        sum(device.gemm(m, k, n, precision) for m, n, k in shapes),
        sum(device.gemm(n, k, m, precision) for m, n, k in shapes),
    )


@lru_cache(maxsize=4096)
def _method(kind: ContextKind, case: attention.LayerAttention) -> attention.Method:
    return {"ring": attention.ring, "allgather": attention.allgather, "ulysses": attention.ulysses}[kind](case)
