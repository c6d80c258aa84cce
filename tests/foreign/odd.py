"""Adapters of which nothing could be compared, or that do not do what they should: each a class of this file."""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Right:
    """What the others change."""

    LAYOUTS = ("dp=2",)
    extra, find_unused = False, False

    def batch(self, step):
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(step))

    def build(self, layout):
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        if self.extra:
            model.extra = nn.Parameter(torch.ones(2))
        if layout.get("dp", 1) == 1:
            return model
        return DistributedDataParallel(model, find_unused_parameters=self.find_unused)

    def step(self, model, batch):
        loss = model(batch.chunk(dist.get_world_size())[dist.get_rank()]).square().mean()
        loss.backward()
        loss = loss.detach()
        dist.all_reduce(loss)
        return {"loss": loss / dist.get_world_size()}


class NoBackward(Right):
    def step(self, model, batch):
        return {"loss": model(batch).sum()}

    def update(self, model):
        return {"grad_norm": sum(p.grad.square().sum() for p in model.parameters()) ** 0.5}  # which fails, too


class Elsewhere(Right):
    """Gradients that are not where they are looked for, and zeros there."""

    def step(self, model, batch):
        result = super().step(model, batch)
        for parameter in model.parameters():
            parameter.main_grad, parameter.grad = parameter.grad, torch.zeros_like(parameter)
        return result


class NotNumbers(Right):
    def step(self, model, batch):
        result = super().step(model, batch)
        next(model.parameters()).grad.fill_(float("nan"))
        return result


class NewEachTime(Right):
    def batch(self, step):
        return torch.full((4, 3), time.time_ns() % 1e9)


class NewOnEachRank(Right):
    def batch(self, step):
        return super().batch(step + dist.get_rank())


class List(Right):
    def step(self, model, batch):
        return [super().step(model, batch)]


class Word(Right):
    def step(self, model, batch):
        return {"loss": f"{super().step(model, batch)['loss']} or so"}


class Group(Right):
    def build(self, layout):
        dist.init_process_group("gloo")
        return super().build(layout)


class Exits(Right):
    def step(self, model, batch):
        sys.exit(0)


class ExitsLate(Right):
    """In its first update, in a layout."""

    def update(self, model):
        if dist.get_world_size() > 1:
            dist.barrier()
            time.sleep(0.3)  # what was measured has been sent
            os._exit(0)


class Raises(Right):
    def step(self, model, batch):
        return F.linear(batch, 3)


class Partly(Right):
    """A parameter without a gradient, which DDP answers in the next step unless it is told."""

    extra = True

    def update(self, model):
        return None


class Told(Partly):
    find_unused = True


class LateUpdate(Right):
    """A layout whose gradients are gone, for which its update raises."""

    def step(self, model, batch):
        result = super().step(model, batch)
        if dist.get_world_size() > 1:
            model.module[0].bias.grad = None
        return result

    def update(self, model):
        return {"grad_norm": sum(parameter.grad.square().sum() for parameter in model.parameters()) ** 0.5}
