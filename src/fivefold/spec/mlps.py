"""The MLPs that come with the package: a dense feed-forward network, and a mixture of experts."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fivefold.spec.kinds import MLP, HfTensor
from fivefold.spec.operations import Elementwise, Matmul, Operation
from fivefold.support.errors import Problem

if TYPE_CHECKING:
    from fivefold.spec.model import ModelSpec


class Dense(MLP, frozen=True, kw_only=True):
    """A feed-forward network of the model's `ffn`."""

    module = "fivefold.model.mlp:DenseMLP"

    def operations(self, spec: "ModelSpec", tp: int) -> Iterator[Operation]:
        return network(spec, self.place, "", spec.ffn, tp)

    def divided(self, spec: "ModelSpec") -> list[int]:
        return [spec.ffn]

    def hf_names(self, spec: "ModelSpec") -> dict[str, HfTensor]:
        return _GPT2 if spec.positions == "learned" else _LLAMA


class MixtureOfExperts(MLP, frozen=True, kw_only=True, tag="moe"):
    """A router, the experts that it chooses, and those that all tokens visit; the numbers are `model.experts`. tp
    divides the shared experts alone.

    A kind that derives from it sends tokens as it does, over ep and tp, and is planned and counted so; its module
    derives from `model/moe.py`'s.
    """

    module = "fivefold.model.moe:MoE"
    routes = True
    reference = "fivefold.verifier.plain_moe:PlainMoE"

    def problems(self, spec: "ModelSpec") -> list[str]:
        none = f"model.pattern has {self.name}, and model.experts has no numbers for it"
        return [] if spec.experts else [Problem("model.pattern.numbers", none)]

    def operations(self, spec: "ModelSpec", tp: int) -> Iterator[Operation]:
        experts = spec.experts
        assert experts is not None
        each: dict[str, Any] = {"bias": spec.bias, "experts": experts.count, "chosen": experts.top_k}
        hidden = spec.hidden
        yield Matmul(
            self.place,
            "router",
            f"widened {self.place}_norm",
            hidden,
            experts.count,
            "replicated_partial",
            bias=spec.bias,
        )
        gated = spec.activation.startswith("swiglu")
        if gated:
            yield Matmul(self.place, "experts.gate", "dispatched", hidden, experts.ffn, "experts", **each)
        yield Matmul(self.place, "experts.up", "dispatched", hidden, experts.ffn, "experts", **each)
        yield Elementwise("swiglu" if gated else "gelu", experts.top_k * experts.ffn)
        yield Matmul(self.place, "experts.down", "activation", experts.ffn, hidden, "experts", **each)
        if experts.shared:
            yield from network(spec, self.place, "shared.", experts.shared_ffn, tp)

    def divided(self, spec: "ModelSpec") -> list[int]:
        shared = spec.experts.shared_ffn if spec.experts else 0
        return [shared] if shared else []

    def hf_names(self, spec: "ModelSpec") -> dict[str, HfTensor]:
        return _MIXTURE


# Names in files of Hugging Face; experts and routers are in `model/hf_names.py`.
_LLAMA = {"mlp_norm": HfTensor("post_attention_layernorm")}
_LLAMA |= {f"mlp.{name}": HfTensor(f"mlp.{name}_proj") for name in ("gate", "up", "down")}
_MIXTURE = {"mlp_norm": HfTensor("post_attention_layernorm")}
_MIXTURE |= {f"mlp.shared.{name}": HfTensor(f"mlp.shared_experts.{name}_proj") for name in ("gate", "up", "down")}
_GPT2 = {
    "mlp_norm": HfTensor("ln_2"),
    "mlp.up": HfTensor("mlp.c_fc", transposed=True),
    "mlp.down": HfTensor("mlp.c_proj", transposed=True),
}


MLPS: dict[str, type[MLP]] = {"dense": Dense, "moe": MixtureOfExperts}


def network(spec: "ModelSpec", place: str, prefix: str, width: int, tp: int) -> Iterator[Operation]:
    """A dense feed-forward network."""
    hidden, ffn, gated = spec.hidden, width // tp, spec.activation.startswith("swiglu")
    if gated:
        yield Matmul(place, f"{prefix}gate", f"{place}_norm", hidden, ffn, "colwise", bias=spec.bias)
    yield Matmul(place, f"{prefix}up", f"{place}_norm", hidden, ffn, "colwise", bias=spec.bias)
    yield Elementwise("swiglu" if gated else "gelu", width)
    yield Matmul(place, f"{prefix}down", f"{prefix}activation", ffn, hidden, "rowwise", bias=spec.bias)
