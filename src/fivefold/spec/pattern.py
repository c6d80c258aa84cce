"""The pattern of a model: the mixer and the MLP of every layer, either of which may be missing.

    Layer(mixer="attention", mlp="dense")               # as in Llama
    Layer(mixer={"name": "attention", "window": 128}, mlp="moe")
    Layer(mlp="dense")                                  # no mixer

`ModelSpec.pattern` has one layer after the other, and is repeated until all layers have theirs. Without one it follows
from the other numbers: `experts.dense_layers`, `window` and `window_period`, `mla`.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from fivefold.spec.kinds import MLP, BlockKind, Mixer
from fivefold.spec.mixers import MIXERS, GroupedQueryAttention, MultiHeadLatentAttention
from fivefold.spec.mlps import MLPS, Dense, MixtureOfExperts
from fivefold.support.errors import Problem, UserError
from fivefold.support.parsing import number_problems, read
from fivefold.support.plugin_calls import problems_of
from fivefold.support.plugins import Registry

if TYPE_CHECKING:
    from fivefold.spec.model import ModelSpec

    AnyMixer: TypeAlias = Mixer | None
    AnyMLP: TypeAlias = MLP | None
else:
    AnyMixer = AnyMLP = Any  # as a job has it: a name, or a table with a name


class Layer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The kinds of one layer. A name stands for the kind with its default settings; what it names is imported by
    nobody here, but found if it has been (`KIND_REGISTRIES`)."""

    mixer: AnyMixer = None
    mlp: AnyMLP = None

    def __post_init__(self) -> None:
        for place, registry in KIND_REGISTRIES.items():
            if (value := getattr(self, place)) is not None:
                msgspec.structs.force_setattr(self, place, _make_kind(registry, value))

    @property
    def branches(self) -> tuple[BlockKind, ...]:
        """Those that it has, in the order of the forward pass."""
        return tuple(kind for kind in (self.mixer, self.mlp) if kind is not None)

    @property
    def routed(self) -> bool:
        """Whether it has experts."""
        return self.mlp is not None and self.mlp.routes

    @property
    def attends(self) -> bool:
        """Whether it has attention, of any kind."""
        return self.mixer is not None and self.mixer.attends


KIND_REGISTRIES: dict[str, Registry[Any]] = {
    "mixer": Registry("model.pattern.mixer", Mixer, MIXERS),
    "mlp": Registry("model.pattern.mlp", MLP, MLPS),
}


def _make_kind(registry: Registry[Any], value: Any) -> BlockKind:
    if isinstance(value, registry.base):
        return value
    settings = {"name": value} if isinstance(value, str) else value
    if not isinstance(settings, dict) or "name" not in settings:
        example = f'write for example {registry.setting.rpartition(".")[2]} = "{next(iter(registry.table))}"'
        raise UserError(
            f"{registry.setting}={value!r} is neither a name nor a table with one; {example}", "model.pattern.kind"
        )
    kind = registry.named(settings["name"], trusted=False)
    problems: list[str] = []
    own = {key: setting for key, setting in settings.items() if key != "name"}
    made = read(kind, own, registry.setting, problems)
    if made is None:
        raise UserError(problems)
    return made


def names_in_pattern(pattern: Any) -> Iterator[tuple[int, str, str]]:
    """(entry number, place, name) of the names in a pattern as a job's table has it. Bad entries are skipped: reading
    the pattern reports them."""
    for number, layer in enumerate(pattern if isinstance(pattern, list | tuple) else ()):
        for place in KIND_REGISTRIES:
            value = layer.get(place) if isinstance(layer, dict) else None
            name = value.get("name") if isinstance(value, dict) else value
            if isinstance(name, str):
                yield number, place, name


def layers_of(spec: "ModelSpec") -> tuple[Layer, ...]:
    """The kinds of every layer."""
    if spec.pattern:
        return tuple(spec.pattern[layer % len(spec.pattern)] for layer in range(spec.layers))
    kinds = [(layer, _window(spec, layer), _is_dense(spec, layer)) for layer in range(spec.layers)]
    made = {(window, dense): _layer(spec, window, dense=dense) for _, window, dense in kinds}
    return tuple(made[window, dense] for _, window, dense in kinds)


def _layer(spec: "ModelSpec", window: int, *, dense: bool) -> Layer:
    mixer = MultiHeadLatentAttention() if spec.mla else GroupedQueryAttention(window=window)
    return Layer(mixer=mixer, mlp=Dense() if dense else MixtureOfExperts())


def _window(spec: "ModelSpec", layer: int) -> int:
    """Every so manieth layer sees all tokens."""
    return 0 if spec.window_period > 1 and (layer + 1) % spec.window_period == 0 else spec.window


def _is_dense(spec: "ModelSpec", layer: int) -> bool:
    return spec.experts is None or layer < spec.experts.dense_layers


def pattern_problems(spec: "ModelSpec") -> Iterator[str]:
    """What is wrong with a model's pattern."""
    if not spec.pattern:
        return
    if len(spec.pattern) > spec.layers:
        yield Problem(
            "model.pattern.layers",
            f"model.pattern has {len(spec.pattern)} layers, and model.layers={spec.layers}; nearest: "
            f"layers={len(spec.pattern)}",
        )
    for number, layer in enumerate(spec.pattern):
        if not layer.branches:
            yield Problem(
                "model.pattern.empty",
                f"model.pattern has neither a mixer nor an mlp in layer {number}; leave the layer out",
            )
        places = [kind.place for kind in layer.branches]
        if len(set(places)) < len(places):
            yield Problem(
                "model.pattern.names",
                f"model.pattern has two kinds called {places[0]} in layer {number}, whose parameters share names",
            )
    for kind in _different(spec.pattern):
        registry = KIND_REGISTRIES["mixer" if isinstance(kind, Mixer) else "mlp"]
        first = next(number for number, layer in enumerate(spec.pattern) if any(kind is one for one in layer.branches))
        found = registry.class_problems(kind) or problems_of(kind, spec)
        for sentence in number_problems(found, f"model.pattern[{first}]"):  # a plugin's may have no code
            yield sentence if isinstance(sentence, Problem) else Problem("model.pattern.rules", sentence)
    said = {"window": spec.window, "window_period": spec.window_period - 1}
    said["experts.dense_layers"] = spec.experts.dense_layers if spec.experts else 0
    for field in (field for field, value in said.items() if value):
        yield Problem(
            "model.pattern.both",
            f"model.{field} and model.pattern both say what layers there are; leave model.{field} out",
        )
    if spec.experts is not None and not any(layer.routed for layer in spec.pattern):
        yield Problem(
            "model.pattern.experts",
            'model.experts are the numbers of mixtures of experts, and model.pattern has none; write mlp = "moe"',
        )


def _different(pattern: Sequence[Layer]) -> list[BlockKind]:
    """Its kinds, each once. Compares settings instead of hashing: objects that a program gives may have no hash."""
    kinds: list[BlockKind] = []
    for kind in (kind for layer in pattern for kind in layer.branches):
        if not any(kind is other or kind == other for other in kinds):
            kinds.append(kind)
    return kinds
