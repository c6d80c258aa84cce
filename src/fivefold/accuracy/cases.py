"""Reads rows of measured runs, one CSV file per source: each gives a planner's workload and its measured step time.

Empty means not published. `status` is ok, oom (ran out of memory), theory, or error.
"""

import csv
import io
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from msgspec import structs

from fivefold.accuracy.checkup_file import checkup_runs
from fivefold.accuracy.mixture_rows import imbalance_of, is_mixture, kernels_of, mixture_spec, with_experts
from fivefold.accuracy.software_file import orphan_software_file, read_software_file
from fivefold.accuracy.sources import Source, defaults_of_system, entry_for, guess_source
from fivefold.accuracy.spelling import (
    UnpredictableRow,
    precision_named,
    preset_named,
    recompute_named,
    schedule_named,
    yes_or_no,
    zero_named,
)
from fivefold.cost.moe import parameters_per_rank
from fivefold.cost.peak_memory import USABLE_FRACTION
from fivefold.cost.software import SoftwareProfile
from fivefold.cost.step import Workload
from fivefold.hardware.accelerators import Accelerator, find_accelerator
from fivefold.hardware.cluster import Cluster, Group
from fivefold.layout.layout import Layout
from fivefold.planner.search import search
from fivefold.schedules.registry import CATALOGUE
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import block, head
from fivefold.spec.presets import PRESETS, preset
from fivefold.support.errors import UserError
from fivefold.support.files import read_regular
from fivefold.support.text import either

# ---- cells ----------------------------------------------------------------------------------------------------------
# Checks the cells that must be numbers. A cell that cannot be read is an error, not an unpublished value.


WHOLE_NUMBER_COLUMNS = (
    "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq_len", "gpus", "gpus_per_node", "dp", "tp", "pp", "vp",
    "cp", "ep", "micro_batch", "global_batch",
)  # fmt: skip
NUMBER_COLUMNS = (
    "step_time_s", "derived_step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "peak_mem_gb",
)  # fmt: skip


class CellValues(Protocol):
    """A row whose cells are read as text."""

    def text(self, column: str) -> str: ...


def number(text: str) -> float | None:
    """The text as a finite number; None if it is not one."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def check_cells(row: CellValues) -> None:
    """Refuse a row with a cell that is not a number above zero, or not a whole number where it must be."""
    problems = [
        sentence
        for column in (*WHOLE_NUMBER_COLUMNS, *NUMBER_COLUMNS)
        if (sentence := _cell_problem(column, row.text(column)))
    ]
    if problems:
        raise UnpredictableRow("; ".join(problems))


def _cell_problem(column: str, text: str) -> str:
    """What is wrong with a cell; empty if nothing is."""
    kind = "whole number" if column in WHOLE_NUMBER_COLUMNS else "number"
    if not text:
        return ""
    value = number(text)
    if value is None:
        return f"{column} is {text!r}; it must be a {kind} (no commas, no units), or empty if it is not known"
    if value <= 0:
        return f"{column} is {text}; it must be above zero, or empty if it is not known"
    if column in WHOLE_NUMBER_COLUMNS and value != int(value):
        return f"{column} is {text}; it must be a whole number; nearest: {either(_around(value, 1))}"
    return ""


def check_world(gpus: int, dp: int | None, inner: dict[str, int]) -> None:
    """Refuse degrees whose product is not the number of GPUs; dp may be unknown."""
    ranks = math.prod(inner.values())
    degrees = " x ".join(f"{axis}={degree}" for axis, degree in inner.items())
    if dp is None and gpus % ranks:
        raise UnpredictableRow(f"{degrees} = {ranks} does not divide gpus={gpus}")
    if dp is not None and dp * ranks != gpus:
        raise UnpredictableRow(f"dp={dp} x {degrees} makes {dp * ranks} GPUs, but gpus is {gpus}")


def check_batch(batch: int, dp: int, samples: int) -> None:
    if batch % (dp * samples):
        near = either(_around(batch, dp * samples))
        raise UnpredictableRow(
            f"global_batch={batch} does not divide over dp={dp} x micro_batch={samples}; nearest: {near}"
        )


def _around(value: float, step: int) -> list[int]:
    """The multiples of `step` below and above a value."""
    below = int(value // step) * step
    return [near for near in (below, below + step) if near]


# ---- workloads ------------------------------------------------------------------------------------------------------


DATA = Path(__file__).parent / "data"
MAX_FILE_BYTES, MAX_CELL_CHARACTERS = 1 << 26, 4000
REQUIRED_COLUMNS = ("source", "model", "seq_len", "gpu", "gpus", "status")


class PublishedRow(NamedTuple):
    """A row of a CSV file."""

    file: str  # its name without the suffix
    line: int
    values: dict[str, str]
    software_file: Source | None = None  # what a TOML file next to the CSV says about its software
    shipped: bool = False  # it comes with the package, whose table has an entry for its source
    workload: Workload | None = None  # of a run of `fivefold checkup`, which its columns do not have to describe

    def text(self, column: str) -> str:
        return (self.values.get(column) or "").strip()

    def number(self, column: str) -> float | None:
        """A cell's number; None if it is not published. `check_cells` refuses what cannot be read."""
        return number(self.text(column))

    def integer(self, column: str) -> int | None:
        value = self.number(column)
        return None if value is None else round(value)

    @property
    def status(self) -> str:
        return self.text("status").lower() or "ok"

    @property
    def where(self) -> str:
        return f"{self.file}, run {self.line}" if self.workload else f"{self.file}.csv line {self.line}"


