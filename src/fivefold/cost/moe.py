"""What a mixture of experts adds to a block: grouped GEMMs, router, permutation, all-to-alls; and who holds what.

    moe = MoEBlock(spec=spec, layer=layer, layout=layout, ..., tokens=4096, activation_bytes=2, precision="bf16")
    moe.gemm_seconds        # seconds of forward, dgrad and wgrad

A rank routes the tokens that it has of a microbatch (with tp, its part of them), each to K of X experts, of which X/ep
are on a rank. Without imbalance a rank receives as many rows as it sends. The most loaded rank computes, receives and
returns `imbalance` times the mean, and all others of its layer wait for it. Where every rank has all experts (ep=1) the
load is even.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from fivefold.cost.block_collectives import BlockCollectives, Collective
from fivefold.cost.collective_time import Topology
from fivefold.cost.kernels import Device
from fivefold.cost.routing import ExpertLoad, RoutedRows
from fivefold.cost.software import CAST_BYTES, ELEMENTWISE_BYTES, ExpertKernels, SoftwareProfile
from fivefold.layout.layout import Layout
from fivefold.layout.stages import Stage
from fivefold.schedules.costs import Segment, Segments
from fivefold.spec.blocks import Experts
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Matmul, block
from fivefold.spec.pattern import Layer
from fivefold.support.dtypes import accum_bytes
from fivefold.support.errors import UserError

# Of the rate of one matmul of the same tiles: 0.73 to 1.02, the mean of ten on one H200 (torch 2.11): up, down and
# the gradients of their weights, of Qwen3-30B, DeepSeek-V3 and Mixtral.
GROUPED_GEMM_EFFICIENCY = 0.89


class ParamShare(NamedTuple):
    """Parameters of one rank: those that tp divides or that all its ranks have, and those of its experts. Numbers, or
    arrays with an element for each of many layouts."""

    dense: Any
    experts: Any

    @property
    def total(self) -> Any:
        return self.dense + self.experts


@lru_cache(maxsize=4096)
def block_share(spec: ModelSpec, tp: int, ep: int, layer: Layer) -> ParamShare:
    """Parameters of a block. Norms count as if tp divided them."""
    params = list(spec.block_parameters(spec.first(layer)))
    of_experts = sum(param.size for param in params if param.experts)
    # Routers, and linears to latents, are whole on every rank.
    replicated = sum(
        param.size for param in params if param.kind != "norm" and param.tp in ("replicated", "replicated_partial")
    )
    return ParamShare(
        replicated + (sum(param.size for param in params) - of_experts - replicated) / tp, of_experts / ep
    )


@lru_cache(maxsize=4096)
def stage_share(spec: ModelSpec, tp: int, ep: int, stage: Stage) -> ParamShare:
    """Parameters of a stage, with the embedding and the head where it has them."""
    table = spec.vocab * spec.hidden
    learned = spec.context * spec.hidden * (spec.positions == "learned")
    embedding = (table + learned) if stage.first else 0
    head = spec.hidden + (0 if stage.first and spec.tied else table) if stage.last else 0
    shares = [(block_share(spec, tp, ep, layer), count) for layer, count in spec.counted(stage.layers).items()]
    dense = sum((count * share.dense for share, count in shares), (embedding + head) / tp)
    return ParamShare(dense, sum(count * share.experts for share, count in shares))


def parameters_per_rank(spec: ModelSpec, tp: int, ep: int) -> float:
    """The parameters of a rank that has all layers, sharded over tp and ep."""
    layers = spec.counted().items()
    blocks = sum(count * block_share(spec, tp, ep, layer).total for layer, count in layers)
    unsharded = sum(count * block_share(spec, 1, 1, layer).total for layer, count in layers)
    return float(blocks + (spec.parameter_count - unsharded) / tp)


def moe_matmuls(spec: ModelSpec, layer: Layer, tp: int = 1) -> list[Matmul]:
    """The matmuls of a layer's mixture of experts: the router's, the experts' and the shared one's."""
    return block(spec, tp, layer).of(layer.mlp.place if layer.mlp else "")


def expert_matmuls(spec: ModelSpec, layer: Layer) -> list[Matmul]:
    return [matmul for matmul in moe_matmuls(spec, layer) if matmul.experts]


def collapsed_imbalance(experts: Experts, ep: int) -> float:
    """The most loaded rank over the mean while all tokens choose the same experts, as untrained routers do.

    The top_k that all choose lie anywhere: the expected number on the rank that has most of them, by rank over ep.
    """
    here, chosen = experts.count // ep, experts.top_k
    within = [0.0, *(_at_most(ep, here, chosen, most) for most in range(1, chosen + 1))]
    expected = sum(most * (within[most] - within[most - 1]) for most in range(1, chosen + 1))
    return expected * ep / chosen


def _at_most(ranks: int, here: int, chosen: int, most: int) -> float:
    """The probability that no rank has more than `most` of `chosen` experts, `here` being on each."""
    ways = [1, *[0] * chosen]
    for _ in range(ranks):
        ways = [
            sum(math.comb(here, n) * ways[total - n] for n in range(min(most, here, total) + 1))
            for total in range(chosen + 1)
        ]
    return ways[chosen] / math.comb(ranks * here, chosen)


@dataclass(frozen=True, kw_only=True)
class MoEBlock(ExpertLoad):
    """The mixture of experts of one block, for a microbatch of `tokens` on a cp rank."""

    spec: ModelSpec
    layer: Layer
    layout: Layout
    device: Device
    topology: Topology
    software: SoftwareProfile
    tokens: int
    activation_bytes: int  # per element
    precision: str
    imbalance: float = 1.0

    @property
    def kernels(self) -> ExpertKernels:
        experts = self.software.experts
        return experts.alone if experts.alone is not None and self.layout.ep == 1 else experts

    @cached_property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of the experts' matmuls; those that read the same are one, if the software joins them."""
        matmuls = expert_matmuls(self.spec, self.layer)
        if self.software.columns_apart:
            return tuple((matmul.outputs, matmul.inputs) for matmul in matmuls)
        *columns, down = matmuls
        return (sum(matmul.outputs for matmul in columns), columns[0].inputs), (down.outputs, down.inputs)

    @cached_property
    def gemm_seconds(self) -> tuple[float, float, float]:
        """Seconds of the GEMMs of experts and router: forward, dgrad and wgrad."""
        m, n, k = self.routed, self.experts.count, self.spec.hidden
        precision = "fp32" if self.kernels.wide_router and self.activation_bytes == 2 else self._router_precision
        forward, dgrad, wgrad = self.expert_gemm_seconds
        return (
            forward + self.device.gemm(m, n, k, precision),
            dgrad + self.device.gemm(m, k, n, precision),
            wgrad + self.device.gemm(n, k, m, precision),
        )

    @cached_property
    def expert_gemm_seconds(self) -> tuple[float, float, float]:
        """Seconds of the experts' GEMMs alone."""
        local_experts = self.experts.count // self.layout.ep
        m = max(1, math.ceil(self.rows / local_experts))
        forward = dgrad = wgrad = 0.0
        for n, k in self.products:
            forward += self._grouped_gemm(m, n, k, local_experts)
            dgrad += self._grouped_gemm(m, k, n, local_experts)
            wgrad += self._grouped_gemm(n, k, m, local_experts)
        return forward, dgrad, wgrad

    @property
    def _router_precision(self) -> str:
        """Never 8 bits."""
        return "bf16" if self.precision in CAST_BYTES else self.precision

    def _grouped_gemm(self, m: int, n: int, k: int, groups: int) -> float:
        if not self.kernels.grouped:
            return groups * self.device.gemm(m, n, k, self.precision)
        launch = self.device.achieved.launch
        return (self.device.gemm(m, n, k, self.precision, groups) - launch) / GROUPED_GEMM_EFFICIENCY + launch

    @cached_property
    def memory_seconds(self) -> tuple[float, float]:
        """Seconds of what is bound by memory, forward and backward: choosing, rearranging, casting, adding up; and of
        the experts' activation what the most loaded rank has beyond the mean."""
        kernels, software = self.kernels, self.software
        moved = ELEMENTWISE_BYTES[software.pointwise]
        inner, gated = self.products[-1][1], self.spec.activation.startswith("swiglu")
        more = self.rows - self.slots
        # Inputs in forward and gradients in backward are each written as they lie and transposed: one write more than
        # dense matmuls have.
        cast_bytes = 0.0 if kernels.fused_casts else CAST_BYTES.get(self.precision, -1.0) + 1
        cast = tuple(cast_bytes * self.rows * sum(shape[side] for shape in self.products) for side in (1, 0))
        choice = kernels.scores / 2 * self.routed * self.experts.count

        def seconds(direction: int) -> float:
            per_row = kernels.rearranged[direction] * self.spec.hidden
            bytes_ = per_row * (self.slots + (2 * self.rows if self.sorts else 0))  # there, back; and once on the way
            bytes_ += self._summed(direction)
            bytes_ += (moved.swiglu if gated else moved.gelu)[direction] * more * inner
            bytes_ = self.activation_bytes / 2 * (bytes_ + cast[direction]) + choice
            return self.device.stream(bytes_, kernels.kernels)

        return seconds(0), seconds(1)

    def _summed(self, direction: int) -> float:
        """Bytes, of 2-byte activations, that adding up experts' outputs moves: forward (0), and backward (1)."""
        return self.kernels.summed[direction] * self.slots * self.spec.hidden

    @property
    def summing_seconds(self) -> tuple[float, float]:
        """Seconds of adding up experts' outputs alone: behind the last message of a forward pass, before the first of a
        backward pass."""
        forward, backward = (self.activation_bytes / 2 * self._summed(direction) for direction in (0, 1))
        return self.device.stream(forward, 0), self.device.stream(backward, 0)

    @property
    def sorts(self) -> bool:
        """Whether rows that arrived are sorted once more: they come rank by rank, for several experts."""
        return self.layout.ep > 1 and self.experts.count > self.layout.ep

    @cached_property
    def collectives(self) -> BlockCollectives:
        """The collectives of one microbatch; the most loaded rank receives `rows`."""
        rows = RoutedRows(self.slots, round(self.rows), round(self.rows / self.layout.ep))
        return BlockCollectives(
            spec=self.spec,
            layout=self.layout,
            tokens=self.tokens,
            compute_bytes=self.activation_bytes,
            accum_bytes=accum_bytes(self.activation_bytes),
            layer=self.layer,
            rows=rows,
        )

    @cached_property
    def ep_seconds(self) -> tuple[float, float]:
        """Seconds of the all-to-alls (or gathers) over ep of one forward pass and of one backward pass."""
        return self._forward_backward("ep")

    @cached_property
    def tp_seconds(self) -> tuple[float, float]:
        """Seconds of tp's gathers of the slices that its ranks have routed."""
        return self._forward_backward("tp")

    def _forward_backward(self, axis: str) -> tuple[float, float]:
        sent = self.collectives
        forward = (*sent.dispatch(), *sent.combine())
        backward = (*sent.combine_back(), *sent.dispatch_back(), *sent.slices_back())
        return self.seconds(forward, axis), self.seconds(backward, axis)

    def seconds(self, collectives: Iterable[Collective], axis: str) -> float:
        """Seconds of the collectives over one axis."""
        if self.layout.size(axis) == 1:
            return 0.0
        return sum(
            self._all_to_all_seconds(sent.payload)
            if sent.kind == "all-to-all"
            else self.topology.time(sent.kind, axis, sent.payload)
            for sent in collectives
            if sent.axis == axis
        )

    def _all_to_all_seconds(self, payload: float) -> float:
        """Seconds over ep. Where a token travels once to each rank, and once to each node, fewer bytes leave them: it
        is copied for several experts where it arrives."""
        reach = self.topology.reaches["ep"]
        if not self.kernels.once:
            return self.topology.time("all-to-all", "ep", payload)
        ranks, nodes = (payload * self._visited(many) / self.experts.top_k for many in (reach.ranks, reach.nodes))
        if reach.nodes == 1:
            return self.topology.time("all-to-all", "ep", ranks)
        card, achieved = self.device.accelerator, self.device.achieved
        return max(ranks / (card.inside.bandwidth * achieved.inside), self.topology.time("all-to-all", "ep", nodes))

    def _visited(self, places: int) -> float:
        """Ranks, or nodes, that a token's experts lie on, on average; groups of experts keep it to a part of them."""
        experts = self.experts
        open_ = max(1.0, places * experts.top_groups / experts.groups) if experts.groups > 1 else float(places)
        return open_ * (1 - (1 - 1 / open_) ** experts.top_k)


