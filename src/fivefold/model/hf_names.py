"""Which part of which tensor in files of Hugging Face holds each of our parameters.

The names inside a layer come from the kinds of its blocks (`BlockKind.hf_names`). This file has those of the
embedding, the last norm and the head, and those of experts and their routers.

Llama, Mistral, Qwen and DeepSeek differ from us in names alone. GPT-2 also transposes matrices, and has q, k and v in
one tensor. Experts, which are concatenated in one matrix here, have one tensor each there, or share one with a leading
expert dimension, in which gate and up are one matrix.
"""

from collections.abc import Container, Iterator
from typing import Literal, NamedTuple

from torch import Tensor

from fivefold.spec.kinds import WANTED_HF_NAMES, BlockKind, HfTensor
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Parameter
from fivefold.support.errors import Problem
from fivefold.support.plugin_calls import ask

_OUTSIDE_LAYERS = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}
_GPT2_OUTSIDE_LAYERS = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
BALANCE_BIAS = "e_score_correction_bias"  # of a router: our `balance`
BLOCKS, BLOCK_SCALES = "_blocks", "_scales"  # suffixes of the names of MXFP4's two tensors
_HF_NAMES_METHOD = "hf_names(self, spec)"  # as messages write it

# How files name the experts of a layer, and lay them out:
# each    mlp.experts.3.gate_proj.weight [F, E], and so on: Qwen, OLMoE, DeepSeek, GLM
# mixtral block_sparse_moe.experts.3.w1.weight, w3 and w2 for gate, up and down
# stacked mlp.experts.gate_up_proj [X, 2 F, E], gate before up: as transformers 5 holds them
# gpt_oss mlp.experts.gate_up_proj [X, E, 2 F], gate and up interleaved
# mxfp4   mlp.experts.gate_up_proj_blocks [X, 2 F, E/32, 16], gate and up interleaved
ExpertFormat = Literal["each", "mixtral", "stacked", "gpt_oss", "mxfp4"]
_ROUTERS: dict[ExpertFormat, str] = {
    "each": "mlp.gate",
    "mixtral": "block_sparse_moe.gate",
    "stacked": "mlp.gate",
    "gpt_oss": "mlp.router",
    "mxfp4": "mlp.router",
}
_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_MIXTRAL_PROJECTIONS = {"gate": "w1", "up": "w3", "down": "w2"}


class TensorSource(NamedTuple):
    """The part of a Hugging Face tensor that holds rows of one of our parameters."""

    name: str
    rows: range  # of our parameter
    expert_dim: int = 0  # size of the tensor's leading expert dimension; 0: it has none
    expert_index: int = 0  # along that dimension
    transposed: bool = False  # the matrix there is [inputs, outputs]
    slots: int = 1  # how many parameters share the matrix: 3 for q, k and v, 2 for gate and up
    slot: int = 0  # which of them this one is
    interleaved: bool = False  # the rows of those parameters alternate; else they are concatenated

    def view_of(self, hf_tensor: Tensor) -> Tensor:
        """These rows, as a view of the Hugging Face tensor."""
        return self.view_of_matrix(hf_tensor[self.expert_index] if self.expert_dim else hf_tensor)

    def view_of_matrix(self, matrix: Tensor) -> Tensor:
        """These rows, as a view of the tensor without its expert dimension."""
        matrix = matrix.T if self.transposed else matrix
        if self.slots == 1:
            return matrix
        return matrix[self.slot :: self.slots] if self.interleaved else matrix.chunk(self.slots)[self.slot]

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        """The shape of the Hugging Face tensor."""
        matrix = (len(self.rows) * self.slots, *parameter.shape[1:])
        matrix = matrix[::-1] if self.transposed else matrix
        return (self.expert_dim, *matrix) if self.expert_dim else matrix


def stored_parameters(spec: ModelSpec) -> list[Parameter]:
    """All that files store of a model: its parameters, and its buffers in the form of parameters."""
    # Each routed layer has one buffer, or no layer has any.
    buffers = zip(spec.buffers().items(), spec.routed_layers, strict=False)
    return [*spec.parameters(), *(Parameter(name, shape, "bias", layer) for (name, shape), layer in buffers)]


def expert_format_of(model_type: str) -> ExpertFormat:
    """The format in which we write the experts of a `model_type`."""
    formats: dict[str, ExpertFormat] = {"mixtral": "mixtral", "gpt_oss": "gpt_oss"}
    return formats.get(model_type, "each")


def expert_format_in(spec: ModelSpec, names: Container[str]) -> ExpertFormat:
    """The format of the experts in files that have tensors of these names."""
    first = next((parameter for parameter in spec.parameters() if parameter.experts), None)
    if first is None:
        return "each"
    # gpt_oss and stacked have the same names; only gpt_oss has biases.
    formats: tuple[ExpertFormat, ...] = ("each", "mixtral", "mxfp4", "gpt_oss" if spec.bias else "stacked")
    return next((one for one in formats if next(sources(spec, first, one)).name in names), "each")


