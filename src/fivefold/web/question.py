"""The question of a page: a model, a cluster, a batch and a layout, read from the query parameters of its address.

workload = workload_of(Ask({"model": "llama3-70b", "cluster": "8x8xH100"}))
requested_layout(workload, ask)     # from "layout", and "move": the field that a slider changes, with its value

Models, accelerators and schedules are those of the catalogues; only the command line reads files.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from fivefold.cost.step import Workload
from fivefold.cost.systems import SYSTEMS
from fivefold.hardware.accelerators import ACCELERATORS, PRECISIONS
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.planner.nearest import nearest, with_field
from fivefold.planner.plan import question
from fivefold.schedules.registry import CATALOGUE
from fivefold.spec.presets import PRESETS, preset
from fivefold.support.errors import UserError
from fivefold.support.ranges import check_range, outside, within
from fivefold.support.text import did_you_mean, either, whole_number

# ---- ask ------------------------------------------------------------------------------------------------------------
# A page's question: the query parameters of an address, read strictly, and the run directories that may be read.
#
# ask = Ask({"model": "llama3-8b", "batch": "512"})
# ask.text("model"), ask.integer("batch"), ask.integer("seq")     # "llama3-8b", 512, None


@dataclass(frozen=True)
class Ask:
    query: Mapping[str, str] = field(default_factory=dict)
    runs: tuple[Path, ...] = ()  # directories that the user gave; nothing else may be read

    def only(self, *names: str) -> None:
        """Refuse all other parameters: a misspelled one must not silently mean its default."""
        if unknown := [name for name in self.query if name not in names]:
            raise UserError(
                [f"{name!r} is not a parameter here; {did_you_mean(name, names)}" for name in unknown], "page.word"
            )

    def text(self, name: str, default: str = "") -> str:
        """A parameter; `default` if it is absent or empty."""
        return self.query.get(name, "").strip() or default

    def integer(self, name: str) -> int | None:
        """A parameter that is a whole number; None if it is absent or empty."""
        if not (word := self.text(name)):
            return None
        if (number := whole_number(word)) is None:
            raise UserError(f"{name}={word[:40]!r} is not a whole number", "page.word")
        return number

    def one_of(self, name: str, choices: tuple[str, ...], default: str = "") -> str:
        """A parameter that is one of `choices`."""
        if (word := self.text(name, default)) not in choices:
            raise UserError(
                f"{name}={word[:40]!r} is not {either([choice or 'nothing' for choice in choices])}", "page.word"
            )
        return word


_OPTION = re.compile(r"(`[^`]*`|'fivefold [^']*')|(?<![\w-])--([a-z][a-z-]*)")


def without_option_dashes(sentence: str) -> str:
    """A command's sentence without the dashes of options, as the page has fields for them: "nearest: --batch 8" becomes
    "nearest: batch 8". Commands in quotes stay as they are."""
    return _OPTION.sub(lambda match: match[1] or match[2].replace("-", " "), sentence)


# ---- question -------------------------------------------------------------------------------------------------------


DEFAULT_MODEL, DEFAULT_CLUSTER = "llama3-70b", "8x8xH100"
QUESTION_PARAMETERS = ("model", "cluster", "batch", "seq", "precision", "software")
# Limits of a question, beyond any real training, so that every answer comes in reasonable time.
MAX_BATCH, MAX_STEP_TOKENS = 1 << 20, 1 << 30
MAX_GPUS = 1 << 17
MAX_LAYOUT_CHARACTERS = 2000  # a layout's split may have any number of parts
MAX_RANKS = 10**9  # of a layout, whose divisors the search enumerates


def query_for(workload: Workload, software: str) -> dict[str, str]:
    """The query parameters that ask for a workload."""
    values = (workload.spec.name, str(workload.cluster), workload.batch, workload.seq, workload.precision, software)
    return dict(zip(QUESTION_PARAMETERS, map(str, values), strict=True))


def workload_of(ask: Ask) -> Workload:
    """The requested workload, whose names must be of the catalogues."""
    model, cluster = ask.text("model", DEFAULT_MODEL), ask.text("cluster", DEFAULT_CLUSTER)
    if model not in PRESETS:
        raise UserError(f"unknown model {model[:60]!r}; {did_you_mean(model[:60], list(PRESETS))}", "model.unknown")
    if ".toml" in cluster.lower() or "/" in cluster:
        raise UserError(
            f"cluster={cluster[:60]!r} is a file, but the page reads no files; `fivefold plan --cluster` does",
            "page.cluster",
        )
    if cluster.startswith("x"):
        raise UserError(
            f"cluster={cluster[:60]!r} has no number of nodes before its first x; nearest: 1{cluster[:60]}",
            "cluster.form",
        )
    if "+" in cluster:
        raise UserError(
            f"cluster={cluster[:60]!r} is heterogeneous, but the page has no sliders for that; use `fivefold plan`",
            "page.cluster",
        )
    batch, seq = check_range("batch", ask.integer("batch"), within(1, MAX_BATCH)), ask.integer("seq")
    parsed = Cluster.parse(cluster)
    if parsed.world > MAX_GPUS:
        raise UserError(
            f"{parsed} has {parsed.world} GPUs, but the page takes at most {MAX_GPUS}; use `fivefold plan`", "page.size"
        )
    workload = _question(model, cluster, batch, seq, ask.text("precision"), requested_software(ask))
    if workload.batch * workload.seq > MAX_STEP_TOKENS:
        raise UserError(
            f"batch={workload.batch} x seq={workload.seq} is {workload.batch * workload.seq} tokens in a step, but the "
            f"page takes at most {MAX_STEP_TOKENS}; nearest: batch={max(1, MAX_STEP_TOKENS // workload.seq)}",
            "page.size",
        )
    return workload


@lru_cache(maxsize=64)
def _question(model: str, cluster: str, batch: int | None, seq: int | None, precision: str, software: str) -> Workload:
    return question(preset(model), Cluster.parse(cluster), (), batch, seq, precision, software)


def requested_software(ask: Ask) -> str:
    return ask.text("software", "fivefold")


def layout_of(text: str) -> Layout:
    """A layout read from a page's text, with schedules of the catalogue alone."""
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key == "schedule" and value not in CATALOGUE:  # a layout may name a file, which a page must not
            raise UserError(
                f"unknown schedule {value[:60]!r}; {did_you_mean(value[:60], list(CATALOGUE))}",
                "layout.schedule.unknown",
            )
    if len(text) > MAX_LAYOUT_CHARACTERS:
        raise UserError(
            f"the layout has {len(text)} characters, but the page reads at most {MAX_LAYOUT_CHARACTERS}", "page.size"
        )
    return _in_range(Layout.parse(text))