def dense_gemms(matmuls: Sequence[Matmul], tokens: int, *, apart: bool, sp_degree: int) -> list[tuple[int, int, int]]:
    """Rows, columns and inner dimension of the forward GEMMs that belong to no expert and no router. Of those that all
    tp ranks compute alike, each has its part of the tokens under sp."""
    gemms: list[tuple[str, int, int, int]] = []
    for matmul in matmuls:
        if not matmul.dense:
            continue
        rows = tokens // sp_degree if matmul.tp == "replicated" else tokens
        if not apart and gemms and gemms[-1][:2] == (matmul.reads, rows):
            gemms[-1] = (matmul.reads, rows, gemms[-1][2] + matmul.outputs, matmul.inputs)
        else:
            gemms.append((matmul.reads, rows, matmul.outputs, matmul.inputs))
    return [(rows, n, k) for _, rows, n, k in gemms]


# ---- travel ---------------------------------------------------------------------------------------------------------
# What runs beside the experts' messages: the shared expert, and in a joined pair the other half's compute.
#
#     travel = Travel(moe)
#     travel.hidden                                   # by the shared expert, in a forward and a backward pass
#     travel.forward(seconds)                         # a block's pass as `schedules/costs.py` plays it
#
# A token travels to its experts (dispatch) and what they made of it back (combine); gradients take the same ways the
# other way around. The shared expert needs neither, and runs while the tokens of the others are in flight.


