"""Megatron-Core 0.16.1: the auxiliary loss of experts, per-token loss and sequence parallelism. Two CPU processes.

    pip install torch megatron-core==0.16.1
    torchrun --nproc-per-node 2 aux_loss.py

A router sees 16 tokens: all of them in one process, and half of them on each of two tensor parallel ranks. The gradient
of the auxiliary loss is summed over the ranks, and divided by the 16 tokens, as calculate_per_token_loss does. Printed
is its ratio to that of one process: 1 would be right. https://github.com/NVIDIA/Megatron-LM/pull/5047 is about it.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist

torch.cuda.current_device = lambda: torch.device("cpu")  # where the router moves its weight

from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402

moe_utils.te_general_gemm = None  # a name that 0.16.1 uses also where Transformer Engine is not installed
TOKENS, WIDTH = 16, 8


def gradient(tokens, group, alone, tp):
    """What the auxiliary loss alone adds to the router's weight, as the optimizer gets it."""
    config = TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=2, num_moe_experts=4, moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1.0, calculate_per_token_loss=True,
        tensor_model_parallel_size=tp, sequence_parallel=tp > 1, add_bias_linear=False, params_dtype=torch.float64,
    )  # fmt: skip
    torch.manual_seed(1)
    router = TopKRouter(config, SimpleNamespace(tp=group, cp=alone, tp_cp=group, tp_dp_cp=group))
    probabilities, _ = router(tokens)
    (0 * probabilities.sum()).backward()  # the auxiliary loss is attached to the probabilities
    total = router.weight.grad.clone()
    dist.all_reduce(total, group=group)  # under sequence parallelism the router's gradient is summed over tp
    return total / TOKENS


dist.init_process_group("gloo")
rank = dist.get_rank()
alone = [dist.new_group([0]), dist.new_group([1])][rank]
tokens = torch.randn(TOKENS, 1, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
truth = gradient(tokens, alone, alone, tp=1)
found = gradient(tokens.chunk(2)[rank], dist.group.WORLD, alone, tp=2)
if rank == 0:
    ratio = float((found * truth).sum() / (truth * truth).sum())
    print(f"gradient of the auxiliary loss with tp=2 and sp: x {ratio:.6f} of that of one process")
    print(f"largest distance from that: {float((found - ratio * truth).abs().max()):.1e}")
dist.destroy_process_group()
