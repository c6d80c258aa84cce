"""The Mesh view: the position of every rank of a layout, its part, its groups, and the messages of one layer.

payload(Ask({"model": "llama3-70b", "cluster": "2x8xH100", "layout": "dp=2,tp=4,pp=2,zero=1,microbatches=4"}))
rank(Ask({..., "rank": "5"}))       # one rank: its part of the model and the batch, its groups, its node, its replica

Positions are those of `fivefold draw mesh`, parts are what training gives a rank, bytes and seconds are the planner's.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fivefold.cost.block_collectives import Collective
from fivefold.cost.collective_time import wire
from fivefold.cost.step import Workload
from fivefold.cost.traffic import layer_collectives
from fivefold.layout.layout import Layout
from fivefold.layout.rank_part import RankPart, part_of
from fivefold.planner.mesh_picture import MAX_RANKS, mesh
from fivefold.planner.nearest import nearest, problems, steps
from fivefold.support.dtypes import dtype_of_bytes
from fivefold.support.errors import UserError
from fivefold.support.ranges import check_range, within
from fivefold.web.question import (
    QUESTION_PARAMETERS,
    Ask,
    choices,
    describe_question,
    fields_of,
    query_for,
    requested_layout,
    requested_software,
    workload_of,
)

MAX_SINGLE_CELLS = 256  # ranks that are drawn one by one; with more ranks, a cell is a node
MAX_REPLICA_RANKS = 512  # that are drawn; of a larger replica, those of one cp coordinate
MAX_COMPUTED_SINGLY = 128  # ranks whose positions are computed one by one
MAX_REPORT_RANKS = 64  # whose parts a report has
SELECTION_PARAMETERS = ("rank", "layer")
COMPOUND_AXES = ("replicate", "fsdp", "efsdp")  # over which parameters are sharded or replicated


def payload(ask: Ask) -> dict[str, Any]:
    """The map, one rank of it, and the collectives of one layer."""
    ask.only(*QUESTION_PARAMETERS, "layout", "move", *SELECTION_PARAMETERS)
    question = _drawable_workload(ask)
    wanted = requested_layout(question, ask) if ask.text("layout") else _start_layout(question)
    wrong = problems(question, wanted)
    shown = nearest(question, wanted, ask.text("move").partition("=")[0]) if wrong else wanted
    page = _controls(question, requested_software(ask), wanted, wrong, shown)
    if shown is None:
        return page | {"map": None, "chosen": None, "layer": None, "asks": {}}
    number = check_range("rank", ask.integer("rank"), within(0, shown.world - 1)) or 0
    layer = check_range("layer", ask.integer("layer"), within(0, question.spec.layers - 1))
    return page | _page(replace(question, layout=shown), requested_software(ask), number, layer)


def mesh_view(workload: Workload, software: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The payload of a workload with its layout, and its parts by name, for a report."""
    page = _controls(workload, software, workload.layout, [], workload.layout) | _page(workload, software, 0, None)
    return page, {"ranks": _ranks_in_file(workload, 0)}


def _controls(
    workload: Workload, software: str, wanted: Layout, wrong: list[str], shown: Layout | None
) -> dict[str, Any]:
    """The question and the choices, the wanted layout and the one that is shown."""
    return {
        "question": describe_question(workload, software),
        "choices": choices(workload, software),
        "steps": steps(workload, wanted),
        "wanted": fields_of(wanted),
        "problems": [str(problem) for problem in wrong],  # JSON has no codes
        "shown": None if shown is None else fields_of(shown),
    }


def _page(workload: Workload, software: str, number: int, layer: int | None) -> dict[str, Any]:
    return {
        "map": _map(workload),
        "chosen": _chosen(workload, number),
        "layer": _layer(workload, layer, number),
        "asks": {"ranks": query_for(workload, software) | {"layout": str(workload.layout), "rank": str(number)}},
    }


