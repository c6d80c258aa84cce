"""Expert parallelism: the experts of a layer are dealt out over the ep axis, and tokens travel to them and back.

slices       which tokens a rank routes: without sp every tp rank has all tokens, and routes its slice of them
alltoall     counts first, then each token to the ranks of its experts, and what they said back
allgather    every rank gets all tokens, computes those of its experts, and the sum goes back: for few ranks

`dispatch_of` chooses.
"""

import torch

from fivefold.model.experts.dispatch import LocalDispatch
from fivefold.model.experts.grouped import has_kernel
from fivefold.parallel.deferred_wgrad import WeightGradQueue
from fivefold.parallel.experts.allgather import AllGatherDispatch
from fivefold.parallel.experts.alltoall import AllToAllDispatch
from fivefold.parallel.experts.slices import SlicedDispatch
from fivefold.parallel.mesh import Mesh
from fivefold.spec.model import ModelSpec

__all__ = ["AllGatherDispatch", "AllToAllDispatch", "dispatch_of"]


def dispatch_of(
    spec: ModelSpec, mesh: Mesh, later: WeightGradQueue | None = None, dtype: torch.dtype | None = None
) -> LocalDispatch:
    """How tokens reach the experts of a layout. With `later`, experts can put off the gradients of their weights;
    `dtype` is that of the tokens."""
    if spec.experts is None:
        return LocalDispatch()
    if mesh.ep.size == 1:  # every rank has all experts: nothing travels
        found = SlicedDispatch(mesh, later)
        # Nobody on the host asks how many tokens an expert has; what is put off leaves a graph, and PyTorch's compiler
        # knows the kernel of bfloat16 alone.
        widths, narrow = (spec.hidden, spec.experts.ffn), dtype == torch.bfloat16
        found.in_graph = later is None and narrow and has_kernel(mesh.device.type, torch.bfloat16, *widths)
        return found
    return (AllGatherDispatch if mesh.layout.dispatch == "allgather" else AllToAllDispatch)(mesh, later)
