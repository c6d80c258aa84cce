"""How a software computes mixtures of experts: which kernels it has for them, and how its tokens travel."""

from msgspec import Struct


class ExpertKernels(Struct, frozen=True, kw_only=True):
    """Bytes are those of 2-byte activations; a slot is one visit of a token to an expert."""

    grouped: bool = True  # one kernel for all experts of a rank; else one after the other
    rearranged: tuple[float, float] = (4.0, 4.0)  # bytes per slot and feature of one rearranging, forward and backward
    summed: tuple[float, float] = (2.5, 4.5)  # of weighting what experts said and adding it up
    scores: float = 40.0  # bytes per token and expert of the router's choice, forward and backward together
    kernels: int = 16  # that are launched around the experts' matmuls, in one pass
    host: float = 1.0  # the host's time for a mixture's forward pass, relative to `Software.host`, beside the block's
    wide_router: bool = False  # its product is in float32
    once: bool = False  # a token travels once to each rank, and to each node, that has experts of it (DeepEP)
    fused_casts: bool = False  # narrow matmuls' inputs are cast by the kernels that make them
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

# This code's, operator by operator (model/experts/): a row is read and written for each rearranging; its gradient is
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