def _drawable_workload(ask: Ask) -> Workload:
    """The workload of the question; a cluster with too many ranks to draw is refused."""
    workload = workload_of(ask)
    if (world := workload.cluster.world) > MAX_RANKS:
        raise UserError(
            f"{workload.cluster} has {world} GPUs, but a mesh is drawn for at most {MAX_RANKS}", "page.size"
        )
    return workload


def _start_layout(workload: Workload) -> Layout:
    """The layout that the page begins with: as many axes as the model and the cluster allow."""
    world, gpus = workload.cluster.world, workload.cluster.groups[0].gpus
    tp, ep = min(4, gpus), 1 if workload.spec.experts is None else 8
    pp = 2 if world >= 2 * tp else 1
    start = Layout(dp=max(1, world // (tp * pp)), tp=tp, pp=pp, ep=ep, zero=1, sp=tp > 1, microbatches=2 * pp)
    return nearest(workload, start) or start


def rank(ask: Ask) -> dict[str, Any]:
    """One rank."""
    workload, number = _workload_and_rank(ask)
    return _chosen(workload, number)


def ranks(ask: Ask) -> list[dict[str, Any]]:
    """All ranks of a small mesh, else those of one rank's node: for a report, which has no server to ask."""
    return _ranks_in_file(*_workload_and_rank(ask))


def _ranks_in_file(workload: Workload, number: int) -> list[dict[str, Any]]:
    world, gpus = workload.layout.world, workload.cluster.groups[0].gpus
    ranks = range(world) if world <= MAX_REPORT_RANKS else range(number // gpus * gpus, (number // gpus + 1) * gpus)
    return [_chosen(workload, rank_number) for rank_number in ranks]


def _workload_and_rank(ask: Ask) -> tuple[Workload, int]:
    ask.only(*QUESTION_PARAMETERS, "layout", "rank")
    question, number = _drawable_workload(ask), ask.integer("rank") or 0
    layout = requested_layout(question, ask)
    if wrong := problems(question, layout):
        raise UserError(wrong)
    if not 0 <= number < layout.world:
        raise UserError(f"there is no rank {number}; {layout} has {layout.world}, from 0", "page.rank")
    return replace(question, layout=layout), number


# ---- the map -----------------------------------------------------------------------------------------------------


def _map(workload: Workload) -> dict[str, Any]:
    layout, drawn = workload.layout, mesh(workload.layout, workload.cluster)
    singly = layout.world <= MAX_SINGLE_CELLS
    cells = range(layout.world) if singly else [node[0] for node in drawn.nodes]
    axes = [axis | {"where": panel.where} for axis, panel in zip(drawn.axes, drawn.panels, strict=True)]
    groups = {axis: layout.groups(axis) for axis in _groups_of_rank_0(workload)} if singly else {}
    return {
        "nodes": len(drawn.nodes),
        "gpus": len(drawn.nodes[0]),
        "singly": singly,
        "axes": axes,
        "cells": list(cells),
        "at": {axis["axis"]: _positions(layout, axis["axis"], cells) for axis in axes},
        "groups": groups,
    }


def _positions(layout: Layout, axis: str, ranks: Sequence[int]) -> list[int]:
    """The positions of ranks along an axis."""
    if len(ranks) < MAX_COMPUTED_SINGLY:
        return [layout.position(axis, rank) for rank in ranks]
    position_of = {rank: position for group in layout.groups(axis) for position, rank in enumerate(group)}
    return [position_of[rank] for rank in ranks]


def _groups_of_rank_0(workload: Workload) -> dict[str, list[int]]:
    """The group of rank 0 on every axis along which ranks communicate: the axes of the layout, and the compound ones
    that parameters are sharded over."""
    expert_axes = ("ep", "efsdp") if workload.spec.experts is not None else ()
    groups: dict[str, list[int]] = {}
    for axis in ("tp", "cp", "pp", "dp", "replicate", "fsdp", *expert_axes):
        if workload.layout.size(axis) > 1:
            group = workload.layout.group(axis, 0)
            if axis not in COMPOUND_AXES or group not in groups.values():  # dp and zero are often the same ranks
                groups[axis] = group
    return groups


# ---- a rank --------------------------------------------------------------------------------------------------------


def _chosen(workload: Workload, number: int) -> dict[str, Any]:
    layout, gpus = workload.layout, workload.cluster.groups[0].gpus
    node = number // gpus
    return {
        "part": _part(workload, part_of(workload.spec, layout, workload.seq, workload.batch, number)),
        "groups": {axis: layout.group(axis, number) for axis in _groups_of_rank_0(workload)},
        "node": {"number": node} | _cells(layout, range(node * gpus, (node + 1) * gpus)),
        "replica": _replica(workload, number),
    }


def _cells(layout: Layout, ranks: Sequence[int]) -> dict[str, Any]:
    """Ranks, and their positions along every axis."""
    coordinates = [layout.coordinates(rank) for rank in ranks]
    positions = {axis: [at[axis] for at in coordinates] for axis in ("tp", "cp", "pp", "dp") if layout.size(axis) > 1}
    positions |= {axis: _positions(layout, axis, ranks) for axis in ("ep", "replicate") if layout.size(axis) > 1}
    return {"ranks": list(ranks), "at": positions}


def _replica(workload: Workload, number: int) -> dict[str, Any]:
    """The ranks of a rank's replica, which hold the model once: a line for each pipeline rank."""
    layout, at = workload.layout, workload.layout.coordinates(number)
    whole = layout.pp * layout.cp * layout.tp <= MAX_REPLICA_RANKS
    cp_positions = range(layout.cp) if whole else [at["cp"]]
    lines = []
    for pp in range(layout.pp):
        line = [layout.rank(dp=at["dp"], pp=pp, cp=cp, tp=tp) for cp in cp_positions for tp in range(layout.tp)]
        layers = [workload.stages[stage].layers for stage in layout.placement.of_rank[pp]]
        lines.append({"layers": [_ends(numbers) for numbers in layers]} | _cells(layout, line))
    return {"dp": at["dp"], "whole": whole, "lines": lines}


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
    """The first and the last number; an empty list for an empty range."""
    return [numbers[0], numbers[-1]] if numbers else []


# ---- a layer -------------------------------------------------------------------------------------------------------


def _layer(workload: Workload, asked_layer: int | None, number: int) -> dict[str, Any]:
    """The collectives of one layer, in order: of the layer that is asked for, or the middle one of a rank's own."""
    spec, layout = workload.spec, workload.layout
    local_layers = [
        layer
        for stage in layout.placement.of_rank[layout.position("pp", number)]
        for layer in workload.stages[stage].layers
    ]
    middle = local_layers[len(local_layers) // 2] if local_layers else 0
    layer = middle if asked_layer is None else asked_layer
    collectives = layer_collectives(
        spec, layout, workload.seq, workload.batch, dtype_of_bytes(workload.block_cost.activation_bytes), layer
    )
    groups = _groups_of_rank_0(workload)
    sent = [_collective(workload, message, groups) for message in collectives]
    return {"number": layer, "layers": spec.layers, "sent": sent}


def _collective(workload: Workload, message: Collective, groups: dict[str, list[int]]) -> dict[str, Any]:
    """A collective with its link, its time, and the axis under which `groups` lists its ranks."""
    layout, card = workload.layout, workload.first_device.accelerator
    reach = workload.topology.reaches.get(message.axis)
    leaves = (reach or workload.cluster).nodes > 1
    link = card.across if leaves else card.inside
    group, listed_as = layout.group(message.axis, 0), message.axis
    if message.axis not in groups:  # the same ranks may be listed under another axis
        listed_as = next((axis for axis in groups if groups[axis] == group), message.axis)
    return message._asdict() | {
        "ranks": layout.size(message.axis),
        "together": layout.size(message.axis) if reach is None else reach.together,
        "wire": float(message.calls * wire(message.kind, message.payload, layout.size(message.axis), message.sent)),
        "link": link.name,
        "across": leaves,
        "bytes_per_second": link.bandwidth,
        "seconds": None
        if reach is None
        else workload.topology.time(message.kind, message.axis, message.payload, message.calls),
        "group": listed_as,
    }
