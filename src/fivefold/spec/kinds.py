"""What a block is made of: a mixer, which moves information between tokens, and an MLP, which works on each token.

A kind of either is a class: its settings as fields, the operations that it computes, its parameters, what it keeps of
earlier tokens (its cache), its names in files of Hugging Face, and the name of the module that computes it. Those that
come with the package are in `mixers.py` and `mlps.py`; one of yours is a class of your own module, which a job names as
"package.module:Name" (docs/plugins.md).

Jobs and plans read kinds without torch: the module that is named imports it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import msgspec

from fivefold.spec.operations import (
    WANTED_OPERATIONS,
    Cache,
    Elementwise,
    Matmul,
    Operation,
    Parameter,
    Scores,
    TensorRule,
    group_problems,
    odd_record,
)
from fivefold.support.errors import UserError
from fivefold.support.plugin_calls import WHOLE_NUMBERS, Wanted, ask, each, value_text
from fivefold.support.plugin_settings import class_shortcomings, unhashable
from fivefold.support.plugins import is_plugin

if TYPE_CHECKING:
    from fivefold.spec.model import ModelSpec


class HfTensor(NamedTuple):
    """Where Hugging Face's files have the weight of a module, and its bias: in the tensor of this name in the layer."""

    name: str
    transposed: bool = False  # a matrix there is [inputs, outputs]
    slot: int = 0  # which one of
    slots: int = 1  # so many weights of the same shape, whose rows are one tensor there, one weight after the other


class BlockKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name", tag=str.lower):
    """What every kind has. Derive from `Mixer` or `MLP`."""

    place: ClassVar[str] = ""  # the name of its module in a block, with which names of its parameters begin
    module: ClassVar[str] = ""  # "package.module:Class", made as Class(kind, spec, ops)
    cp: ClassVar[bool] = True  # whether cp may divide the tokens of a sequence between ranks

    @property
    def name(self) -> str:
        """What a job calls it."""
        return str(self.__struct_config__.tag)

    def problems(self, spec: "ModelSpec") -> Iterable[str]:
        """What is wrong with its settings in this model, each with the value and what would be right."""
        return ()

    def operations(self, spec: "ModelSpec", tp: int) -> Iterator[Operation]:
        """What it computes for a token on one of `tp` ranks, in the order of the forward pass, between the norm before
        it and the sum after it."""
        raise NotImplementedError

    def parameters(self, spec: "ModelSpec", layer: int) -> Iterator[Parameter]:
        """Its parameters in that layer: those that its operations read."""
        for operation in ask(self, "operations", spec, 1, wanted=WANTED_OPERATIONS):
            yield from parameters_of(operation, spec, layer, self.place)

    def cache(self, spec: "ModelSpec", tp: int) -> Cache | None:
        """What its module keeps of earlier tokens on one of `tp` ranks (`MixerInputs.cache`), for `fivefold generate`
        and the cost of serving; None: it computes whole sequences alone."""
        return None

    def hf_names(self, spec: "ModelSpec") -> Mapping[str, HfTensor]:
        """Where Hugging Face's files have its weights, and that of the norm before it, by our names in the layer
        ("conv.x"); empty: nobody has said it. Experts and their router have several forms (`model/hf_names.py`)."""
        return {}

    def divided(self, spec: "ModelSpec") -> list[int]:
        """Widths that tp must divide, beside heads and kv heads of attention."""
        return []

    @staticmethod
    def shortcomings(kind: "type[BlockKind]", name: str) -> Iterator[str]:
        """What a class lacks that a job calls `name`."""
        yield from class_shortcomings(kind, Mixer if issubclass(kind, Mixer) else MLP, name)
        yield from unhashable(kind)
        yield from _place_problems("module", kind.module, "computes it", name)
        if issubclass(kind, MLP) and kind.routes:
            yield from _place_problems("reference", kind.reference, "`verify` holds it against", name)
        if not str(kind.place).isidentifier():
            yield f"has place={kind.place!r}, and not the name that its module has in a block"
        if kind.operations is BlockKind.operations:
            yield "has no method operations(self, spec, tp)"


def _place_problems(member: str, place: object, does: str, name: str) -> Iterator[str]:
    """Problems of a path to a kind's classes: it must be the plugin's own module or ours, since importing runs code."""
    module, _, attribute = str(place).partition(":")
    if not attribute.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        yield f'has {member}={place!r}, and not the "package.module:Class" that {does}'
    elif ":" in name and module.partition(".")[0] not in ("fivefold", name.partition(":")[0].partition(".")[0]):
        yield f"has {member}={place!r}, which is not of its own package"


class Mixer(BlockKind, frozen=True, kw_only=True):
    """Moves information between tokens: attention, a convolution, a recurrence."""

    place: ClassVar[str] = "mixer"
    cp: ClassVar[bool] = False  # a kind that needs its neighbours' tokens and does not ask for them would be wrong
    # Whether it is attention of the model's heads, by `ops.attend`: cp then sends what that needs, and plans count it.
    attends: ClassVar[bool] = False


