"""The decoder's verbs for a layout: tensor parallelism where tp > 1, context parallelism where cp > 1."""

from typing import Any

from torch import Tensor

from fivefold.model.local import Local
from fivefold.model.place import Place
from fivefold.parallel.context import Context
from fivefold.parallel.later import Later
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.tensor import Split, TensorParallel
from fivefold.spec import ModelSpec


def verbs_of(spec: ModelSpec, mesh: Mesh, later: Later | None = None) -> Local:
    """With `later`, linears that can put off the gradients of their weights."""
    if mesh.tp.size > 1:
        return TensorParallel(spec, mesh, later) if mesh.cp.size == 1 else OverBoth(spec, mesh, later)
    if later is not None:
        return Split(later) if mesh.cp.size == 1 else SplitOverContext(mesh, later)
    return Local() if mesh.cp.size == 1 else OverContext(mesh)


class OverContext(Local):
    """Attention across the ranks that share a sequence; every other verb works token by token."""

    def __init__(self, mesh: Mesh):
        self.context = Context(mesh)

    def sight(self, place: Place) -> Any:
        return self.context.sight(place)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sight: Any) -> Tensor:
        return self.context.attend(q, k, v, sight)


class OverBoth(OverContext, TensorParallel):
    def __init__(self, spec: ModelSpec, mesh: Mesh, later: Later | None = None):
        OverContext.__init__(self, mesh)
        TensorParallel.__init__(self, spec, mesh, later)


class SplitOverContext(OverContext, Split):
    def __init__(self, mesh: Mesh, later: Later):
        OverContext.__init__(self, mesh)
        Split.__init__(self, later)
