"""Our parameter names and Hugging Face's: where each parameter lives in the other's files.

Llama, Mistral, Qwen and DeepSeek only rename. GPT-2 also keeps matrices transposed and q, k, v in one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.spec.model import ModelSpec
from fivefold.spec.parameters import Parameter

_LLAMA = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
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
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "attention_norm": "ln_1",
    "attention.q": "attn.c_attn",
    "attention.k": "attn.c_attn",
    "attention.v": "attn.c_attn",
    "attention.o": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


class Source(NamedTuple):
    """Where a parameter is found: a tensor's name, whether it lies transposed, which third of it (after that)."""

    name: str
    transposed: bool = False
    third: int | None = None

    def ours(self, theirs: Tensor) -> Tensor:
        """The parameter in their tensor."""
        whole = theirs.T if self.transposed else theirs
        return whole if self.third is None else whole.chunk(3, dim=0)[self.third]

    def theirs(self, *ours: Tensor) -> Tensor:
        """Their tensor, of the one parameter or the three that are in it."""
        whole = torch.cat(ours) if len(ours) > 1 else ours[0]
        return whole.T if self.transposed else whole


def source(spec: ModelSpec, parameter: Parameter) -> Source:
    """The Hugging Face home of our parameter."""
    gpt, layer = spec.positions == "learned", parameter.layer
    names, prefix = (_GPT2, "transformer.h") if gpt else (_LATENT if spec.mla else _LLAMA, "model.layers")
    module, _, leaf = parameter.name.removeprefix(f"layers.{layer}.").rpartition(".")
    if layer is None:
        return Source(f"{names[module]}.{leaf}")
    third = {"attention.q": 0, "attention.k": 1, "attention.v": 2}.get(module) if gpt else None
    return Source(f"{prefix}.{layer}.{names[module]}.{leaf}", gpt and parameter.kind == "linear", third)
