"""What part of a backward pass computes: all gradients, those of inputs (and of all but linears), or the linears'."""

from typing import Literal

Part = Literal["all", "inputs", "weights"]