class MLP(BlockKind, frozen=True, kw_only=True):
    """Works on each token alone."""

    place: ClassVar[str] = "mlp"
    # Whether it sends tokens to the model's experts, as `MixtureOfExperts` does: its module derives from
    # `model/moe.py`'s, plans and traffic count what ep sends, and `verify` holds it against what `reference` names.
    routes: ClassVar[bool] = False
    reference: ClassVar[str] = ""

    def cache(self, spec: "ModelSpec", tp: int) -> Cache | None:
        return Cache()  # a token needs no other


# ---- what is asked of a kind ----------------------------------------------------------------------------------------

WANTED_PARAMETERS = each(
    "fivefold.spec.operations:Parameter, in a list or by yield",
    lambda one: odd_record(one, Parameter),
)
WANTED_CACHE = Wanted(
    "a fivefold.spec.operations:Cache or None", lambda found: "" if found is None else odd_record(found, Cache)
)


def _odd_names(found: object) -> str:
    if not isinstance(found, Mapping):
        return value_text(found)
    return next((f"{name!r}: {value_text(at)}" for name, at in found.items() if not isinstance(at, HfTensor)), "")


WANTED_HF_NAMES = Wanted("a dict of names and fivefold.spec.kinds:HfTensor", _odd_names)


def trial(kind: BlockKind, spec: "ModelSpec", layer: int) -> Iterator[str]:
    """What is wrong with what a plugin says of itself in a layer of a model, beyond its settings."""
    if not is_plugin(kind.name):
        return
    asked: dict[str, tuple[Wanted, tuple[object, ...]]] = {
        "operations": (WANTED_OPERATIONS, (spec, 1)),
        "parameters": (WANTED_PARAMETERS, (spec, layer)),
        "divided": (WHOLE_NUMBERS, (spec,)),
        "cache": (WANTED_CACHE, (spec, 1)),
        "hf_names": (WANTED_HF_NAMES, (spec,)),
    }
    found: dict[str, None] = {}  # parameters follow from operations, and then fail as they do
    for member, (wanted, given) in asked.items():
        try:
            ask(kind, member, *given, wanted=wanted)
        except UserError as error:
            found |= dict.fromkeys(error.coded)
    yield from found or _inconsistent(kind, spec)


def _inconsistent(kind: BlockKind, spec: "ModelSpec") -> Iterator[str]:
    """What does not fit together in a plugin's operations: it could not be computed, or would be counted wrong."""
    operations = list(ask(kind, "operations", spec, 1, wanted=WANTED_OPERATIONS))
    scores = [operation for operation in operations if isinstance(operation, Scores)]
    matmuls = [operation for operation in operations if isinstance(operation, Matmul)]
    if isinstance(kind, Mixer) and kind.attends != (len(scores) == 1):
        yield f"{kind.name} has attends={kind.attends}, and {len(scores)} Scores; attention has attends=True, and one"
    elif scores and not isinstance(kind, Mixer):
        yield f"{kind.name} has Scores, which are of mixers; derive from Mixer, with attends=True"
    for matmul in matmuls:
        of = f"{kind.name}.operations has {matmul.branch}.{matmul.name}"
        if matmul.branch != kind.place:
            yield f"{of}, and its place is {kind.place}; write Matmul(self.place, {matmul.name!r}, ...)"
        elif matmul.tp == "colwise_kv" and matmul.outputs != spec.kv_heads * spec.head_dim:
            yield (
                f"{of} with tp=colwise_kv and {matmul.outputs} outputs, and the model's kv heads have "
                f"{spec.kv_heads * spec.head_dim}; heads of its own are colwise"
            )
        elif matmul.experts or matmul.tp in ("experts", "replicated_partial"):
            yield from _of_experts(kind, spec, matmul, of)
    for parameter in ask(kind, "parameters", spec, 0, wanted=WANTED_PARAMETERS):
        of = f"{kind.name}.parameters has {parameter.name}"
        if parameter.init is not None and parameter.init.problem:
            yield f"{of} with init of {parameter.init.problem}"
        if parameter.unit != 0:
            yield f"{of} with unit={parameter.unit} in layer 0; a parameter of a block has its layer as its unit"
        if not parameter.size:
            yield f"{of} of shape {[*parameter.shape]}, which has no numbers"
    ungrouped = [f"{kind.name}.operations under tp: {problem}" for problem in group_problems(matmuls)]
    yield from ungrouped or _division_problems(kind, spec, operations)


