"""The Mesh view: which rank of a layout stands where, what it has, whom it talks to, and what one layer sends.

payload(Ask({"model": "llama3-70b", "cluster": "2x8xH100", "layout": "dp=2,tp=4,pp=2,zero=1,microbatches=4"}))
rank(Ask({..., "rank": "5"}))       # one rank: its part of the model and the batch, its groups, its node, its replica

Places are those of `fivefold draw mesh`; parts those that training gives a rank; bytes and seconds the planner's.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fivefold.cost.block_collectives import Collective
from fivefold.cost.collective_time import wire
from fivefold.cost.model_state import dtype_of
from fivefold.cost.step import Workload
from fivefold.cost.traffic import layer_collectives
from fivefold.layout.layout import Layout
from fivefold.layout.rank_part import RankPart, part_of
from fivefold.planner.nearest import nearest, problems, steps
from fivefold.planner.pictures import MOST, mesh
from fivefold.support.errors import UserError
from fivefold.support.ranges import checked, within
from fivefold.web.question import (
    ASKED,
    Ask,
    choices,
    described,
    fields_of,
    layout_asked,
    software_asked,
    words_of,
    workload_of,
)

SINGLY = 256  # ranks that are drawn one by one; of more, a cell is a node
REPLICA = 512  # ranks of a replica that are drawn; of more, those of one place along cp
FEW = 128  # ranks that are asked for their places one by one
HELD = 64  # ranks whose parts a file holds
CHOSEN = ("rank", "layer")
SHARED = ("replicate", "fsdp", "efsdp")  # what parameters are shared over: made of other axes


def payload(ask: Ask) -> dict[str, Any]:
    """The map, one rank of it, and the collectives of one layer."""
    ask.only(*ASKED, "layout", "move", *CHOSEN)
    question = _small(ask)
    wanted = layout_asked(question, ask) if ask.text("layout") else _usual(question)
    wrong = problems(question, wanted)
    shown = nearest(question, wanted, ask.text("move").partition("=")[0]) if wrong else wanted
    page = _asked_for(question, software_asked(ask), wanted, wrong, shown)
    if shown is None:
        return page | {"map": None, "chosen": None, "layer": None, "asks": {}}
    number = checked("rank", ask.integer("rank"), within(0, shown.world - 1)) or 0
    layer = checked("layer", ask.integer("layer"), within(0, question.spec.layers - 1))
    return page | _page(replace(question, layout=shown), software_asked(ask), number, layer)


def placed(workload: Workload, software: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The payload and the parts of a workload with its layout, of whatever model and cluster."""
    page = _asked_for(workload, software, workload.layout, [], workload.layout) | _page(workload, software, 0, None)
    return page, {"ranks": _held(workload, 0)}


def _asked_for(
    workload: Workload, software: str, wanted: Layout, wrong: list[str], shown: Layout | None
) -> dict[str, Any]:
    return {
        "question": described(workload, software),
        "choices": choices(workload, software),
        "steps": steps(workload, wanted),
        "wanted": fields_of(wanted),
        "problems": wrong,
        "shown": None if shown is None else fields_of(shown),
    }


def _page(workload: Workload, software: str, number: int, layer: int | None) -> dict[str, Any]:
    return {
        "map": _map(workload),
        "chosen": _chosen(workload, number),
        "layer": _layer(workload, layer, number),
        "asks": {"ranks": words_of(workload, software) | {"layout": str(workload.layout), "rank": str(number)}},
    }


def _small(ask: Ask) -> Workload:
    """The question, of a cluster whose ranks can be drawn."""
    workload = workload_of(ask)
    if (world := workload.cluster.world) > MOST:
        raise UserError(f"{workload.cluster} has {world} GPUs, and a mesh of more than {MOST} is not drawn")
    return workload