def read_rows(directory: Path = DATA) -> list[PublishedRow]:
    """All rows of all CSV files of a directory, or the runs of a report of `fivefold checkup`."""
    if directory.is_file() and directory.suffix == ".json":
        runs = checkup_runs(directory)
        return [
            PublishedRow(file, line, values, software, workload=workload)
            for file, line, values, software, workload in runs
        ]
    if directory.is_file():
        raise UserError(
            f"{directory} is a file, but rows are read from a directory, or from the .json of fivefold checkup; "
            f"nearest: {directory.parent}",
            "accuracy.data.missing",
        )
    files = sorted(path for path in directory.glob("*.csv") if path.is_file()) if directory.is_dir() else []
    if not files:
        raise UserError(
            f"{directory} has no .csv files; give a directory of measured runs, such as {DATA}",
            "accuracy.data.missing",
        )
    if orphan := orphan_software_file(directory):
        raise UserError(
            f"{orphan} describes the runs of {orphan.stem}.csv, which does not exist; rename or move it",
            "accuracy.data.orphan",
        )
    rows, shipped = [], directory.resolve() == DATA.resolve()
    for path in files:
        software = read_software_file(path.with_suffix(".toml"))
        try:
            text = read_regular(path, MAX_FILE_BYTES, links=True).decode(errors="replace")
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}", "file.read") from None
        reader = csv.DictReader(io.StringIO(text, newline=""))
        try:
            missing = [column for column in REQUIRED_COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise UserError(
                    f"{path} lacks the columns {', '.join(missing)}; its first line must name them",
                    "accuracy.data.columns",
                )
            rows += [PublishedRow(path.stem, reader.line_num, _limited(values), software, shipped) for values in reader]
        except (csv.Error, ValueError) as error:
            raise UserError(f"{path} line {reader.line_num} cannot be read: {error}", "file.syntax") from None
    return rows


def _limited(values: dict[str, str]) -> dict[str, str]:
    """The cells of a row. Their length is limited, as patterns are searched in them."""
    for column, text in values.items():
        if isinstance(text, str) and len(text) > MAX_CELL_CHARACTERS:
            raise ValueError(f"{column} has {len(text):,} characters, and at most {MAX_CELL_CHARACTERS:,} are read")
    return values


class MeasuredRun(NamedTuple):
    """A row with its workload; `seconds` and `memory` (bytes) are None if they are not published."""

    row: PublishedRow
    source: Source
    workload: Workload
    seconds: float | None
    memory: float | None


def source_of(row: PublishedRow) -> Source:
    """The software of a row: by its own column, else by its file, else by its source's entry, else a guess.

    Entries are about the package's own runs; in other files the same name may mean other settings, and is a guess.
    """
    file, source = row.software_file, row.text("source")
    if system := row.text("system"):
        of_row = defaults_of_system(system)
        return structs.replace(of_row, why=f"{of_row.why} of the row, not {file.why}") if file else of_row
    if file:
        return file
    if (entry := entry_for(source)) is None:
        text = f"{source} {row.text('url_or_path')} {row.text('notes')}"
        return guess_source(text, row.text("gpu"), row.text("precision"))
    return entry if row.shipped else structs.replace(entry, assumed=True, why=f"its source's name: {entry.why}")


def measured(row: PublishedRow) -> MeasuredRun:
    """The workload and the measurements of a row; UnpredictableRow says why there is none."""
    source = source_of(row)
    check_cells(row)
    if row.workload is not None:
        return MeasuredRun(row, source, row.workload, row.number("step_time_s"), _peak_bytes(row, source))
    spec, cluster = spec_of(row, source), cluster_of(row, source)
    if problems := spec.problems():
        raise UnpredictableRow("; ".join(problems))
    layout_known = any(row.integer(axis) is not None for axis in ("dp", "tp", "pp"))
    layout = layout_of(row, source, spec) if layout_known else Layout()
    batch = row.integer("global_batch") or layout.dp * layout.microbatches * (row.integer("micro_batch") or 1)
    precision = precision_named(row.text("precision"), cluster.groups[0].accelerator)
    workload = Workload(spec, layout, cluster, _need(row, "seq_len"), batch, precision, software_of_row(row, source))
    if is_mixture(row):
        if not layout_known:
            raise UnpredictableRow("the layout of this mixture of experts is not published")
        workload = _with_experts(row, source, workload)
    if layout_known and (problems := impossible(workload)):
        raise UnpredictableRow("; ".join(problems))
    if not layout_known:  # take the planner's
        workload = search(workload, top=1, zero=source.zero).best.workload
    return MeasuredRun(row, source, workload, seconds_of(row, source, workload), _peak_bytes(row, source))


def _peak_bytes(row: PublishedRow, source: Source) -> float | None:
    memory = row.number("peak_mem_gb")
    return memory and memory * source.memory_unit


def impossible(workload: Workload) -> list[str]:
    """Why no software can have run a workload's layout. Limits of Fivefold's own trainer do not count."""
    # Other software allows tied embeddings with ZeRO 2 and 3 in any schedule, shard groups with ZeRO 1, and pads
    # sequences for sp.
    spec, layout = structs.replace(workload.spec, tied=False), structs.replace(workload.layout, replicate=1, sp=False)
    return layout.problems(spec, seq=workload.seq, batch=workload.batch)


def _with_experts(row: PublishedRow, source: Source, workload: Workload) -> Workload:
    """The workload with the row's ep, the kernels of its release, and its routing."""
    spec, layout = with_experts(row, workload.spec, workload.layout, tp_shards_experts=source.tp_shards_experts)
    if spec.experts is None:
        raise UnpredictableRow(f"ep={layout.ep} shards experts, but {spec.name} has none")
    software = workload.software.but(experts=kernels_of(row, workload.software.experts))
    return replace(workload, spec=spec, layout=layout, software=software, imbalance=imbalance_of(row, spec, layout))


def _need(row: PublishedRow, column: str) -> int:
    value = row.integer(column)
    if value is None:
        raise UnpredictableRow(f"{column} is not published")
    return value


SHAPE_COLUMNS = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")


def spec_of(row: PublishedRow, source: Source) -> ModelSpec:
    """The row's model; sizes that it leaves out are those of the preset that it names, if there is one."""
    name, published = row.text("model"), {column: _need(row, column) for column in SHAPE_COLUMNS if row.text(column)}
    if is_mixture(row):
        return mixture_spec(row, published | {"context": _need(row, "seq_len")})
    known = preset_named(name)
    if known and published.get("hidden", PRESETS[known]["hidden"]) == PRESETS[known]["hidden"]:
        return structs.replace(preset(known, **published, context=_need(row, "seq_len")), name=name)
    shape: dict[str, Any] = {column: _need(row, column) for column in ("layers", "hidden", "heads")}
    shape |= {column: published.get(column, 0) for column in ("kv_heads", "ffn")}
    shape |= {"vocab": published.get("vocab", source.vocab or 1), "context": _need(row, "seq_len")}
    if shape["hidden"] % shape["heads"]:
        shape["head_dim"] = 256 if "PaLM" in name else 128  # arXiv 2204.02311, table 1
    if not re.search(r"llama|palm|internlm|mistral|qwen", name, re.I):
        shape |= {"norm": "layernorm", "activation": "gelu", "positions": "learned", "tied": not source.untied_head}
        shape |= {"bias": False} if "MPT" in name else {"bias": True, "dropout": source.dropout}
    return ModelSpec(name=name, **shape)


ASYNC_TP_OVERLAP = 0.45  # of tp's communication, by torchtitan's rows with and without async TP


def software_of_row(row: PublishedRow, source: Source) -> SoftwareProfile:
    """The source's software with what the row's notes say about it."""
    notes = row.text("notes")
    kernels = (kernel for word, kernel in source.kernels.items() if word in notes)
    software = source.software.but(attention=next(kernels, source.software.attention))
    if source.compiled_only_if_noted and "compile" not in notes.lower():
        software = software.but(pointwise="eager", norm="eager")
    if "rowwise" in row.text("precision").lower():
        software = software.but(rowwise=True)
    if re.search(r"async.?(tp|tensor)", notes, re.I):
        software = software.but(overlap=structs.replace(software.overlap, tp=ASYNC_TP_OVERLAP))
    if "RMS kernel" in notes:
        software = software.but(norm="fused")
    return software


NVL72_GPUS = 72
NVL72_GPUS_WITH_EP = 64  # of each rack, in runs over several racks that shard experts


def device_of(name: str) -> Accelerator:
    """The accelerator of a name, which must match as a whole: 'A100' of 'A100-PCIE-40GB' has more memory."""
    if not name:
        raise UnpredictableRow("gpu is not published")
    try:
        return find_accelerator(name)
    except UserError as error:
        raise UnpredictableRow(f"gpu is not in the catalogue: {error}") from None


def cluster_of(row: PublishedRow, source: Source) -> Cluster:
    gpus, per_node = _need(row, "gpus"), row.integer("gpus_per_node") or 8
    device = device_of(row.text("gpu"))
    across = structs.replace(device.across, bandwidth=device.across.bandwidth * source.network_scale)
    device = structs.replace(device, across=across)
    if device.name.startswith("GB"):
        per_node = NVL72_GPUS  # NVLink joins a rack, whatever counts as a node there
        if is_mixture(row) and gpus % NVL72_GPUS_WITH_EP == 0:
            per_node = NVL72_GPUS_WITH_EP  # so that ep lies within a rack
    per_node = min(per_node, gpus)
    return Cluster((Group(-(-gpus // per_node), per_node, device),))


def layout_of(row: PublishedRow, source: Source, spec: ModelSpec) -> Layout:
    tp, pp, cp = (row.integer(axis) or 1 for axis in ("tp", "pp", "cp"))
    gpus = _need(row, "gpus")
    check_world(gpus, row.integer("dp"), {"tp": tp, "pp": pp, "cp": cp})
    dp = gpus // (tp * pp * cp)
    zero = _zero(row, source, parameters_per_rank(spec, tp, _ep(row, source, tp)) / pp)
    zero = min(zero, source.max_zero_with_pp) if pp > 1 else zero
    batch = row.integer("global_batch") or (row.integer("micro_batch") or 1) * dp
    samples = row.integer("micro_batch") or (1 if pp > 1 else max(1, batch // dp))
    check_batch(batch, dp, samples)
    microbatches = batch // (dp * samples)
    sp = yes_or_no("sequence_parallel", row.text("sequence_parallel"), default=source.sp)
    degrees: dict[str, Any] = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "zero": zero, "microbatches": microbatches}
    if zero and (group := re.search(r"shard group: (\d+) ranks", row.text("notes"))):
        degrees["replicate"] = max(1, dp // int(group.group(1)))
    layout = Layout(
        **degrees,
        cp_kind=source.cp_kind,
        sp=sp and tp > 1,
        recompute=recompute_named(row.text("recompute"), default=source.recompute),
    )
    schedule, chunks = _schedule(row, source, spec, layout)
    layout = structs.replace(layout, schedule=schedule, chunks=chunks)
    keyword = source.balanced_layers_keyword
    balanced = keyword and keyword in row.text("notes")
    if balanced and layout.stages > 1:
        return structs.replace(layout, split=_redistributed(spec, layout.stages))
    return structs.replace(layout, split=_even(spec.layers, layout)) if source.software.even else layout


def _ep(row: PublishedRow, source: Source, tp: int) -> int:
    """The ranks over which experts are sharded, by ep and tp."""
    return (row.integer("ep") or 1) * (tp if source.tp_shards_experts else 1)


def _zero(row: PublishedRow, source: Source, parameters: float) -> int:
    """The ZeRO stage that the row states, or else the source's; 3 if weights and gradients would not fit otherwise."""
    if (stated := zero_named(row.text("zero_stage"))) is not None:
        return stated
    needed = parameters * (source.software.weight_bytes + source.software.gradient_bytes)
    return 3 if needed > USABLE_FRACTION * device_of(row.text("gpu")).memory else source.zero


def _schedule(row: PublishedRow, source: Source, spec: ModelSpec, layout: Layout) -> tuple[str, int]:
    """The name of the schedule, and the stages of a rank."""
    name = schedule_named(row.text("schedule"))
    if layout.pp == 1:
        return "1f1b", 1
    if name not in ("", "1f1b", "interleaved"):
        record = CATALOGUE[name]
        return name, (record.any_chunks and row.integer("vp")) or record.chunks
    most = max(source.max_chunks, 2 if name == "interleaved" else 1)
    chunks = row.integer("vp") or _chunks(spec.layers, layout.pp, most)
    several = chunks > 1 and layout.microbatches >= layout.pp
    return ("interleaved", chunks) if several else ("1f1b", 1)


def _even(layers: int, layout: Layout) -> tuple[int, ...]:
    """The layers of each stage: equally many, if need be counting embedding and head as a layer each, as in Llama 3."""
    n = layout.stages
    if layers % n == 0:
        return (layers // n,) * n
    if (layers + 2) % n == 0 and n > 1 and layers + 2 > n:
        per_stage = (layers + 2) // n
        return (per_stage - 1, *(per_stage,) * (n - 2), per_stage - 1)
    few, rest = divmod(layers, n)  # the first stages have one more: embedding and head do not count
    return (*(few + 1,) * rest, *(few,) * (n - rest)) if few else ()


def _redistributed(spec: ModelSpec, stages: int) -> tuple[int, ...]:
    """The layers of each stage where the head counts as so many whole layers, and the last stages get the remainder, as
    the times of Vocabulary Parallelism show."""
    layer = block(spec)
    head_in_layers = round(2 * head(spec).size / (2 * layer.weights + layer.attention.flops(spec.context)))
    per_stage = -(-(spec.layers + head_in_layers) // stages)
    last = max(0, per_stage - head_in_layers)
    few, rest = divmod(spec.layers - last, stages - 1)
    return (*(few,) * (stages - 1 - rest), *(few + 1,) * rest, last)


def _chunks(layers: int, pp: int, most: int) -> int:
    """The most chunks that divide the layers evenly, if need be with embedding and head as a layer each (Llama 3)."""
    for units in (layers, layers + 2):
        if units % pp == 0:
            return max(n for n in range(1, most + 1) if units % (pp * n) == 0)
    return 1


def seconds_of(row: PublishedRow, source: Source, workload: Workload) -> float | None:
    """The published step time, or the one that follows from tokens/s, TFLOP/s or MFU by the source's own convention."""
    for column in ("step_time_s", "derived_step_time_s"):
        if (value := row.number(column)) is not None:
            return value
    if rate := row.number("tokens_per_s_per_gpu"):
        return float(workload.batch * workload.seq) / rate / workload.layout.world
    flops = workload.flops(source.attention_flops)
    if rate := row.number("tflops_per_gpu"):
        if source.counts_recompute_flops and workload.layout.recompute == "full":
            flops *= 4 / 3
        return flops / (rate * 1e12) / workload.layout.world
    if mfu := row.number("mfu"):
        return flops / (mfu / 100 * workload.first_device.peak()) / workload.layout.world
    return None
