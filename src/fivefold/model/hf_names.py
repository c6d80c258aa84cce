"""Our parameter names and Hugging Face's: where each parameter lives in the other's files.

Llama, Mistral, Qwen and DeepSeek only rename. GPT-2 also keeps matrices transposed and q, k, v in one. Experts, which
are one below the other here, are tensors of their own there, or stacks with gate and up in one.
"""

from collections.abc import Container, Iterator
from typing import Literal, NamedTuple

from torch import Tensor

from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Parameter

_LLAMA = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",  # its sinks
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
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
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
BALANCE = "e_score_correction_bias"
BLOCKS, BLOCK_SCALES = "_blocks", "_scales"  # how the names of MXFP4's two tensors end

# How files name the experts of a layer, and lay them out:
# each    mlp.experts.3.gate_proj.weight [F, E], and so on: Qwen, OLMoE, DeepSeek, GLM
# mixtral block_sparse_moe.experts.3.w1.weight, w3 and w2 for gate, up and down
# stacked mlp.experts.gate_up_proj [X, 2 F, E], gate before up: as transformers 5 holds them
# gpt_oss mlp.experts.gate_up_proj [X, E, 2 F], gate and up in turns
# mxfp4   mlp.experts.gate_up_proj_blocks [X, 2 F, E/32, 16], gate and up in turns
Style = Literal["each", "mixtral", "stacked", "gpt_oss", "mxfp4"]
_ROUTERS = {"mixtral": "block_sparse_moe.gate", "gpt_oss": "mlp.router", "mxfp4": "mlp.router"}
_ROUTERS |= {"each": "mlp.gate", "stacked": "mlp.gate"}
_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_W = {"gate": "w1", "up": "w3", "down": "w2"}


class TensorSource(NamedTuple):
    """Where rows of a parameter are found: a tensor's name, and which part of it they are."""

    name: str
    rows: range  # of the parameter
    stack: int = 0  # the tensor is a stack of so many
    expert: int = 0  # and this one is meant
    transposed: bool = False
    part: int = 0  # after that, which one of
    parts: int = 1  # several parameters that lie in it together,
    in_turns: bool = False  # a row of each in turn; else one below the other

    def ours(self, theirs: Tensor) -> Tensor:
        """The rows in their tensor: a view of it."""
        return self.of_matrix(theirs[self.expert] if self.stack else theirs)

    def of_matrix(self, matrix: Tensor) -> Tensor:
        """The rows in the tensor, or in the one of its stack that is meant."""
        matrix = matrix.T if self.transposed else matrix
        if self.parts == 1:
            return matrix
        return matrix[self.part :: self.parts] if self.in_turns else matrix.chunk(self.parts)[self.part]

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Of their tensor, whose rows are the parameter's."""
        matrix = (len(self.rows) * self.parts, *parameter.shape[1:])
        matrix = matrix[::-1] if self.transposed else matrix
        return (self.stack, *matrix) if self.stack else matrix


def tensors(spec: ModelSpec) -> list[Parameter]:
    """What files hold of a model: its parameters, and its buffers as if they were some."""
    layers = range(spec.dense_layers, spec.layers)
    buffers = zip(spec.buffers().items(), layers, strict=False)
    return [*spec.parameters(), *(Parameter(name, shape, "bias", layer) for (name, shape), layer in buffers)]


def style_of(kind: str) -> Style:
    """How files of a `model_type` call the experts."""
    styles: dict[str, Style] = {"mixtral": "mixtral", "gpt_oss": "gpt_oss"}
    return styles.get(kind, "each")


def style_in(spec: ModelSpec, names: Container[str]) -> Style:
    """How these names call the experts."""
    first = next((parameter for parameter in spec.parameters() if parameter.experts), None)
    if first is None:
        return "each"
    styles: tuple[Style, ...] = ("each", "mixtral", "mxfp4", "gpt_oss" if spec.bias else "stacked")
    return next((style for style in styles if next(sources(spec, first, style)).name in names), "each")


def sources(spec: ModelSpec, parameter: Parameter, style: Style = "each") -> Iterator[TensorSource]:
    """The Hugging Face homes of our parameter, in the order of its rows: one, or one for each expert."""
    gpt, layer = spec.positions == "learned", parameter.layer
    names, prefix = (_GPT2, "transformer.h") if gpt else (_LATENT if spec.mla else _LLAMA, "model.layers")
    module, _, leaf = parameter.name.removeprefix(f"layers.{layer}.").rpartition(".")
    rows = range(parameter.shape[0])
    if layer is None:
        yield TensorSource(f"{names[module]}.{leaf}", rows)
    elif parameter.experts:
        for source in _stacked(parameter, module.removeprefix("mlp.experts."), leaf, style):
            yield source._replace(name=f"{prefix}.{layer}.{source.name}")
    elif module == "mlp.router":
        leaf = BALANCE if leaf == "balance" else leaf
        yield TensorSource(f"{prefix}.{layer}.{_ROUTERS[style]}.{leaf}", rows)
    else:
        third = {"attention.q": 0, "attention.k": 1, "attention.v": 2}.get(module) if gpt else None
        source = TensorSource(
            f"{prefix}.{layer}.{names[module]}.{leaf}", rows, transposed=gpt and parameter.kind == "linear"
        )
        yield source if third is None else source._replace(part=third, parts=3)


def _stacked(parameter: Parameter, which: str, leaf: str, style: Style) -> Iterator[TensorSource]:
    """The homes of one linear (gate, up or down) of all experts."""
    count = parameter.experts
    each = parameter.shape[0] // count
    for expert in range(count):
        rows = range(expert * each, (expert + 1) * each)
        if style == "each":
            yield TensorSource(f"mlp.experts.{expert}.{_PROJECTIONS[which]}.{leaf}", rows)
        elif style == "mixtral":
            yield TensorSource(f"block_sparse_moe.experts.{expert}.{_W[which]}.{leaf}", rows)
        else:
            name = "mlp.experts.down_proj" if which == "down" else "mlp.experts.gate_up_proj"
            name += "_bias" if leaf == "bias" else BLOCKS if style == "mxfp4" else ""
            transposed = style == "gpt_oss" and leaf == "weight"
            source = TensorSource(name, rows, count, expert, transposed, in_turns=style != "stacked")
            yield source if which == "down" else source._replace(part=int(which == "up"), parts=2)
