"""Which software a row ran with: by its `system` column, a TOML file beside its CSV, its source's entry, or a guess.

# my-runs/march.toml, beside my-runs/march.csv
system = "megatron-core"             # the start: a name of plan/cost/systems.py
recompute = "selective"              # where a row does not say
[stack]
attention = "flash3"
[stack.overlap]
dp = 1
"""

from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, structs

from fivefold.layout.axes import PLACED
from fivefold.support.documents import read_toml
from fivefold.support.errors import UserError
from fivefold.support.reading import join, read, unknown_key
from fivefold.truth.sources import Source, guessed, known, usual

S = TypeVar("S", bound=Struct)
START = "megatron-core"  # of a file that names no system
OURS = {"match", "assumed", "software"}  # that no file may set


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
    return structs.replace(base, **changes)


def description(system: str, file: Source | None, source: str, words: str, gpu: str, precision: str) -> Source:
    """What is known of a row's software, from what says most of it to what says least."""
    if system:
        return usual(system)
    return file or known(source) or guessed(f"{source} {words}", gpu, precision)
