"""A linear that costs nothing to make on the meta device."""

from torch import nn


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """On the meta device there is nothing to draw, and torch imports its compiler to draw it."""
        if not self.weight.is_meta:
            super().reset_parameters()
