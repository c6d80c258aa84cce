"""What trains, is proven and planned, but has no cost model yet for lengths: refused by name."""

from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError


def refuse_unplanned(spec: ModelSpec) -> None:
    if spec.experts is not None:
        raise UserError(
            f"{spec.name} has {spec.experts.count} experts a layer, and the comparison of lengths knows dense "
            f"models alone; training is planned: 'fivefold plan {spec.name} --cluster 2x8xH100'"
        )
