"""Our parameter names and Hugging Face's: where each parameter lives in the other's files.

Llama and Qwen3 only rename. GPT-2 also keeps matrices transposed and q, k, v in one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.spec.model import ModelSpec
from fivefold.spec.parameters import Parameter
from fivefold.support.errors import UserError

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


def source(spec: ModelSpec, parameter: Parameter) -> Source:
    """The Hugging Face home of our parameter."""
    gpt, layer = spec.positions == "learned", parameter.layer
    names, prefix = (_GPT2, "transformer.h") if gpt else (_LLAMA, "model.layers")
    module, _, leaf = parameter.name.removeprefix(f"layers.{layer}.").rpartition(".")
    if layer is None:
        return Source(f"{names[module]}.{leaf}")
    third = {"attention.q": 0, "attention.k": 1, "attention.v": 2}.get(module) if gpt else None
    return Source(f"{prefix}.{layer}.{names[module]}.{leaf}", gpt and parameter.kind == "linear", third)


def from_hf(spec: ModelSpec, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict from theirs; missing tensors and wrong shapes are named, all at once."""
    ours: dict[str, Tensor] = {}
    problems: list[str] = []
    for parameter in spec.parameters():
        home = source(spec, parameter)
        if home.name not in state:
            problems.append(f"tensor {home.name} is missing (our {parameter.name}, shape {list(parameter.shape)})")
            continue
        tensor = state[home.name].T if home.transposed else state[home.name]
        tensor = tensor if home.third is None else tensor.chunk(3, dim=0)[home.third]
        if tuple(tensor.shape) != parameter.shape:
            problems.append(
                f"tensor {home.name} gives shape {list(tensor.shape)} for our {parameter.name}, and {spec.name} has "
                f"{list(parameter.shape)}"
            )
        ours[parameter.name] = tensor.contiguous()
    if problems:
        raise UserError(problems)
    return ours


def to_hf(spec: ModelSpec, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their state dict from ours."""
    theirs: dict[str, Tensor] = {}
    thirds: dict[Source, list[Tensor]] = {}
    for parameter in spec.parameters():  # q, k, v come in this order, so thirds are appended in theirs
        home, tensor = source(spec, parameter), state[parameter.name]
        if home.third is not None:
            thirds.setdefault(home._replace(third=None), []).append(tensor)
        else:
            theirs[home.name] = tensor.T.contiguous() if home.transposed else tensor
    for home, parts in thirds.items():
        whole = torch.cat(parts, dim=0)
        theirs[home.name] = whole.T.contiguous() if home.transposed else whole
    return theirs
