"""Translates the words of measured runs: schedules, precisions and models as papers and logs spell them."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from msgspec import Struct, structs

from fivefold.accuracy.sources import Source, guessed, known, usual
from fivefold.cost.moe import IMBALANCE, block_share, collapsed_imbalance
from fivefold.cost.software import FUSED_EXPERTS, ExpertKernels, Overlap
from fivefold.hardware.accelerators import Accelerator
from fivefold.layout.axes import PLACEMENT_ORDER
from fivefold.layout.layout import Layout, Recompute
from fivefold.schedules.registry import CATALOGUE
from fivefold.spec.blocks import Experts
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import PRESETS, preset
from fivefold.support.errors import UserError
from fivefold.support.parsing import join, read, read_toml, unknown_key
from fivefold.support.ranges import misfit, within
from fivefold.support.text import did_you_mean

# ---- describe -------------------------------------------------------------------------------------------------------
# The software of a row: by its `system` column, a TOML file next to its CSV, its source's entry, or a guess.
#
# # my-runs/march.toml, next to my-runs/march.csv
# system = "megatron-core"             # a name of cost/systems.py, whose settings the following ones change
# recompute = "selective"              # for rows that do not say
# [stack]
# attention = "flash3"
# [stack.overlap]
# dp = 1


S = TypeVar("S", bound=Struct)
START = "megatron-core"  # the system of a file that names none
OURS = {"match", "assumed", "achieved"}  # fields that no file may set

SHARE, STAGE, BYTES = within(0, 1), within(0, 3), within(1, 1000)
RANGES = {  # by setting; all other numbers must not be negative
    "zero": STAGE,
    "pipelined_zero": STAGE,
    "chunks": within(1, 1000),
    "dropout": SHARE,
    "ports": within(1e-3, 1000),
    "memory_unit": within(1, 2**40),
    **{f"stack.overlap.{name}": SHARE for name in Overlap.__struct_fields__},
    **{f"stack.{name}": BYTES for name in ("weight_bytes", "gradient_bytes", "state_bytes")},
}
ANY_NUMBER = within(0, 1e15)


def described(path: Path) -> Source | None:
    """The description in a TOML file; None if there is no such file."""
    if not path.is_file():
        return None
    table = read_toml(path)
    system = table.pop("system", None)
    if system is not None and not isinstance(system, str):
        raise UserError(
            f'{path}: system={system!r} is not text; give a name, as system = "megatron-core"', "accuracy.data.setting"
        )
    try:
        base = usual(START if system is None else system)
    except UserError as error:
        raise UserError(f"{path}: {error}", "accuracy.data.setting") from None
    problems: list[str] = []
    source = _changed(structs.replace(base, why=f"{path.name}, from {system or START!r}"), table, "", problems)
    if not set(source.stack.order) <= set(PLACEMENT_ORDER) or len(set(source.stack.order)) < len(source.stack.order):
        problems.append(f"stack.order={list(source.stack.order)} is not an order of {', '.join(PLACEMENT_ORDER)}")
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}", "accuracy.data.setting")
    return source


def _changed(base: S, table: dict[str, Any], path: str, problems: list[str]) -> S:
    """The description `base` with the settings of a table."""
    fields = {field.name: field for field in structs.fields(base) if field.name not in OURS}
    changes: dict[str, Any] = {}
    for key, value in table.items():
        if key not in fields:
            problems.append(unknown_key(path, key, ["system", *fields] if not path else list(fields)))
            continue
        old = getattr(base, key)
        if isinstance(old, Struct) and isinstance(value, dict):
            changes[key] = _changed(old, value, join(path, key), problems)
        elif (new := read(fields[key].type, value, join(path, key), problems)) is not None:
            changes[key] = new
            problems += _outside(join(path, key), new)
    return structs.replace(base, **changes)


def _outside(path: str, value: Any) -> list[str]:
    """A sentence for each number that is out of its range."""
    values = value if isinstance(value, tuple) else (value,)
    numbers = [number for number in values if type(number) in (int, float)]
    problems = (misfit(path, number, RANGES.get(path, ANY_NUMBER)) for number in numbers)
    return [sentence for sentence in problems if sentence]


def stray(directory: Path) -> Path | None:
    """A description whose CSV file is missing; other TOML files are ignored."""
    for path in sorted(directory.glob("*.toml")):
        if not path.with_suffix(".csv").exists():
            with suppress(UserError):
                table = read_toml(path)
                if table and set(table) <= {"system", *Source.__struct_fields__}:
                    return path
    return None


def description(
    system: str, file: Source | None, source: str, words: str, gpu: str, precision: str, shipped: bool = False
) -> Source:
    """The software of a row: by its own column, else by its file, else by its source's entry, else a guess.

    Entries are about the package's own runs; in other files the same name may mean other settings, and is a guess.
    """
    if system:
        of_row = usual(system)
        return structs.replace(of_row, why=f"{of_row.why} of the row, and not {file.why}") if file else of_row
    if file:
        return file
    if (entry := known(source)) is None:
        return guessed(f"{source} {words}", gpu, precision)
    return entry if shipped else structs.replace(entry, assumed=True, why=f"its source's name: {entry.why}")


# ---- spelling -------------------------------------------------------------------------------------------------------


class Refused(UserError):
    """Why a row cannot be predicted."""

    def __init__(self, sentence: str):
        super().__init__(sentence, "accuracy.row")


# Name -> other spellings, without case, dashes and blanks. ZB-1p and ZB-2p of arXiv 2401.10241 are found by a search
# within the memory of zb-h1 and zb-h2.
_SCHEDULES = {
    "1f1b": "1f1b pipedreamflush dapple noninterleaved1f1b",
    "interleaved": "interleaved1f1b 1f1binterleaved 1f1bi interleaved1f1bvp vpp interleavedpipeline",
    "gpipe": "fthenb afab allforwardallbackward",
    "bfs": "breadthfirst interleavedgpipe loopedbfs",
    "zb-h1": "zb1p zbh1 zerobubbleh1 zerobubble1p zerobubble zb",
    "zb-h2": "zb2p zbh2 zerobubbleh2 zerobubble2p",
    "zb-v": "zbv zbvshape zerobubblev",
    "v-half": "vhalf vshapehalf",
    "v-min": "vmin",
    "dualpipe-v": "dualpipev",
}
_NARROW_OR_WIDE = ("fp4", "fp8", "tf32", "fp32")
_NONE = {"", "none", "no", "na", "nopipeline", "-"}


def plain(text: str) -> str:
    """A text in lower case, without dashes and blanks."""
    return re.sub(r"[^a-z0-9+.]", "", text.lower())


def schedule_named(text: str) -> str:
    """The catalogue's name of a schedule; empty if a row does not say."""
    word = plain(re.sub(r"\(.*?\)", "", text))
    if word in _NONE:
        return ""
    spelled = {other: name for name, others in _SCHEDULES.items() for other in others.split()}
    schedule = (spelled | {plain(name): name for name in CATALOGUE}).get(word)
    if schedule is None:
        raise Refused(f"schedule {text!r} is none of ours; {did_you_mean(text.lower(), list(CATALOGUE))}")
    return schedule


