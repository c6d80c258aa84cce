"""The planted bugs: in which framework, in which of its code paths, of which class, and what has to be said of each."""

from typing import NamedTuple

from fivefold.foreign.layout_proof import LayoutProof


class Bug(NamedTuple):
    framework: str
    layout: str  # for Megatron: the adapter of planted_megatron.py
    what: str
    path: str  # where it is planted
    kind: str  # finding N: as in Megatron-LM #7452
    parameter: str  # whose gradient is named
    factor: str  # by which factor, or what else is told of it
    words: tuple[str, ...]

    @property
    def row(self) -> str:
        """As docs/others.md has it."""
        return f"| {self.what} | {self.framework}: `{self.path}` | {self.kind} | {self.parameter} | {self.factor} |"


SUM, MEAN = "the parts of ranks [0, 1] add up to the truth", "the mean of ranks [0, 1] is the truth"
BUGS = [
    Bug(
        "huggingface",
        "dp=2,bug=summed",
        "a comm hook without its division",
        "default_hooks._allreduce_fut",
        "mean over data",
        "all 20",
        "x 2 = dp",
        ("all 20 gradients", "exactly x 2 = dp on every rank"),
    ),
    Bug(
        "huggingface",
        "dp=2,bug=halved",
        "a comm hook that divides twice",
        "register_comm_hook",
        "mean over data",
        "all 20",
        "x 0.5 = 1/dp",
        ("all 20 gradients", "exactly x 0.5 = 1/dp on every rank"),
    ),
    Bug(
        "huggingface",
        "dp=2,bug=no_sync",
        "`no_sync` that stays on",
        "DistributedDataParallel.require_backward_grad_sync",
        "missing reduction",
        "all 20",
        "missing MEAN of ranks 0, 1",
        ("all 20 gradients", MEAN, "a missing MEAN"),
    ),
    Bug(
        "huggingface",
        "dp=2,accumulate=2,bug=sync_too_early",
        "the first microbatch is reduced instead of the last",
        "DistributedDataParallel.require_backward_grad_sync",
        "missing reduction",
        "all 20",
        "missing MEAN of ranks 0, 1",
        ("all 20 gradients", MEAN),
    ),
    Bug(
        "huggingface",
        "dp=2,bug=one_parameter",
        "a parameter that DDP ignores",
        "_ddp_params_and_buffers_to_ignore",
        "missing reduction",
        "`model.norm.weight`",
        "missing MEAN of ranks 0, 1",
        ("1 of 20 gradients (model.norm.weight)", MEAN),
    ),
    Bug(
        "huggingface",
        "dp=2,bug=mean_of_means",
        "a mean over each rank's own targets",
        "loss_utils.fixed_cross_entropy",
        "findings 3 and 9",
        "all",
        "samples x their share",
        ("a mean of 2 means, each part divided by its own number",),
    ),
    Bug(
        "huggingface",
        "fsdp=2,bug=factor",
        "a sum over shards where a mean is meant",
        "FSDPModule.set_gradient_divide_factor",
        "mean over data",
        "all 20",
        "x 2 = fsdp",
        ("all 20 gradients", "exactly x 2 = fsdp on every rank that holds them"),
    ),
    Bug(
        "huggingface",
        "dp=2,fsdp=2,bug=no_replicas",
        "HSDP without the reduction over replicas",
        "FSDPModule.set_requires_all_reduce",
        "missing reduction",
        "all 20",
        "zero or missing",
        ("all 20 gradients", "zero or missing on every rank that holds them"),
    ),
    Bug(
        "huggingface",
        "fsdp=2,bug=local_norm",
        "a norm of what rank 0 holds",
        "clip_grad_norm_",
        "finding 8",
        "-",
        "the norm of one rank's shards",
        ("it is the norm of what rank 0 holds, and not summed over ranks",),
    ),
    Bug(
        "pipelining",
        "pp=2,schedule=GPipe,bug=scaled",
        "a schedule that divides by its microbatches",
        "_PipelineSchedule.scale_grads",
        "scale of the loss",
        "all 90",
        "x 0.25 = 1/microbatches",
        (
            "all 90 gradients",
            "exactly x 0.25 = 1/microbatches on every rank",
            "the ranks' own parts are right: what reduces or scales them is wrong",
        ),
    ),
    Bug(
        "pipelining",
        "tp=2,sp,bug=norms_alone",
        "norms under sequence parallelism that nobody sums",
        "SequenceParallel",
        "missing reduction",
        "`blocks.0.norm1.bias` and 24 more",
        "missing SUM of ranks 0, 1",
        ("25 of 90 gradients (blocks.0.norm1.bias, blocks.0.norm1.weight, blocks.0.norm2.weight", SUM),
    ),
    Bug(
        "pipelining",
        "tp=2,bug=reduced_twice",
        "an output that is reduced twice",
        "RowwiseParallel._prepare_output_fn",
        "double reduction",
        "-",
        "forward: `blocks.0.attention.out`",
        (
            "forward: the output of blocks.0.attention.out is the first that differs",
            "what it is given is that of one process",
        ),
    ),
    Bug(
        "pipelining",
        "fsdp=2,bug=summed",
        "FSDP2 without its mean",
        "FSDPModule.set_gradient_divide_factor",
        "mean over data",
        "all 90",
        "x 2 = fsdp",
        ("all 90 gradients", "exactly x 2 = fsdp on every rank that holds them"),
    ),
    Bug(
        "torchtitan",
        "fsdp=2,bug=averaged",
        "FSDP divides, and so does the loss",
        "fsdp.disable_fsdp_gradient_division",
        "mean over data",
        "all",
        "x 0.5 = 1/fsdp",
        ("exactly x 0.5 = 1/fsdp on every rank that holds them",),
    ),
    Bug(
        "torchtitan",
        "pp=2,schedule=1F1B,bug=scaled",
        "a schedule that divides by its microbatches",
        "pipeline_parallel.get_schedule_class",
        "scale of the loss",
        "all",
        "x 0.25 = 1/microbatches",
        ("exactly x 0.25 = 1/microbatches on every rank that holds them",),
    ),
    Bug(
        "torchtitan",
        "cp=2,bug=local_positions",
        "positions that begin anew on each rank of cp",
        "Trainer.post_dataloading_process",
        "wrong part of the data",
        "-",
        "forward: `layers.0.attention`",
        ("forward: the output of layers.0.attention",),
    ),
    Bug(
        "megatron",
        "unsummed_norms",
        "norms under sequence parallelism that nobody sums",
        "_allreduce_non_tensor_model_parallel_grads",
        "missing reduction",
        "`decoder.final_layernorm.bias` and 25 more",
        "missing SUM of ranks 0, 1",
        ("26 of 51 gradients (decoder.final_layernorm.bias, ", SUM),
    ),
    Bug(
        "megatron",
        "unsummed_embedding",
        "tied embeddings that are not summed",
        "_allreduce_word_embedding_grads",
        "missing reduction",
        "`embedding.word_embeddings.weight`",
        "missing SUM of ranks 0, 1",
        ("1 of 51 gradients (embedding.word_embeddings.weight)", SUM, "tied embeddings"),
    ),
    Bug(
        "megatron",
        "auxiliary_losses",
        "auxiliary losses that grow with microbatches",
        "MoEAuxLossAutoScaler.set_loss_scale",
        "finding 10",
        "those that feel the term",
        "the term x 8 = microbatches",
        ("the whole difference is the term aux loss and z-loss: it entered x 8 = microbatches",),
    ),
    Bug(
        "megatron",
        "norm_of_replicas",
        "a norm that counts replicas",
        "param_is_not_tensor_parallel_duplicate",
        "finding 8",
        "-",
        "every copy is counted",
        ("every copy of a replicated parameter is counted",),
    ),
    Bug(
        "megatron",
        "dropout_of_each_rank",
        "dropout that differs between tp ranks",
        "_bias_dropout_add_func",
        "random state",
        "-",
        "masks of ranks 0, 1",
        ("ranks [0, 1] hold the same activation and draw different masks",),
    ),
    Bug(
        "megatron",
        "sum_over_dp",
        "a sum over dp where a mean is meant",
        "bucket.gradient_scaling_factor",
        "mean over data",
        "all 51",
        "x 2 = dp",
        ("all 51 gradients", "exactly x 2 = dp on every rank"),
    ),
]


def told(proof: LayoutProof) -> str:
    """All that is said of the causes in a layout, which has to differ."""
    assert not proof.broken, proof.details
    assert not proof.passed
    return "\n".join(f"{cause.text}; {cause.likely}" for cause in proof.causes)
