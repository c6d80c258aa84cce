"""Bugs in Megatron-Core's own code paths, each an adapter of its own: planted_megatron.py:unsummed_norms."""

import sys
from typing import Any

import torch

from fivefold.foreign.adapters.megatron import Training, experts  # isort: split

from megatron.core.fusions import fused_bias_dropout
from megatron.core.optimizer import optimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

reductions: Any = sys.modules["megatron.core.distributed.finalize_model_grads"]  # the package has a function so named
set_loss_scale = MoEAuxLossAutoScaler.set_loss_scale
add_with_dropout = fused_bias_dropout._bias_dropout_add_func


class UnsummedNorms(Training):
    """With sequence parallelism nobody adds the gradients of norms over tp."""

    def build(self, layout: dict[str, Any]) -> Any:
        reductions._allreduce_non_tensor_model_parallel_grads = lambda *args: None
        return super().build(layout)


class UnsummedEmbedding(Training):
    """Nobody adds the gradients of the two copies of tied embeddings."""

    def build(self, layout: dict[str, Any]) -> Any:
        reductions._allreduce_word_embedding_grads = lambda *args: None
        return super().build(layout)


class AuxiliaryLossesPerMicrobatch(Training):
    """In a pipeline, the auxiliary losses are not divided by the number of microbatches."""

    def build(self, layout: dict[str, Any]) -> Any:
        if layout.get("pp", 1) > 1:
            MoEAuxLossAutoScaler.set_loss_scale = lambda scale: set_loss_scale(torch.ones_like(scale))
        return super().build(layout)


class NormOfReplicas(Training):
    """Clipping counts what all tp ranks hold as often as there are ranks."""

    def build(self, layout: dict[str, Any]) -> Any:
        optimizer.tensor_parallel.param_is_not_tensor_parallel_duplicate = lambda *args: True
        return super().build(layout)


class DropoutOfEachRank(Training):
    """Dropout after a layer draws from the generator that differs between tp ranks, also where they hold the same."""

    def build(self, layout: dict[str, Any]) -> Any:
        fused_bias_dropout._bias_dropout_add_func = of_each_rank
        return super().build(layout)


class SumOverDp(Training):
    """The reduction over dp sums what each rank has averaged over its own microbatches."""

    def build(self, layout: dict[str, Any]) -> Any:
        model = super().build(layout)
        for chunk in model:
            for buffer in chunk.buffers:
                for bucket in buffer.buckets:
                    bucket.gradient_scaling_factor = 1.0
        return model


def of_each_rank(*args: Any) -> torch.Tensor:
    with get_cuda_rng_tracker().fork():
        return add_with_dropout(*args)


unsummed_norms = UnsummedNorms(["tp=2,sp"])
unsummed_embedding = UnsummedEmbedding(["pp=2"])
auxiliary_losses = AuxiliaryLossesPerMicrobatch(["pp=2"], terms=experts.TERMS, **experts.config)
norm_of_replicas = NormOfReplicas(["tp=2,sp"])
dropout_of_each_rank = DropoutOfEachRank(["tp=2"], hidden_dropout=0.1)
dropout = Training(["tp=2", "tp=2,sp"], hidden_dropout=0.1, attention_dropout=0.1)  # no bug
sum_over_dp = SumOverDp(["dp=2"], calculate_per_token_loss=False)
