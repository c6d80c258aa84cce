"""Megatron-Core 0.16.1: batched messages between two interleaved pipeline stages. Two CPU processes, over gloo.

    pip install torch megatron-core==0.16.1
    torchrun --nproc-per-node 2 interleaved_p2p.py

In a steady state of the interleaved schedule each rank sends an activation to the next rank and a gradient to the one
before. With two ranks that is the same one. Each rank sends activation 1 and gradient 2, and prints what it has
received as the activation and as the gradient, with the library's default batch_p2p_comm=True, and without.
https://github.com/NVIDIA/Megatron-LM/issues/750 is about it, and Megatron-LM's command line refuses it.
"""

import torch
import torch.distributed as dist

torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda: None

from megatron.core.model_parallel_config import ModelParallelConfig  # noqa: E402
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402

dist.init_process_group("gloo")
for batched in (True, False):
    config = ModelParallelConfig(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, pipeline_dtype=torch.float64,
        batch_p2p_comm=batched, overlap_p2p_comm=not batched,
    )  # fmt: skip
    between = P2PCommunicator(dist.group.WORLD, config)
    activation, gradient = torch.full((1,), 1.0).double(), torch.full((1,), 2.0).double()
    received = between.send_forward_backward_recv_forward_backward(
        activation, gradient, recv_prev=True, recv_next=True, tensor_shape=(1,)
    )
    activation, gradient = (f"{tensor.item():.0f}" for tensor in received)
    line = f"batch_p2p_comm={batched}: rank {dist.get_rank()} received activation {activation}, gradient {gradient}\n"
    print(line, end="", flush=True)
    dist.barrier()
dist.destroy_process_group()