def _division_problems(kind: BlockKind, spec: "ModelSpec", operations: Sequence[Operation]) -> Iterator[str]:
    """Operations that two tp ranks cannot divide as their rules say, where layouts may have tp=2."""
    heads = [(one.heads, one.kv_heads) for one in operations if isinstance(one, Scores)]
    uneven = any(count % 2 or kv_heads % 2 > (kv_heads == 1) for count, kv_heads in heads)
    if uneven or any(width % 2 for width in ask(kind, "divided", spec, wanted=WHOLE_NUMBERS)):
        return
    try:
        parts = list(ask(kind, "operations", spec, 2, wanted=WANTED_OPERATIONS))
    except UserError:  # said where a layout has this tp
        return
    of = f"{kind.name}.operations under tp:"
    if [*map(_operation_name, parts)] != [*map(_operation_name, operations)]:
        yield f"{of} with tp=2 they are others than with tp=1; a rank has all of them, on its part"
        return
    for whole, part in zip(operations, parts, strict=True):
        for field, rule, wanted in _part(whole, spec):
            had, has = getattr(whole, field), getattr(part, field)
            if has != wanted:
                right = f"a rank has {wanted:g}" if wanted % 1 == 0 else f"let divided(self, spec) give {had}"
                yield f"{of} {_operation_name(whole)} has {rule}{field} {has} at tp=2, and {had} at tp=1; {right}"


def _part(whole: Operation, spec: "ModelSpec") -> Iterator[tuple[str, str, float]]:
    """What one of two tp ranks has of an operation: fields, the rule that says so, and the values."""
    if isinstance(whole, Elementwise):
        yield "width", "", whole.width  # over all tp ranks
    elif isinstance(whole, Scores):
        yield from (("heads", "", whole.heads / 2), ("kv_heads", "", max(1, whole.kv_heads / 2)))
    else:
        one_head = whole.tp == "colwise_kv" and spec.kv_heads == 1
        divided = {"colwise": "outputs", "colwise_kv": "outputs", "rowwise": "inputs"}.get(whole.tp)
        for field in ("inputs", "outputs"):
            size = getattr(whole, field)
            yield field, f"{whole.tp} ", size / 2 if field == divided and not one_head else size


def _operation_name(operation: Operation) -> str:
    if isinstance(operation, Matmul):
        return f"{operation.branch}.{operation.name}"
    return f"{type(operation).__name__}({getattr(operation, 'name', '') or getattr(operation, 'kind', '')})"


def _of_experts(kind: BlockKind, spec: "ModelSpec", matmul: Matmul, of: str) -> Iterator[str]:
    """Experts that ep could not deal out."""
    if not (isinstance(kind, MLP) and kind.routes):
        yield (
            f"{of}, which is of experts, and {kind.name} does not send tokens to any: derive from "
            "fivefold.spec.mlps:MixtureOfExperts, or say routes=True"
        )
    elif spec.experts and matmul.experts and matmul[-2:] != (spec.experts.count, spec.experts.top_k):
        yield (
            f"{of} with experts={matmul.experts}, chosen={matmul.chosen}, and ep deals out model.experts, with "
            f"count={spec.experts.count}, top_k={spec.experts.top_k}"
        )


# ---- parameters -----------------------------------------------------------------------------------------------------


def parameters_of(operation: Operation, spec: "ModelSpec", layer: int, place: str) -> Iterator[Parameter]:
    """The parameters that an operation of a layer reads, in the branch of this place."""
    if isinstance(operation, Matmul):
        yield from _linear(layer, operation)
    elif isinstance(operation, Scores):
        if operation.sinks:
            name = f"layers.{layer}.{place}.sinks"
            yield Parameter(name, (operation.heads,), "bias", layer, "colwise", full_precision=True)
    elif operation.kind == "norm":
        yield from norm(f"layers.{layer}.{operation.name}", spec, layer, operation.width)
    elif operation.kind == "qk_norm":
        yield _qk_norm(spec, layer, operation)
    elif operation.weights:
        shape = (operation.width, operation.weights)
        yield Parameter(f"layers.{layer}.{operation.name}.weight", shape, "filter", layer, "colwise", std=operation.std)


def _linear(layer: int, matmul: Matmul) -> Iterator[Parameter]:
    name, writes = f"layers.{layer}.{matmul.branch}.{matmul.name}", matmul.writes_residual
    shape, stack = (matmul.rows, matmul.inputs), matmul.experts
    yield Parameter(f"{name}.weight", shape, "linear", layer, matmul.tp, residual=writes, experts=stack)
    if matmul.bias:  # of summands it is added once, to their sum
        rule: TensorRule = "replicated" if matmul.tp == "rowwise" else matmul.tp
        yield Parameter(f"{name}.bias", (matmul.rows,), "bias", layer, rule, experts=stack)


def norm(name: str, spec: "ModelSpec", unit: int, width: int) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (width,), "norm", unit, full_precision=True)
    if spec.norm == "layernorm":
        yield Parameter(f"{name}.bias", (width,), "bias", unit, full_precision=True)


def _qk_norm(spec: "ModelSpec", layer: int, operation: Elementwise) -> Parameter:
    name = f"layers.{layer}.{operation.name}.weight"
    if spec.qk_norm_over == "head":
        return Parameter(name, (spec.head_dim,), "norm", layer, "per_head", full_precision=True)
    rule: TensorRule = "colwise" if operation.name.endswith(".q_norm") else "colwise_kv"
    return Parameter(name, (operation.width,), "norm", layer, rule, full_precision=True)