def _in_range(layout: Layout) -> Layout:
    """The layout, if its numbers are in range. Checked before anything loops up to one of them or divides by it."""
    if problems := outside(layout, "layout"):
        raise UserError(list(problems.values()))
    if layout.world > MAX_RANKS:
        raise UserError(f"{layout} has {layout.world} ranks, but at most {MAX_RANKS} are allowed", "page.size")
    return layout


def requested_layout(workload: Workload, ask: Ask) -> Layout:
    """The requested layout; by default data parallelism with ZeRO 3 over the whole cluster, or the nearest layout that
    can run."""
    if not ask.text("layout"):
        start = Layout(dp=workload.cluster.world, zero=3, microbatches=max(1, workload.batch // workload.cluster.world))
        layout = nearest(workload, start) or start
    else:
        layout = layout_of(ask.text("layout"))
    field, equals, value = ask.text("move").partition("=")
    if not field:
        return layout
    if not equals or field not in Layout.__struct_fields__ or field == "split":
        raise UserError(
            f"move={ask.text('move')[:60]!r} is not a layout setting and its value; write move=tp=8", "page.word"
        )
    layout_of(f"{field}={value}")  # checks the new value by itself, before other fields follow it
    return _in_range(with_field(workload, layout, field, value))


def fields_of(layout: Layout) -> dict[str, Any]:
    """A layout as text and field by field."""
    fields = {name: getattr(layout, name) for name in layout.__struct_fields__}
    return {"text": str(layout), "world": layout.world, "fields": fields}


def describe_question(workload: Workload, software: str) -> dict[str, Any]:
    """The question and the facts of its model and cluster that the page shows."""
    spec, group = workload.spec, workload.cluster.groups[0]
    links = {name: {"name": link.name, "bytes_per_second": link.bandwidth} for name, link in
             (("inside", group.accelerator.inside), ("across", group.accelerator.across))}  # fmt: skip
    return {
        "model": spec.name, "parameters": spec.parameter_count, "active_parameters": spec.active_parameters,
        "layers": spec.layers, "heads": spec.heads, "context": spec.context,
        "experts": None if spec.experts is None else spec.experts.count,
        "cluster": str(workload.cluster), "nodes": group.nodes, "gpus": group.gpus, "world": group.world,
        "accelerator": group.accelerator.name, "links": links,
        "batch": workload.batch, "seq": workload.seq, "precision": workload.precision, "software": software,
    }  # fmt: skip


def choices(workload: Workload, software: str) -> dict[str, Any]:
    """The choices of the page's lists; a model or an accelerator from a file is one more choice."""
    device, spec = workload.cluster.groups[0].accelerator, workload.spec
    from_file = [] if spec.name in PRESETS else [{"name": spec.name, "parameters": spec.parameter_count}]
    devices = {device.name: device} | ACCELERATORS if device.name not in ACCELERATORS else ACCELERATORS
    return {
        "models": [*_models(), *from_file],
        "accelerators": [
            {"name": accelerator.name, "memory_bytes": accelerator.memory} for accelerator in devices.values()
        ],
        "precisions": [name for name in PRECISIONS if getattr(device.peak, name) is not None],
        "software": list(dict.fromkeys((*SYSTEMS, software))),
        "schedules": [{"name": schedule.name, "needs": schedule.needs} for schedule in CATALOGUE.values()],
    }


@lru_cache(maxsize=1)
def _models() -> list[dict[str, Any]]:
    specs = [preset(name) for name in PRESETS]
    return [{"name": spec.name, "parameters": spec.parameter_count} for spec in specs]
