"""The decoder's ops for a layout: tensor parallelism where tp > 1, context parallelism where cp > 1."""

from typing import Any

from torch import Tensor

from fivefold.model.ops import LocalOps
from fivefold.model.positions import TokenPositions
from fivefold.parallel.context import Context
from fivefold.parallel.deferred_wgrad import WeightGradQueue
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.tensor import DeferredLocalOps, TensorParallel
from fivefold.spec.model import ModelSpec


def verbs_of(spec: ModelSpec, mesh: Mesh, later: WeightGradQueue | None = None) -> LocalOps:
    """With `later`, linears that can put off the gradients of their weights."""
    if mesh.tp.size > 1:
        return TensorParallel(spec, mesh, later) if mesh.cp.size == 1 else OverBoth(spec, mesh, later)
    if later is not None:
        return DeferredLocalOps(later) if mesh.cp.size == 1 else DeferredOverContext(mesh, later)
    return LocalOps() if mesh.cp.size == 1 else OverContext(mesh)


class OverContext(LocalOps):
    """Attention across the ranks that share a sequence; every other verb works token by token."""

    def __init__(self, mesh: Mesh):
        self.context = Context(mesh)

    def sight(self, place: TokenPositions) -> Any:
        return self.context.sight(place)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sight: Any) -> Tensor:
        return self.context.attend(q, k, v, sight)


class OverBoth(OverContext, TensorParallel):
    def __init__(self, spec: ModelSpec, mesh: Mesh, later: WeightGradQueue | None = None):
        OverContext.__init__(self, mesh)
        TensorParallel.__init__(self, spec, mesh, later)


class DeferredOverContext(OverContext, DeferredLocalOps):
    def __init__(self, mesh: Mesh, later: WeightGradQueue):
        OverContext.__init__(self, mesh)
        DeferredLocalOps.__init__(self, later)
