"""Rows of models with experts: their shapes, their routing, and which of a vendor's releases counts.

Sizes that a row leaves out are those of the preset of its name; notes may give `experts=16 top-k=4 expert_ffn=8192`.
"""

import re
from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import structs

from fivefold.accuracy.spelling import UnpredictableRow, normalize, preset_named, without_parentheses
from fivefold.cost.moe import IMBALANCE, collapsed_imbalance
from fivefold.cost.software import FUSED_EXPERTS, ExpertKernels
from fivefold.layout.layout import Layout
from fivefold.spec.blocks import Experts
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import PRESETS, preset

MOE_NAME = r"mixtral|moe|\dx\d+b|deepseek|a\d+b\b|maverick|scout|grok"
EXPERTS_IN_NOTES = r"experts=(?P<count>\d{1,9}) top-k=(?P<top_k>\d{1,9}) expert_ffn=(?P<ffn>\d{1,9})\b"
SIZES_REQUIRED_WITHOUT_PRESET = ("layers", "hidden", "heads", "vocab")
RELEASE = r"v?(\d{1,9}(?:\.\d{1,9})+)"
BLACKWELL = r"G?B[23]00"
NEGLIGIBLE_BALANCE_COEFF = 1e-3  # no effect in a run's first steps; typical values are about 0.01
CONFIGURATION_COLUMNS = (
    "seq_len", "gpu", "gpus", "dp", "tp", "pp", "cp", "ep", "micro_batch", "global_batch", "layers",
)  # fmt: skip


class RowValues(Protocol):
    """A row whose cells are read as text and whole numbers."""

    def text(self, column: str) -> str: ...
    def integer(self, column: str) -> int | None: ...


def is_mixture(row: RowValues) -> bool:
    return (row.integer("ep") or 1) > 1 or re.search(MOE_NAME, row.text("model"), re.I) is not None


def mixture_spec(row: RowValues, shape: dict[str, Any]) -> ModelSpec:
    """The row's model; `shape` has the sizes that the row gives."""
    name = row.text("model")
    if re.search(r"tokendrop|token drop", name, re.I):
        raise UnpredictableRow("it drops tokens beyond an expert's capacity, which this planner does not model")
    if given := re.search(EXPERTS_IN_NOTES, row.text("notes")):
        numbers: dict[str, Any] = {key: int(value) for key, value in given.groupdict().items()}
        if missing := [column for column in SIZES_REQUIRED_WITHOUT_PRESET if column not in shape]:
            raise UnpredictableRow(
                f"the notes of {name!r} give its experts, so no preset gives its sizes; not published: "
                f"{', '.join(missing)}"
            )
        return ModelSpec(name=name, **shape, experts=Experts(**numbers))
    preset_name = _preset(without_parentheses(name))
    if preset_name is None:
        raise UnpredictableRow(f"{name!r} has experts, but neither a preset of its name nor its notes say how many")
    spec = structs.replace(preset(preset_name, **shape), name=name)
    if re.search(r"deepseek-?v3", name, re.I) and "w/o MTP" not in name:
        # Its recipe has multi-token prediction (MTP): one more layer, which predicts a further token. The head runs
        # once more for it, so that it counts as one of twice the vocabulary.
        spec = structs.replace(spec, layers=spec.layers + 1, vocab=2 * spec.vocab)
    return spec


def _preset(name: str) -> str | None:
    """The preset of that name; else the only one with experts whose name begins with it, or with which it begins."""
    if exact := preset_named(name):
        return exact
    word = normalize(name)
    near = [other for other in PRESETS if normalize(other).startswith(word) or word.startswith(normalize(other))]
    mixtures = [other for other in near if preset(other).experts is not None] if word else []
    return mixtures[0] if len(mixtures) == 1 else None


def with_experts(
    row: RowValues, spec: ModelSpec, layout: Layout, *, tp_shards_experts: bool
) -> tuple[ModelSpec, Layout]:
    """The model and the layout with the row's ep. If tp shards experts, each shard counts as an expert: ep x tp ranks
    have them, and a token visits all shards of the experts that it chooses."""
    ep = row.integer("ep") or 1
    if tp_shards_experts and layout.tp > 1 and spec.experts is not None:
        experts, tp = spec.experts, layout.tp
        shards = structs.replace(experts, count=experts.count * tp, top_k=experts.top_k * tp, ffn=experts.ffn // tp)
        return structs.replace(spec, experts=shards), structs.replace(layout, ep=ep * tp)
    return spec, structs.replace(layout, ep=ep)


def imbalance_of(row: RowValues, spec: ModelSpec, layout: Layout) -> float:
    """The tokens of the most loaded rank, relative to the mean.

    It is 1 in benchmarks that force an even load. If the notes say that routing was real, it is the default imbalance,
    or that of collapsed routers if no loss balanced them.
    """
    notes = row.text("notes").lower()
    if spec.experts is None or "real routing" not in notes:
        return 1.0
    balance_coeff = re.search(r"aux loss (\d[\d.e-]*\d|\d)", notes)
    if balance_coeff and float(balance_coeff.group(1)) < NEGLIGIBLE_BALANCE_COEFF:
        return collapsed_imbalance(spec.experts, layout.ep)
    return IMBALANCE


def kernels_of(row: RowValues, default: ExpertKernels) -> ExpertKernels:
    """The expert kernels of a row's release: since 26.06, Megatron-Bridge has fused ones on Blackwell."""
    fused = "Megatron-Bridge" in row.text("source") and release(row) >= (26, 6)
    return FUSED_EXPERTS if fused and re.match(BLACKWELL, row.text("gpu")) else default


def release(row: RowValues) -> tuple[int, ...]:
    """The release that a row's source names, (26, 6); empty if it names none."""
    match = re.search(RELEASE, row.text("source"))
    return tuple(map(int, match.group(1).split("."))) if match else ()


def superseded_rows(rows: Sequence[Any]) -> dict[tuple[str, int], int]:
    """{(file, line): line of the newest release} for rows with experts that a later release has run again."""
    keys = {(row.file, row.line): _configuration_of(row) for row in rows if is_mixture(row) and release(row)}
    newest: dict[tuple[str, ...], Any] = {}
    for row in rows:
        key = keys.get((row.file, row.line))
        if key is not None and (key not in newest or release(row) > release(newest[key])):
            newest[key] = row
    return {where: newest[key].line for where, key in keys.items() if newest[key].line != where[1]}


def _configuration_of(row: Any) -> tuple[str, ...]:
    """What two rows must have in common for one to supersede the other."""
    name = row.text("model")
    model = re.sub(r"\(.*?\)|[^a-z0-9]", "", name.lower()) + (" w/o MTP" if "w/o MTP" in name else "")
    bits = "8" if re.search("8", re.sub("16", "", row.text("precision"))) else "16"
    return row.file, model, bits, str(row.integer("vp") or 1), *map(row.text, CONFIGURATION_COLUMNS)
