"""`SoftwareProfile`: the software that runs a layout, its kernels, what it overlaps, and how it orders the axes.

Two systems that run one layout on one cluster differ by a third in speed, and in memory too; what makes the difference
is said here, by name. `FIVEFOLD` is this code. The systems behind published runs are in `systems.py`.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from msgspec import Struct, structs

from fivefold.cost.model_state import Accounting
from fivefold.hardware.accelerators import Software, software
from fivefold.layout.axes import PLACEMENT_ORDER
from fivefold.optim.adamw import AdamW
from fivefold.optim.base import OptimizerConfig, states_of
from fivefold.schedules.registry import RECORDS
from fivefold.spec.operations import Parameter

# ---- expert kernels -------------------------------------------------------------------------------------------------
# How a software computes mixtures of experts: which kernels it has for them, and how its tokens travel.


class ExpertKernels(Struct, frozen=True, kw_only=True):
    """Bytes with 2-byte activations; a slot is one visit of a token to an expert."""

    grouped: bool = True  # one kernel for all experts of a rank; else one after the other
    rearranged: tuple[float, float] = (4.0, 4.0)  # bytes per slot and feature of one rearranging, forward and backward
    summed: tuple[float, float] = (2.5, 4.5)  # of weighting what experts said and adding it up
    scores: float = 40.0  # bytes per token and expert of the router's choice, forward and backward together
    kernels: int = 16  # that are launched around the experts' matmuls, in one pass
    host: float = 1.0  # the host's time for a mixture's forward pass, relative to `Software.host`, beside the block's
    wide_router: bool = False  # its product is in float32
    once: bool = False  # a token travels once to each rank, and to each node, that has experts of it (DeepEP)
    fused_casts: bool = False  # inputs of low-precision matmuls are cast by the kernels that make them
    graphs: bool = False  # a whole step is one CUDA graph: no layer waits for the host
    alone: "ExpertKernels | None" = None  # those where every expert is on the rank, if they are others


# Transformer Engine and Megatron-Core up to 2026: a product for each expert, over a few streams; tokens by DeepEP or
# HybridEP. A layer of Qwen3-30B took 8.8 ms of its host in forward and backward, with one sequence of 4,096 tokens on a
# B200 that computes it in a third of that (Megatron-Bridge 26.02): 3.5 times a dense block's 1.13 ms a pass.
MEGATRON_EXPERTS = ExpertKernels(grouped=False, host=3.5, once=True)
# From 26.06 on, on Blackwell: grouped matmuls that cast and activate, and a whole step as one CUDA graph (release notes
# of Megatron-Bridge 0.5.1).
FUSED_EXPERTS = ExpertKernels(once=True, fused_casts=True, kernels=8, graphs=True)
# Megatron without any of it: one expert after the other, and NCCL's all-to-all.
PLAIN_EXPERTS = ExpertKernels(grouped=False)

# This code's, operator by operator (model/moe.py): a row is read and written for each rearranging; its gradient is
# added up in float32. What experts said is widened, weighted and summed, each by itself; scores are sorted, stably.
# Where all experts are here, they are part of their block's graph: a pass reads a row, or writes it; backward reads the
# gradients of gate and up, and of what experts said the row, the token's gradient, and writes one.
FIVEFOLD_EXPERTS = ExpertKernels(
    rearranged=(4.0, 8.0),
    summed=(18.0, 30.0),
    scores=120.0,
    kernels=40,
    wide_router=True,
    alone=ExpertKernels(rearranged=(4.0, 4.5), summed=(2.5, 6.0), scores=120.0),
)


# ---- profile --------------------------------------------------------------------------------------------------------


Attention = Literal["torch", "fused", "flash1", "flash2", "flash3"]
Pointwise = Literal["eager", "fused", "compiled", "fivefold", "float32"]
Selective = Literal["pointwise", "attention", "half"]


# Bytes of an element of a matmul's input: in low precision the inputs are cast first, and activations are in bf16.
LOW_PRECISION_BYTES = {"fp8": 1.0, "fp4": 0.5}
# Bytes that casting an element of a matmul's input moves. fp8: read 2, write 1. fp4: read for the tensor's largest,
# read and rotated (the random Hadamard transform, arXiv 2509.25149) and written, and again transposed.
CAST_BYTES = {"fp8": 3.0, "fp4": 7.0}
HIGH_PRECISION_BYTES = {"fp32": 4, "tf32": 4, "fp64": 8}  # of an element of weights and activations, where not 2


class Overlap(Struct, frozen=True, kw_only=True):
    """Which collectives run behind compute: 1 those that do, 0 those that do not. `Software` says how much it hides."""

    tp: float = 0.0  # of tensor parallelism, forward and backward
    tp_backward: float = 0.0  # of its input gradients alone, behind the weight gradients
    cp: float = 0.0  # keys and values round the ring, behind attention
    zero: float = 0.0  # weights gathered and gradients scattered layer by layer (ZeRO 3), behind the neighbours
    dp: float = 0.0  # gradients behind the last backward pass, weights behind the next forward
    exposes_weights: bool = False  # the next forward waits for all weights, although gradients run behind backward
    pp: float = 0.0  # sends between stages
    ep: float = 0.0  # experts' messages, behind the shared expert and, in a joined pair, behind the other half


class SoftwareProfile(Struct, frozen=True, kw_only=True):
    name: str
    attention: Attention = "flash2"
    cp_attention: Attention | None = None  # where cp needs the log-sum-exp; None: the same
    merges: bool = False  # partial results are merged by kernels of their own
    pointwise: Pointwise = "fused"  # activation functions, rotations, residual sums
    norm: Pointwise = "fused"
    overlap: Overlap = Overlap()
    achieved: Software = software()
    order: tuple[str, ...] = PLACEMENT_ORDER  # of the degrees, the fastest first
    host: float = 1.0  # the host's time for one block's forward pass, relative to `Software.host`
    computes_itself: bool = False  # the host does, as on CPUs: its time is not behind the device's, but added
    host_step: float = 0.0  # seconds of a step that neither compute nor collectives explain
    weight_bytes: int = 2  # of a weight in compute; ZeRO 3 gathers so many
    gradient_bytes: int = 4  # of a gradient when it is added up and reduced
    accumulate_bytes: float = 0.0  # that a separate kernel moves per weight to add up its gradient; 0: the GEMM adds
    lazy_gradients: bool = False  # they take memory from the first backward pass on
    step_bytes: float = 12.0  # that a step moves per parameter besides state and gradient: norm, zeroing, new weight
    states: float = len(AdamW.states)  # of the optimizer, per parameter
    state_bytes: float = 4 * (1 + len(AdamW.states))  # of master weight and states
    matrices: OptimizerConfig | None = None  # the optimizer, if it reads whole matrices
    logit_bytes: float = 16.0  # that the loss moves per logit, forward and backward
    peak_logit_bytes: float = 10.0  # that the loss holds per logit: bf16, its float32 copy, the gradient
    one_pass: bool = False  # loss and gradient of a slice of the tokens at a time: no more logits than its are held
    broadcasts: bool = False  # new weights (ZeRO 1 and 2) are broadcast by one rank after the other, each past all
    unit_parts: int = 1  # collectives that ZeRO 3 makes of a block: 1, or one for each parameter
    copies_parts: bool = False  # what ZeRO 3 gathers is copied to its place by a kernel for each rank's part
    gathers_again: bool = False  # a recomputed block's weights are gathered for it, and once more for its backward
    reduces_whole: bool = False  # ZeRO 3 adds up whole gradients on every rank, which then keeps its part
    keeps_ends: bool = False  # ZeRO 3 leaves embedding and head gathered from forward to backward
    gathers_logits: bool = False  # every tp rank computes the loss over the whole vocabulary
    bucket_bytes: float = 0.5e9  # of collectives' buffers
    copies_attention: bool = False  # its output is kept twice: as attention left it, and as the next product reads it
    columns_apart: bool = False  # q, k and v, and gate and up, are products of their own: smaller ones fill less
    rowwise: bool = False  # fp8 with a scale per row
    scattered_sends: bool = False  # a stage's output is sent once, in tp parts, and gathered behind the link
    schedules: tuple[str, ...] = ("1f1b", "interleaved")  # that it has
    even: bool = False  # every stage has as many layers, whatever stands at the ends
    stops_early: bool = False  # recompute ends before a block's last product, whose output nothing needs
    remakes_heads: bool = False  # of latent attention, from their latents in backward, with no other recompute
    pads_values: bool = False  # values of latent attention are padded to the width of the keys
    experts: ExpertKernels = ExpertKernels()
    selective: Selective = "pointwise"  # recompute: all but matmuls; attention's core alone; every other matmul too

    def but(self, **changes: object) -> "SoftwareProfile":
        return structs.replace(self, **changes)

    def computing_in(self, precision: str) -> "SoftwareProfile":
        """The same with wider weights: no master beside them, and moments as wide."""
        wide = HIGH_PRECISION_BYTES.get(precision)
        if wide is None:
            return self
        logits = 2.0 * wide if self.one_pass else self.peak_logit_bytes  # nothing is widened
        moved = self.logit_bytes * (wide / 2 if self.one_pass else 1.0)  # others widen their logits in any case
        held = {"weight_bytes": wide, "gradient_bytes": wide, "state_bytes": self.states * wide}
        return self.but(**held, peak_logit_bytes=logits, logit_bytes=moved)

    def optimizing_with(self, optimizer: OptimizerConfig, parameters: Iterable[Parameter] = ()) -> "SoftwareProfile":
        """The same with another optimizer's states, before or after `computing_in`: on average, where it keeps more of
        some of these `parameters` than of others."""
        states, each = _states(optimizer, parameters), self.accounting
        held = {"states": states, "state_bytes": each.master + states * max(4, each.weight)}
        return self.but(**held, matrices=optimizer if optimizer.unit == "matrix" else None)

    @property
    def accounting(self) -> Accounting:
        """Bytes per parameter. Weights of four bytes and more are the masters themselves."""
        master = int(min(4, self.state_bytes)) if self.weight_bytes < 4 else 0
        return Accounting(self.weight_bytes, self.gradient_bytes, master, self.state_bytes - master)

    def hides(self, what: str) -> float:
        """The fraction of a kind of collective that runs behind compute, where there is enough of it."""
        return min(1.0, float(getattr(self.overlap, what) * getattr(self.achieved, what)))

    @property
    def hides_experts(self) -> float:
        """The fraction of experts' messages that can run behind compute: as of gathers behind the neighbouring blocks,
        for no published run tells of these alone."""
        return min(1.0, self.overlap.ep * self.achieved.zero)

    @property
    def hides_weights(self) -> float:
        """The fraction of gathering new weights (ZeRO 1 and 2) that runs behind the next forward pass."""
        return 0.0 if self.overlap.exposes_weights else self.hides("dp")


def _states(optimizer: OptimizerConfig, parameters: Iterable[Parameter]) -> float:
    """Of a parameter, on average."""
    if optimizer.unit == "element":
        return len(optimizer.states)
    counted = [(param.size, len(states_of(optimizer, param))) for param in parameters]
    return sum(size * states for size, states in counted) / sum(size for size, _ in counted)


class Moved(NamedTuple):
    """Bytes that kernels without a GEMM move per element, forward and backward, weights and sums in 2 bytes.

    Norms and residual sums are per hidden feature of a token, the activation is per feed-forward column (of which a
    gated one has two), the rotation per feature of q and k.
    """

    rmsnorm: tuple[float, float]
    layernorm: tuple[float, float]
    residual: tuple[float, float]
    dropout: tuple[float, float]
    swiglu: tuple[float, float]
    gelu: tuple[float, float]
    rope: tuple[float, float]


# Fused: read the inputs, write the outputs. Eager: what the usual PyTorch expressions read and write, an RMSNorm in
# float32 (to float, square, mean, scale, to bf16, weight), a rotation as two halves with a concatenation.
ELEMENTWISE_BYTES: dict[Pointwise, Moved] = {
    "fused": Moved((4, 8), (4, 8), (6, 4), (1, 3), (6, 10), (4, 6), (4, 4)),
    "eager": Moved((36, 60), (6, 10), (6, 6), (5, 5), (10, 18), (8, 14), (20, 24)),
    # This code's blocks, compiled, by a profile of Llama 3 8B's on an H200, as bytes at the pace of plain streams: the
    # norms' backward reduces as it reads, and attention's transposes are in the residual's share.
    "fivefold": Moved((4, 12), (4, 12), (6, 6), (1, 3), (6, 10), (4, 6), (5.4, 6.2)),
    "compiled": Moved((4, 8), (4, 8), (4, 4), (1, 3), (6, 10), (4, 6), (4, 4)),
    # This code's blocks as they are, in float32, where nothing is widened: PyTorch's operators, counted one by one.
    "float32": Moved((14, 46), (4, 6), (6, 6), (5, 5), (10, 18), (4, 6), (19, 28)),
}

FIVEFOLD = SoftwareProfile(
    name="fivefold",
    attention="flash3",  # what scaled_dot_product_attention takes on Hopper: cuDNN's
    cp_attention="flash2",  # called by name: torch's cuDNN operator does not promise its log-sum-exp
    merges=True,
    pointwise="fivefold",
    norm="fivefold",
    columns_apart=True,
    copies_attention=True,
    stops_early=True,
    lazy_gradients=True,
    step_bytes=7,  # the norm, 4 at less than a stream's pace, and the model's copy of the weight, 2
    overlap=Overlap(tp_backward=1, cp=1, zero=1, dp=1, pp=1, ep=1),
    # Of those it has, the ones worth trying; those that are made for their stages, where these are unequal.
    schedules=tuple(record.name for record in RECORDS if record.planned or record.uses_stage_times),
    host=0.9,  # 0.86 to 1.27 ms on the hosts of five H200s
    accumulate_bytes=8.0,  # a bf16 gradient widened by itself, 6 at three quarters of a stream's pace
    # Per logit, compiled: read for its exponential, read again for the slope, which is written; both a little slow.
    logit_bytes=10.0,
    one_pass=True,
    peak_logit_bytes=8.0,  # the logits, their shares in float32, and the slope that is rounded from them
    keeps_ends=True,  # FSDP2's root
    bucket_bytes=0.0,
    pads_values=True,
    experts=FIVEFOLD_EXPERTS,
)

# On CPU ranks, a thread each, in float32: nothing is compiled, and the core that launches and that carries bytes is the
# one that computes, so nothing hides anything.
ON_CPUS = FIVEFOLD.but(
    name="fivefold on CPUs",
    overlap=Overlap(),
    pointwise="float32",
    norm="float32",
    accumulate_bytes=10.0,  # a gradient is copied to its place, 8, or added to what is there, 12
    logit_bytes=20.0,  # of 2-byte numbers, operator by operator: the maximum, exponentials, their sum, the slope
    step_bytes=20.0,  # the norm, clipping, and the weight itself; where `calibrate` was not asked
    computes_itself=True,
)