def sources(spec: ModelSpec, parameter: Parameter, expert_format: ExpertFormat = "each") -> Iterator[TensorSource]:
    """The Hugging Face tensors that hold our parameter, in the order of its rows: one, or one for each expert."""
    is_gpt2, layer = spec.positions == "learned", parameter.layer
    prefix = "transformer.h" if is_gpt2 else "model.layers"
    module, leaf = _module_and_leaf(parameter)
    rows = range(parameter.shape[0])
    if layer is None:
        yield TensorSource(f"{(_GPT2_OUTSIDE_LAYERS if is_gpt2 else _OUTSIDE_LAYERS)[module]}.{leaf}", rows)
    elif parameter.experts:
        for source in _expert_sources(parameter, module.rpartition(".")[2], leaf, expert_format):
            yield source._replace(name=f"{prefix}.{layer}.{source.name}")
    elif module == _router_module(spec, layer):
        leaf = BALANCE_BIAS if leaf == "balance" else leaf
        yield TensorSource(f"{prefix}.{layer}.{_ROUTERS[expert_format]}.{leaf}", rows)
    else:
        names = _names_in_layer(spec, layer)
        if (named := names.get(f"{module}.{leaf}")) is not None:  # the parameter itself, else its module
            name = f"{prefix}.{layer}.{named.name}"
        else:
            named = names[module]
            name = f"{prefix}.{layer}.{named.name}.{leaf}"
        transposed = named.transposed and parameter.kind == "linear"
        yield TensorSource(name, rows, transposed=transposed, slot=named.slot, slots=named.slots)


def unnamed_kinds(spec: ModelSpec) -> list[Problem]:
    """The kinds of block that do not say where files have their weights."""
    problems = []
    for kinds in spec.counted():
        layer = spec.first(kinds)
        known = {*_names_in_layer(spec, layer), _router_module(spec, layer)}
        dense = [parameter for parameter in spec.block_parameters(layer) if not parameter.experts]
        for kind in kinds.branches:
            modules_and_leaves = [_module_and_leaf(parameter) for parameter in dense if _belongs_to(parameter, kind)]
            missing = {
                module if leaf in ("weight", "bias") else f"{module}.{leaf}"
                for module, leaf in modules_and_leaves
                if not {module, f"{module}.{leaf}"} & known
            }
            if missing:
                problem = f"{kind.name} does not say where files of Hugging Face have {', '.join(sorted(missing))}"
                given = ", ".join(ask(kind, "hf_names", spec, wanted=WANTED_HF_NAMES))
                hint = (
                    f"its method {_HF_NAMES_METHOD} gives {given}" if given else f"write its method {_HF_NAMES_METHOD}"
                )
                problems.append(Problem("hf.names", f"{problem}; {hint}"))
    return list(dict.fromkeys(problems))


def _router_module(spec: ModelSpec, layer: int) -> str:
    """The name of the layer's router in the layer; empty if it has none."""
    return spec.router(layer).removeprefix(f"layers.{layer}.") if spec.kinds(layer).routed else ""


def _names_in_layer(spec: ModelSpec, layer: int) -> dict[str, HfTensor]:
    """{our name of a module or a parameter in the layer: where files have it}, without experts and routers."""
    by_kind = [ask(kind, "hf_names", spec, wanted=WANTED_HF_NAMES) for kind in spec.kinds(layer).branches]
    return {ours: theirs for names in by_kind for ours, theirs in names.items()}


def _module_and_leaf(parameter: Parameter) -> tuple[str, str]:
    """The name of a parameter's module in its layer, and its own in the module: "attention.q" and "weight"."""
    module, _, leaf = parameter.name.removeprefix(f"layers.{parameter.layer}.").rpartition(".")
    return module, leaf


def _belongs_to(parameter: Parameter, kind: BlockKind) -> bool:
    """Whether it is in the module of the kind, or in the norm before it."""
    return _module_and_leaf(parameter)[0].partition(".")[0] in (kind.place, f"{kind.place}_norm")


def _expert_sources(
    parameter: Parameter, projection: str, leaf: str, expert_format: ExpertFormat
) -> Iterator[TensorSource]:
    """The sources of one projection (gate, up or down) of all experts."""
    count = parameter.experts
    height = parameter.shape[0] // count  # rows of one expert
    for expert in range(count):
        rows = range(expert * height, (expert + 1) * height)
        if expert_format == "each":
            yield TensorSource(f"mlp.experts.{expert}.{_PROJECTIONS[projection]}.{leaf}", rows)
        elif expert_format == "mixtral":
            yield TensorSource(f"block_sparse_moe.experts.{expert}.{_MIXTRAL_PROJECTIONS[projection]}.{leaf}", rows)
        else:
            name = "mlp.experts.down_proj" if projection == "down" else "mlp.experts.gate_up_proj"
            name += "_bias" if leaf == "bias" else BLOCKS if expert_format == "mxfp4" else ""
            source = TensorSource(
                name,
                rows,
                expert_dim=count,
                expert_index=expert,
                transposed=expert_format == "gpt_oss" and leaf == "weight",
                interleaved=expert_format != "stacked",
            )
            yield source if projection == "down" else source._replace(slot=int(projection == "up"), slots=2)
