"""A gated short convolution in place of attention, as in LFM2 and Hyena: out(c * conv(b * x)).

    model.pattern = [{mixer = "fivefold_gated_conv:GatedConv", mlp = "dense"}, {mixer = "attention", mlp = "dense"}]

This is the description, which plans and jobs read without torch; `layer.py` computes it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fivefold.spec.kinds import HfTensor, Mixer
from fivefold.spec.operations import Cache, Elementwise, Matmul, Operation

if TYPE_CHECKING:
    from fivefold.spec.model import ModelSpec


class GatedConv(Mixer, frozen=True, kw_only=True, tag="fivefold_gated_conv:GatedConv"):
    place = "conv"
    module = "fivefold_gated_conv.layer:GatedConvLayer"

    taps: int = 3  # tokens that each output reads, its own the last

    def problems(self, spec: "ModelSpec") -> list[str]:
        if 1 <= self.taps <= 64:
            return []
        return [f"model.pattern.mixer.taps={self.taps} must lie in 1 to 64; nearest: {min(max(self.taps, 1), 64)}"]

    def operations(self, spec: "ModelSpec", tp: int) -> Iterator[Operation]:
        width = spec.hidden
        for name in ("b", "c", "x"):
            yield Matmul("conv", name, "conv_norm", width, width // tp, "colwise")
        yield Elementwise(
            "other",
            width,
            name="conv.filter",
            weights=self.taps,
            std=self.taps**-0.5,
            flops=2 * self.taps + 2,
            # The two products and the convolution, a pass over memory for each tap; backward twice as much.
            moved=(12.0 + 6.0 * (self.taps - 1), 24.0 + 12.0 * (self.taps - 1)),
            saved=2.0,  # the gated input, and what the filter makes of it
        )
        yield Matmul("conv", "out", "gated", width // tp, width, "rowwise")

    def cache(self, spec: "ModelSpec", tp: int) -> Cache:
        return Cache(sequence=(self.taps - 1) * spec.hidden // tp)  # the gated inputs that the next token reads

    def hf_names(self, spec: "ModelSpec") -> dict[str, HfTensor]:
        # b, c and x are one matrix in files, their rows one after the other; the filter is a tensor [width, taps].
        joined = {f"conv.{name}": HfTensor("conv.in_proj", slot=slot, slots=3) for slot, name in enumerate("bcx")}
        names = {"conv_norm": "operator_norm", "conv.filter": "conv.conv", "conv.out": "conv.out_proj"}
        return joined | {ours: HfTensor(theirs) for ours, theirs in names.items()}

    def divided(self, spec: "ModelSpec") -> list[int]:
        return [spec.hidden]
