"""Megatron-Core: its GPTModel, DistributedDataParallel, schedules, finalize_model_grads and optimizer, none edited.

    fivefold verify --adapter megatron                  # a dense model: tied embeddings, grouped queries, qk norms
    fivefold verify --adapter megatron:untied           # RMS norms, and an output layer of its own
    fivefold verify --adapter megatron:experts          # of experts, with shared ones, the auxiliary loss and z-loss
    fivefold verify --adapter megatron tp=2,sp,pp=2     # a layout of your own

Keys of a layout: dp, tp, sp, pp, vpp (chunks of layers on a rank), ep, etp; mbs (samples of a microbatch); and
switches: zero1 (its distributed optimizer), overlap (its reduction during the backward pass), recompute, allgather (its
other dispatcher of tokens), batch_p2p (with vpp: its default communication between stages, which needs pp from 3).

It runs on CPU processes in float64, by fivefold.foreign.cuda_on_cpu, or on GPUs by --device cuda, with the layers that
Megatron-Core has in PyTorch ("local"). What is CUDA alone is not verified: Transformer Engine and all that needs it
(context parallelism, FP8, grouped GEMM of experts, tp_comm_overlap), Apex, flash attention, fused kernels, CUDA graphs,
DeepEP. Its norms are of those, so there is one here, marked for sequence parallelism as theirs are.
"""

import logging
import os
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fivefold.foreign import cuda_on_cpu

DEVICE = os.environ.get("FIVEFOLD_DEVICE", "cpu")
cuda_on_cpu.only_float64() if DEVICE == "cuda" else cuda_on_cpu.install()
warnings.filterwarnings("ignore", module="megatron")
logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)  # one generator plays both

from megatron.core import parallel_state as groups  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.backends import LocalSpecProvider  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402

moe_utils.te_general_gemm = None  # the router of 0.16 names it also where Transformer Engine is missing

SAMPLES, LENGTH, VOCABULARY, LAYERS = 8, 16, 48, 4
_USUAL = {"calculate_per_token_loss": True, "hidden_dropout": 0.0, "attention_dropout": 0.0}


