"""The shipped adapter of Hugging Face, with bugs planted in PyTorch's DDP and FSDP2 and in transformers' loss:
`dp=2,bug=summed`."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers.loss import loss_utils

from fivefold.foreign.adapters import huggingface
from fivefold.foreign.adapters.huggingface import *  # noqa: F403

BUG = ""


def build(layout, device):
    global BUG
    BUG = layout.pop("bug", "")
    planting = {
        "one_parameter": one_parameter, "mean_of_means": mean_of_means, "ignored_padding": ignored_padding,
        "no_replicas": no_replicas,
    }  # fmt: skip
    if BUG in planting:
        planting[BUG]()
    model = huggingface.build(layout, device)
    if BUG == "summed":
        default_hooks._allreduce_fut = summed
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    if BUG == "halved":
        model.register_comm_hook(None, halved)
    if BUG == "factor":
        for part in (*model.model.layers, model):
            part.set_gradient_divide_factor(1.0)
    return model


def step(model, batch):
    if BUG in ("no_sync", "sync_too_early"):
        DistributedDataParallel.require_backward_grad_sync = property(
            lambda self: BUG == "sync_too_early" and not self.__dict__.get("last", True),
            lambda self, last: self.__dict__.update(last=last),
        )
    return huggingface.step(model, batch)


def update(model):
    if BUG == "local_norm":
        norms = [p.grad.to_local().norm() for p in model.parameters()]
        huggingface.update(model)
        return {"grad_norm": torch.stack(norms).norm()}
    return huggingface.update(model)


def summed(group, tensor):
    """DDP's hook for an all-reduce, without its division."""
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0])


def halved(state, bucket):
    """A hook that takes the mean of what is a mean already."""
    tensor = bucket.buffer().div_(dist.get_world_size())
    return default_hooks._allreduce_fut(None, tensor)


def one_parameter():
    """DDP is told to leave one parameter alone."""
    usual = DistributedDataParallel.__init__

    def start(self, module, **kwargs):
        module._ddp_params_and_buffers_to_ignore = {"model.norm.weight"}
        usual(self, module, **kwargs)

    DistributedDataParallel.__init__ = start


def mean_of_means():
    """The loss does not know how many targets the others have, and takes the mean over its own."""
    usual = loss_utils.fixed_cross_entropy

    def own_mean(source, target, num_items_in_batch=None):
        if dist.get_world_size() == 1:
            return usual(source, target, num_items_in_batch)
        return usual(source, target) / dist.get_world_size()  # the adapter multiplies by that, for DDP's mean

    loss_utils.fixed_cross_entropy = own_mean


def no_replicas():
    """HSDP reduces over shards, and never over replicas."""
    usual = FSDPModule.set_requires_gradient_sync

    def synchronize(self, wanted, **options):
        usual(self, wanted, **options)
        self.set_requires_all_reduce(False)

    FSDPModule.set_requires_gradient_sync = synchronize


def ignored_padding():
    """In layouts the mask of the padding does not reach the model."""
    usual = huggingface.AutoModelForCausalLM.from_config

    def from_config(config):
        model = usual(config)
        if dist.get_world_size() > 1:
            model.register_forward_pre_hook(
                lambda module, args, kwargs: (args, kwargs | {"attention_mask": None}), with_kwargs=True
            )
        return model

    huggingface.AutoModelForCausalLM = type("Loader", (), {"from_config": staticmethod(from_config)})


def filled_in_the_middle(step):
    """Causal attention sees no padding at the end of a sample, with or without a mask."""
    full = huggingface.padded_batch(step)
    return {name: torch.cat([tensor[:, :2], tensor[:, 2:].flip(1)], dim=1) for name, tensor in full.items()}


class padded:
    LAYOUTS = huggingface.padded.LAYOUTS
    batch, build, step, update = map(staticmethod, (filled_in_the_middle, build, step, update))
