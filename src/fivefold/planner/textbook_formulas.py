"""What textbooks say of a layout in one formula each, beside the planner's figure, and why the two differ.

P parameters, B sequences of a microbatch on a rank, S tokens of a sequence on a cp rank, H hidden, L layers, m
microbatches, N ranks that ZeRO shards over, t, p, e the degrees tp, pp, ep, K experts of a token, a attention heads.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fivefold.cost.model_state import FIVEFOLD_ACCOUNTING, PAPER_ACCOUNTING
from fivefold.planner.explain import AxisTraffic, traffic, traffic_rank
from fivefold.planner.option import Option
from fivefold.render.blocks import Block, Result, Table
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import block
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError
from fivefold.support.ranges import MAX_RANKS, check_range, within
from fivefold.support.text import si

NUMBER_BYTES = 2  # in textbooks
ZERO_FORMULAS = {0: "16", 1: "(4 + 12/N)", 2: "(2 + 14/N)", 3: "16/N"}  # bytes a parameter, arXiv 1910.02054, table 1
DATA_AXES = ("dp", "fsdp", "dp_cp", "replicate", "efsdp", "expert_dp")  # axes of gradients and weights


@dataclass(frozen=True)
class Shortcut:
    """`textbook` and `exact` are in bytes, FLOPs or shares of time, by `unit`."""

    name: str
    formula: str
    textbook: float
    exact: float
    unit: str  # "GB", "FLOPs", "%"
    why: str

    def said(self, value: float) -> str:
        if self.unit == "GB":
            return f"{value / 1e9:,.2f} GB"
        return f"{value:.1%}" if self.unit == "%" else flops_text(value)

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("name", "formula", "textbook", "exact", "unit", "why")}


def flops_text(value: float) -> str:
    """'1,776 PFLOP': P alone is a number of parameters here."""
    size, unit = next(
        scale for scale in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (0, "FLOP")) if value >= scale[0]
    )
    return f"{value / (size or 1):,.{0 if value >= 100 * size else 2}f} {unit}"


def shortcuts(option: Option) -> list[Shortcut]:
    """The formulas that apply to this layout."""
    formulas = [_flops(option), _state(option), _activations(option)]
    rows = traffic(option)
    formulas += [*_data(option, rows), *_tensor(option, rows), *_pipeline(option, rows), *_experts(option, rows)]
    return [*formulas, *_bubble(option)]


def _because(*reasons: str) -> str:
    return "; ".join(filter(None, reasons)) or "nothing does"


def _flops(option: Option) -> Shortcut:
    workload, active = option.workload, option.workload.spec.active_parameters
    tokens, exact = workload.batch * workload.seq, workload.flops()
    attention = 2 * (exact - workload.flops("causal")) / exact  # a causal mask leaves half of its scores
    why = _because(
        f"attention is {attention:.1%} of the exact ones, which count all of its scores",
        "an embedding is looked up, not multiplied",
        "P counts the parameters that are active for a token" if workload.spec.experts else "",
    )
    return Shortcut("FLOPs", "6 P x tokens of the step", 6.0 * active * tokens, exact, "FLOPs", why)


def _state(option: Option) -> Shortcut:
    workload, layout, needs = option.workload, option.layout, option.footprint
    ranks, share = layout.size("fsdp"), workload.spec.parameter_count / (layout.tp * layout.pp)
    zero = layout.zero if ranks > 1 else 0
    textbook = PAPER_ACCOUNTING.state(share, share / ranks, zero, ranks).total
    each = workload.software.accounting
    why = _because(
        f"gradients are added up in {each.gradient} bytes, and not in {NUMBER_BYTES}"
        if each.gradient != NUMBER_BYTES else "",
        "" if each.master else f"weights have {each.weight} bytes, and no master beside them",
        f"the optimizer's states have {each.states} bytes, and not {PAPER_ACCOUNTING.states}"
        if each.states != PAPER_ACCOUNTING.states else "",
        "ZeRO 3 has the 4-byte master as a weight's only copy, without 2 bytes beside it"
        if zero == 3 and each.master else "",
        "at the peak not all gradients exist" if needs.gradients < 0.99 * needs.state.gradients else "",
        f"embedding, head and layers do not divide evenly over pp; this is rank {needs.rank}" if layout.pp > 1 else "",
        f"experts are dealt out over ep={layout.ep}, and ZeRO shards their copies only" if layout.ep > 1 else "",
    )  # fmt: skip
    exact = needs.state.parameters + needs.gradients + needs.state.optimizer
    over = " / (t p)" if layout.tp * layout.pp > 1 else ""
    return Shortcut("state", f"{ZERO_FORMULAS[zero]} bytes x P{over}", textbook, exact, "GB", why)


def _activations(option: Option) -> Shortcut:
    """Korthikanti et al. 2022 (arXiv 2205.05198), table 2, with as many microbatches as 1F1B's first rank holds."""
    workload, layout, spec = option.workload, option.layout, option.workload.spec
    t, scores = layout.tp, 5 * spec.heads * workload.seq / spec.hidden
    if layout.recompute == "full":
        inside, each, scores = "2", 2.0, 0.0
    elif layout.recompute == "selective":
        inside, each, scores = "34", 34.0, 0.0
    else:
        inside, each = "34 + 5aS/H", 34.0
    if t > 1 and layout.sp:
        formula, size = f"BSH ({inside}) / t" if each > 2 else "2 BSH / t", (each + scores) / t
    elif t > 1 and layout.recompute != "full":
        formula, size = f"BSH (10 + 24/t{' + 5aS/(Ht)' if scores else ''})", 10 + 24 / t + scores / t
    else:
        formula, size = f"BSH ({inside})" if each > 2 else "2 BSH", each + scores
    flying = min(layout.pp, layout.microbatches)
    textbook = size * _stream(option) * spec.layers / layout.pp * flying
    kept = option.footprint.activations
    why = _because(
        "attention in one kernel keeps no scores: there is no 5aS/H" if scores and not kept.scores else "",
        f"34 is of GPT's block, with dropout; {spec.name} has its own widths and no masks" if each > 2 else "",
        "what a block is given, and nothing else" if each == 2 else "",
        "layers without a mixer or an MLP keep less" if spec.residual_writers < 2 * spec.layers else "",
        f"{layout.schedule} holds its own number of microbatches, on its fullest rank" if layout.pp > 1 else "",
        "recomputation keeps what its collectives made" if layout.recompute == "selective" else "",
    )
    return Shortcut("activations", f"{formula} x L/p x min(p, m)", textbook, kept.total, "GB", why)


