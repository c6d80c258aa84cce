"""The shipped adapter of PyTorch's own parallelism, with bugs planted in PyTorch: `tp=2,bug=reduced_twice`."""

from torch.distributed.nn.functional import all_reduce
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel

from fivefold.foreign.adapters import pipelining
from fivefold.foreign.adapters.pipelining import *  # noqa: F403


def build(layout, device):
    bug = layout.pop("bug", "")
    if bug:
        globals()[bug]()
    model = pipelining.build(layout, device)
    if bug == "summed":
        for stage in model:
            stage.set_gradient_divide_factor(1.0)  # FSDP2 divides by its ranks, and here by nothing
    return model


def summed():
    pass


def scaled():
    """A schedule divides by its microbatches, as it does by itself, and the loss is of the whole batch already."""
    usual = _PipelineSchedule.__init__

    def start(self, *args, **kwargs):
        usual(self, *args, **kwargs | {"scale_grads": True})

    _PipelineSchedule.__init__ = start


def norms_alone():
    """A norm of tokens that tp has cut uses its local weight: DTensor does not know that gradients are parts."""
    usual = SequenceParallel._replicate_module_fn

    def replicate(self, name, module, mesh):
        usual(self, name, module, mesh)
        forward = module.forward

        def local(x):
            whole = dict(module._parameters)
            module._parameters.update({key: value.to_local() for key, value in whole.items() if value is not None})
            result = DTensor.from_local(forward(x.to_local()), mesh, x.placements, run_check=False)
            module._parameters.update(whole)
            return result

        module.forward = local

    SequenceParallel._replicate_module_fn = replicate


def reduced_twice():
    """The output of the attention's last matrix is summed over tp once more."""
    usual = RowwiseParallel._prepare_output_fn

    def prepare(layouts, use_local, module, output, mesh):
        result = usual(layouts, use_local, module, output, mesh)
        square = getattr(module, "in_features", 0) == pipelining.WIDTH
        return all_reduce(result, group=mesh.get_group()) if square else result

    RowwiseParallel._prepare_output_fn = staticmethod(prepare)