class Messages(NamedTuple):
    """Seconds of what can run beside compute; the rest of the experts' collectives stands among the compute."""

    dispatch: float = 0.0
    combine: float = 0.0
    combine_back: float = 0.0
    dispatch_back: float = 0.0


class Shared(NamedTuple):
    """Seconds of the expert that all tokens visit."""

    forward: float = 0.0
    dgrad: float = 0.0
    wgrad: float = 0.0


@dataclass(frozen=True)
class Travel:
    """The messages of one block's mixture, and what there is to do meanwhile."""

    of: MoEBlock

    @cached_property
    def messages(self) -> Messages:
        """All but the numbers of tokens that each expert gets: they go first, and are waited for."""
        overlap_fraction = self.of.software.hides_experts
        if not overlap_fraction or self.of.layout.ep == 1:
            return Messages()
        sent = self.of.collectives
        ways = sent.tokens_to_experts(), sent.combine(), sent.combine_back(), sent.dispatch_back()
        return Messages(*(overlap_fraction * self.of.seconds(way, "ep") for way in ways))

    @cached_property
    def shared(self) -> Shared:
        of = self.of
        matmuls = [matmul for matmul in moe_matmuls(of.spec, of.layer, of.layout.tp) if matmul.dense]
        if not matmuls:
            return Shared()
        forward = dgrad = wgrad = 0.0
        for m, n, k in dense_gemms(matmuls, of.tokens, apart=of.software.columns_apart, sp_degree=1):
            forward += of.device.gemm(m, n, k, of.precision)
            dgrad += of.device.gemm(m, k, n, of.precision)
            wgrad += of.device.gemm(n, k, m, of.precision)
        moved = ELEMENTWISE_BYTES[of.software.pointwise]
        bytes_per_element = moved.swiglu if of.spec.activation.startswith("swiglu") else moved.gelu
        elements = of.activation_bytes / 2 * of.tokens * matmuls[-1].inputs
        activation, activation_backward = (of.device.stream(bytes_ * elements) for bytes_ in bytes_per_element)
        return Shared(forward + activation, dgrad + activation_backward, wgrad)

    @cached_property
    def hidden(self) -> tuple[float, float]:
        """Seconds that the shared expert hides, forward and backward; deferred weight gradients hide nothing."""
        back = self.shared.dgrad + (0.0 if self.of.layout.splits_backward else self.shared.wgrad)
        return min(self.messages.dispatch, self.shared.forward), min(self.messages.dispatch_back, back)

    def forward(self, seconds: float) -> Segments:
        """A block's forward pass, which takes so long without any overlap."""
        there, back, *_ = self.messages
        made, added = self.of.expert_gemm_seconds[0], self.of.summing_seconds[0]
        before = seconds - sum((there, back, self.shared.forward, made, added))
        return Segment(before, there, self.shared.forward), Segment(made, back), Segment(added)

    def backward(self, seconds: float) -> Segments:
        """Its backward pass, the gradients of the weights in their places; likewise, and without recomputation."""
        *_, back, there = self.messages
        _, dgrad, wgrad = self.of.expert_gemm_seconds
        made, added, shared = dgrad + wgrad, self.of.summing_seconds[1], self.shared.dgrad + self.shared.wgrad
        rest = seconds - sum((back, there, shared, made, added))
        return Segment(added, back), Segment(made, there, shared), Segment(rest)


