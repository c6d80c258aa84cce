"""Rows of models with experts: their shapes, their routing, and which of a vendor's releases is judged.

Shapes that a row leaves out are those of the preset of its name; notes may give `experts=16 top-k=4 expert_ffn=8192`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import structs

from fivefold.layout.layout import Layout
from fivefold.plan.cost.expert_stack import FUSED_EXPERTS, ExpertKernels
from fivefold.plan.cost.experts import block_share, collapsed
from fivefold.plan.imbalance import IMBALANCE
from fivefold.spec.experts import Experts
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import PRESETS, preset
from fivefold.truth.spelling import Refused, plain, preset_named

NAMES = r"mixtral|moe|\dx\d+b|deepseek|a\d+b\b|maverick|scout|grok"
GIVEN = r"experts=(?P<count>\d{1,9}) top-k=(?P<top_k>\d{1,9}) expert_ffn=(?P<ffn>\d{1,9})\b"
ALONE = ("layers", "hidden", "heads", "vocab")  # that a model has of itself, where no preset lends them
RELEASE = r"v?(\d{1,9}(?:\.\d{1,9})+)"
WEAK = 1e-3  # a factor of the balance loss below which it balances nothing in a run's first steps; usual are 0.01 or so
SAME = ("seq_len", "gpu", "gpus", "dp", "tp", "pp", "cp", "ep", "micro_batch", "global_batch", "layers")


class Values(Protocol):
    """A row, as far as it matters here."""

    @property
    def values(self) -> Mapping[str, str]: ...
    def text(self, column: str) -> str: ...
    def whole(self, column: str) -> int | None: ...


def is_mixture(row: Values) -> bool:
    return (row.whole("ep") or 1) > 1 or re.search(NAMES, row.text("model"), re.I) is not None


def mixture_spec(row: Values, shape: dict[str, Any]) -> ModelSpec:
    """The row's model; `shape` has the numbers that it gives."""
    name = row.text("model")
    if re.search(r"tokendrop|token drop", name, re.I):
        raise Refused("it drops tokens where an expert has too many, which this planner does not know")
    if given := re.search(GIVEN, row.text("notes")):
        numbers: dict[str, Any] = {key: int(value) for key, value in given.groupdict().items()}
        if missing := [column for column in ALONE if column not in shape]:
            raise Refused(
                f"{name!r} has its experts in its notes, and so takes no shape of a preset; not published: "
                f"{', '.join(missing)}"
            )
        return ModelSpec(name=name, **shape, experts=Experts(**numbers))
    known = _preset(re.sub(r"\(.*?\)", "", name))
    if known is None:
        raise Refused(f"{name!r} has experts, and neither a preset of its name nor its notes say how many")
    spec = structs.replace(preset(known, **shape), name=name)
    if re.search(r"deepseek-?v3", name, re.I) and "w/o MTP" not in name:
        # Its recipe trains with one more layer, which predicts a token further ahead, through the same head.
        spec = structs.replace(spec, layers=spec.layers + 1, vocab=2 * spec.vocab)
    return spec


def _preset(name: str) -> str | None:
    """The preset of that name, or the only one whose name begins as it does, or with which it begins."""
    if exact := preset_named(name):
        return exact
    word = plain(name)
    near = [known for known in PRESETS if plain(known).startswith(word) or word.startswith(plain(known))]
    mixtures = [known for known in near if preset(known).experts is not None] if word else []
    return mixtures[0] if len(mixtures) == 1 else None


def with_experts(row: Values, spec: ModelSpec, layout: Layout, divided: bool) -> tuple[ModelSpec, Layout]:
    """The layout with the row's ep. `divided`: tp divides the experts, too. A part of an expert is then an expert by
    itself: ep x tp ranks have them, and a token visits all parts of those that it chooses."""
    ep = row.whole("ep") or 1
    if divided and layout.tp > 1 and spec.experts is not None:
        own, tp = spec.experts, layout.tp
        parts = structs.replace(own, count=own.count * tp, top_k=own.top_k * tp, ffn=own.ffn // tp)
        return structs.replace(spec, experts=parts), structs.replace(layout, ep=ep * tp)
    return spec, structs.replace(layout, ep=ep)


def imbalance_of(row: Values, spec: ModelSpec, layout: Layout) -> float:
    """The fullest rank against the mean. Benchmarks force an even load. Where notes say that routing was real, it is
    the usual one; and that of routers that send all tokens the same way, if nothing balanced them."""
    notes = row.text("notes").lower()
    if spec.experts is None or "real routing" not in notes:
        return 1.0
    loss = re.search(r"aux loss (\d[\d.e-]*\d|\d)", notes)
    return collapsed(spec.experts, layout.ep) if loss and float(loss.group(1)) < WEAK else IMBALANCE


def kernels_of(row: Values, usual: ExpertKernels) -> ExpertKernels:
    """Of its release: Megatron-Bridge has others since 26.06, on Blackwell."""
    new = "Megatron-Bridge" in row.text("source") and release(row) >= (26, 6)
    return FUSED_EXPERTS if new and re.match(r"G?B[23]00", row.text("gpu")) else usual


def held_parameters(spec: ModelSpec, tp: int, ep: int) -> float:
    """Of a rank that has all layers."""
    plain, mixed = block_share(spec, tp, ep, True), block_share(spec, tp, ep)
    blocks = spec.dense_layers * plain.total + (spec.layers - spec.dense_layers) * mixed.total
    whole = spec.dense_layers * block_share(spec, 1, 1, True).total
    whole += (spec.layers - spec.dense_layers) * block_share(spec, 1, 1).total
    return blocks + (spec.parameter_count - whole) / tp


def release(row: Values) -> tuple[int, ...]:
    found = re.search(RELEASE, row.text("source"))
    return tuple(map(int, found.group(1).split("."))) if found else ()


def older(rows: Sequence[Any]) -> dict[tuple[str, int], int]:
    """By file and line: rows of mixtures of which a later release ran the same configuration, and that row's line."""
    keys = {(row.file, row.line): _configuration(row) for row in rows if is_mixture(row) and release(row)}
    newest: dict[tuple[str, ...], Any] = {}
    for row in rows:
        key = keys.get((row.file, row.line))
        if key is not None and (key not in newest or release(row) > release(newest[key])):
            newest[key] = row
    return {where: newest[key].line for where, key in keys.items() if newest[key].line != where[1]}


def _configuration(row: Any) -> tuple[str, ...]:
    """What two releases must have in common to be compared."""
    name = row.text("model")
    model = re.sub(r"\(.*?\)|[^a-z0-9]", "", name.lower()) + (" w/o MTP" if "w/o MTP" in name else "")
    narrow = "8" if re.search("8", re.sub("16", "", row.text("precision"))) else "16"
    return row.file, model, narrow, str(row.whole("vp") or 1), *map(row.text, SAME)