class Norm:
    """PyTorch's own, of the kind that the configuration asks for."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> torch.nn.Module:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


LocalSpecProvider.layer_norm = lambda self, rms_norm=False, for_qk=False: Norm


class Chunks(list[DistributedDataParallel]):
    """What a rank has of the model, its optimizer, and the layout."""

    optimizer: Any
    layout: dict[str, Any]


class Training:
    """An adapter: a model by Megatron's configuration, in layouts."""

    def __init__(self, layouts: list[str], *, terms: dict[str, Any] | None = None, tied: bool = True, **config: Any):
        self.LAYOUTS, self.TERMS, self.KNOWN = layouts, terms or {}, {"microbatches": SAMPLES}
        self.config, self.tied = config, tied

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        labels = tokens[:, 1:].clone()
        for sample in range(SAMPLES):  # unlike numbers of targets
            labels[sample, : (5 * sample + 3 * step) % (LENGTH - 3)] = -100
        return tokens[:, :-1].contiguous(), labels

    def build(self, layout: dict[str, Any]) -> Chunks:
        tp, pp, vpp, ep = (int(layout.get(key, 1)) for key in ("tp", "pp", "vpp", "ep"))
        switches = (bool(layout.get(key)) for key in ("zero1", "overlap", "batch_p2p", "recompute"))
        etp, (zero1, overlap, batched, recompute) = layout.get("etp", tp), switches
        groups.destroy_model_parallel()
        groups.initialize_model_parallel(
            tp, pp, vpp if vpp > 1 else None, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
            create_gloo_process_groups=False,
        )  # fmt: skip
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        config = TransformerConfig(
            num_layers=LAYERS, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2,
            gated_linear_unit=True, activation_func=torch.nn.functional.silu, params_dtype=torch.float64,
            pipeline_dtype=torch.float64, tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            expert_model_parallel_size=ep, expert_tensor_parallel_size=etp, sequence_parallel=bool(layout.get("sp")),
            batch_p2p_comm=batched or vpp == 1, overlap_p2p_comm=vpp > 1 and not batched,
            recompute_granularity="full" if recompute else None, recompute_method="uniform" if recompute else None,
            recompute_num_layers=1 if recompute else None,
            moe_token_dispatcher_type="allgather" if layout.get("allgather") else "alltoall",
            finalize_model_grads_func=finalize_model_grads, **{**_USUAL, **self.config},
        )  # fmt: skip
        reduction = DistributedDataParallelConfig(
            use_distributed_optimizer=zero1, overlap_grad_reduce=overlap, bucket_size=3000 if overlap else None
        )
        model = Chunks()
        for chunk in range(vpp):
            stage = chunk if vpp > 1 else None
            layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
            layers.layer_norm = Norm
            module = GPTModel(
                config, layers, VOCABULARY, LENGTH, share_embeddings_and_output_weights=self.tied, vp_stage=stage,
                position_embedding_type="rope",
                pre_process=groups.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=groups.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            ).to(DEVICE)  # fmt: skip
            model.append(DistributedDataParallel(config, reduction, module, disable_bucketing=chunk > 0))
        if overlap:
            pick = [chunk.no_sync for chunk in model], [chunk.start_grad_sync for chunk in model]
            config.no_sync_func, config.grad_sync_func = pick if vpp > 1 else (pick[0][0], pick[1][0])
        optimizer = OptimizerConfig(
            optimizer="adam", lr=1e-2, weight_decay=0.1, clip_grad=0.1, params_dtype=torch.float64,
            use_distributed_optimizer=zero1,
        )  # fmt: skip
        model.optimizer = get_megatron_optimizer(optimizer, model, use_gloo_process_groups=False)
        model.layout = layout
        return model

    def named(self, model: Chunks) -> list[tuple[str, torch.nn.Parameter]]:
        return [(_whole_name(chunk, name), p) for chunk in model for name, p in chunk.module.named_parameters()]

    def load(self, model: Chunks, full: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.named(model):
            parameter.copy_(_own_part(full[name], name, parameter))
        model.optimizer.reload_model_params()

    def grad(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return parameter.main_grad

    def step(self, model: Chunks, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
        for chunk in model:
            chunk.zero_grad_buffer()
        model.optimizer.zero_grad()
        size = int(model.layout.get("mbs", 1))
        rank, ranks = groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()
        tokens, labels = (part.split(size)[rank::ranks] for part in batch)
        data = [iter(zip(tokens, labels, strict=True)) for _ in model]
        one = len(model) == 1
        losses = get_forward_backward_func()(
            forward_step_func=_forward, data_iterator=data[0] if one else data, model=model[0] if one else list(model),
            num_microbatches=len(tokens), seq_length=LENGTH, micro_batch_size=size, forward_only=False,
        )  # fmt: skip
        if model.layout.get("zero1"):
            _gather_gradients(model)
        if not losses:
            return {"loss": None}
        total = torch.stack(losses)
        if not {**_USUAL, **self.config}["calculate_per_token_loss"]:
            total = torch.stack([total[:, 0] / total[:, 1], torch.ones_like(total[:, 1])], dim=1)
        dist.all_reduce(total := total.sum(dim=0), group=groups.get_data_parallel_group())
        return {"loss": total[0] / total[1]}

    def update(self, model: Chunks) -> dict[str, Any]:
        _, norm, _ = model.optimizer.step()
        return {"grad_norm": norm}


def _forward(data: Any, model: DistributedDataParallel) -> tuple[torch.Tensor, Any]:
    tokens, labels = next(data)
    positions = torch.arange(LENGTH, device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=labels.clamp(min=0)), partial(_loss, labels != -100)


def _loss(counted: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total, count = (losses * counted).sum(), counted.sum().int()
    return total, count, torch.stack([total.detach(), count.double()])


def _whole_name(chunk: DistributedDataParallel, name: str) -> str:
    """With layers and experts numbered as in one process; the last stage's copy of tied embeddings is the first's."""
    tied = chunk.module.share_embeddings_and_output_weights
    words = (name.replace("output_layer.", "embedding.word_embeddings.") if tied else name).split(".")
    if words[0] == "decoder" and words[1] == "layers":
        words[2] = str(chunk.module.decoder.layers[int(words[2])].layer_number - 1)
    if "local_experts" in words:
        at = words.index("local_experts") + 1
        experts = len(chunk.module.get_submodule(name.split(".local_experts.")[0]).local_experts)
        words[at] = str(int(words[at]) + experts * groups.get_expert_model_parallel_rank())
    return ".".join(words)


def _own_part(full: torch.Tensor, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    if not getattr(parameter, "tensor_model_parallel", False):
        return full
    rank, ranks = groups.get_tensor_model_parallel_rank(), groups.get_tensor_model_parallel_world_size()
    if "local_experts" in name:
        rank, ranks = groups.get_expert_tensor_parallel_rank(), groups.get_expert_tensor_parallel_world_size()
    pieces = full.chunk(2) if "linear_fc1" in name else [full]  # the gate, and what it is multiplied with
    return torch.cat([piece.chunk(ranks, parameter.partition_dim)[rank] for piece in pieces], parameter.partition_dim)


def _gather_gradients(model: Chunks) -> None:
    """Its distributed optimizer leaves a rank with the reduced gradients of its own shard: show all of them."""
    for chunk in model:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            for bucket in buffer.buckets:
                group = buffer.data_parallel_group
                own = bucket.grad_data.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def _switch(model: Chunks, on: bool, **coefficients: float) -> None:
    for chunk in model:
        for name, value in coefficients.items():
            setattr(chunk.config, name, value if on else 0.0)


dense = Training(
    [
        "dp=2", "dp=2,overlap", "dp=2,zero1,overlap", "tp=2", "tp=2,sp", "tp=4,sp", "pp=2", "pp=2,recompute",
        "pp=2,vpp=2", "pp=4,mbs=4", "dp=2,pp=2,zero1", "dp=2,tp=2,sp", "tp=2,sp,pp=2,vpp=2",
    ],
    qk_layernorm=True,
)  # fmt: skip
untied = Training(["dp=2", "tp=2,sp", "tp=2,sp,pp=2,vpp=2"], tied=False, normalization="RMSNorm")
_of_experts = partial(
    Training, add_bias_linear=False, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24,
    moe_layer_freq=[0, 1, 1, 1], moe_shared_expert_intermediate_size=16, moe_router_load_balancing_type="aux_loss",
    moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.01, terms={
        "aux loss": partial(_switch, moe_aux_loss_coeff=0.1),
        "z-loss": partial(_switch, moe_z_loss_coeff=0.01),
        "aux loss and z-loss": partial(_switch, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.01),
    },
)  # fmt: skip
experts = _of_experts(
    [
        "dp=2", "dp=2,ep=2", "dp=2,ep=2,allgather", "dp=2,ep=2,zero1", "tp=2,sp", "tp=2,sp,ep=2,etp=1", "pp=2",
        "pp=2,vpp=2", "dp=2,tp=2,sp,ep=2", "dp=4,ep=2",
    ],
    calculate_per_token_loss=False,
)  # fmt: skip
experts_per_token = _of_experts(["dp=2", "dp=2,ep=2", "pp=2"])  # with tp, 0.16 is not right

LAYOUTS, KNOWN, TERMS = dense.LAYOUTS, dense.KNOWN, dense.TERMS
batch, build, named, load, grad = dense.batch, dense.build, dense.named, dense.load, dense.grad
step, update = dense.step, dense.update
