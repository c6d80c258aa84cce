"""The decoder's ops for a layout: tensor parallelism where tp > 1, context parallelism where cp > 1."""

from typing import Any

from fivefold.model.ops import AttentionOps, LocalOps
from fivefold.parallel.context import Context
from fivefold.parallel.deferred_wgrad import WeightGradQueue
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.tensor import DeferredLocalOps, TensorParallel
from fivefold.spec.model import ModelSpec


def ops_of(
    spec: ModelSpec,
    mesh: Mesh,
    later: WeightGradQueue | None = None,
    *,
    attention: AttentionOps | None = None,
    compiled: bool = False,
    fp8: bool = False,
) -> LocalOps:
    """With `later`, linears can put off the gradients of their weights; `attention`: in place of the layout's."""
    attention = attention or (Context(mesh) if mesh.cp.size > 1 else None)
    options: Any = {"attention": attention, "compiled": compiled, "fp8": fp8, "breaks": mesh.layout.breaks_graphs}
    if mesh.tp.size > 1:
        return TensorParallel(spec, mesh, later, **options)
    return LocalOps(**options) if later is None else DeferredLocalOps(later, **options)