def _stream(option: Option) -> float:
    """BSH of a microbatch on one rank."""
    workload = option.workload
    return workload.samples * workload.seq / option.layout.cp * workload.spec.hidden


def _wire(rows: list[AxisTraffic], axes: set[str], kinds: tuple[str, ...] = ()) -> float:
    return sum(row.inside + row.across for row in rows if row.axis in axes and (not kinds or row.kind in kinds))


def _data(option: Option, rows: list[AxisTraffic]) -> Iterator[Shortcut]:
    layout, workload = option.layout, option.workload
    axes = {layout.same_axis(axis) for axis in DATA_AXES if layout.size(axis) > 1} & set(DATA_AXES)
    if not axes or layout.size("dp_cp") == 1:
        return
    size = NUMBER_BYTES * workload.spec.parameter_count / (layout.tp * layout.pp)
    times, sharded = (3, True) if layout.zero == 3 else (2, False)
    each = workload.software.accounting
    why = _because(
        f"gradients travel in {each.gradient} bytes, weights in {each.weight}" if each.gradient != NUMBER_BYTES else "",
        f"for each of {layout.microbatches} microbatches weights are gathered twice and gradients scattered"
        if sharded and layout.microbatches > 1 else "",
        f"ZeRO 2 sums gradients after each of {layout.microbatches} microbatches" if layout.zero == 2 else "",
        f"a ring sends (N-1)/N, with N={layout.size('dp_cp')}",
        "experts are summed over the ranks that have the same ones" if layout.ep > 1 else "",
        f"pipeline rank {traffic_rank(option)} has its own share of the layers" if layout.pp > 1 else "",
    )  # fmt: skip
    over = " / (t p)" if layout.tp * layout.pp > 1 else ""
    yield Shortcut("dp on the wire", f"{times}M, M = 2P{over} bytes", times * size, _wire(rows, axes), "GB", why)


def _tensor(option: Option, rows: list[AxisTraffic]) -> Iterator[Shortcut]:
    """Shoeybi et al. 2019 (arXiv 1909.08053): four all-reduces of BSH a layer; a ring's sends its bytes twice."""
    layout, spec, t = option.layout, option.workload.spec, option.layout.tp
    if t == 1:
        return
    calls = 2 * spec.residual_writers / layout.pp * layout.microbatches
    textbook = calls * NUMBER_BYTES * _stream(option) * 2 * (t - 1) / t
    why = _because(
        "with sp the backward pass gathers the columns' saved input once more" if layout.sp else "",
        "the forward pass runs twice" if layout.recompute == "full" else "",
        "layers of experts have two of the four, unless one is shared" if spec.experts is not None else "",
        "latent attention sends latents instead of the stream"
        if any(block(spec, layer=layer).latent for layer in spec.counted()) else "",
        "embedding, head and loss send too",
        _own_layers(option, len(_layers(option)), spec.layers),
    )  # fmt: skip
    each = "4 BSH a layer" if spec.residual_writers == 2 * spec.layers else "2 BSH a mixer or MLP"
    formula = f"{each}, 2(t-1)/t each in a ring"
    yield Shortcut("tp on the wire", formula, textbook, _wire(rows, {"tp"}), "GB", why)


def _layers(option: Option) -> list[int]:
    """Of the pipeline rank whose traffic is counted."""
    stages, local = option.workload.stages, option.layout.placement.of_rank[traffic_rank(option)]
    return [layer for number in local for layer in stages[number].layers]


