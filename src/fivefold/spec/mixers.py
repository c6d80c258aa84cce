"""The mixers that come with the package: attention over heads, and latent attention (MLA).

Their numbers are the model's own (`heads`, `kv_heads`, `head_dim`, `mla` and so on): all layers have the same. A window
is that of a layer.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from fivefold.spec.kinds import HfTensor, Mixer
from fivefold.spec.operations import Cache, Elementwise, Matmul, Operation, Scores
from fivefold.support.errors import Problem
from fivefold.support.ranges import MAX_TOKENS, outside, within

if TYPE_CHECKING:
    from fivefold.spec.model import ModelSpec


class GroupedQueryAttention(Mixer, frozen=True, kw_only=True, tag="attention"):
    """Queries, keys and values of the stream; MHA, GQA or MQA by the model's kv_heads."""

    place = "attention"
    module = "fivefold.model.attention:Attention"
    cp = attends = True

    window: Annotated[int, within(0, MAX_TOKENS)] = 0  # keys that a query sees, its own the last; 0: all before it

    def problems(self, spec: "ModelSpec") -> list[str]:
        latent = "model.pattern has attention, and model.mla is latent attention's; write mla"
        wrong = [Problem("model.pattern.numbers", latent)] if spec.mla else []
        return [*outside(self, "model.pattern.mixer").values(), *wrong]

    def operations(self, spec: "ModelSpec", tp: int) -> Iterator[Operation]:
        heads, kv_heads, dim = spec.heads // tp, max(1, spec.kv_heads // tp), spec.head_dim
        scores = Scores(heads, kv_heads, dim, dim, self.window, spec.sinks)
        bias = spec.bias or spec.qkv_bias
        yield Matmul(self.place, "q", f"{self.place}_norm", spec.hidden, scores.width, "colwise", bias=bias)
        yield Matmul(self.place, "k", f"{self.place}_norm", spec.hidden, scores.kv_width, "colwise_kv", bias=bias)
        yield Matmul(self.place, "v", f"{self.place}_norm", spec.hidden, scores.kv_width, "colwise_kv", bias=bias)
        if spec.qk_norm:
            yield Elementwise("qk_norm", spec.heads * spec.head_dim, name=f"{self.place}.q_norm")
            yield Elementwise("qk_norm", spec.kv_heads * spec.head_dim, name=f"{self.place}.k_norm")
        if spec.positions == "rope":
            yield Elementwise("rope", (spec.heads + spec.kv_heads) * spec.rotary_dim)
        yield scores
        yield Matmul(self.place, "o", "attention", scores.seen, spec.hidden, "rowwise", bias=spec.bias)

    def cache(self, spec: "ModelSpec", tp: int) -> Cache:
        return Cache(2 * max(1, spec.kv_heads // tp) * spec.head_dim, self.window)  # keys and values

    def hf_names(self, spec: "ModelSpec") -> dict[str, HfTensor]:
        return _GPT2 if spec.positions == "learned" else _hf_tensors(_LLAMA)


class MultiHeadLatentAttention(Mixer, frozen=True, kw_only=True, tag="mla"):
    """MLA: the latents are the same on every tp rank, which makes its heads of them."""

    place = "attention"
    module = "fivefold.model.attention:LatentAttention"
    cp = attends = True

    def problems(self, spec: "ModelSpec") -> list[str]:
        none = "model.pattern has mla, and model.mla has no numbers for it"
        return [] if spec.mla else [Problem("model.pattern.numbers", none)]

    def operations(self, spec: "ModelSpec", tp: int) -> Iterator[Operation]:
        assert spec.mla is not None
        mla, heads = spec.mla, spec.heads // tp
        scores = Scores(heads, heads, mla.head_dim, mla.v_dim)
        if mla.q_rank:
            yield Matmul(self.place, "q_down", f"{self.place}_norm", spec.hidden, mla.q_rank, "replicated")
        else:
            yield Matmul(self.place, "q", f"{self.place}_norm", spec.hidden, scores.width, "colwise")
        yield Matmul(self.place, "kv_down", f"{self.place}_norm", spec.hidden, mla.cached, "replicated")
        if mla.q_rank:
            yield Elementwise("norm", mla.q_rank, stream=True, name=f"{self.place}.q_norm")
            yield Matmul(self.place, "q_up", "q_latent", mla.q_rank, scores.width, "colwise")
        yield Elementwise("norm", mla.kv_rank, stream=True, name=f"{self.place}.kv_norm")
        yield Matmul(self.place, "kv_up", "kv_latent", mla.kv_rank, heads * (mla.nope_dim + mla.v_dim), "colwise")
        yield Elementwise("rope", (spec.heads + 1) * mla.rope_dim)
        yield scores
        yield Matmul(self.place, "o", "attention", scores.seen, spec.hidden, "rowwise", bias=spec.bias)

    def cache(self, spec: "ModelSpec", tp: int) -> Cache:
        assert spec.mla is not None
        return Cache(spec.mla.cached)  # the latent has no heads that tp could divide

    def hf_names(self, spec: "ModelSpec") -> dict[str, HfTensor]:
        return _hf_tensors(_LATENT)


# Names in files of Hugging Face.
_LLAMA = {
    "attention_norm": "input_layernorm",
    "attention": "self_attn",  # its sinks
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}
_LATENT = _LLAMA | {
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
}
_GPT2 = {
    "attention_norm": HfTensor("ln_1"),
    "attention.q": HfTensor("attn.c_attn", transposed=True, slot=0, slots=3),
    "attention.k": HfTensor("attn.c_attn", transposed=True, slot=1, slots=3),
    "attention.v": HfTensor("attn.c_attn", transposed=True, slot=2, slots=3),
    "attention.o": HfTensor("attn.c_proj", transposed=True),
}


def _hf_tensors(names: dict[str, str]) -> dict[str, HfTensor]:
    return {ours: HfTensor(theirs) for ours, theirs in names.items()}


MIXERS: dict[str, type[Mixer]] = {"attention": GroupedQueryAttention, "mla": MultiHeadLatentAttention}