def _usual(workload: Workload) -> Layout:
    """What the page begins with: something of every axis that the model and the cluster have room for."""
    world, gpus = workload.cluster.world, workload.cluster.groups[0].gpus
    tp, ep = min(4, gpus), 1 if workload.spec.experts is None else 8
    pp = 2 if world >= 2 * tp else 1
    start = Layout(dp=max(1, world // (tp * pp)), tp=tp, pp=pp, ep=ep, zero=1, sp=tp > 1, microbatches=2 * pp)
    return nearest(workload, start) or start


def rank(ask: Ask) -> dict[str, Any]:
    """One rank."""
    workload, number = _asked(ask)
    return _chosen(workload, number)


def ranks(ask: Ask) -> list[dict[str, Any]]:
    """All ranks of a small mesh, or those of one rank's node: for a page that cannot ask."""
    return _held(*_asked(ask))


def _held(workload: Workload, number: int) -> list[dict[str, Any]]:
    world, gpus = workload.layout.world, workload.cluster.groups[0].gpus
    ranks = range(world) if world <= HELD else range(number // gpus * gpus, (number // gpus + 1) * gpus)
    return [_chosen(workload, rank_number) for rank_number in ranks]


def _asked(ask: Ask) -> tuple[Workload, int]:
    ask.only(*ASKED, "layout", "rank")
    question, number = _small(ask), ask.integer("rank") or 0
    layout = layout_asked(question, ask)
    if wrong := problems(question, layout):
        raise UserError(wrong)
    if not 0 <= number < layout.world:
        raise UserError(f"there is no rank {number}; {layout} has {layout.world}, from 0")
    return replace(question, layout=layout), number


# ---- the map -----------------------------------------------------------------------------------------------------


def _map(workload: Workload) -> dict[str, Any]:
    layout, drawn = workload.layout, mesh(workload.layout, workload.cluster)
    singly = layout.world <= SINGLY
    cells = range(layout.world) if singly else [node[0] for node in drawn.nodes]
    axes = [axis | {"where": panel.where} for axis, panel in zip(drawn.axes, drawn.panels, strict=True)]
    groups = {axis: layout.groups(axis) for axis in _talking(workload)} if singly else {}
    return {
        "nodes": len(drawn.nodes),
        "gpus": len(drawn.nodes[0]),
        "singly": singly,
        "axes": axes,
        "cells": list(cells),
        "at": {axis["axis"]: _places(layout, axis["axis"], cells) for axis in axes},
        "groups": groups,
    }


def _places(layout: Layout, axis: str, ranks: Sequence[int]) -> list[int]:
    """Where ranks stand along an axis."""
    if len(ranks) < FEW:
        return [layout.position(axis, rank) for rank in ranks]
    place_of = {rank: place for group in layout.groups(axis) for place, rank in enumerate(group)}
    return [place_of[rank] for rank in ranks]


def _talking(workload: Workload) -> dict[str, list[int]]:
    """Every axis along which a rank talks, with the group of rank 0: those of the layout, and those that parameters
    are shared over."""
    more = ("ep", "efsdp") if workload.spec.experts is not None else ()
    groups: dict[str, list[int]] = {}
    for axis in ("tp", "cp", "pp", "dp", "replicate", "fsdp", *more):
        if workload.layout.size(axis) > 1:
            group = workload.layout.group(axis, 0)
            if axis not in SHARED or group not in groups.values():  # dp and zero are often the same ranks
                groups[axis] = group
    return groups


# ---- a rank --------------------------------------------------------------------------------------------------------


def _chosen(workload: Workload, number: int) -> dict[str, Any]:
    layout, gpus = workload.layout, workload.cluster.groups[0].gpus
    node = number // gpus
    return {
        "part": _part(workload, part_of(workload.spec, layout, workload.seq, workload.batch, number)),
        "groups": {axis: layout.group(axis, number) for axis in _talking(workload)},
        "node": {"number": node} | _cells(layout, range(node * gpus, (node + 1) * gpus)),
        "replica": _replica(workload, number),
    }


def _cells(layout: Layout, ranks: Sequence[int]) -> dict[str, Any]:
    """Ranks, and where they stand along every axis."""
    where = [layout.coordinates(rank) for rank in ranks]
    at = {axis: [place[axis] for place in where] for axis in ("tp", "cp", "pp", "dp") if layout.size(axis) > 1}
    at |= {axis: _places(layout, axis, ranks) for axis in ("ep", "replicate") if layout.size(axis) > 1}
    return {"ranks": list(ranks), "at": at}


def _replica(workload: Workload, number: int) -> dict[str, Any]:
    """The ranks that hold the model once, in a line for each pipeline rank."""
    layout, at = workload.layout, workload.layout.coordinates(number)
    all_of_it = layout.pp * layout.cp * layout.tp <= REPLICA
    shares = range(layout.cp) if all_of_it else [at["cp"]]
    lines = []
    for pp in range(layout.pp):
        line = [layout.rank(dp=at["dp"], pp=pp, cp=cp, tp=tp) for cp in shares for tp in range(layout.tp)]
        layers = [workload.stages[stage].layers for stage in layout.placement.of_rank[pp]]
        lines.append({"layers": [_ends(numbers) for numbers in layers]} | _cells(layout, line))
    return {"dp": at["dp"], "whole": all_of_it, "lines": lines}


def _part(workload: Workload, part: RankPart) -> dict[str, Any]:
    layout, spec = workload.layout, workload.spec
    shards = {axis: [layout.position(axis, part.rank), layout.size(axis)] for axis in ("fsdp", "efsdp")}
    return {
        "rank": part.rank,
        "at": part.at | ({"ep": layout.position("ep", part.rank)} if layout.ep > 1 else {}),
        "stages": [
            {"stage": stage.index, "layers": _ends(stage.layers), "embedding": stage.first, "head": stage.last}
            for stage in part.stages
        ],
        "heads": _ends(part.heads),
        "kv_heads": _ends(part.kv_heads),
        "experts": _ends(part.experts),
        "positions": [_ends(piece) for piece in part.positions],
        "sequences": _ends(part.sequences),
        "of": {
            "layers": spec.layers, "heads": spec.heads, "kv_heads": spec.kv_heads, "positions": workload.seq,
            "sequences": workload.batch, "experts": 0 if spec.experts is None else spec.experts.count,
            "parameters": spec.parameter_count,
        },
        "zero": layout.zero,
        "shards": shards if spec.experts is not None else {"fsdp": shards["fsdp"]},
        "parameters": part.parameters,
        "own": part.own,
    }  # fmt: skip


def _ends(numbers: range) -> list[int]:
    """First and last; nothing of nothing."""
    return [numbers[0], numbers[-1]] if numbers else []


# ---- a layer -------------------------------------------------------------------------------------------------------


def _layer(workload: Workload, asked_layer: int | None, number: int) -> dict[str, Any]:
    """What one layer sends, in order: that which is asked for, or the middle one of a rank's own."""
    spec, layout = workload.spec, workload.layout
    local_layers = [
        layer
        for stage in layout.placement.of_rank[layout.position("pp", number)]
        for layer in workload.stages[stage].layers
    ]
    layer = asked_layer if asked_layer is not None else local_layers[len(local_layers) // 2] if local_layers else 0
    sent = layer_collectives(
        spec, layout, workload.seq, workload.batch, dtype_of(workload.block_cost.activation_bytes), layer
    )
    talking = _talking(workload)
    return {"number": layer, "layers": spec.layers, "sent": [_sent(workload, message, talking) for message in sent]}


def _sent(workload: Workload, message: Collective, talking: dict[str, list[int]]) -> dict[str, Any]:
    layout, card = workload.layout, workload.first_device.accelerator
    reach = workload.topology.reaches.get(message.axis)
    leaves = (reach or workload.cluster).nodes > 1
    link = card.across if leaves else card.inside
    group = talking.get(message.axis) or layout.group(message.axis, 0)
    same = (
        message.axis
        if message.axis in talking
        else next((axis for axis in talking if talking[axis] == group), message.axis)
    )
    return message._asdict() | {
        "ranks": layout.size(message.axis),
        "together": layout.size(message.axis) if reach is None else reach.together,
        "wire": float(wire(message.kind, message.calls * message.payload, layout.size(message.axis))),
        "link": link.name,
        "across": leaves,
        "bytes_per_second": link.bandwidth,
        "seconds": None
        if reach is None
        else workload.topology.time(message.kind, message.axis, message.payload, message.calls),
        "group": same,  # the name under which its ranks are listed
    }
