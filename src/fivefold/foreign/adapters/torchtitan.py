"""torchtitan 0.3.0: its Llama 3, its parallelize and pipelining functions, its training step; none of it is edited.

    fivefold verify --adapter torchtitan
    fivefold verify --adapter torchtitan fsdp=2,tp=2,sp,backend=full_dtensor

The debug model made narrow, in float64, on CPU ranks, or on GPUs by --device cuda. Patched from here: the device type;
float64 as a dtype of the configuration; `Tensor.float()`, which the loss and RoPE call, keeps float64; flex attention
has no backward pass on a CPU, so its masks are made dense; a pipeline takes the whole batch, for want of a list of
microbatches in PyTorch 2.13.

What cannot run on a CPU is not proven: compiled flex attention, varlen attention, CUDA graphs, symmetric memory,
dist_gemm, DeepEP, float8. Its default backend, spmd_types, needs a newer FSDP than that of PyTorch 2.13.
"""
# ruff: noqa: E402

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchtitan.tools.utils

DEVICE = os.environ.get("FIVEFOLD_DEVICE", "cpu")
torchtitan.tools.utils.device_type = DEVICE  # before other modules import it from there
torchtitan.tools.utils.device_module = getattr(torch, DEVICE)

from torch.distributed.tensor import DTensor
from torch.nn.attention import flex_attention
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm, attention
from torchtitan.models.llama3 import Llama3Model, _build_llama3_layers, model_registry
from torchtitan.trainer import Trainer

LAYOUTS = [
    "dp=2", "fsdp=2", "tp=2", "tp=2,sp", "cp=2", "dp=2,fsdp=2", "fsdp=2,tp=2,sp", "fsdp=2,cp=2", "cp=2,tp=2,sp",
    "pp=2,schedule=1F1B", "pp=2,schedule=Interleaved1F1B", "pp=2,schedule=ZBVZeroBubble",
    "fsdp=2,pp=2,schedule=1F1B", "tp=2,sp,pp=2,schedule=1F1B",
    "fsdp=2,tp=2,sp,backend=full_dtensor", "cp=2,backend=full_dtensor",
]  # fmt: skip
SAMPLES, SEQ, VOCAB, WIDTH = 8, 16, 64, 32
MICROBATCH = 2  # samples
KNOWN = {"microbatches": SAMPLES // MICROBATCH}


def attend(q, k, v, *, block_mask, scale, enable_gqa, **unused):
    mask = flex_attention.create_mask(block_mask.mask_mod, len(q), None, q.shape[2], k.shape[2], device=q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa), None


TORCH_DTYPE_MAP["float64"] = torch.float64
torch.Tensor.float = torch.Tensor.double
attention.FlexAttention._compiled_flex_attn = staticmethod(attend)
attention._compiled_create_block_mask = flex_attention.create_block_mask
flex_attention._DEFAULT_SPARSE_BLOCK_SIZE = 4  # cp wants a multiple of it on each rank


def specification():
    """The debug model of model_registry with its own layers, narrower; two heads of k and v."""
    result = model_registry("debugmodel")
    usual = result.model
    layers = _build_llama3_layers(
        n_layers=4, dim=WIDTH, n_heads=4, n_kv_heads=2, hidden_dim=48, attn_backend="flex",
        rope=ComplexRoPE.Config(dim=WIDTH // 4, max_seq_len=SEQ, theta=500000, scaling="llama"),
    )  # fmt: skip
    for layer in layers:
        layer.attention.inner_attention.block_size = 4
    init = usual.tok_embeddings.param_init
    result.model = Llama3Model.Config(
        dim=WIDTH, vocab_size=VOCAB, layers=layers,
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=WIDTH, param_init=init),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=usual.norm.param_init),
        lm_head=Linear.Config(in_features=WIDTH, out_features=VOCAB, param_init=init),
    )  # fmt: skip
    return result


