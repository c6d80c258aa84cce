"""Our parameter names and Hugging Face's: which part of which tensor of its files each of our parameters is.

The names in a layer are those that its kinds say (`BlockKind.hf_names`); the ends of a model are here, and what
files have of experts. Llama, Mistral, Qwen and DeepSeek only use other names than we do. GPT-2 also transposes
matrices, and has q, k and v in one. Experts, whose rows are concatenated in one matrix here, have one tensor each
there, or one tensor with a leading expert dimension and with gate and up in one.
"""

from collections.abc import Container, Iterator
from typing import Literal, NamedTuple

from torch import Tensor

from fivefold.spec.kinds import WANTED_HF_NAMES, BlockKind, HfTensor
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Parameter
from fivefold.support.errors import Problem
from fivefold.support.plugin_calls import ask

_END_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}  # of a model, beside its layers
_GPT2_ENDS = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
EXPERT_BIAS = "e_score_correction_bias"
_NAMES_METHOD = "hf_names(self, spec)"
BLOCKS, BLOCK_SCALES = "_blocks", "_scales"  # suffixes of the names of MXFP4's two tensors

# How files name the experts of a layer, and lay them out:
# each    mlp.experts.3.gate_proj.weight [F, E], and so on: Qwen, OLMoE, DeepSeek, GLM
# mixtral block_sparse_moe.experts.3.w1.weight, w3 and w2 for gate, up and down
# stacked mlp.experts.gate_up_proj [X, 2 F, E], gate before up: as transformers 5 holds them
# gpt_oss mlp.experts.gate_up_proj [X, E, 2 F], gate and up interleaved
# mxfp4   mlp.experts.gate_up_proj_blocks [X, 2 F, E/32, 16], gate and up interleaved
ExpertFormat = Literal["each", "mixtral", "stacked", "gpt_oss", "mxfp4"]
_ROUTERS = {"mixtral": "block_sparse_moe.gate", "gpt_oss": "mlp.router", "mxfp4": "mlp.router"}
_ROUTERS |= {"each": "mlp.gate", "stacked": "mlp.gate"}
_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_W = {"gate": "w1", "up": "w3", "down": "w2"}


class TensorSource(NamedTuple):
    """Where rows of one of our parameters are: the name of a Hugging Face tensor, and the part of it."""

    name: str
    rows: range  # of our parameter
    expert_dim: int = 0  # size of the tensor's leading expert dimension; 0: it has none
    expert_index: int = 0  # along that dimension
    transposed: bool = False
    slot: int = 0  # index among
    slots: int = 1  # the parameters whose rows are in this matrix (q, k and v; gate and up)
    interleaved: bool = False  # their rows alternate; else they are concatenated

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


def tensors(spec: ModelSpec) -> list[Parameter]:
    """All that files store of a model: its parameters, and its buffers in the form of parameters."""
    buffers = zip(spec.buffers().items(), spec.routed_layers, strict=False)
    return [*spec.parameters(), *(Parameter(name, shape, "bias", layer) for (name, shape), layer in buffers)]


def expert_format_of(model_type: str) -> ExpertFormat:
    """The format in which experts of a `model_type` are written."""
    formats: dict[str, ExpertFormat] = {"mixtral": "mixtral", "gpt_oss": "gpt_oss"}
    return formats.get(model_type, "each")


def expert_format_in(spec: ModelSpec, names: Container[str]) -> ExpertFormat:
    """The format of the experts in files that have tensors of these names."""
    first = next((parameter for parameter in spec.parameters() if parameter.experts), None)
    if first is None:
        return "each"
    formats: tuple[ExpertFormat, ...] = ("each", "mixtral", "mxfp4", "gpt_oss" if spec.bias else "stacked")
    return next((known for known in formats if next(sources(spec, first, known)).name in names), "each")