def precision_named(text: str, device: Accelerator) -> str:
    """The precision of matmuls: fp8 for any recipe in 8 bits, fp4 in 4, tf32 and fp32 if stated; else the device's
    16-bit format."""
    word = text.lower()
    if word and not re.search(r"(fp|float)(4|8|16|32)|bf16|tf32|^(amp|mixed|half|16)\b", word):
        raise Refused(f"precision {text!r} is none of ours; {did_you_mean(word, ['bf16', 'fp16', *_NARROW_OR_WIDE])}")
    for precision in _NARROW_OR_WIDE:
        pattern = f"{precision}|{precision.replace('fp', 'float')}"
        if re.search(pattern, word) and not re.search("bf16|fp16", word):
            device.rate(precision)  # raises an error that says what the device has
            return precision
    return "bf16" if device.peak.bf16 else "fp16"


def zero_named(text: str) -> int | None:
    """The ZeRO stage: 3 for '3', 'zero3', 'ZeRO-3', 'stage 3' or '3 (FSDP2)'; None if a row does not say."""
    word = plain(re.sub(r"\(.*?\)", "", text))
    if match := re.fullmatch(r"(?:zero)?(?:stage)?([0-3])(?:\.0)?", word):
        return int(match.group(1))
    # "not resharded": weights are gathered once a step, and the stage is the software's.
    if not word or "not resharded" in text:
        return None
    raise Refused(f"zero_stage is {text!r}, and must be 0, 1, 2 or 3, or empty where it is not known")


def recompute_named(text: str, default: Recompute) -> Recompute:
    """Recompute by the first word: 'full', 'selective op', 'none (baseline)'; 'partial', some layers, counts as all."""
    kinds: dict[str, Recompute] = {"none": "none", "selective": "selective", "full": "full", "partial": "full"}
    first = re.match(r"\w*", text.lower())
    word = first.group() if first else ""
    if text and word not in kinds:
        raise Refused(f"recompute {text!r} is none of ours; {did_you_mean(word, list(kinds))}")
    return kinds[word] if text else default


