"""Reads the software of measured runs from a TOML file next to their CSV file.

# my-runs/march.toml, next to my-runs/march.csv
system = "megatron-core"             # a name of cost/systems.py, whose settings the following ones change
recompute = "selective"              # for rows that do not say
[software]
attention = "flash3"
[software.overlap]
dp = 1
"""

from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, structs

from fivefold.accuracy.sources import Source, defaults_of_system
from fivefold.cost.software import Overlap
from fivefold.layout.axes import PLACEMENT_ORDER
from fivefold.support.errors import Problem, UserError
from fivefold.support.parsing import join, read, read_toml, unknown_key
from fivefold.support.ranges import misfit, within

S = TypeVar("S", bound=Struct)
DEFAULT_SYSTEM = "megatron-core"  # of a file that names none
INTERNAL_FIELDS = {"match", "assumed", "achieved"}  # which no file may set
RENAMED_SETTINGS = {
    "stack": "software",
    "pipelined_zero": "max_zero_with_pp",
    "counting": "attention_flops",
    "hardware_flops": "counts_recompute_flops",
    "compiled_if_said": "compiled_only_if_noted",
    "chunks": "max_chunks",
    "reserved": "publishes_reserved_memory",
    "ports": "network_scale",
    "divides_experts": "tp_shards_experts",
    "untied": "untied_head",
    "balanced_if": "balanced_layers_keyword",
}

FRACTION, BYTES_PER_VALUE = within(0, 1), within(1, 1000)
RANGES = {  # by setting; all other numbers must not be negative
    "zero": within(0, 3),
    "max_zero_with_pp": within(0, 3),
    "max_chunks": within(1, 1000),
    "dropout": FRACTION,
    "network_scale": within(1e-3, 1000),
    "memory_unit": within(1, 2**40),
    **{f"software.overlap.{name}": FRACTION for name in Overlap.__struct_fields__},
    **{f"software.{name}": BYTES_PER_VALUE for name in ("weight_bytes", "gradient_bytes", "state_bytes")},
}
NOT_NEGATIVE = within(0, 1e15)


def read_software_file(path: Path) -> Source | None:
    """The software that a TOML file describes; None if there is no such file."""
    if not path.is_file():
        return None
    table = read_toml(path)
    system = table.pop("system", None)
    if system is not None and not isinstance(system, str):
        raise UserError(
            f'{path}: system={system!r} is not text; give a name, as system = "megatron-core"', "accuracy.data.setting"
        )
    try:
        base = defaults_of_system(DEFAULT_SYSTEM if system is None else system)
    except UserError as error:
        raise UserError(f"{path}: {error}", "accuracy.data.setting") from None
    why = f"{path.name}, from {system or DEFAULT_SYSTEM!r}"
    source, problems = _with_settings(structs.replace(base, why=why), table, "")
    order = source.software.order
    if not set(order) <= set(PLACEMENT_ORDER) or len(set(order)) < len(order):
        problems.append(f"software.order={list(order)} is not an order of {', '.join(PLACEMENT_ORDER)}")
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}", "accuracy.data.setting")
    return source


def _with_settings(base: S, table: dict[str, Any], path: str) -> tuple[S, list[str]]:
    """`base` with the settings of a table, and what is wrong with them."""
    fields = {field.name: field for field in structs.fields(base) if field.name not in INTERNAL_FIELDS}
    problems: list[str] = []
    changes: dict[str, Any] = {}
    for key, value in table.items():
        setting = join(path, key)
        if not path and key in RENAMED_SETTINGS:
            problems.append(Problem("setting.unknown", f"{key} is now {RENAMED_SETTINGS[key]}"))
        elif key not in fields:
            problems.append(unknown_key(path, key, ["system", *fields] if not path else list(fields)))
        elif isinstance(old := getattr(base, key), Struct) and isinstance(value, dict):
            changes[key], more = _with_settings(old, value, setting)
            problems += more
        elif (new := read(fields[key].type, value, setting, problems)) is not None:
            changes[key] = new
            problems += _range_errors(setting, new)
    return structs.replace(base, **changes), problems


def _range_errors(setting: str, value: Any) -> list[str]:
    """A sentence for each number that is out of its range."""
    values = value if isinstance(value, tuple) else (value,)
    numbers = [number for number in values if type(number) in (int, float)]
    problems = (misfit(setting, number, RANGES.get(setting, NOT_NEGATIVE)) for number in numbers)
    return [sentence for sentence in problems if sentence]


def orphan_software_file(directory: Path) -> Path | None:
    """A software file whose CSV file is missing; other TOML files are ignored."""
    for path in sorted(directory.glob("*.toml")):
        if not path.with_suffix(".csv").exists():
            with suppress(UserError):
                table = read_toml(path)
                if table and set(table) <= {"system", *Source.__struct_fields__, *RENAMED_SETTINGS}:
                    return path
    return None
