"""The shipped adapter of torchtitan, with bugs planted in torchtitan: `fsdp=2,bug=averaged`."""

import torch

from fivefold.foreign.adapters import torchtitan as shipped
from fivefold.foreign.adapters.torchtitan import *  # noqa: F403


def build(layout):
    bug = layout.pop("bug", "")
    if bug:
        globals()[bug]()
    return shipped.build(layout)


def averaged():
    """FSDP divides by its ranks, and the loss by the targets of all of them."""
    import torchtitan.distributed.fsdp as fsdp

    fsdp.disable_fsdp_gradient_division = lambda model: None


def local_positions():
    """Context parallelism cuts the sequence, and RoPE counts from zero on every rank."""
    usual = shipped.Loop.post_dataloading_process

    def process(self, inputs, labels):
        tokens, labels, others = usual(self, inputs, labels)
        if self.parallel_dims.cp_enabled:
            others["positions"] = torch.arange(tokens.shape[1]).expand(tokens.shape)
        return tokens, labels, others

    shipped.Loop.post_dataloading_process = process


def scaled():
    """Schedules divide by their microbatches, and the loss is of all targets already."""
    import torchtitan.distributed.pipeline_parallel as pipeline

    usual = pipeline.get_schedule_class
    pipeline.get_schedule_class = lambda name: _scaled(usual(name))


def _scaled(schedule):
    class Scaled(schedule):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs | {"scale_grads": True})

    return Scaled
