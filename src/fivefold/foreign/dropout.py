"""Dropout turned off, wherever it is called: what is left is a function of the data, and can be compared by value."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fivefold.foreign.torch_modes import everywhere

DROPOUTS = (
    torch.dropout, functional.dropout, torch.feature_dropout, functional.dropout1d, functional.dropout2d,
    functional.dropout3d, torch.alpha_dropout, functional.alpha_dropout, functional.feature_alpha_dropout,
    torch.native_dropout,
)  # fmt: skip
_ATTENTION = functional.scaled_dot_product_attention


@contextmanager
def still(on: bool) -> Iterator[None]:
    """Inside of this dropout leaves everything as it is, also in what a backward pass computes again."""
    if not on:
        yield
        return
    with everywhere(_Still()):
        yield


class _Still(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if function is torch.native_dropout:
            entered = args[0] if args else options["input"]
            return entered.clone(), torch.ones_like(entered, dtype=torch.bool)
        if function in DROPOUTS:
            entered = args[0] if args else options["input"]
            return entered if _in_place(args, options) else entered.clone()
        if function is _ATTENTION:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in options:
                options["dropout_p"] = 0.0
        return function(*args, **options)


def _in_place(args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    return bool(options.get("inplace", args[3] if len(args) > 3 else False))