def batch(step):
    """Packed documents, whose positions begin anew, and unequal numbers of targets."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (SAMPLES, SEQ + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for sample in range(SAMPLES):
        labels[sample, : 5 * sample % 11] = -100
    positions = torch.stack([torch.cat([torch.arange(3 + n), torch.arange(SEQ - 3 - n)]) for n in range(SAMPLES)])
    return {"input": tokens[:, :-1], "positions": positions, "labels": labels}


class Loop(Trainer):
    """torchtitan's trainer. Of its __init__ only what a step needs: no dataloader, no metrics, no checkpoints."""

    def __init__(self, layout):
        dp, fsdp, tp, cp, pp = (layout.get(axis, 1) for axis in ("dp", "fsdp", "tp", "cp", "pp"))
        parallelism = ParallelismConfig(
            data_parallel_replicate_degree=dp, data_parallel_shard_degree=fsdp, tensor_parallel_degree=tp,
            context_parallel_degree=cp, pipeline_parallel_degree=pp, enable_sequence_parallel="sp" in layout,
            pipeline_parallel_schedule=layout.get("schedule", "1F1B"), pipeline_parallel_microbatch_size=MICROBATCH,
            spmd_backend=layout.get("backend", "partial_dtensor"),
        )  # fmt: skip
        training = TrainingConfig(
            dtype="float64", mixed_precision_param="float64", mixed_precision_reduce="float64", seq_len=SEQ,
            local_batch_size=SAMPLES // dp // fsdp,
        )  # fmt: skip
        self.config, self.device = SimpleNamespace(parallelism=parallelism, training=training), torch.device(DEVICE)
        self.parallel_dims = ParallelDims.from_config(parallelism, dist.get_world_size())
        self.parallel_dims.build_mesh()
        dist_utils.set_spmd_backend(parallelism.spmd_backend)
        own = specification()
        self.model_config = own.model
        self.model_config.update_from_config(config=self.config)
        self.loss_fn = CrossEntropyLoss(CrossEntropyLoss.Config(global_vocab_size=VOCAB))
        with torch.device("meta"):
            model = self.model_config.build()
        how = {
            "parallel_dims": self.parallel_dims, "training": training, "parallelism": parallelism,
            "compile_config": CompileConfig(), "ac_config": None, "dump_folder": "",
        }  # fmt: skip
        if pp > 1:
            self.pp_schedule, self.model_parts, self.pp_has_first_stage, self.pp_has_last_stage = own.pipelining_fn(
                model, **how, device=self.device, model_config=self.model_config, parallelize_fn=own.parallelize_fn,
                loss_fn=self.loss_fn,
            )  # fmt: skip
        else:
            self.model_parts = [own.parallelize_fn(model, **how)]
        for part in self.model_parts:
            part.to_empty(device=DEVICE)
            with torch.no_grad():
                part.init_weights(buffer_device=None)
        self.train_context = dist_utils.get_spmd_context(parallel_dims=self.parallel_dims)
        self.fwd_bwd_fn, self.ntokens_seen = self._forward_backward_body, 0

    def pp_forward_backward_step(self, *, input_dict_mbs, label_mbs, global_valid_tokens):
        [inputs], [labels] = input_dict_mbs, label_mbs
        tokens, labels, others = self.post_dataloading_process(inputs, labels)
        losses = []
        with self.train_context():
            self.pp_schedule.step(
                *([tokens] if self.pp_has_first_stage else []), target=labels if self.pp_has_last_stage else None,
                losses=losses, return_outputs=False, loss_kwargs={"global_valid_tokens": global_valid_tokens}, **others,
            )  # fmt: skip
        return torch.stack(losses).sum() if losses else None


class Parts(list):
    """The model, or the stages of this rank; and what trains them."""

    def __init__(self, loop):
        super().__init__(loop.model_parts)
        self.loop, self.dims = loop, loop.parallel_dims
        self.optimizer = torch.optim.AdamW([p for part in self for p in part.parameters()], lr=1e-3)


def build(layout):
    return Parts(Loop(layout))


def step(model, batch):
    targets, mesh = (batch["labels"] != -100).sum(), model.dims.get_optional_mesh("batch")
    ranks, rank = (mesh.size(), mesh.get_local_rank()) if mesh else (1, 0)
    inputs = {name: tensor.chunk(ranks)[rank] for name, tensor in batch.items()}
    labels = inputs.pop("labels")
    if model.dims.pp_enabled:
        inputs, labels = [inputs], [labels]
    loss = model.loop.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=targets)
    if loss is None:
        return {"loss": None}  # not a last stage
    if isinstance(loss, DTensor):
        return {"loss": loss.detach().full_tensor()}
    mesh = model.dims.get_optional_mesh("loss")
    return {"loss": dist_utils.dist_sum(loss.detach(), mesh) if mesh else loss.detach()}


def update(model):
    parameters = [parameter for part in model for parameter in part.parameters()]
    pp = model.dims.get_optional_mesh("pp")
    norm = dist_utils.clip_grad_norm_(parameters, 0.1, foreach=True, pp_mesh=pp)
    model.optimizer.step()
    return {"grad_norm": norm}
