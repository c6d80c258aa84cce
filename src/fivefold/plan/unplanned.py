"""What trains and is proven, but has no cost model yet: refused by name, so that no figure is a guess."""

from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError


def refuse_unplanned(spec: ModelSpec) -> None:
    if spec.experts is not None:
        raise UserError(
            f"{spec.name} has {spec.experts.count} experts a layer, and plan, simulate and goodput know dense models "
            "alone; train, verify and dryrun know both: 'fivefold dryrun mixtral-8x7b --layout dp=8,ep=8,zero=1'"
        )
