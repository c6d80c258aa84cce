"""The decoder's verbs for a layout: tensor parallelism where tp > 1, context parallelism where cp > 1."""

from typing import Any

from torch import Tensor

from fivefold.model.local import Local
from fivefold.model.place import Place
from fivefold.parallel.context import Context
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.tensor import TensorParallel
from fivefold.spec import ModelSpec


def verbs_of(spec: ModelSpec, mesh: Mesh) -> Local:
    if mesh.tp.size == 1:
        return Local() if mesh.cp.size == 1 else OverContext(mesh)
    return TensorParallel(spec, mesh) if mesh.cp.size == 1 else OverBoth(spec, mesh)


class OverContext(Local):
    """Attention across the ranks that share a sequence; every other verb works token by token."""

    def __init__(self, mesh: Mesh):
        self.context = Context(mesh)

    def sight(self, place: Place) -> Any:
        return self.context.sight(place)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sight: Any) -> Tensor:
        return self.context.attend(q, k, v, sight)


class OverBoth(OverContext, TensorParallel):
    def __init__(self, spec: ModelSpec, mesh: Mesh):
        OverContext.__init__(self, mesh)
        TensorParallel.__init__(self, spec, mesh)