# ---- imbalance ------------------------------------------------------------------------------------------------------
# How uneven the load of experts is: the most loaded rank of an ep group over the mean.


# Qwen3-235B-A22B on 256 H100, tp 4, pp 8, ep 8, with routing forced to be even and with its own: 295 and 237 TFLOP/s at
# sequences of 16,384, 335 and 277 at 32,768, 368 and 320 at 65,536, 389 and 357 at 131,072 (Megatron-MoE-ModelZoo,
# best_practice/qwen3/readme.md). Under this planner's costs these are ranks with 1.50 to 1.75 times the mean.
IMBALANCE = 1.6
MEASURED_EXPERTS_PER_RANK = 16  # in these runs
IMBALANCE_SOURCE = (
    f"by four published pairs of even and real routing with {MEASURED_EXPERTS_PER_RANK} experts a rank (ep=8)"
)


def imbalance_caveat(spec: ModelSpec, ep: int, imbalance: float) -> str:
    """A caveat if ranks have more experts than the default was measured with: it is likely too high."""
    if (
        spec.experts is None
        or imbalance != IMBALANCE
        or ep == 1
        or (each := spec.experts.count // ep) <= MEASURED_EXPERTS_PER_RANK
    ):
        return ""
    return f"with {each} a rank, as here, it is likely less, as more loads even out more"


def imbalance_for(spec: ModelSpec, given: float | None = None) -> float:
    """As given, or as published runs have it; 1 for models without experts."""
    if spec.experts is None:
        if given is not None:
            raise UserError(
                f"imbalance={given:g} is one of experts, and {spec.name} has none; leave it out", "imbalance.dense"
            )
        return 1.0
    if given is None:
        return IMBALANCE
    if not 1 <= given <= spec.experts.count:
        raise UserError(
            f"imbalance={given:g} must be what the fullest rank gets over the mean, 1 to {spec.experts.count}; the "
            f"default is {IMBALANCE}, {IMBALANCE_SOURCE}",
            "imbalance.range",
        )
    return given