def yes_or_no(column: str, text: str, default: bool) -> bool:
    words = {"": default, "yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
    if text.lower() not in words:
        raise Refused(f"{column} is {text!r}, and must be yes or no, or empty where it is not known")
    return words[text.lower()]


def preset_named(text: str) -> str | None:
    """The preset that a model's name means, without words about precision and makers; None if there is none."""
    word = re.sub(r"(?i)\b(nv|mx)?(bf16|fp16|fp8|fp4)\b|meta|pre-?train(ing)?|[-_ ]cs\b", "", text.replace("_", " "))
    word = plain(word)
    known = {plain(name): name for name in PRESETS}
    # Megatron's names of GPT-3, and shapes that two releases share.
    same = {"llama3.1405b": "llama3-405b", "gpt3175b": "gpt3-175b", "llama27b": "llama2-7b", "grok1314b": "grok-1"}
    return known.get(word) or same.get(word)


# ---- mixtures -------------------------------------------------------------------------------------------------------
# Rows of models with experts: their shapes, their routing, and which of a vendor's releases counts.
#
# Sizes that a row leaves out are those of the preset of its name; notes may give
# `experts=16 top-k=4 expert_ffn=8192`.


NAMES = r"mixtral|moe|\dx\d+b|deepseek|a\d+b\b|maverick|scout|grok"
GIVEN = r"experts=(?P<count>\d{1,9}) top-k=(?P<top_k>\d{1,9}) expert_ffn=(?P<ffn>\d{1,9})\b"
ALONE = ("layers", "hidden", "heads", "vocab")  # sizes that a row must have if no preset gives them
RELEASE = r"v?(\d{1,9}(?:\.\d{1,9})+)"
WEAK = 1e-3  # a coefficient of the balance loss below it has no effect in a run's first steps; usual are about 0.01
SAME = ("seq_len", "gpu", "gpus", "dp", "tp", "pp", "cp", "ep", "micro_batch", "global_batch", "layers")


class MixtureValues(Protocol):
    """A row whose cells are read as text and whole numbers."""

    @property
    def values(self) -> Mapping[str, str]: ...
    def text(self, column: str) -> str: ...
    def integer(self, column: str) -> int | None: ...


def is_mixture(row: MixtureValues) -> bool:
    return (row.integer("ep") or 1) > 1 or re.search(NAMES, row.text("model"), re.I) is not None


def mixture_spec(row: MixtureValues, shape: dict[str, Any]) -> ModelSpec:
    """The row's model; `shape` has the sizes that the row gives."""
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
        # Its recipe has multi-token prediction: one more layer, which predicts a further token, through the same head.
        spec = structs.replace(spec, layers=spec.layers + 1, vocab=2 * spec.vocab)
    return spec


def _preset(name: str) -> str | None:
    """The preset of that name; or the only one with experts of which one name begins with the other."""
    if exact := preset_named(name):
        return exact
    word = plain(name)
    near = [known for known in PRESETS if plain(known).startswith(word) or word.startswith(plain(known))]
    mixtures = [known for known in near if preset(known).experts is not None] if word else []
    return mixtures[0] if len(mixtures) == 1 else None


def with_experts(row: MixtureValues, spec: ModelSpec, layout: Layout, divided: bool) -> tuple[ModelSpec, Layout]:
    """The model and the layout with the row's ep. `divided`: tp divides the experts, too. Then each part of an expert
    counts as an expert: ep x tp ranks have them, and a token visits all parts of the experts that it chooses."""
    ep = row.integer("ep") or 1
    if divided and layout.tp > 1 and spec.experts is not None:
        own, tp = spec.experts, layout.tp
        parts = structs.replace(own, count=own.count * tp, top_k=own.top_k * tp, ffn=own.ffn // tp)
        return structs.replace(spec, experts=parts), structs.replace(layout, ep=ep * tp)
    return spec, structs.replace(layout, ep=ep)


def imbalance_of(row: MixtureValues, spec: ModelSpec, layout: Layout) -> float:
    """The tokens of the most loaded rank over the mean. It is 1 in benchmarks, which force an even load. If notes say
    that routing was real, it is the usual imbalance, or that of collapsed routers if no loss balanced them."""
    notes = row.text("notes").lower()
    if spec.experts is None or "real routing" not in notes:
        return 1.0
    loss = re.search(r"aux loss (\d[\d.e-]*\d|\d)", notes)
    return collapsed_imbalance(spec.experts, layout.ep) if loss and float(loss.group(1)) < WEAK else IMBALANCE


def kernels_of(row: MixtureValues, default: ExpertKernels) -> ExpertKernels:
    """The kernels of experts of a row's release: Megatron-Bridge has new ones since 26.06, on Blackwell."""
    new = "Megatron-Bridge" in row.text("source") and release(row) >= (26, 6)
    return FUSED_EXPERTS if new and re.match(r"G?B[23]00", row.text("gpu")) else default


def held_parameters(spec: ModelSpec, tp: int, ep: int) -> float:
    """The parameters of a rank that has all layers, sharded over tp and ep."""
    kinds = spec.counted().items()
    blocks = sum(count * block_share(spec, tp, ep, kind).total for kind, count in kinds)
    undivided = sum(count * block_share(spec, 1, 1, kind).total for kind, count in kinds)
    return blocks + (spec.parameter_count - undivided) / tp


def release(row: MixtureValues) -> tuple[int, ...]:
    """The release that a row's source names, (26, 6); empty if it names none."""
    match = re.search(RELEASE, row.text("source"))
    return tuple(map(int, match.group(1).split("."))) if match else ()


def older(rows: Sequence[Any]) -> dict[tuple[str, int], int]:
    """{(file, line): line of the newest release} for rows with experts whose configuration a later release ran, too."""
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
    return row.file, model, narrow, str(row.integer("vp") or 1), *map(row.text, SAME)