def sources(spec: ModelSpec, parameter: Parameter, expert_format: ExpertFormat = "each") -> Iterator[TensorSource]:
    """The Hugging Face tensors that hold our parameter, in the order of its rows: one, or one for each expert."""
    is_gpt2, layer = spec.positions == "learned", parameter.layer
    prefix = "transformer.h" if is_gpt2 else "model.layers"
    module, leaf = _parts(parameter)
    rows = range(parameter.shape[0])
    if layer is None:
        yield TensorSource(f"{(_GPT2_ENDS if is_gpt2 else _END_NAMES)[module]}.{leaf}", rows)
    elif parameter.experts:
        for source in _expert_sources(parameter, module.rpartition(".")[2], leaf, expert_format):
            yield source._replace(name=f"{prefix}.{layer}.{source.name}")
    elif module == _router(spec, layer):
        leaf = EXPERT_BIAS if leaf == "balance" else leaf
        yield TensorSource(f"{prefix}.{layer}.{_ROUTERS[expert_format]}.{leaf}", rows)
    else:
        names = _names(spec, layer)
        own = names.get(f"{module}.{leaf}")  # of a parameter alone, which has the whole name there
        stored = own or names[module]
        name = f"{prefix}.{layer}.{stored.name}" + ("" if own else f".{leaf}")
        transposed = stored.transposed and parameter.kind == "linear"
        yield TensorSource(name, rows, transposed=transposed, slot=stored.slot, slots=stored.slots)


def unnamed_kinds(spec: ModelSpec) -> list[Problem]:
    """The kinds of block that do not say where files have their weights."""
    problems = []
    for kinds in spec.counted():
        layer = spec.first(kinds)
        names = _names(spec, layer)
        for kind in kinds.branches:
            own = [_parts(one) for one in spec.block_parameters(layer) if _of(kind, one) and not one.experts]
            known = {*names, _router(spec, layer)}
            missing = {
                module if leaf in ("weight", "bias") else f"{module}.{leaf}"
                for module, leaf in own
                if not {module, f"{module}.{leaf}"} & known
            }
            if missing:
                lacks = f"{kind.name} does not say where files of Hugging Face have {', '.join(sorted(missing))}"
                given = ", ".join(ask(kind, "hf_names", spec, wanted=WANTED_HF_NAMES))
                says = f"its method {_NAMES_METHOD} gives {given}" if given else f"write its method {_NAMES_METHOD}"
                problems.append(Problem("hf.names", f"{lacks}; {says}"))
    return list(dict.fromkeys(problems))


def _router(spec: ModelSpec, layer: int) -> str:
    """The module of a layer's router, if it has one."""
    return spec.router(layer).removeprefix(f"layers.{layer}.") if spec.kinds(layer).routed else ""


def _names(spec: ModelSpec, layer: int) -> dict[str, HfTensor]:
    """Of all weights of a layer, but of experts and routers."""
    found = [ask(kind, "hf_names", spec, wanted=WANTED_HF_NAMES) for kind in spec.kinds(layer).branches]
    return {ours: place for names in found for ours, place in names.items()}


def _parts(parameter: Parameter) -> tuple[str, str]:
    """The module in its layer, and what it is of it: "attention.q" and "weight"."""
    module, _, leaf = parameter.name.removeprefix(f"layers.{parameter.layer}.").rpartition(".")
    return module, leaf


def _of(kind: BlockKind, parameter: Parameter) -> bool:
    return _parts(parameter)[0].partition(".")[0] in (kind.place, f"{kind.place}_norm")


def _expert_sources(parameter: Parameter, which: str, leaf: str, expert_format: ExpertFormat) -> Iterator[TensorSource]:
    """The sources of one linear (gate, up or down) of all experts."""
    count = parameter.experts
    each = parameter.shape[0] // count
    for expert in range(count):
        rows = range(expert * each, (expert + 1) * each)
        if expert_format == "each":
            yield TensorSource(f"mlp.experts.{expert}.{_PROJECTIONS[which]}.{leaf}", rows)
        elif expert_format == "mixtral":
            yield TensorSource(f"block_sparse_moe.experts.{expert}.{_W[which]}.{leaf}", rows)
        else:
            name = "mlp.experts.down_proj" if which == "down" else "mlp.experts.gate_up_proj"
            name += "_bias" if leaf == "bias" else BLOCKS if expert_format == "mxfp4" else ""
            transposed = expert_format == "gpt_oss" and leaf == "weight"
            interleaved = expert_format != "stacked"
            source = TensorSource(name, rows, count, expert, transposed, interleaved=interleaved)
            yield source if which == "down" else source._replace(slot=int(which == "up"), slots=2)