def _own_layers(option: Option, own: int, all_of_them: int) -> str:
    even = all_of_them / option.layout.pp
    return f"pipeline rank {traffic_rank(option)} has {own} such layers, and not {even:.4g}" if own != even else ""


def _pipeline(option: Option, rows: list[AxisTraffic]) -> Iterator[Shortcut]:
    layout = option.layout
    if layout.pp == 1:
        return
    textbook = NUMBER_BYTES * _stream(option) * layout.microbatches
    why = _because(
        f"under sp a rank sends its tp part alone, 1/{layout.tp}" if layout.sp and layout.tp > 1 else "",
        f"{layout.chunks} stages a rank: a microbatch passes by as often" if layout.chunks > 1 else "",
    )
    yield Shortcut("pp on the wire", "BSH x m, one way", textbook, _wire(rows, {"pp"}, ("send",)), "GB", why)


def _experts(option: Option, rows: list[AxisTraffic]) -> Iterator[Shortcut]:
    layout, spec = option.layout, option.workload.spec
    if spec.experts is None or layout.ep == 1:
        return
    calls = 4 * spec.experts.top_k * len(spec.routed_layers) / layout.pp * layout.microbatches
    textbook = calls * NUMBER_BYTES * _stream(option) / layout.tp * (layout.ep - 1) / layout.ep
    why = _because(
        f"dispatch={layout.dispatch} sends otherwise" if layout.dispatch != "alltoall" else "",
        "the forward pass runs twice" if layout.recompute == "full" else "",
        _own_layers(option, len({*_layers(option)} & {*spec.routed_layers}), len(spec.routed_layers)),
        "ranks tell each other how many rows will come",
    )
    formula = "4 K BSH/t a layer, (e-1)/e of it"
    yield Shortcut("ep on the wire", formula, textbook, _wire(rows, {"ep"}), "GB", why)


def _bubble(option: Option) -> Iterator[Shortcut]:
    """Of the pipeline's seconds, without what follows them."""
    layout, causes = option.layout, option.estimate.causes
    p, m, v = layout.pp, layout.microbatches, layout.chunks
    if p == 1:
        return
    busy = option.seconds - causes["dp"] - causes["optimizer"] - causes["other"]
    rounds = v * m if layout.record.any_chunks else m
    formula = "(p-1) / (v m + p-1)" if rounds != m else "(p-1) / (m + p-1)"
    why = _because(
        "" if layout.schedule in ("1f1b", "gpipe") or rounds != m else f"{layout.schedule} is made to have another one",
        "stages are not equal: the embedding, the head and the loss",
        "messages between stages, as far as nothing hides them",
    )
    yield Shortcut("bubble", formula, (p - 1) / (rounds + p - 1), causes["bubble"] / busy, "%", why)


# ---- zero -----------------------------------------------------------------------------------------------------------
# `zero`: the bytes that ZeRO leaves a rank of parameters, gradients and optimizer state, by two accountings.


@dataclass(frozen=True)
class ZeroResult(Result):
    """Bytes of a rank between steps, for each ZeRO stage."""

    parameters: float
    ranks: int

    @property
    def rows(self) -> list[dict[str, float]]:
        count, ranks = self.parameters, self.ranks
        return [
            {
                "stage": stage,
                "paper": PAPER_ACCOUNTING.state(count, count / ranks, stage, ranks).total,
                "parameters": ours.parameters,
                "gradients": ours.gradients,
                "optimizer": ours.optimizer,
                "total": ours.total,
            }
            for stage in range(4)
            for ours in [FIVEFOLD_ACCOUNTING.state(count, count / ranks, stage, ranks)]
        ]

    def blocks(self) -> Iterator[Block]:
        heads = [">stage", ">paper", ">fivefold", ">parameters", ">gradients", ">optimizer"]
        keys = ("paper", "total", "parameters", "gradients", "optimizer")
        rows = [[str(row["stage"]), *(f"{row[key] / 1e9:.4g}" for key in keys)] for row in self.rows]
        yield Table(heads, rows, f"{si(self.parameters)} parameters over {self.ranks} ranks: GB on each rank")

    def to_dict(self) -> dict[str, Any]:
        return {"parameters": self.parameters, "ranks": self.ranks, "stages": self.rows}


def zero(model: str | float | ModelSpec, ranks: int = 64) -> ZeroResult:
    """Bytes by ZeRO stage of a model, or of a number of parameters, sharded over `ranks` (dp x cp)."""
    check_range("ranks", ranks, within(1, MAX_RANKS))
    if isinstance(model, ModelSpec):
        return ZeroResult(float(model.parameter_count), ranks)
    try:
        count = float(model)
    except OverflowError:
        count = math.inf
    except ValueError:
        return ZeroResult(float(preset(str(model)).parameter_count), ranks)
    if not 1 <= count < 1e18:
        raise UserError(f"{model} parameters cannot be; give a number like 7.5e9, or a model's name", "option.range")
    return ZeroResult(count, ranks)
