"""Which software a row ran with: by its `system` column, a TOML file beside its CSV, its source's entry, or a guess.

# my-runs/march.toml, beside my-runs/march.csv
system = "megatron-core"             # the start: a name of plan/cost/systems.py
recompute = "selective"              # where a row does not say
[stack]
attention = "flash3"
[stack.overlap]
dp = 1
"""

from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, structs

from fivefold.layout.axes import PLACED
from fivefold.plan.cost.stack import Overlap
from fivefold.support.documents import read_toml
from fivefold.support.errors import UserError
from fivefold.support.ranges import misfit, within
from fivefold.support.reading import join, read, unknown_key
from fivefold.truth.sources import Source, guessed, known, usual

S = TypeVar("S", bound=Struct)
START = "megatron-core"  # of a file that names no system
OURS = {"match", "assumed", "software"}  # that no file may set

SHARE, STAGE, BYTES = within(0, 1), within(0, 3), within(1, 1000)
RANGES = {  # of switches, by name; of others a number is not negative
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
    """The description in a TOML file; None where there is no such file."""
    if not path.is_file():
        return None
    table = read_toml(path)
    system = table.pop("system", None)
    if system is not None and not isinstance(system, str):
        raise UserError(f'{path}: system={system!r} is not text; give a name, as system = "megatron-core"')
    try:
        base = usual(START if system is None else system)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    problems: list[str] = []
    found = _changed(structs.replace(base, why=f"{path.name}, from {system or START!r}"), table, "", problems)
    if not set(found.stack.order) <= set(PLACED) or len(set(found.stack.order)) < len(found.stack.order):
        problems.append(f"stack.order={list(found.stack.order)} is not an order of {', '.join(PLACED)}")
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}")
    return found


def _changed(base: S, table: dict[str, Any], path: str, problems: list[str]) -> S:
    """A description with the switches of a table; what the table does not name stays."""
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
    """A sentence for each number that no run can have."""
    every = value if isinstance(value, tuple) else (value,)
    numbers = [one for one in every if type(one) in (int, float)]
    found = (misfit(path, one, RANGES.get(path, ANY_NUMBER)) for one in numbers)
    return [sentence for sentence in found if sentence]


def stray(directory: Path) -> Path | None:
    """A description without its runs; other TOML files may lie there."""
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
    """What is known of a row's software, from what says most of it to what says least.

    Entries are about the package's own runs; elsewhere the same name may mean other settings, and is called a guess.
    """
    if system:
        own = usual(system)
        return structs.replace(own, why=f"{own.why} of the row, and not {file.why}") if file else own
    if file:
        return file
    if (entry := known(source)) is None:
        return guessed(f"{source} {words}", gpu, precision)
    return entry if shipped else structs.replace(entry, assumed=True, why=f"its source's name: {entry.why}")
