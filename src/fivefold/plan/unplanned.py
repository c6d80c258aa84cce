"""What trains and is proven, but has no cost model yet: refused by name, so that no figure is a guess."""

from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError


def refuse_unplanned(spec: ModelSpec) -> None:
    if spec.experts is not None:
        raise UserError(
            f"{spec.name} has {spec.experts.count} experts a layer, and plan, simulate, goodput and dryrun know dense "
            "models alone; train and verify know both: 'fivefold verify --model tiny-moe --layout dp=2,ep=2'"
        )
